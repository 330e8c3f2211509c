"""Faster exports: torch needs seconds to trace a graph."""

import functools
import importlib
from pathlib import Path

import pytest
import torch

from engine.export import formats


def read_operators_once() -> None:
    """Let torch read its table of ONNX operators once in this process, not for each export: a quarter of the time."""
    export = torch.onnx.export

    def with_one_table(*arguments, **options):
        registry = importlib.import_module("torch.onnx._internal.exporter._registration").ONNXRegistry
        if not hasattr(registry.from_torchlib, "cache_info"):
            registry.from_torchlib = staticmethod(functools.cache(registry.from_torchlib))
        return export(*arguments, **options)

    torch.onnx.export = with_one_table


def share_graph(monkeypatch: pytest.MonkeyPatch, graph: Path) -> None:
    """Let exports to onnx and web copy this file with their own facts. If it is missing, the first export writes it."""
    write_onnx = formats.write_onnx

    def write(subject, path):
        import onnx

        if not graph.exists():
            write_onnx(subject, graph)
        model = onnx.load(graph)
        del model.metadata_props[:]
        onnx.helper.set_model_props(model, subject.facts)
        onnx.save(model, path)

    monkeypatch.setattr(formats, "write_onnx", write)
    monkeypatch.setitem(formats.FORMATS, "onnx", formats.FORMATS["onnx"]._replace(write=write))

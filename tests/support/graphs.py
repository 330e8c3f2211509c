"""Exports that share a graph, because torch needs ten seconds to trace one that takes photos."""

import shutil
from pathlib import Path

import pytest

from engine.export import formats


def share_graph(monkeypatch: pytest.MonkeyPatch, graph: Path) -> None:
    """Let exports to onnx and web copy this file. If it is missing, the first export writes it."""
    write_onnx = formats.write_onnx

    def write(subject, path):
        if not graph.exists():
            write_onnx(subject, graph)
        shutil.copy(graph, path)

    monkeypatch.setattr(formats, "write_onnx", write)
    monkeypatch.setitem(formats.FORMATS, "onnx", formats.FORMATS["onnx"]._replace(write=write))

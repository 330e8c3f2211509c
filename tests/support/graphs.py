"""Exports that start from a graph that another export has written, because torch needs ten seconds for a graph of photos."""

import shutil
from pathlib import Path

import pytest

from engine.export import formats


def share_graph(monkeypatch: pytest.MonkeyPatch, graph: Path) -> None:
    """Let all exports to onnx and web begin with a copy of this file. If it does not exist, the first export writes it."""
    write_onnx = formats.write_onnx

    def write(subject, path):
        if not graph.exists():
            write_onnx(subject, graph)
        shutil.copy(graph, path)

    monkeypatch.setattr(formats, "write_onnx", write)
    monkeypatch.setitem(formats.FORMATS, "onnx", formats.FORMATS["onnx"]._replace(write=write))

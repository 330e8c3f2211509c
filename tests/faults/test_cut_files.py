"""A file that is read again has its old or its new content after a kill at any file operation of its writer."""

import ast
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch

from datasets.index import IndexBuilder, open_index, open_or_build
from datasets.sources.shards import ShardTar, scan
from datasets.sources.tar import Tar
from engine.checkpoint.async_saver import AsyncSaver
from engine.checkpoint.find import newest_in, read_checkpoint
from engine.checkpoint.format import keep_as
from engine.checkpoint.sharded_saver import ShardedSaver
from engine.export.files import staged
from engine.predict.output import ClassFolders
from engine.record.metrics import EpochRows, StepRows
from engine.record.saved_files import read_rows, read_table
from models.weights.sharded import PIECES
from models.weights.torch_files import read_torch
from scripts.make_shards import prepare_output_folder, write_part
from scripts.sweep import Sweep, make_folder, read_sweep
from tests.support.batches import batch
from tests.support.configs import CPU
from tests.support.dying import deaths, dying
from tests.support.modules import ROOT, parsed
from utils.distributed import Process
from utils.files import write_text


def write_metrics(folder: Path, version: int) -> None:
    EpochRows(folder, version).add({"epoch": version, "train_loss": version / 7})


def write_steps(folder: Path, version: int) -> None:
    rows = StepRows(folder, version)
    rows.add({"step": version, "loss": version / 7, "other_pct": 100 / 7})
    rows.close()


def save(folder: Path, version: int, kind: Callable[..., AsyncSaver], state: dict) -> None:
    progress = {"skips_in_a_row": 0, "best": [float(version), version, 0.5, ""]}
    saver = kind(folder, 1, CPU if kind is AsyncSaver else Process(CPU), pytest.fail)
    saver.reload_from_disk()
    state |= {"epoch": version - 1, "step": version, "progress": progress}
    saver.save(state, ["best.pth", f"checkpoint-{version}.pth"])
    saver.wait()


def steps_saved(folder: Path) -> dict[str, Any]:
    """Return the update from which a run resumes, and the update of the best weights. No checkpoint may be damaged."""
    steps = {path.name: read_checkpoint(path)["step"] for path in folder.glob("*.pth")}
    newest = newest_in(folder, pytest.fail)
    return {"best": steps.get("best.pth"), "newest": steps[newest.name] if newest else None}


def copy_without_links(folder: Path, version: int) -> None:
    write_text(folder / "last.pth", str(version))
    with patch.object(os, "link", side_effect=OSError):
        keep_as(folder / "last.pth", folder / "best.pth")


def write_index(folder: Path, version: int) -> None:
    def build(builder: IndexBuilder) -> dict:
        builder.add("path", [b"a", b"bc"])
        builder.add("target", np.array([version, 2]))
        return {}

    columns = {"path": "text", "target": "<i4"}
    open_or_build([folder / "train.index"], columns, {"of": version}, build, keep_small=True)


def read_index(folder: Path) -> dict[str, Any]:
    index = open_index(folder / "train.index")
    return {} if index is None else {"rows": (index.column("target").tolist(), index.text("path").chunk(0, 2))}


def write_shards(folder: Path, version: int) -> None:
    images = SimpleNamespace(file=lambda index: (".png", b"%d" % index * 600), targets=np.array([0, 1, 1]), name=str)
    prepare_output_folder(folder, "{}\n")
    if version == 2:
        write_part(folder, "train", images, np.arange(3), 2)


def read_shards(folder: Path) -> dict[str, Any]:
    tars = {path.name: scan(Tar(path)).names for path in folder.glob("*.tar")}
    index = open_index(folder / "train.index")
    claimed = {"claimed": (folder / "shards.json").exists()}
    return tars | claimed | ({"index": index.column("label").tolist()} if index else {})


def export_file(folder: Path, version: int) -> None:
    with staged(folder / "x.safetensors") as path:
        path.write_bytes(b"%d" % version * 99)


def export_folder(folder: Path, version: int) -> None:
    if not (folder / f"hf-{version}").exists():  # -output must be a new folder
        with staged(folder / f"hf-{version}") as path:
            path.mkdir()
            for name in ("config.json", "README.md"):
                (path / name).write_text(str(version))


def sort_photo(folder: Path, version: int) -> None:
    """Copy a photo to the folder of its class, as halfstep predict -into does."""
    (folder / "photos").mkdir(exist_ok=True)
    (folder / f"photos/{version}.png").write_bytes(b"%d" % version * 999)
    (folder / "sorted").mkdir(exist_ok=True)
    ClassFolders(folder / "sorted", ["cat"]).add(str(folder / f"photos/{version}.png"), "cat")


def save_sweep(folder: Path, version: int) -> None:
    make_folder(folder)
    Sweep(["-seed", str(version)], {}, [1, 2], points=[{}]).save(folder)


def read_saved_sweep(folder: Path) -> dict[str, Any]:
    sweep = read_sweep(folder)
    return {"flags": sweep.flags} if sweep else {}


def write_cache(folder: Path, version: int) -> None:
    from datasets import cache
    from datasets.pixels import Pixels

    if f"images {version}" not in read_cache(folder):
        images = ((1, 2, b"%d%d" % (version, number)) for number in range(2))
        cache.write_cache(cache_at(folder, version), Pixels(1), None, np.arange(4).reshape(2, 2), images)
    cache_at(folder, 3 - version).remove()


def cache_at(folder: Path, version: int):
    from datasets.cache import CacheLocation

    return CacheLocation(folder, "digits-train", str(version))


def read_cache(folder: Path) -> dict[str, Any]:
    from datasets.cache import open_cache

    caches = {f"images {version}": open_cache(cache_at(folder, version)) for version in (1, 2)}
    return {name: [each.read(number).tobytes() for number in range(2)] for name, each in caches.items() if each}


def pull_tar(folder: Path, version: int) -> None:
    from datasets.sources.remote import Pull

    tar_cache(folder).pull(Pull(ShardTar("a.tar", 99, version)))


def tar_cache(folder: Path):
    from datasets.sources.remote import TarCache

    def read_ranges(name: str, size: int, ranges: np.ndarray) -> list[tuple[int, bytes]]:
        return [(start, b"x" * (stop - start)) for start, stop in ranges.tolist()]

    return TarCache(folder, SimpleNamespace(read_ranges=read_ranges, url_of=str), 999)


def read_tars(folder: Path) -> dict[str, Any]:
    cache, tars = tar_cache(folder), [ShardTar("a.tar", 99, version) for version in (1, 2)]
    return {str(tar): cache.path(tar).read_bytes() for tar in tars if cache.holds(tar)}


def pull_range(folder: Path, version: int) -> None:
    from datasets.sources.remote import Pull

    tar_cache(folder).pull(Pull(ShardTar("a.tar", 99_999, 1), ranges=np.array([[30_000 * version, 40_000 * version]])))


def read_range(folder: Path) -> dict[str, Any]:
    try:
        tar = tar_cache(folder).open(ShardTar("a.tar", 99_999, 1))
    except FileNotFoundError:
        return {}
    return {str(start): tar.read(start, stop - start) for start, stop in tar.ranges.tolist()}


def write_embeddings(folder: Path, version: int) -> None:
    from engine.features.embedder import Photos, Table
    from engine.features.feature_files import write_features

    features, nothing = np.full((1, 3), version, np.float32), np.zeros((1, 0), np.float32)
    table = Table(np.array([0]), np.ones((1, 2), np.int32), features, logits=nothing, known=nothing)
    write_features(folder / "x.npz", Photos(folder, ["1.png"]), {}, table)


def write_labels(folder: Path, version: int) -> None:
    from engine.labelling.review import Row, write_review

    data = SimpleNamespace(name=lambda number: "a.png", label=lambda number: "cat", root=folder)
    with patch("engine.labelling.review.draw_sheets", return_value=[]):
        write_review(folder, [Row(0, f"dog {version}", 0.5, "")], data)


def write_overflow(folder: Path, version: int) -> None:
    from engine.doctor.overflow import Batches, save_overflow

    save_overflow(folder, Batches(version, 0, [(batch(2), 1.0)]))


def contents(*names: str, read: Callable[[Path], Any] = Path.read_bytes) -> Callable[[Path], dict[str, Any]]:
    """Return a function that reads these files of a folder."""
    return lambda folder: {name: read(folder / name) for name in names if (folder / name).exists()}


class Writer(NamedTuple):
    write: Callable[[Path, int], None]  # writes version 1 of its files, or version 2
    read: Callable[[Path], dict[str, Any]]  # what the next start of the program reads; it must not fail


WRITERS = {
    "text": Writer(
        lambda folder, version: write_text(folder / "config.yaml", f"SEED: {version}"), contents("config.yaml")
    ),
    "metrics": Writer(
        write_metrics,
        lambda folder: (
            contents("metrics.jsonl", read=read_rows)(folder) | contents("metrics.csv", read=read_table)(folder)
        ),
    ),
    "steps": Writer(write_steps, lambda folder: {"rows": read_table(folder / "steps.csv")}),
    "checkpoints": Writer(
        lambda folder, version: save(folder, version, AsyncSaver, {"state_dict": {"w": torch.full((9,), version)}}),
        steps_saved,
    ),
    "sharded checkpoints": Writer(
        lambda folder, version: save(folder, version, ShardedSaver, {PIECES: {"w": torch.full((9,), version)}}),
        steps_saved,
    ),
    "checkpoint without links": Writer(copy_without_links, contents("best.pth")),
    "index of images": Writer(write_index, read_index),
    "shards": Writer(write_shards, read_shards),
    "exported file": Writer(export_file, contents("x.safetensors")),
    "exported folder": Writer(
        export_folder, contents(*[f"hf-{v}/{name}" for v in (1, 2) for name in ("config.json", "README.md")])
    ),
    "sorted photos": Writer(
        sort_photo, lambda folder: {path.name: path.read_bytes() for path in folder.glob("sorted/*/[!.]*")}
    ),
    "sweep": Writer(save_sweep, read_saved_sweep),
    "cache": Writer(write_cache, read_cache),
    "tars of a server": Writer(pull_tar, read_tars),
    "range of a tar of a server": Writer(pull_range, read_range),
    "features": Writer(write_embeddings, contents("x.npz", read=lambda path: np.load(path)["features"].tolist())),
    "table of labels": Writer(write_labels, contents("labels.csv", "labels.json")),
    "batch of an overflow": Writer(
        write_overflow, contents("overflow-batch.pth", read=lambda path: read_torch(path)["step"])
    ),
}


def leftovers(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob(".*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("before", ["nothing", "older files"])
@pytest.mark.parametrize(
    "writer",
    [pytest.param(each, id=name) for name, each in WRITERS.items()],
)
def test_file_is_old_or_new_after_kill_at_any_operation(tmp_path, writer, before):
    first, done, folder = (tmp_path / name for name in ("first", "done", "folder"))
    first.mkdir()
    if before == "older files":
        writer.write(first, 1)
    shutil.copytree(first, done)
    old = writer.read(done)
    with dying() as disk:
        writer.write(done, 2)
    new = writer.read(done)
    assert old != new and not disk.renamed_unsynced
    for number, part in deaths(disk.operations):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(first, folder)
        with dying(number, part) as killed:
            writer.write(folder, 2)
        assert killed.is_dead
        place = f"after a death at {killed.operations[number]}, {part} bytes of it done"
        for name, content in writer.read(folder).items():
            assert content in (old.get(name), new.get(name)), f"{name} {place}"
        writer.write(folder, 2)
        assert writer.read(folder) == new and leftovers(folder) == leftovers(done), place


# {file that writes without utils/files.py: why a kill does no harm}
DIRECT = {
    "datasets/identity.py": "an unnamed temporary file",
    "datasets/index.py": "unnamed temporary files",
    "engine/session.py": "the empty lock of a run's folder",
    "datasets/cache.py": "the index, written last, makes the data count",
    "engine/export/web.py": "a temporary path of `staged`",
    "models/compilation.py": "an unnamed temporary file",
    "engine/export/files.py": "a temporary path of `staged`",
    "engine/export/formats.py": "a temporary path of `staged`",
    "engine/export/hugging_face.py": "a temporary path of `staged`",
    "scripts/export.py": "a temporary path of `staged`",
    "scripts/sweep.py": "the empty lock of a sweep, and the output of trials, which only people read",
    "utils/log.py": "/dev/null",
}
TOOLS = ("scripts/benchmarks/", "scripts/maintenance/", "utils/files.py")
WRITES = {"write_bytes", "tofile", "save_file", "to_csv", "rename", "savetxt", "memmap", "TemporaryFile"}


def writes_directly(call: ast.Call) -> bool:
    """Return whether a call writes to a path.

    `write_text(path, text)` of utils/files.py has the path as an argument.
    """
    if isinstance(call.func, ast.Attribute):
        return call.func.attr in WRITES or (call.func.attr == "write_text" and len(call.args) == 1)
    modes = [str(each.value) for each in call.args[1:2] if isinstance(each, ast.Constant)]
    return isinstance(call.func, ast.Name) and call.func.id == "open" and bool({*"".join(modes)} & {*"wax+"})


@pytest.mark.long
def test_only_listed_files_write_without_the_safe_functions():
    found = {
        name
        for package in ("configs", "datasets", "engine", "models", "scripts", "utils")
        for path in (ROOT / package).rglob("*.py")
        if not (name := path.relative_to(ROOT).as_posix()).startswith(TOOLS)
        if any(isinstance(node, ast.Call) and writes_directly(node) for node in ast.walk(parsed(path)))
    }
    assert found <= {*DIRECT}, "write with utils/files.py, and add a row to WRITERS"
    assert all((ROOT / name).exists() for name in DIRECT)

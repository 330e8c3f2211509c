"""Foreign or malicious files: none is removed, executed, trusted, or waited for without end."""

import io
import json
import os
import resource
import shutil
import tarfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from configs.load import load
from configs.yaml_files import read_layers
from datasets import class_weights
from datasets.pixels import Pixels
from datasets.pixels.decode import FORMATS, decode
from datasets.pixels.rules import ImageReadError
from datasets.sources.tar import Tar
from engine.checkpoint.find import read_checkpoint
from engine.checkpoint.format import progress_in, remove_unused_parts
from engine.open_model import config_of
from engine.predict.output import Output
from engine.predict.output_paths import Outputs
from engine.predict.predictor import Guess, Prediction
from engine.record.metrics import StepRows
from engine.record.saved_run import read_settings, read_status
from models.weights.files import chosen_weights, read_record, read_weights
from models.weights.torch_files import named_shards, to_safetensors
from scripts.predict import find_images
from tests.support.cases import cases_of, content_of, names_of
from tests.support.image_sets import files_with, make_folders, noise, samples, write_tar
from tests.support.image_sets import load as load_images
from tests.support.modules import ROOT
from tests.support.parquet_files import rows, write_parquet
from tests.support.refusals import assert_names
from tests.support.runs import run_folder, typed
from utils.errors import ConfigError
from utils.program import exit_code, exit_code_and_message

pytestmark = pytest.mark.slow

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(touched) (w) file closefile\nshowpage\n%%EOF\n"


@pytest.fixture
def theirs(tmp_path) -> Path:
    """Return a folder with a user's file."""
    (tmp_path / "theirs/step-3").mkdir(parents=True)
    (tmp_path / "theirs/step-3/precious.txt").touch()
    return tmp_path / "theirs"


@pytest.mark.parametrize("link", ["shards", "shards/step-7", "shards/notes", None])
def test_cleanup_removes_only_step_folders_and_follows_no_link(tmp_path, theirs, link):
    run = tmp_path / "run"
    if link != "shards":
        (run / "shards/step-5.2").mkdir(parents=True)
        (run / "shards/notes-of-mine").mkdir()
    if link:
        (run / link).parent.mkdir(parents=True, exist_ok=True)
        (run / link).symlink_to(theirs)
    remove_unused_parts(run)
    assert (theirs / "step-3/precious.txt").exists()
    assert link == "shards" or (run / "shards/notes-of-mine").exists() and not (run / "shards/step-5.2").exists()
    assert link is None or (run / link).is_symlink()


def test_embedded_program_in_an_image_is_not_executed(tmp_path, monkeypatch):
    start = Mock()
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", start)
    with pytest.raises(ImageReadError, match="a format that halfstep does not read"):
        decode(EPS, Pixels(3))
    start.assert_not_called()
    assert not {"EPS", "PSD", "FITS", "WMF"} & {*FORMATS}


@pytest.mark.parametrize("words", cases_of("mistakes-with_a_url"))
def test_url_as_folder_is_refused_without_showing_password(tmp_path, tiny, words):
    given = words.format(tiny=tiny, folder=tmp_path).replace("URL", "s3://me:hunter2@bucket/runs")
    ended = typed(*given.split()).refused(*names_of("mistakes-with_a_url", words))
    assert "hunter2" not in ended.printed
    assert not (ROOT / "s3:").exists()
    for path in tmp_path.rglob("*"):
        assert not (path.is_file() and b"hunter2" in path.read_bytes()), path


@pytest.fixture(scope="module")
def trained(tmp_path_factory, start) -> Path:
    """Return the weights of a run."""
    output = tmp_path_factory.mktemp("trained")
    assert start(output, "-opts", "TRAIN.NUM_EPOCHS=1").returncode == 0
    return run_folder(output) / "last.pth"


def scaled(path: Path, factor: float, into: Path) -> Path:
    """Write the weights times a factor. They stay finite, or become NaN."""
    weights = torch.load(path, weights_only=True)["state_dict"]
    torch.save({name: each * factor if "blocks" in name else each for name, each in weights.items()}, into)
    return into


@pytest.mark.parametrize("factor", [1e30, float("nan")])
def test_error_for_nonfinite_outputs_names_the_first_bad_layer(tmp_path, tiny, start, trained, factor):
    bad = scaled(trained, factor, tmp_path / "bad.pth")
    ended = start(tmp_path / "o", "-eval", "-pretrained", str(bad)).refused(str(bad), "blocks.0")
    assert "Validation" not in ended.stdout, ended.printed
    make_folders(tmp_path / "images", {"ant": 2})
    output = ["-csv", tmp_path / "p.csv", "-cfg", tiny]
    ended = typed("scripts/predict.py", bad, tmp_path / "images", *output).refused(str(bad), "blocks.0")
    assert not (tmp_path / "p.csv").exists(), ended.printed


def test_yaml_alias_of_a_number_is_allowed(tmp_path):
    (tmp_path / "0.yaml").write_text("TRAIN: {BASE_LR: &lr 1e-3, END_LR: *lr}")
    assert read_layers(str(tmp_path / "0.yaml"))[0].texts == {"TRAIN.BASE_LR": "1e-3", "TRAIN.END_LR": "1e-3"}


def extended(kind: bytes, content: bytes) -> bytes:
    """Return an additional header of a file, with this content."""
    header = tarfile.TarInfo("x")
    header.type, header.size = kind, len(content)
    return header.tobuf(tarfile.USTAR_FORMAT) + content + bytes(-len(content) % 512)


def jpeg_of(side: int, **options) -> bytes:
    content = io.BytesIO()
    noise(side, side).save(content, "JPEG", **options)
    return content.getvalue()


def test_jpeg_with_too_many_scans_is_not_decoded():
    jpeg = jpeg_of(1000, progressive=True)
    scan = jpeg.rfind(b"\xff\xda")
    # Only one scan of a single-scan JPEG is decoded, and nothing after the end of any JPEG, whatever follows.
    whole = (jpeg_of(1000) + 2000 * b"\xff\xda", jpeg + 2000 * b"\xff\xda")
    for each in (jpeg[:-2] + 20 * jpeg[scan : scan + 40] + jpeg[-2:], *whole):
        assert decode(each, Pixels(3)).shape == (1000, 1000, 3)
    with pytest.raises(ImageReadError, match="scans"):
        decode(jpeg[:-2] + 5000 * jpeg[scan : scan + 40] + jpeg[-2:], Pixels(3))
    # A large JPEG may have fewer scans, and a comment is not its end.
    jpeg = jpeg_of(100, progressive=True)
    size, scan = jpeg.find(b"\xff\xc2") + 5, jpeg.rfind(b"\xff\xda")
    wide = jpeg[:size] + 2 * (14_000).to_bytes(2, "big") + jpeg[size + 4 :]
    for end in (b"", b"\xff\xfe\0\4\xff\xd9"):  # a comment that looks like the end
        with pytest.raises(ImageReadError, match="scans"):
            decode(wide[:-2] + end + 100 * wide[scan:-2] + wide[-2:], Pixels(3))


def with_start(mode: str, kind: str, start: bytes, after: int) -> bytes:
    """Return an image file with other bytes inserted near its start."""
    content = io.BytesIO()
    noise(8, 8, mode).save(content, kind)
    return content.getvalue()[:after] + start + content.getvalue()[after:]


def test_pixel_limit_counts_the_memory_of_narrow_images():
    column = b"P5 1 10000 255\n" + bytes(10_000)
    assert decode(column, Pixels(3)).shape == (10_000, 1, 3)
    with pytest.raises(ImageReadError, match="MAX_PIXELS"):
        decode(column, Pixels(3, max_pixels=100_000))


def test_error_quoting_a_whole_file_is_shortened(capsys):
    assert exit_code(Mock(side_effect=ConfigError("x" * 10**6)), []) == 2
    assert len(capsys.readouterr().err) < 10_000


@pytest.mark.parametrize(
    "what", ["open log.txt", "open .config.yaml.tmp", "fsync .config.yaml.tmp", "open .steps.csv.tmp", "open steps.csv"]
)
def test_disk_failure_at_start_prints_no_traceback(tmp_path, start, what):
    ended = start(tmp_path, find_no_room=[what, 1, True])
    assert ended.returncode == 1 and "Traceback" not in ended.printed, ended.printed
    assert "disk full" in ended.stderr


STRANGE = "=1+1\n2026 forged\t\x1b[31m\u202e"


def test_hostile_names_are_escaped_on_console_and_in_csv(tmp_path, capfd):
    path = os.fsdecode(b"\xff=.png")
    found = Prediction(0, path, [Guess(0, STRANGE, 0.5)])
    outputs = Outputs(csv=tmp_path / "p.csv")
    output = Output([path], outputs, [STRANGE], is_first=True, may_stop=False)
    output.add(found)
    output.close({})
    line = capfd.readouterr().out
    assert line.count("\n") == 1 and line.count("\t") == 2 and "\x1b" not in line and "\u202e" not in line
    content = (tmp_path / "p.csv").read_bytes()
    assert os.fsencode(path) in content and b"\"'=1+1" in content


def changed(path: Path, change: str) -> dict:
    """Return a checkpoint with another value under a name, as in `progress/totals=[0.0]`."""
    state = place = torch.load(path, weights_only=True)
    where, value = change.split("=", 1)
    *parents, name = where.split("/")
    for each in parents:
        place = place[each]
    other, is_tensor = json.loads(value), isinstance(place.get(name), torch.Tensor)
    place[name] = torch.tensor(other) if is_tensor and other else other
    return state


@pytest.mark.long
@pytest.mark.parametrize("change", cases_of("mistakes-of_types_in_a_checkpoint"))
def test_checkpoint_with_wrongly_typed_values_is_reported_damaged(tmp_path, start, trained, change):
    folder = tmp_path / "o/train-20260102-03-04-05"
    shutil.copytree(trained.parent, folder)
    torch.save(changed(trained, change), folder / "last.pth")
    for path in folder.glob("checkpoint-*.pth"):
        path.unlink()
    for words in (
        ["scripts/predict.py", folder / "last.pth", trained],
        ["scripts/export.py", folder / "last.pth", "-output", tmp_path / "w.pth"],
    ):
        typed(*words).refused(*names_of("mistakes-of_types_in_a_checkpoint", change))
    ended = start(tmp_path / "o", "-opts", "TRAIN.NUM_EPOCHS=1")
    assert ended.returncode in (0, 2) and "Traceback" not in ended.printed, ended.printed
    assert_names(ended.printed, folder / "last.pth")


def test_weights_sharing_memory_are_read(tmp_path):
    both = torch.ones(4, 8)
    torch.save({"a.weight": both[:2], "b.weight": both, "c.weight": both.T}, tmp_path / "w.pth")
    assert read_weights(tmp_path / "w.pth").state["b.weight"].equal(both)


@pytest.mark.parametrize("change", cases_of("mistakes-in_a_checkpoint"))
def test_checkpoint_without_restorable_state_is_reported_damaged(tmp_path, tiny, trained, signal_handlers, change):
    folder = tmp_path / "r"
    folder.mkdir()
    shutil.copy(trained.parent / "config.yaml", folder)
    torch.save(changed(trained, change), folder / "last.pth")
    words = ["-cfg", tiny, "-amp", "-output", tmp_path / "o", "-resume", folder / "last.pth"]
    typed("main_single_gpu.py", *words).refused(*names_of("mistakes-in_a_checkpoint", change))


def test_invalid_record_of_best_epoch_is_ignored(tmp_path):
    torch.save({"progress": 5, "epoch": 1, "step": 2}, tmp_path / "best.pth")
    assert progress_in(tmp_path / "best.pth") == {}
    save_file({"a": torch.zeros(1)}, tmp_path / "w.safetensors", {"split": 5000 * "9"})
    assert read_record(tmp_path / "w.safetensors") == {}


def make_sets(folder: Path) -> None:
    """An image folder, lists, shards and parquet files of the same images."""
    for part in ("train", "val"):
        make_folders(folder / "imagefolder" / part, {"ant": 2, "bee": 2})
        make_folders(folder / "csv" / part, {"ant": 2})
        lines = "".join(f"{part}/ant/0{number}.JPEG,{number}\n" for number in range(2))
        (folder / f"csv/{part}.csv").write_text(f"image_path,target\n{lines}")
        (folder / "shards").mkdir(exist_ok=True)
        write_tar(folder / f"shards/{part}-0.tar", samples(0, 4))
        write_parquet(folder / f"parquet/{part}.parquet", rows(range(4)))


class Hostile(NamedTuple):
    """A file, and what each reader of it must say."""

    file: str
    write: Callable[[Path, Path], object]  # takes its path, and the weights of a run
    read: tuple[Callable[[Path], object], ...]
    mention: list[str]
    code: int | None  # the exit code; None: the image counts as unreadable


def rows_of(file: str, read: tuple, mention: str, contents: dict, code: int | None = 2) -> dict[str, Hostile]:
    """Return {its name: a row} for each of these contents of a file."""
    return {f"{file}, {name}": Hostile(file, write, read, mention.split(), code) for name, write in contents.items()}


def cases_in(file: str, read: tuple, name: str, write: Callable[[str], Callable]) -> dict[str, Hostile]:
    """Return a row for each case of tests/cases/NAME.txt."""
    cases = {f"{file}, {number}": case for number, case in enumerate(cases_of(name))}
    return {title: Hostile(file, write(case), read, names_of(name, case), 2) for title, case in cases.items()}


def text(content: str | bytes) -> Callable:
    return lambda path, weights: path.write_bytes(content if isinstance(content, bytes) else content.encode())


def torch_file(state: dict) -> Callable:
    return lambda path, weights: torch.save(state, path)


def checkpoint(change: str) -> Callable:
    return lambda path, weights: torch.save(changed(weights, change), path)


def outside(names: object) -> Callable:
    def write(path: Path, weights: Path) -> None:
        (path.parent / "shards").mkdir(exist_ok=True)
        torch.save({}, path.parent / "beside.pth")
        torch.save({"shards": names, "state_dict": {}}, path)

    return write


def head(tensor: object) -> Callable:
    return torch_file({"head.bias": torch.zeros(2), "head.weight": tensor})


def tar(start: bytes) -> Callable:
    return lambda path, weights: path.write_bytes(start + write_tar(path, samples(0, 2)).read_bytes())


def bomb(member: str) -> Callable:
    def write(path: Path, weights: Path) -> None:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open(member, "w") as file:
            for _ in range(200):
                file.write(bytes(2**20))

    return write


def bases(path: Path, weights: Path) -> None:
    """Write files that each include all later ones."""
    for number in range(9):
        others = ", ".join(f"{each}.yaml" for each in range(number + 1, 9))
        (path.parent / f"{number}.yaml").write_text(f"BASE: [{others}]")


def shards(part: object) -> Callable:
    """Write a checkpoint of four rows in one shard, which has this content."""

    def write(path: Path, weights: Path) -> None:
        (path.parent / "shards/step-1").mkdir(parents=True)
        torch.save(part, path.parent / "shards/step-1/1.pth")
        torch.save({"shards": ["shards/step-1/1.pth"], "state_dict": {"a": {"rows_in_shards": 4}}}, path)

    return write


def odd(kind: str) -> Callable:
    """Write a pipe, a folder, a file of a tebibyte without content, nothing, or a link to a device."""

    def write(path: Path, weights: Path) -> None:
        make_sets(path.parents[1] if path.suffix in (".tar", ".csv", ".parquet") else path.parent)
        path.unlink(missing_ok=True)
        make = {"pipe": os.mkfifo, "folder": Path.mkdir, "missing": str, "sparse": Path.touch}
        make.get(kind, lambda path: path.symlink_to(kind))(path)
        if kind == "sparse":
            os.truncate(path, 2**40)

    return write


def image(path: Path) -> np.ndarray:
    return files_with(path.parent, [path.name], [0], ["a"], Pixels(3)).read(0)


def of_set(data_set: str, **data) -> Callable:
    return lambda path: load_images(data_set, path.parent, **data)


def members(path: Path) -> list:
    return list(Tar(path).members())


def all_columns(path: Path) -> object:
    return load_images("csv", path, COLUMNS=("image_path", "*"))


def as_chosen(path: Path) -> object:
    return chosen_weights({"state_dict": torch.load(path, weights_only=True)}, path)


def from_safetensors(path: Path) -> dict:
    state = torch.load(path, weights_only=True)
    other = path.with_suffix(".safetensors")
    other.write_bytes(to_safetensors(state["state_dict"], {"config": state["config"]}))
    return read_record(other)


def in_shards(path: Path) -> object:
    remove_unused_parts(path.parent)
    return read_checkpoint(path) and named_shards(path)


def weights_of_classes(path: Path) -> object:
    config = load(["-opts", f"TRAIN.CLASS_WEIGHTS={path}"], needs_file=False).config
    return class_weights(config, load_images("imagefolder", path.parent / "imagefolder")[0])


MATRIX = torch.ones(2, 8)
TENSORS = {"repeated": torch.ones(1).expand(2**36), "single": torch.tensor(1.0), "none": None}
TENSORS |= {"sparse": MATRIX.to_sparse(), "meta": MATRIX.to("meta")}
TENSORS |= {"float8": MATRIX.to(torch.float8_e4m3fn), "complex": MATRIX.to(torch.complex64)}
TWICE = "step,loss\n0,1\nstep,loss\n0,1\n"
COLUMNS = f"image_path,{','.join(f'k{n}' for n in range(20_000))}\n"
HEADERS = {
    "digits": extended(b"x", b"1" * 60_000),
    "long name": extended(b"L", b"n" * 100_000),
    "size": extended(b"x", b"39 size=" + b"9" * 30 + b"\n"),
    "sparse": extended(b"x", b"21 GNU.sparse.size=x\n"),
    "headers": 3000 * extended(b"x", b"6 a=b\n"),
}
IN_PIECES = {
    "exif": with_start("CMYK", "JPEG", 400_000 * b"\xff\xe1\0\x09Exif\0\0X", 2),
    "fill": with_start("CMYK", "JPEG", 10**7 * b"\xff", 2),
    "chunks": with_start("RGB", "PNG", 500_000 * (b"\0\0\0\0tESt" + zlib.crc32(b"tESt").to_bytes(4, "big")), 33),
    "comment": with_start("RGB", "PPM", b"#" + 10**7 * b"c" + b"\n", 3),
    "extensions": with_start("RGB", "GIF", 300_000 * b"\x21\xfe\1c\0", 13),
}
OUTSIDE = ([1, None], ["/etc/passwd"], ["shards/../beside.pth"], ["shards/../../x"], ["other/x"], 5)
ROWS = ([], *({"state_dict/a": rows} for rows in (torch.ones(3), None, torch.ones(1).expand(4))))
ZERO = (b"a.png \0 0\n", 1001 * b"a.png 0\n" + b"\0.png 0\n", "a.png 0\n".encode("utf-16"))
WEIGHTS = (read_weights, read_record)
OF_CLASSES = (
    lambda path: find_images([], [str(path)], Outputs()),
    lambda path: find_images([f"@{path}"], [], Outputs()),
    lambda path: load_images("imagefolder", path.parent / "imagefolder", CLASSES=str(path)),
    weights_of_classes,
)
SPECIAL = {"pipe": odd("pipe")}
ENDLESS = {kind: odd(kind) for kind in ("/dev/zero", "sparse", "pipe", "folder", "missing")}


def numbered(write: Callable, contents: Iterable) -> dict[str, Callable]:
    return {f"{number}": write(content) for number, content in enumerate(contents)}


TABLE = {
    # Settings and files of a run
    **cases_in("0.yaml", (read_layers, read_settings), "mistakes-without_end", lambda case: text(content_of(case))),
    **rows_of("0.yaml", (lambda path: read_layers(str(path)),), "BASE", {"bases": bases}),
    **rows_of("status.json", (lambda path: read_status(path.parent),), "status.json", {"sparse": odd("sparse")}),
    **rows_of("steps.csv", (lambda path: StepRows(path.parent, 9),), "steps.csv damaged", {"twice": text(TWICE)}),
    # Images and data sets
    **rows_of("a.jpg", (image,), "DATA.MAX_PIXELS", {"sparse": odd("sparse")}, None),
    **rows_of("a.jpg", (image,), "pieces", {name: text(each) for name, each in IN_PIECES.items()}, None),
    **rows_of("0.tar", (members,), "0.tar damaged", {name: tar(each) for name, each in HEADERS.items()}),
    **rows_of("x.csv", (all_columns,), "x.csv", {"many columns": text(COLUMNS)}),
    **rows_of("train_list.txt", (of_set("imagenet2012"),), "train_list.txt", numbered(text, ZERO)),
    **rows_of("train.csv", (of_set("csv"),), "train.csv", numbered(text, (each.replace(b" ", b",") for each in ZERO))),
    **rows_of("csv/val.csv", (of_set("csv"),), "val.csv", SPECIAL),
    **rows_of("shards/val-0.tar", (of_set("shards"),), "val-0.tar", SPECIAL),
    **rows_of("parquet/val.parquet", (of_set("parquet"),), "val.parquet", SPECIAL),
    **rows_of("names.txt", OF_CLASSES, "names.txt", ENDLESS),
    # Weights and checkpoints
    **rows_of("w.pth", (*WEIGHTS, read_settings, lambda path: read_layers(str(path))), "w.pth", SPECIAL),
    **rows_of("w.pth", (read_weights, as_chosen), "w.pth head.weight", {n: head(each) for n, each in TENSORS.items()}),
    **rows_of("w.pth", (read_weights,), "bytearray", {"bytes": torch_file({"a.weight": bytearray(9)})}),
    **rows_of("w.pdparams", (read_weights,), "w.pdparams", {"memo": text(b"\x80\2}r\xff\xff\xff\x0f.")}),
    **rows_of("w.npz", (*WEIGHTS, read_checkpoint), "unpack", {"bomb": bomb("cls.npy")}),
    **rows_of("w.pth", (*WEIGHTS, read_checkpoint), "unpack", {"bomb": bomb("bomb/data.pkl")}),
    **rows_of("last.pth", (in_shards,), "last.pth", numbered(outside, OUTSIDE)),
    **rows_of(
        "last.pth", (read_checkpoint,), "-resume last.pth", {f"rows {n}": shards(each) for n, each in enumerate(ROWS)}
    ),
    **cases_in(
        "w.pth", (read_checkpoint, read_record, from_safetensors), "mistakes-in_settings_of_a_checkpoint", checkpoint
    ),
    **cases_in(
        "x.pth", (lambda path: config_of(torch.load(path), "x.pth"),), "mistakes-in_images_of_a_checkpoint", checkpoint
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_hostile_file_is_refused_at_once(tmp_path, trained, case):
    hostile, before = TABLE[case], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (path := tmp_path / hostile.file).parent.mkdir(exist_ok=True)
    hostile.write(path, trained)
    for read in hostile.read:
        began = time.process_time()
        with pytest.raises(Exception) as caught:
            read(path)
        error = caught.value
        code, told = (None, str(error)) if isinstance(error, ImageReadError) else exit_code_and_message(error)
        assert code == hostile.code, error
        assert_names(told, *hostile.mention)
        assert time.process_time() - began < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB


TEMPORARY = ".last.pth.tmp .status.json.tmp"
IN_THE_WAY = {  # {kind of object: {the files that it replaces: the exit code}}
    "link": {".lock": 2, "log.txt": 0, f"last.pth config.yaml .config.yaml.tmp {TEMPORARY}": 0},
    "pipe": {".lock": 2, "log.txt": 2, "last.pth": 1, "config.yaml": 2, f".config.yaml.tmp {TEMPORARY}": 0},
    "folder": {".lock": 2, "log.txt": 2, "last.pth": 1, "config.yaml": 2, ".config.yaml.tmp": 2, TEMPORARY: 1},
}


@pytest.mark.parametrize(("kind", "names"), [(kind, names) for kind in IN_THE_WAY for names in IN_THE_WAY[kind]])
def test_links_in_run_folder_never_redirect_writes(tmp_path, start, trained, kind, names):
    folder, precious = tmp_path / "o/train-20260102-03-04-05", tmp_path / "precious"
    shutil.copytree(trained.parent, folder)
    precious.write_text("precious")
    make = {"link": lambda path: path.symlink_to(precious), "pipe": os.mkfifo, "folder": os.mkdir}[kind]
    for name in names.split():
        (folder / name).unlink(missing_ok=True)
        make(folder / name)
    ended = start(tmp_path / "o")
    assert "Traceback" not in ended.printed and ended.returncode == IN_THE_WAY[kind][names], ended.printed
    assert precious.read_text().startswith("precious") and (names == "log.txt" or precious.read_text() == "precious")
    assert ended.returncode or not (folder / "last.pth").is_symlink()

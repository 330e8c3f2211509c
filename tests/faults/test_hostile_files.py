"""Foreign or malicious files: none is removed, executed, trusted, or waited for without end."""

import contextlib
import io
import json
import os
import resource
import shutil
import tarfile
import time
import zipfile
import zlib
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from configs.load import load, to_yaml
from configs.schema import Config
from configs.yaml_files import read_layers
from datasets import class_weights
from datasets.index import MAGIC, IndexWriter, open_index
from datasets.sources.arrays import ArrayImages
from datasets.sources.images import FileImages
from datasets.sources.tar import Tar
from datasets.split import divide, new_record
from datasets.transforms.decode import FORMATS, decode
from datasets.transforms.pixel_rules import PixelRules
from datasets.types import ImageReadError
from engine.checkpoint.find import read_checkpoint
from engine.checkpoint.format import progress_in, remove_unused_parts
from engine.predict.classifier import config_of, load_classifier
from engine.predict.output import Output
from engine.predict.predictor import Guess, Prediction
from engine.record.metrics import StepRows
from engine.record.saved_files import read_object
from engine.record.saved_run import KINDS, SavedRun, read_settings, read_status
from engine.saves import Saves
from engine.train.stop_conditions import NonFinite
from extras.report.report import write_report
from models.weights.files import chosen_weights, read_record, read_weights
from models.weights.torch_files import named_shards, to_safetensors
from scripts.comparing.groups import group_runs
from scripts.comparing.tables import to_markdown
from scripts.predict import Outputs, find_images
from scripts.sweeping import runner
from scripts.sweeping.plan import read_sweep
from scripts.sweeping.results import read_result
from tests.support.cases import cases_of, content_of, names_of
from tests.support.configs import small_config
from tests.support.image_sets import load as load_images
from tests.support.image_sets import make_folders, noise, samples, write_tar
from tests.support.modules import ROOT
from tests.support.parquet_files import rows, write_parquet
from tests.support.refusals import assert_names, refused
from tests.support.runs import run_folder, status_of, typed
from tests.support.trainers import make_trainer, update
from utils.errors import ConfigError, DataError, naming_damage
from utils.program import exit_code

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
        decode(EPS, PixelRules(3))
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


def test_run_without_a_valid_update_ends_as_stopped(tmp_path, start, trained):
    too_large = scaled(trained, 1e30, tmp_path / "large.pth")
    ended = start(tmp_path / "o", "-pretrained", str(too_large), "-opts", "VALIDATE_FREQ=1")
    assert ended.returncode == 3, ended.printed
    facts = status_of(run_folder(tmp_path / "o"))
    assert facts["state"] == "stopped" and facts["exit_code"] == 3
    assert "best validation top-1 0.00%" in ended.stdout


@pytest.mark.parametrize("factor", [1e30, float("nan")])
def test_error_for_nonfinite_outputs_names_the_first_bad_layer(tmp_path, tiny, start, trained, factor):
    bad = scaled(trained, factor, tmp_path / "bad.pth")
    ended = start(tmp_path / "o", "-eval", "-pretrained", str(bad)).refused(str(bad), "blocks.0")
    assert "Validation" not in ended.stdout, ended.printed
    make_folders(tmp_path / "images", {"ant": 2})
    output = ["-csv", tmp_path / "p.csv", "-cfg", tiny]
    ended = typed("scripts/predict.py", bad, tmp_path / "images", *output).refused(str(bad), "blocks.0")
    assert not (tmp_path / "p.csv").exists(), ended.printed


@pytest.mark.parametrize("text", cases_of("mistakes-without_end"))
def test_settings_files_that_expand_endlessly_are_refused_at_once(tmp_path, text):
    (tmp_path / "0.yaml").write_text(content_of(text))
    for read in (read_layers, read_settings):
        with refused(ConfigError, *names_of("mistakes-without_end", text)):
            read(tmp_path / "0.yaml")


def test_exponentially_nested_base_files_are_refused_at_once(tmp_path):
    for number in range(9):
        others = ", ".join(f"{each}.yaml" for each in range(number + 1, 9))
        (tmp_path / f"{number}.yaml").write_text(f"BASE: [{others}]")
    with refused(ConfigError):
        read_layers(str(tmp_path / "0.yaml"))


WORDS = {text[:2]: f"MODEL.KWARGS.x={text}" for text in ("[&a [*a]]", 9_000 * "[", 9_000 * "(" + 9_000 * ")")}


@pytest.mark.parametrize(
    "word", [*WORDS.values(), f"TAG{50_000 * '-'}=1", f"-{50_000 * 'a.'}"], ids=[*WORDS, "key", "flag"]
)
def test_very_long_command_line_word_is_refused_at_once(word):
    began = time.process_time()
    with pytest.raises(ConfigError, match=word[:3]):
        load(["-opts", word] if "=" in word else [word, "1"], needs_file=False)
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    "value", [None, [], {}, [[None]], [[1, 2, 3]], {"epoch": "x"}, "\ud800\x1b", -1, 1e308, 10**400, float("nan")]
)
def test_values_of_wrong_type_in_run_files_are_ignored(tmp_path, value):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(to_yaml(Config(), {}))
        row = dict.fromkeys(["eval_top1", "eval_loss", "images_per_s", "train_seconds", "memory_mb", "skipped"], value)
        rows = [json.dumps({"epoch": epoch, "eval_top5": 50.0} | row) + "\n" for epoch in range(2)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(rows))
        facts = dict.fromkeys(KINDS, value)
        (tmp_path / name / "status.json").write_text(json.dumps(facts))
    nested = {"about": facts, "best": facts, "state": "stopped"}
    (tmp_path / "b/status.json").write_text(json.dumps(facts | nested))
    runs = [SavedRun.open(tmp_path / name) for name in ("a", "b")]
    for each in runs:
        write_report(each, tmp_path / "r.html")
    text = to_markdown(group_runs(runs, None), "", [])
    assert "\x1b" not in text and text.encode()
    read_result(tmp_path / "b")


def test_yaml_alias_of_a_number_is_allowed(tmp_path):
    (tmp_path / "0.yaml").write_text("TRAIN: {BASE_LR: &lr 1e-3, END_LR: *lr}")
    assert read_layers(str(tmp_path / "0.yaml"))[0].texts == {"TRAIN.BASE_LR": "1e-3", "TRAIN.END_LR": "1e-3"}


def test_oversized_image_or_status_file_is_never_read(tmp_path):
    for name in ("large.jpg", "status.json"):
        with open(tmp_path / name, "wb") as file:
            file.truncate(2**40)
    with pytest.raises(ImageReadError, match="MAX_PIXELS"):
        FileImages(tmp_path, ["large.jpg"], [0], ["a"], PixelRules(3)).read(0)
    with pytest.raises(ConfigError, match=r"status\.json"):
        read_status(tmp_path)


def extended(kind: bytes, content: bytes) -> bytes:
    """Return an additional header of a file, with this content."""
    header = tarfile.TarInfo("x")
    header.type, header.size = kind, len(content)
    return header.tobuf(tarfile.USTAR_FORMAT) + content + bytes(-len(content) % 512)


@pytest.mark.parametrize(
    "start",
    [
        extended(b"x", b"1" * 60_000),
        extended(b"x", b"1 " * 100_000),
        extended(b"L", b"n" * 100_000),
        extended(b"x", b"39 size=" + b"9" * 30 + b"\n"),
        extended(b"x", b"21 GNU.sparse.size=x\n"),
        3000 * extended(b"L", b"n"),
        3000 * extended(b"x", b"6 a=b\n"),
    ],
    ids=["digits", "large", "long name", "size", "sparse", "names", "headers"],
)
def test_tar_with_impossible_headers_is_refused_at_once(tmp_path, start):
    path = write_tar(tmp_path / "0.tar", samples(0, 2))
    path.write_bytes(start + path.read_bytes())
    began = time.process_time()
    with pytest.raises(DataError, match=r"0\.tar.*damaged"):
        list(Tar(path).members())
    assert time.process_time() - began < 5


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
        assert decode(each, PixelRules(3)).shape == (1000, 1000, 3)
    with pytest.raises(ImageReadError, match="scans"):
        decode(jpeg[:-2] + 5000 * jpeg[scan : scan + 40] + jpeg[-2:], PixelRules(3))
    # A large JPEG may have fewer scans, and a comment is not its end.
    jpeg = jpeg_of(100, progressive=True)
    size, scan = jpeg.find(b"\xff\xc2") + 5, jpeg.rfind(b"\xff\xda")
    wide = jpeg[:size] + 2 * (14_000).to_bytes(2, "big") + jpeg[size + 4 :]
    for end in (b"", b"\xff\xfe\0\4\xff\xd9"):  # a comment that looks like the end
        with pytest.raises(ImageReadError, match="scans"):
            decode(wide[:-2] + end + 100 * wide[scan:-2] + wide[-2:], PixelRules(3))


def with_start(mode: str, kind: str, start: bytes, after: int) -> bytes:
    """Return an image file with other bytes inserted near its start."""
    content = io.BytesIO()
    noise(8, 8, mode).save(content, kind)
    return content.getvalue()[:after] + start + content.getvalue()[after:]


@pytest.mark.parametrize(
    "data",
    [
        with_start("CMYK", "JPEG", 400_000 * b"\xff\xe1\0\x09Exif\0\0X", 2),
        with_start("CMYK", "JPEG", 500 * (b"\xff\xe1\x01\0Exif\0\0" + bytes(248)), 2),
        with_start("CMYK", "JPEG", 10**7 * b"\xff", 2),
        with_start("RGB", "PNG", 500_000 * (b"\0\0\0\0tESt" + zlib.crc32(b"tESt").to_bytes(4, "big")), 33),
        with_start("RGB", "PPM", b"#" + 10**7 * b"c" + b"\n", 3),
        b"P3 4 4 255\n" + 200_000 * b"#c\n",
        with_start("RGB", "GIF", 300_000 * b"\x21\xfe\1c\0", 13),
    ],
    ids=["exif", "some exif", "fill", "chunks", "comment", "comments", "extensions"],
)
def test_image_with_too_many_chunks_is_refused(data):
    began = time.process_time()
    with pytest.raises(ImageReadError, match="pieces"):
        decode(data, PixelRules(3))
    assert time.process_time() - began < 2


def test_pixel_limit_counts_memory_needed_for_decoding():
    column, webp = b"P5 1 10000 255\n" + bytes(10_000), io.BytesIO()
    noise(20, 20).save(webp, "WEBP")
    assert decode(column, PixelRules(3)).shape == (10_000, 1, 3)
    assert decode(webp.getvalue(), PixelRules(3, max_pixels=640)).shape == (20, 20, 3)
    for content, limit, told in ((column, 100_000, "MAX_PIXELS"), (webp.getvalue(), 639, "WebP")):
        with pytest.raises(ImageReadError, match=told):
            decode(content, PixelRules(3, max_pixels=limit))


def test_thousands_of_classes_or_columns_are_read_quickly(tmp_path):
    (tmp_path / "columns.csv").write_text(f"image_path,{','.join(f'k{n}' for n in range(20_000))}\n")
    began = time.process_time()
    with pytest.raises(DataError):
        load_images("csv", tmp_path / "columns.csv", COLUMNS=("image_path", "*"))
    images = ArrayImages(np.zeros((50_000, 1, 1)), np.arange(50_000) // 2, ["x"] * 25_000, PixelRules(1), "x")
    images.split_keys = lambda: [[b"%d.png" % (number // 2 % 2) for number in range(50_000)]]
    assert len(divide(images, new_record("hash", "x", 1e-9, None))[1]) == 0
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    "content", [b"[]", b"x", 10**5 * b"[", b'{"columns": {"a": 5}}', b'{"columns": {}, "facts": [], "id": ""}']
)
def test_forged_index_description_is_rejected(tmp_path, content):
    start = b"".join(number.to_bytes(8, "little") for number in (len(content), zlib.crc32(content)))
    (tmp_path / "train.index").write_bytes(MAGIC + start + content)
    assert open_index(tmp_path / "train.index") is None


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
    given = Namespace(csv=tmp_path / "p.csv", json=None, sheet=None, into=None, unsure=None)
    output = Output([path], given, [STRANGE], is_first=True, may_stop=False)
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


MATRIX = torch.ones(2, 8)
NO_MATRICES = {"repeated": torch.ones(1).expand(2**36), "single": torch.tensor(1.0), "none": None}
NO_MATRICES |= {"sparse": MATRIX.to_sparse(), "meta": MATRIX.to("meta")}
NO_MATRICES |= {"float8": MATRIX.to(torch.float8_e4m3fn), "complex": MATRIX.to(torch.complex64)}


@pytest.mark.parametrize("kind", NO_MATRICES)
def test_error_names_an_unsupported_tensor_among_the_weights(tmp_path, kind):
    path, state = tmp_path / "w.pth", {"head.bias": torch.zeros(2), "head.weight": NO_MATRICES[kind]}
    torch.save(state, path)
    for read in (lambda: read_weights(path), lambda: chosen_weights({"state_dict": state}, path)):
        with pytest.raises(ConfigError, match=r"w\.pth: head\.weight"):
            read()


def test_weights_sharing_memory_are_read(tmp_path):
    both = torch.ones(4, 8)
    torch.save({"a.weight": both[:2], "b.weight": both, "c.weight": both.T}, tmp_path / "w.pth")
    assert read_weights(tmp_path / "w.pth").state["b.weight"].equal(both)


@pytest.mark.parametrize("names", [[1, None], ["/etc/passwd"], ["shards/../../x"], ["other/x"], 5])
def test_checkpoint_shards_outside_the_shards_folder_are_refused(tmp_path, names):
    torch.save({"shards": names, "state_dict": {}}, tmp_path / "last.pth")
    with pytest.raises(ConfigError, match="last.pth"):
        read_checkpoint(tmp_path / "last.pth") and named_shards(tmp_path / "last.pth")
    remove_unused_parts(tmp_path)


def test_shard_rows_contradicting_the_checkpoint_index_are_refused(tmp_path):
    (tmp_path / "shards/step-1").mkdir(parents=True)
    index = {"shards": ["shards/step-1/1.pth"], "state_dict": {"a": {"rows_in_shards": 4}}}
    torch.save(index, tmp_path / "last.pth")
    others = ({"state_dict/a": rows} for rows in (torch.ones(3), None, torch.ones(1).expand(4)))
    for part in ([], *others):
        torch.save(part, tmp_path / "shards/step-1/1.pth")
        with pytest.raises(ConfigError):
            read_checkpoint(tmp_path / "last.pth")


@pytest.mark.parametrize("change", cases_of("mistakes-in_a_checkpoint"))
def test_checkpoint_without_restorable_state_is_reported_damaged(tmp_path, tiny, trained, signal_handlers, change):
    folder = tmp_path / "r"
    folder.mkdir()
    shutil.copy(trained.parent / "config.yaml", folder)
    torch.save(changed(trained, change), folder / "last.pth")
    words = ["-cfg", tiny, "-amp", "-output", tmp_path / "o", "-resume", folder / "last.pth"]
    typed("main_single_gpu.py", *words).refused(*names_of("mistakes-in_a_checkpoint", change))


@pytest.mark.parametrize("change", [{"exp_avg": torch.zeros(3)}, {"step": torch.zeros(2)}], ids=str)
def test_optimizer_state_with_wrong_shapes_is_reported_damaged(tmp_path, change):
    trainer = update(make_trainer(small_config(tmp_path)), 1)
    state = trainer.state_dict()
    state["optimizer"]["state"][0].update(change)
    torch.save(state, tmp_path / "last.pth")
    with pytest.raises(ConfigError, match="damaged"), naming_damage(tmp_path):
        trainer.load_state_dict(state)
    # A rollback meets this checkpoint, and then a file of another program.
    said = SimpleNamespace(warn=pytest.fail, say=pytest.fail)
    saves = SimpleNamespace(trainer=trainer, process=trainer.process, folder=tmp_path, log=said, _wait=lambda: None)
    with pytest.raises(ConfigError, match=r"last\.pth: damaged"):
        Saves.roll_back(saves, NonFinite("x", range(1, 9)))
    torch.save({}, tmp_path / "last.pth")
    said.warn = lambda line: assert_names(line, tmp_path / "last.pth", "damaged")
    assert not Saves.roll_back(saves, NonFinite("x", range(1, 9)))


@pytest.mark.parametrize("change", cases_of("mistakes-in_settings_of_a_checkpoint"))
def test_checkpoint_with_impossible_settings_is_reported_damaged(tmp_path, trained, change):
    state = changed(trained, change)
    torch.save(state, tmp_path / "w.pth")
    metadata = {"config": json.dumps(state["config"])}
    (tmp_path / "w.safetensors").write_bytes(to_safetensors(state["state_dict"], metadata))
    for read, ending in ((read_checkpoint, "pth"), (read_record, "pth"), (read_record, "safetensors")):
        with refused(ConfigError, *names_of("mistakes-in_settings_of_a_checkpoint", change)):
            read(tmp_path / f"w.{ending}")


SPLIT = {"rule": "hash", "fraction": 0.2, "seed": 0}


@pytest.mark.parametrize(
    "change", [{"fraction": "x"}, {"fraction": float("nan")}, {"seed": None}, {"folds": 0}, {"fold": 2}], ids=str
)
def test_checkpoint_with_unusable_split_is_reported_damaged(tmp_path, change):
    folds = [SPLIT | {"folds": 2, "fold": number} for number in (0, 1)]
    for split in (SPLIT | change, SPLIT | {"folds": 2, "fold": 2}, {"rule": "position"}, SPLIT, *folds):
        (tmp_path / "w.safetensors").write_bytes(to_safetensors({"a": torch.zeros(1)}, {"split": json.dumps(split)}))
        with contextlib.nullcontext() if split in (SPLIT, *folds) else pytest.raises(ConfigError, match="damaged"):
            assert read_record(tmp_path / "w.safetensors")["split"] == split


def test_steps_csv_with_duplicate_rows_is_reported_damaged(tmp_path):
    (tmp_path / "steps.csv").write_text("step,loss\n0,1\nstep,loss\n0,1\n")
    with pytest.raises(ConfigError, match="steps.csv: damaged"):
        StepRows(tmp_path, 9)


@pytest.mark.parametrize("change", cases_of("mistakes-in_images_of_a_checkpoint"))
def test_checkpoint_with_impossible_image_settings_is_reported_damaged(trained, change):
    assert config_of(torch.load(trained, weights_only=True)).DATA.IMAGE_SIZE == 8
    with refused(ConfigError, *names_of("mistakes-in_images_of_a_checkpoint", change)):
        config_of(changed(trained, change), "x.pth")


def test_tiny_pickle_in_weights_cannot_exhaust_memory(tmp_path):
    torch.save({"a.weight": bytearray(9)}, tmp_path / "w.pth")
    with pytest.raises(ConfigError, match="bytearray"):
        read_weights(tmp_path / "w.pth")
    (tmp_path / "w.pdparams").write_bytes(b"\x80\2}r\xff\xff\xff\x0f.")  # a memo index of pickle
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ConfigError, match="no weights"):
        read_weights(tmp_path / "w.pdparams")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB


def test_invalid_record_of_best_epoch_is_ignored(tmp_path):
    torch.save({"progress": 5, "epoch": 1, "step": 2}, tmp_path / "best.pth")
    assert progress_in(tmp_path / "best.pth") == {}
    (tmp_path / "w.safetensors").write_bytes(to_safetensors({"a": torch.zeros(1)}, {"split": 5000 * "9"}))
    assert read_record(tmp_path / "w.safetensors") == {}


def test_file_with_too_many_tensors_is_refused_unread(tmp_path, monkeypatch):
    monkeypatch.setattr("models.weights.state.MOST_MEMBERS", 3)
    torch.save({"a": torch.zeros(1)}, tmp_path / "w.pth")
    with pytest.raises(ConfigError, match=r"w\.pth.*tensors"):
        read_record(tmp_path / "w.pth")


@pytest.mark.parametrize("ending", [".npz", ".pth"])
def test_zip_bomb_in_weights_is_refused_unread(tmp_path, ending):
    path = tmp_path / f"bomb{ending}"
    member = "bomb/data.pkl" if ending == ".pth" else "cls.npy"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open(member, "w") as file:
        for _ in range(200):
            file.write(bytes(2**20))
    for read in (read_weights, read_checkpoint, read_record):
        with pytest.raises(ConfigError, match="unpack"):
            read(path)


@pytest.mark.parametrize("what", ["/dev/zero", "sparse", "pipe", "folder", "missing"])
def test_endless_list_of_class_names_is_refused_at_once(tmp_path, trained, what):
    make_sets(tmp_path)
    path = tmp_path / "names.txt"
    make = {"sparse": path.touch, "pipe": lambda: os.mkfifo(path), "folder": path.mkdir, "missing": lambda: None}
    make.get(what, lambda: path.symlink_to(what))()
    if what == "sparse":
        os.truncate(path, 2**40)
    config = load(["-opts", f"TRAIN.CLASS_WEIGHTS={path}"], needs_file=False).config
    for read in (
        lambda: find_images([], [str(path)], Outputs()),
        lambda: find_images([f"@{path}"], [], Outputs()),
        lambda: load_classifier(trained, names=path),
        lambda: load_images("imagefolder", tmp_path / "imagefolder", CLASSES=str(path)),
        lambda: class_weights(config, load_images("imagefolder", tmp_path / "imagefolder")[0]),
    ):
        with pytest.raises(ConfigError, match="names.txt"):
            read()


OF_SETS = {"csv": "val.csv", "shards": "classes.txt val-0.tar", "imagenet2012": "val_list.txt"}
OF_SETS["parquet"] = "val.parquet"


@pytest.mark.parametrize("what", ["/proc/version", "pipe"])
@pytest.mark.parametrize(("data_set", "name"), [(each, name) for each in OF_SETS for name in OF_SETS[each].split()])
def test_kernel_files_and_pipes_are_refused_unread(tmp_path, data_set, name, what):
    make_sets(tmp_path)
    (tmp_path / "imagenet2012").mkdir()
    (tmp_path / "imagenet2012/train_list.txt").touch()
    path, weights = tmp_path / data_set / name, tmp_path / "w.pth"
    path.unlink(missing_ok=True)
    for each in (path, weights):
        os.mkfifo(each) if what == "pipe" else each.symlink_to(what)
    with pytest.raises((ConfigError, DataError), match="kernel|pipe|empty") as raised:
        load_images(data_set, tmp_path / data_set)
    assert path.name in str(raised.value)
    for read in (read_weights, read_record, read_settings, lambda path: read_layers(str(path))):
        with pytest.raises(ConfigError, match="kernel|pipe"):
            read(weights)


@pytest.mark.parametrize("data", [b"a.png \0 0\n", 1001 * b"a.png 0\n" + b"\0.png 0\n", "a.png 0\n".encode("utf-16")])
def test_image_list_with_zero_bytes_is_refused(tmp_path, data):
    for name in ("train", "val"):
        (tmp_path / f"{name}_list.txt").write_bytes(data)
        (tmp_path / f"{name}.csv").write_bytes(b"image_path,target\n" + data.replace(b" ", b","))
    for data_set in ("imagenet2012", "csv"):
        with pytest.raises(DataError, match="train.*(zero byte|UTF-16)"):
            load_images(data_set, tmp_path)


OF_INDEXES = {"imagefolder": "path target", "csv": "0.path 0.target", "shards": "label name tar.size"}
OF_INDEXES["parquet"] = "label group_rows file_rows"
NUMBERS = {"imagefolder": "target", "shards": "label tar.first", "parquet": "label group_file group_rows group_bytes"}
IN_INDEXES = {"rows": OF_INDEXES, "types": OF_INDEXES | {"csv": "0.group 0.target"}, "numbers": NUMBERS}
IN_INDEXES["more"] = {"parquet": "file_rows"}


@pytest.mark.parametrize(
    ("what", "data_set", "name"),
    [(what, each, name) for what, sets in IN_INDEXES.items() for each in sets for name in sets[each].split()],
)
def test_index_with_wrong_columns_is_rebuilt(tmp_path, monkeypatch, what, data_set, name):
    make_sets(tmp_path)
    monkeypatch.setattr("datasets.index.SMALL", -1)
    add, init = IndexWriter.add, IndexWriter.__init__

    def begin(writer, place, columns, small=None):
        init(writer, place, {of: "u1" if of == name else kind for of, kind in columns.items()}, small)

    def add_other(writer, of, values):
        other = np.full(len(values), 0 if what == "types" else -7)
        other = {"rows": values[1:], "more": [*values, 0]}.get(what, other)
        add(writer, of, other if of == name else values)

    with monkeypatch.context() as patched, contextlib.suppress(Exception):
        patched.setattr(IndexWriter, "add", add_other)
        patched.setattr(IndexWriter, "__init__", begin if what == "types" else init)
        load_images(data_set, tmp_path / data_set)
    assert list((tmp_path / data_set).rglob("*.index"))
    check_sets(tmp_path, data_set)


FACTS = "notes first_lines folder_names repeated shared shared_groups left_out of"


@pytest.mark.parametrize("value", [None, 5, 10**400, "x", [], [[None]], ["x"], {"a": {}}, {"a": "x"}], ids=str)
@pytest.mark.parametrize("data_set", OF_INDEXES)
def test_index_with_metadata_of_wrong_type_is_rebuilt(tmp_path, monkeypatch, data_set, value):
    make_sets(tmp_path)
    monkeypatch.setattr("datasets.index.SMALL", -1)
    finish = IndexWriter.finish
    with monkeypatch.context() as patched, contextlib.suppress(Exception):
        wrong = {"classes": value} if data_set == "parquet" else dict.fromkeys(FACTS.split(), value)
        patched.setattr(IndexWriter, "finish", lambda writer, facts: finish(writer, facts | wrong))
        load_images(data_set, tmp_path / data_set)
    check_sets(tmp_path, data_set)


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


def check_sets(folder: Path, data_set: str) -> None:
    for images in load_images(data_set, folder / data_set):
        assert len(images) == len(images.targets) == (2 if data_set == "csv" else 4)
        assert len({images.name(number) for number in range(len(images))}) == len(images)


def test_pipes_in_place_of_saved_files_never_block_reading(tmp_path):
    for name in ("results.json", "sweep.json", "wandb.json", "trial-000.txt"):
        os.mkfifo(tmp_path / name)
    assert read_object(tmp_path / "results.json") == {}
    assert read_object(tmp_path / "wandb.json") == {}
    with pytest.raises(ConfigError, match="pipe"):
        read_sweep(tmp_path)
    with pytest.raises(OSError, match=r"trial-000\.txt"):
        runner.start(["true"], tmp_path / "trial-000.txt", str(tmp_path))


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

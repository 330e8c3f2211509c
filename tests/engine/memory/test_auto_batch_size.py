"""-batch_size auto: the largest batch that fits, told and saved with the run, and taken again when it goes on."""

import gc
import re

import pytest
import torch

import main_single_gpu
from configs.load import load
from engine.memory import auto_batch_size as batch_size
from engine.memory.auto_batch_size import Trial, calculate, most_images, search, settle
from engine.memory.estimate import fixed_bytes, passing_bytes
from engine.precision.policy import Precision
from engine.session import Session
from models import build_model
from tests.support.configs import CPU, SMALL, small_config
from tests.support.programs.train_fp64 import run_out
from tests.support.refusals import assert_names
from tests.support.run_hash import run_hash
from tests.support.runs import rows, run_folder
from utils.distributed import Process
from utils.program import exit_code
from utils.signals import StopSignal

MIB = 2**20


@pytest.fixture
def program(tmp_path, capsys):
    """Runs main_single_gpu.py on the digits with -batch_size auto; returns exit code, stdout and stderr."""
    (tmp_path / "small.yaml").write_text(SMALL.replace("NUM_EPOCHS: 2", "NUM_EPOCHS: 1"))

    def type_in(*flags: str, cfg=tmp_path / "small.yaml", size=("-batch_size", "auto")) -> tuple[int, str, str]:
        given = ["-cfg", str(cfg), "-output", str(tmp_path / "output"), *size]
        code = exit_code(main_single_gpu.main, [*given, *flags])
        gc.collect()  # frees the lock of the run's folder, as the end of a program does
        return code, *capsys.readouterr()

    return type_in


def never(*_):
    raise AssertionError("searched")


def test_a_run_says_what_it_found_saves_it_and_never_searches_again(program, tmp_path, monkeypatch):
    monkeypatch.setattr(batch_size, "free_memory", lambda device: 4 * MIB)
    options = ("-opts", "TRAIN.LINEAR_SCALED_LR=8", "TRAIN.WARMUP_EPOCHS=0", "TRAIN.BASE_LR=1e-4")
    code, said, error = program(*options)
    assert code == 0, error
    (line,) = [line for line in said.splitlines() if line.startswith("batch size: ")]
    found = int(re.match(r"batch size: (\d+) images", line)[1])
    assert_names(line, "2, 3, 8 and 16 images", "20%", "4 MiB")
    assert 8 <= found < 1000 and found % 8 == 0
    assert_names(said, f"updates of {found} images", f"Lr: {1e-4 * found / 8:.6f}")
    path = run_folder(tmp_path / "output")
    text = (path / "config.yaml").read_text()
    assert re.search(rf"BATCH_SIZE: {found} +# auto \(flag -batch_size\)", text)
    assert torch.load(path / "last.pth", weights_only=True)["config"]["DATA.BATCH_SIZE"] == found
    monkeypatch.setattr(batch_size, "calculate", never)
    saved = tmp_path / "saved.yaml"
    saved.write_text(text)
    code, said, error = program(cfg=saved, size=("-tag", "again"))
    assert code == 0 and "batch size: " not in said, error
    (other,) = (tmp_path / "output").glob("*-again")
    assert run_hash(other) == run_hash(path)
    code, said, error = program("-resume", "auto", *options)
    assert code == 0 and "Epoch[" not in said, error
    assert_names(said, f"batch size: {found}")
    (again,) = rows(program("-resume", "auto", "-check", *options)[1])["batch size"][1:]
    assert_names(again, f"{found} images")


def test_what_is_calculated_leaves_its_margin(tmp_path):
    config = small_config(tmp_path, "TRAIN.MODEL_EMA=true", "MODEL.EMBED_DIM=64")
    stop, free = StopSignal(), 40 * MIB

    def found(process=Process(CPU), config=config) -> int:  # noqa: B008
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(batch_size, "free_memory", lambda device: free)
            return calculate(config, 10, process, 10**6, stop)[0]

    trial = Trial(config, 10, Process(CPU), stop)
    trial.update(8)
    fixed = fixed_bytes(config, build_model(config, 10), Precision(config, CPU))
    count = found()
    assert 0.5 * free < fixed + passing_bytes(lambda: trial.update(count)) < 0.8 * free
    assert found(Process(CPU, world_size=2, local_size=2)) < count / 2
    assert found(config=small_config(tmp_path, "MODEL.EMBED_DIM=64")) > count, "the running mean counts"
    assert found(config=small_config(tmp_path, "TRAIN.MODEL_EMA=true", "MODEL.EMBED_DIM=64", "AMP=true")) > count


def test_what_lives_only_in_the_forward_is_measured_where_a_part_is_frozen(tmp_path, monkeypatch):
    monkeypatch.setattr(batch_size, "free_memory", lambda device: 40 * MIB)
    config = small_config(tmp_path, "MODEL.EMBED_DIM=64", "MODEL.FREEZE=[*,!head]")
    count, _ = calculate(config, 10, Process(CPU), 10**6, stop := StopSignal())
    trial = Trial(config, 10, Process(CPU), stop)
    trial.update(8)
    assert 8 * MIB < passing_bytes(lambda: trial.update(count)) < 0.8 * 40 * MIB


class Limited(Trial):
    """On a device that holds so many images at once."""

    def __init__(self, config, most: int, process=None):
        super().__init__(config, 10, process or Process(CPU), StopSignal())
        self.most, self.tried = most, []

    def update(self, count: int, times: int = 1) -> None:
        self.tried.append(count)
        super().update(count, times)

    def _begin(self, config, train_data) -> None:
        super()._begin(config, train_data)
        run_out(self.trainer, self.most, step=0)


@pytest.mark.parametrize(
    ("fits", "found"), [(300, 200), (190, 184), (24, 24), (23, 16), (8, 8), (7, 4), (3, 2), (1, 1), (0, 0)]
)
def test_the_search_ends_at_the_largest_multiple_of_8_that_fits_or_below_8_with_less(tmp_path, fits, found):
    config = small_config(tmp_path, "TRAIN.ACCUM_ITER=3")
    trial = Limited(config, fits)
    assert search(trial, withheld=100, most=200) == found
    assert not trial.trainer or trial.trainer.data.order.num_accumulated == 2, "the second meets gradients"


@pytest.mark.parametrize(("fits", "found"), [(17, 16), (7, 4), (2, 2), (1, 0)])
def test_images_that_are_mixed_come_in_pairs_and_several_processes_try_what_they_rehearse(tmp_path, fits, found):
    repeats = "TRAIN.REPEATED_AUG=3"  # of fewer images they are refused
    config = small_config(tmp_path, "TRAIN.MIXUP_ALPHA=0.8", "TRAIN.MODEL_EMA=true", "AMP=true", repeats)
    trial = Limited(config, fits, Process(CPU, world_size=2))
    assert search(trial, withheld=0, most=100) == found
    if found > 2:
        assert trial.trainer.rehearsals < -1 and trial.trainer.micro_batches.size is None
        gradients = sum(parameter.nbytes for parameter in trial.trainer.parameters)
        assert sum(each.nbytes for each in trial.kept_by_ddp) == gradients


def test_an_error_that_is_about_something_else_ends_the_search(tmp_path, monkeypatch):
    def fail(trial, config, train_data):
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr(Trial, "_begin", fail)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        search(Trial(small_config(tmp_path), 10, Process(CPU), StopSignal()), withheld=0, most=100)


@pytest.mark.parametrize(
    ("num_images", "world_size", "options", "most"),
    [
        (1000, 1, (), 1000),
        (1001, 2, (), 496),
        (10**8, 2, (), 10**6),
        (1000, 1, ("TRAIN.ACCUM_ITER=4",), 248),
        (7, 1, (), 7),
        (7, 1, ("TRAIN.CUTMIX_ALPHA=1",), 6),
        (1, 2, ("TRAIN.CUTMIX_ALPHA=1",), 2),
    ],
)
def test_an_update_never_asks_for_more_images_than_there_are(tmp_path, num_images, world_size, options, most):
    assert most_images(small_config(tmp_path, *options), num_images, world_size) == most


def test_all_images_of_a_small_set_are_as_many_as_are_taken(program):
    code, said, _ = program("-compile", "false")
    assert code == 0
    assert_names(said, "batch size: 1432 images")  # of 1,438, a multiple of 8


def test_evaluation_takes_the_default_and_says_so(program):
    code, said, error = program("-eval")
    assert code == 2
    assert_names(error, "-eval", "-pretrained", "-resume")
    assert_names(said, "DATA.BATCH_SIZE auto", 256)


def test_check_shows_the_estimate(program, monkeypatch):
    monkeypatch.setattr("engine.preflight.free_memory", lambda device: 4 * MIB)
    found = rows(program("-check")[1])
    verdict, told = found["batch size"]
    count = int(re.match(r"(\d+) images", told)[1])
    assert verdict == "ok" and count % 8 == 0 and f"for {count} images" in found["memory"][1]
    assert found["memory"][0] == "ok" and f"for {count} images an update" in found["learning rate"][1]
    monkeypatch.setattr("engine.preflight.free_memory", lambda device: 1000)
    assert rows(program("-check")[1])["batch size"][0] == "WRONG"
    for wrong in ("MODEL.FREEZE=[nothing]", "PRECISION.CUSTOM_BLACK_LIST=[nothing]"):
        assert rows(program("-check", "-amp", "-opts", wrong)[1])["batch size"][0] == "WARN"


def test_where_not_one_image_fits_the_run_ends_with_2_and_says_what_to_lower(program, monkeypatch):
    monkeypatch.setattr(batch_size, "free_memory", lambda device: 1000)
    code, _, error = program()
    assert code == 2 and error.startswith("error: ")
    assert_names(error, "DATA.BATCH_SIZE", "DATA.IMAGE_SIZE (8)", "-amp")


def test_of_torch_compile_it_is_said_that_it_was_left_out(tmp_path, monkeypatch, capsys):
    (tmp_path / "small.yaml").write_text(SMALL)
    loaded = load(["-cfg", str(tmp_path / "small.yaml"), "-batch_size", "auto", "-compile"])
    monkeypatch.setattr(batch_size, "calculate", lambda *_: (64, "as arranged"))
    session = Session(loaded, Process(CPU))
    settle(session, 1000, 10, None, StopSignal())
    said = capsys.readouterr().out
    assert_names(said, "batch size: 64 images", "torch.compile")
    assert not Trial(session.config, 10, Process(CPU), StopSignal()).config.COMPILE


def test_told_to_stop_while_it_looks_nothing_is_trained(program, monkeypatch, tmp_path):
    def told(config, num_classes, process, most, stop):
        stop.number = 15
        return 8, ""

    monkeypatch.setattr(batch_size, "calculate", told)
    code, _, error = program()
    assert code == 128 + 15 and error.startswith("error: ")
    assert not list((tmp_path / "output").iterdir())


def test_a_trial_that_is_told_to_stop_tries_no_more(tmp_path):
    trial = Limited(small_config(tmp_path), 1000)
    trial.stop.number = 15
    assert search(trial, withheld=0, most=100) == 0 and not trial.tried


@pytest.mark.parametrize("text", ["auto", "AUTO", " Auto "])
def test_auto_is_read_in_any_case_from_a_file_a_flag_and_opts(tmp_path, text):
    (tmp_path / "x.yaml").write_text(f"DATA: {{BATCH_SIZE: '{text}'}}")
    assert load(["-cfg", str(tmp_path / "x.yaml")]).config.DATA.BATCH_SIZE == "auto"
    (tmp_path / "y.yaml").write_text("TRAIN: {MIXUP_ALPHA: 0.8}")
    for argv in (["-batch_size", text], ["-opts", f"DATA.BATCH_SIZE={text}"]):
        assert load(["-cfg", str(tmp_path / "y.yaml"), *argv]).config.DATA.BATCH_SIZE == "auto"

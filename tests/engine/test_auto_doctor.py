"""A run that skips updates calls the doctor by itself, stays as it is, and ends with exit code 3 and the finding."""

import csv
import json
import signal
from types import SimpleNamespace

import pytest
import torch

import main_single_gpu
from configs.load import load
from engine.diagnose.auto_doctor import examine
from models import build_model
from tests.support.configs import SMALL, replaced, small_config
from tests.support.refusals import assert_names
from tests.support.run_hash import run_hash
from tests.support.runs import run, run_folder
from tests.support.trainers import make_trainer
from utils.program import exit_code

FLOAT16 = ["-amp", "-amp_dtype", "float16"]
OVERFLOWS = ["PRECISION.MAX_CONSECUTIVE_SKIPS=200", "REPORT_FREQ=1", "SAVE_STEPS=50"]


def big_logits(model):
    """Queries and keys of hundreds in one block: their products are above float16's end, whatever the loss scale."""
    with torch.no_grad():
        model.blocks[1].attn.qkv.weight[:32].normal_(std=200.0)


def overflow(script, folder, *flags, options, processes=1) -> tuple:
    """A run of 200 skipped updates: its folder, what it printed, its rows of steps.csv."""
    (folder / "small.yaml").write_text(SMALL)
    start = ["-cfg", str(folder / "small.yaml"), "-output", str(folder / "output"), "-batch_size", "2", *FLOAT16]
    result = run(script, *start, *flags, "-opts", *OVERFLOWS, *options, processes=processes)
    assert result.returncode == 3, result.stdout + result.stderr
    path = run_folder(folder / "output")
    with open(path / "steps.csv") as file:
        return path, result.stdout, list(csv.DictReader(file))


def check_stopped(path, said, rows, finding) -> None:
    assert [int(row["step"]) for row in rows] == list(range(200))
    for name, weights in (("last.pth", "state_dict"), ("overflow-batch.pth", "state_dict")):
        state = torch.load(path / name, weights_only=True)[weights]
        assert all(torch.isfinite(value).all() for value in state.values()), name
    status = json.loads((path / "status.json").read_text())
    assert status["state"] == "stopped"
    for told in (said.splitlines()[-1], status["reason"]):
        assert_names(told, "200 updates", *finding.split(), f"-cfg {path / 'doctor.yaml'}", "-amp_dtype bfloat16")
    assert said.count("doctor: ") == 2, "it looks once a run: one line why, one with what it found"


def test_200_overflows_at_a_constant_scale_end_with_exit_code_3_and_whole_weights(tmp_path):
    options = [f"PRECISION.INIT_LOSS_SCALING={2.0**100}", "PRECISION.USE_DYNAMIC_LOSS_SCALING=false"]
    path, said, rows = overflow("main_single_gpu.py", tmp_path, options=options)
    check_stopped(
        path, said, rows, "head: forward is finite; the first gradient that is not, at loss scale 1.26765e+30"
    )
    assert all(float(row["loss_scale"]) == pytest.approx(2.0**100) for row in rows)
    prescribed = load(["-cfg", str(path / "doctor.yaml")]).config.PRECISION
    assert 1 <= prescribed.INIT_LOSS_SCALING <= 2**24 and not prescribed.CUSTOM_BLACK_LIST


def test_200_overflows_of_the_forward_pass_on_two_processes_end_at_the_floor_of_the_scale(tmp_path):
    torch.manual_seed(0)
    model = build_model(small_config(tmp_path), 10)
    big_logits(model)
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    flags = ["-pretrained", str(tmp_path / "weights.pth")]
    path, said, rows = overflow(
        "main_multi_gpu.py", tmp_path, *flags, options=["PRECISION.MIN_LOSS_SCALING=2"], processes=2
    )
    check_stopped(path, said, rows, "blocks.1.attn logits (q·k)")
    scales = [float(row["loss_scale"]) for row in rows]
    assert min(scales) == scales[-1] == 2 and scales[0] == 2**15
    assert load(["-cfg", str(path / "doctor.yaml")]).config.PRECISION.CUSTOM_BLACK_LIST == ("blocks.1.attn",)


@pytest.fixture
def train(tmp_path, capsys):
    """A short run in float16 with a large first scale; returns its folder and what it printed."""
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}

    def start(name, scale, *options):
        (tmp_path / "small.yaml").write_text(SMALL)
        flags = ["-cfg", str(tmp_path / "small.yaml"), "-output", str(tmp_path / name), "-epochs", "1", *FLOAT16]
        more = [f"PRECISION.INIT_LOSS_SCALING={scale}", "MODEL.DROPOUT=0.1", "REPORT_FREQ=1", *options]
        assert exit_code(main_single_gpu.main, [*flags, "-opts", *more]) == 0
        return run_folder(tmp_path / name), capsys.readouterr().out

    yield start
    for each, handler in before.items():
        signal.signal(each, handler)


def test_the_doctor_looks_once_and_changes_nothing_of_the_run(train):
    with_doctor, said = train("with", 2.0**34)
    without, silent = train("without", 2.0**34, "PRECISION.DOCTOR_SKIPS=null")
    assert run_hash(with_doctor) == run_hash(without)
    assert said.count("doctor: ") == 2
    assert_names(said, "step 9")
    assert (with_doctor / "doctor.yaml").exists()
    assert "doctor:" not in silent and not (without / "doctor.yaml").exists()


def test_a_scale_that_is_finding_its_level_does_not_call_the_doctor(train):
    folder, said = train("settles", 2.0**22)
    skipped = json.loads((folder / "metrics.jsonl").read_text())["skipped"]
    assert 0 < skipped < 10 and "doctor:" not in said and not (folder / "doctor.yaml").exists()


def test_a_doctor_that_fails_does_not_end_the_run(train, monkeypatch):
    def no_memory(case):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr("engine.diagnose.auto_doctor.diagnose", no_memory)
    _, said = train("fails", 2.0**34)
    (line,) = [line for line in said.splitlines() if line.startswith("warning: ")]
    assert_names(line, "doctor", "step 9", "OutOfMemoryError: out of memory")


def examined(folder, plant, *options, **precision):
    """What a trainer with something planted is told after one update, the words of the log, and the trainer."""
    trainer = make_trainer(replaced(small_config(folder, *options), PRECISION=precision))
    plant(trainer.model)
    trainer.precision.refresh()
    windows = trainer.data.windows(0, 1)
    trainer.update(next(windows))
    said = []
    trainer.log.say = said.append
    before = {name: value.clone() for name, value in trainer.state_dict()["state_dict"].items()}
    kinds = [(type(module), module.training) for module in trainer.model.modules()]
    torch.manual_seed(1)
    random_state = torch.get_rng_state()
    told = examine(SimpleNamespace(log=trainer.log, config=trainer.config, path=folder), trainer)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert kinds == [(type(module), module.training) for module in trainer.model.modules()]
    after = trainer.model.state_dict()
    assert all(torch.equal(value.nan_to_num(), after[name].nan_to_num()) for name, value in before.items())
    assert all(parameter.grad is None for parameter in trainer.parameters)
    return told, said


def test_in_float32_it_names_the_module_and_prescribes_nothing(tmp_path):
    told, said = examined(tmp_path, lambda model: model.blocks[1].norm1.weight.data.fill_(float("nan")))
    assert_names(told, "blocks.1.norm1", "float32", "TRAIN.BASE_LR")
    assert len(said) == 1 and not (tmp_path / "doctor.yaml").exists()


@pytest.mark.parametrize(
    ("settings", "undone"),
    [
        ({"MODE": "naive"}, "    MODE: autocast\n"),
        ({"CUSTOM_WHITE_LIST": ("layer_norm",)}, "    CUSTOM_WHITE_LIST: []\n"),
    ],
)
def test_what_the_replay_leaves_out_is_taken_back_by_what_is_prescribed(tmp_path, settings, undone):
    told, said = examined(tmp_path, big_logits, "AMP=true", DTYPE="float16", **settings)
    assert_names(told, "blocks.1.attn", f"-cfg {tmp_path / 'doctor.yaml'}")
    text = (tmp_path / "doctor.yaml").read_text()
    assert undone in text and "CUSTOM_BLACK_LIST: [blocks.1.attn]" in text and "a replay with them is finite" in said[1]


def test_what_no_setting_mends_is_not_recommended(tmp_path, monkeypatch):
    monkeypatch.setattr("engine.diagnose.doctor.MOST_REPLAYS", 0)
    told, said = examined(tmp_path, big_logits, "AMP=true", DTYPE="float16")
    assert told.endswith("; try -amp_dtype bfloat16") and "a replay with them still breaks" in said[1]


def test_a_residual_sum_in_half_is_replayed_as_the_run_has_it(tmp_path):
    told, said = examined(tmp_path, big_logits, "AMP=true", DTYPE="float16", RESIDUAL="half")
    assert told.startswith("first non-finite: blocks.1.attn") and "a replay with them is finite" in said[1]

"""A run that skips updates calls the doctor itself, and ends with exit code 3 and the finding of a replay."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from configs.load import load
from engine.doctor import Doctor
from engine.doctor.diagnosis import Diagnosis, best_scale, replay
from engine.doctor.overflow import Batches, make_case
from models import build_model
from tests.support.configs import CPU, SMALL, replaced, small_config
from tests.support.pretend_device import DEVICE, on_pretend_device, waits
from tests.support.refusals import assert_names
from tests.support.runs import rows_of, run_folder, status_of, typed
from tests.support.trainers import Lines, big_logits, make_trainer, train, update
from utils.seed import seed_update

pytestmark = pytest.mark.slow

OVERFLOWS = ["PRECISION.MAX_CONSECUTIVE_SKIPS=40", "SAVE_STEPS=10"]


def start(folder, name: str, *options: str, flags: tuple = (), processes: int = 1, code: int = 0, **more) -> tuple:
    """Run in float16. Return the run's folder and its output."""
    (folder / "small.yaml").write_text(SMALL)
    script = "main_single_gpu.py" if processes == 1 else "main_multi_gpu.py"
    words = ["-cfg", str(folder / "small.yaml"), "-output", str(folder / name), "-amp", "-amp_dtype", "float16", *flags]
    result = typed(script, *words, "-opts", "REPORT_FREQ=1", *options, processes=processes, **more)
    assert result.returncode == code, result.printed
    return run_folder(folder / name), result.stdout


def scales_of_stopped_run(path, said, finding) -> list[float]:
    """Return the loss scales of a run of 40 skipped updates, after checking that it ended correctly."""
    rows = rows_of(path / "steps.csv")
    assert [int(row["step"]) for row in rows] == list(range(40))
    for name in ("last.pth", "overflow-batch.pth"):
        state = torch.load(path / name, weights_only=True)["state_dict"]
        assert all(torch.isfinite(value).all() for value in state.values()), name
    status = status_of(path)
    assert status["state"] == "stopped"
    for told in (said.splitlines()[-1], status["reason"]):
        assert_names(told, "40 updates", *finding.split(), f"-cfg {path / 'doctor.yaml'}", "-amp_dtype bfloat16")
    assert said.count("doctor: ") == 2, "once per run: a line for the reason, a line for the finding"
    return [float(row["loss_scale"]) for row in rows]


def test_run_overflowing_at_constant_loss_scale_exits_with_3(tmp_path):
    options = [f"PRECISION.INIT_LOSS_SCALING={2.0**100}", "PRECISION.USE_DYNAMIC_LOSS_SCALING=false", *OVERFLOWS]
    path, said = start(tmp_path, "output", *options, flags=("-batch_size", "2"), code=3)
    finding = "head: the first gradient that is not finite, at loss scale 1.26765e+30"
    assert scales_of_stopped_run(path, said, finding) == [pytest.approx(2.0**100)] * 40
    prescribed = load(["-cfg", str(path / "doctor.yaml")]).config.PRECISION
    assert 1 <= prescribed.INIT_LOSS_SCALING <= 2**24 and not prescribed.CUSTOM_BLACK_LIST


@pytest.mark.long
def test_forward_overflow_on_two_processes_lowers_loss_scale_to_its_minimum(tmp_path):
    torch.manual_seed(0)
    big_logits(model := build_model(small_config(tmp_path), 10))
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    flags = ("-pretrained", str(tmp_path / "weights.pth"), "-batch_size", "2")
    options = ["PRECISION.MIN_LOSS_SCALING=2", *OVERFLOWS]
    path, said = start(tmp_path, "output", *options, flags=flags, processes=2, code=3)
    scales = scales_of_stopped_run(path, said, "blocks.1.attn logits (q·k)")
    assert min(scales) == scales[-1] == 2 and scales[0] == 2**15
    assert load(["-cfg", str(path / "doctor.yaml")]).config.PRECISION.CUSTOM_BLACK_LIST == ("blocks.1.attn",)


def test_initial_loss_scale_search_does_not_call_the_doctor(tmp_path):
    config = small_config(tmp_path, "AMP=true", "PRECISION.DTYPE=float16", f"PRECISION.INIT_LOSS_SCALING={2.0**22}")
    log = Lines()
    doctor = Doctor(config, tmp_path, log, {})
    assert 0 < train(make_trainer(config, callbacks=[doctor])).skipped < 10
    assert not log.said and not doctor.get_advice()


def examined(folder, plant, *options, **precision) -> tuple[str, Lines]:
    """Return the finding for a trainer with a planted fault after one update, and its log."""
    config = replaced(small_config(folder, *options), PRECISION={"MAX_CONSECUTIVE_SKIPS": 1, **precision})
    log = Lines()
    doctor = Doctor(config, folder, log, {})
    trainer = make_trainer(config, callbacks=[doctor])
    plant(trainer.model)
    trainer.computing.refresh()
    report = update(trainer).report()
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    kinds = [(type(module), module.training) for module in trainer.model.modules()]
    torch.manual_seed(1)
    random_state = torch.get_rng_state()
    doctor.on_report(trainer, report)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert kinds == [(type(module), module.training) for module in trainer.model.modules()]
    after = trainer.model.state_dict()
    assert all(torch.equal(value.nan_to_num(), after[name].nan_to_num()) for name, value in before.items())
    assert all(parameter.grad is None for parameter in trainer.parameters)
    return doctor.get_advice(), log


def test_doctor_replays_an_update_with_its_teacher(tmp_path):
    options = ("AMP=true", "TRAIN.DISTILLATION_TYPE=soft", "TRAIN.TEACHER_MODEL=test_resnet")
    advice, _ = examined(tmp_path, lambda model: None, *options, DTYPE="float16", INIT_LOSS_SCALING=2.0**100)
    assert_names(advice, "the update breaks at", "doctor.yaml")


def test_failing_doctor_does_not_end_the_run(tmp_path):
    def fail_in_float32(module, inputs):
        if not torch.is_autocast_enabled("cpu"):
            raise torch.OutOfMemoryError("out of memory")

    def plant(model):
        big_logits(model)
        model.register_forward_pre_hook(fail_in_float32)

    told, log = examined(tmp_path, plant, "AMP=true", DTYPE="float16")
    (line,) = log.warned
    assert_names(line, "doctor", "step 0", "OutOfMemoryError: out of memory")
    assert told == ""


@pytest.mark.parametrize("options", [(), ("AMP=true",)])
def test_doctor_names_module_failing_in_float32_but_prescribes_nothing(tmp_path, options):
    told, log = examined(tmp_path, lambda model: model.blocks[1].norm1.weight.data.fill_(float("nan")), *options)
    assert_names(told, "blocks.1.norm1", "float32", "TRAIN.BASE_LR")
    assert len(log.said) == 1 and not (tmp_path / "doctor.yaml").exists()


@pytest.mark.parametrize(
    ("settings", "undone"),
    [
        ({"MODE": "naive"}, "    MODE: autocast\n"),
        ({"CUSTOM_WHITE_LIST": ("layer_norm",)}, "    CUSTOM_WHITE_LIST: []\n"),
        ({"RESIDUAL": "half"}, ""),  # replayed with the run's setting
    ],
)
def test_doctor_prescription_reverts_settings_that_the_replay_ignored(tmp_path, settings, undone):
    told, log = examined(tmp_path, big_logits, "AMP=true", DTYPE="float16", **settings)
    assert told.startswith("the update breaks at blocks.1.attn")
    assert_names(told, f"-cfg {tmp_path / 'doctor.yaml'}")
    text = (tmp_path / "doctor.yaml").read_text()
    assert undone in text and "CUSTOM_BLACK_LIST: [blocks.1.attn]" in text
    assert "with these settings the replayed update is finite" in log.said[1]


def test_doctor_replay_uses_dropout_of_the_failed_update(tmp_path):
    config = small_config(tmp_path, "AMP=true", "PRECISION.DTYPE=float16", "MODEL.DROPOUT=0.5")
    last = Doctor(config, tmp_path, Lines(), {})
    trainer = update(make_trainer(config, callbacks=[last]), 3)
    batches = Batches(last.step, 0, last.batches)
    case = make_case(config, trainer.model, trainer.prepare, batches, 1.0, trainer.loss)
    assert case.seed == (config.SEED, 2, 0)
    seen = []
    case.loss = lambda logits, targets: seen.append(logits.detach()) or logits.sum()
    seed_update(7, 7, 7, CPU)
    replay(case, in_half=False, scale=1.0)
    seed_update(*case.seed, CPU)
    with torch.no_grad():
        expected = [case.model.train()(case.prepare(batch)[0]) for batch, _ in case.batches]
    assert all(map(torch.equal, seen, expected)) and len(seen) == len(expected)


@pytest.mark.parametrize(
    ("largest", "half", "expected"),
    [
        (3.0, torch.float16, 2**13),
        (1e-3, torch.float16, 2**24),
        (20_000.0, torch.float16, 1),
        (0.0, torch.float16, 2**24),
        (math.inf, torch.float16, 1),
        (1e-3, torch.bfloat16, 1),
    ],
)
def test_best_loss_scale_keeps_gradients_below_half_of_float16s_maximum(largest, half, expected):
    exact = SimpleNamespace(gradients={"one": (None, largest), "two": (None, largest / 9), "in float32": (None, 1e9)})
    scale = best_scale(exact, SimpleNamespace(in_half={"one", "two", "gone"}), half)
    assert scale == expected and (math.isinf(largest) or scale * largest <= 65504 / 2)


def test_streak_of_skips_after_rollback_is_diagnosed_again(tmp_path, monkeypatch):
    config = replaced(small_config(tmp_path, "AMP=true"), PRECISION={"DTYPE": "float16"})
    found = []
    monkeypatch.setattr(
        "engine.doctor.overflow.diagnose", lambda case: found.append(1) or Diagnosis(torch.float16, len(found))
    )
    doctor = Doctor(config, tmp_path, Lines(), {})
    trainer = make_trainer(config, callbacks=[doctor])
    report = replace(train(trainer), skips_in_a_row=10)
    doctor.on_report(trainer, report)
    doctor.on_report(trainer, report)
    assert len(found) == 1 and doctor.get_advice()
    doctor.on_rollback(trainer)
    assert not doctor.get_advice()
    doctor.on_report(trainer, report)
    assert len(found) == 2


@on_pretend_device
def test_doctor_adds_no_sync_to_an_update(tmp_path):
    config = small_config(tmp_path, "AMP=true")
    doctor = Doctor(config, tmp_path, Lines(), {})
    trainer = make_trainer(config, callbacks=[doctor], device=torch.device(DEVICE))
    with waits() as seen:
        update(trainer, 2)
    assert seen == {}


@pytest.mark.long
@on_pretend_device
def test_doctor_gives_the_same_advice_on_device_and_host(tmp_path):
    config = small_config(tmp_path, "AMP=true", "PRECISION.DTYPE=float16", "PRECISION.MAX_CONSECUTIVE_SKIPS=1")
    said = {}
    for device in ("cpu", DEVICE):
        lines = Lines()
        doctor = Doctor(config, tmp_path, lines, {})
        trainer = make_trainer(config, callbacks=[doctor], device=torch.device(device))
        with torch.no_grad():
            trainer.model.blocks[1].mlp.fc1.weight.mul_(2e6)
        trainer.notify("on_report", update(trainer).report())
        assert lines.warned == []
        said[device] = doctor.get_advice()
    assert said["cpu"] == said[DEVICE] and "blocks.1.mlp" in said[DEVICE]


@on_pretend_device
def test_doctor_keeps_several_micro_batches_on_the_host(tmp_path):
    config = small_config(tmp_path, "AMP=true", "TRAIN.ACCUM_ITER=3")
    doctor = Doctor(config, tmp_path, Lines(), {})
    trainer = make_trainer(config, callbacks=[doctor], device=torch.device(DEVICE))
    with waits() as seen:
        update(trainer)
    assert seen == {}
    assert [batch.images.device.type for batch, _ in doctor.batches] == ["cpu"] * 3

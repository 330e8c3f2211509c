"""A run stores a calibration with its best weights; the weights and the run hash do not change."""

import json
import signal
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engine.confidence import calibration
from engine.confidence.calibration import Calibration, gather_scores
from engine.confidence.temperature import Likelihood, calibrate, fit_temperature
from engine.tasks.classes import ClassTally, PerImage
from engine.tasks.labels import LabelTally, OfLabels
from engine.train.counters import EpochResult
from models.weights.files import read_weights
from models.weights.torch_files import read_torch
from tests.support.configs import CPU, small_config
from tests.support.run_hash import run_hash, state_hash
from tests.support.runs import run_folder, typed
from tests.support.threads import Threads
from tests.support.trainers import Lines, make_trainer
from utils.distributed import Process

pytestmark = pytest.mark.slow

NUM_IMAGES, NUM_CLASSES = 60, 4


def make_scores(has_several_labels: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits and targets of 60 images. The logits of image 7 are not finite."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(NUM_IMAGES, NUM_CLASSES, generator=generator)
    labels = (logits + 3 * torch.randn(logits.shape, generator=generator)).argmax(1)
    logits[7, 2] = torch.nan
    return logits, torch.nn.functional.one_hot(labels, NUM_CLASSES) if has_several_labels else labels


def evaluated(process: Process, has_several_labels: bool = False):
    """Return the results of an evaluation of these images, which are dealt out to the processes in turn."""
    logits, targets = make_scores(has_several_labels)
    tally = (LabelTally if has_several_labels else ClassTally)(CPU, torch.float64, NUM_IMAGES)
    share = np.arange(process.rank, NUM_IMAGES, process.world_size)
    for part in (share[:5], share[5:]):
        tally.add(logits[part], targets[part], 0)
    tally.result(process)
    tally.per_image.indices = share
    return tally.per_image.gather(process)


@pytest.mark.parametrize("has_several_labels", [False, True])
@pytest.mark.parametrize("most_images", [1000, 25])
def test_calibration_is_the_same_for_any_number_of_processes(monkeypatch, has_several_labels, most_images):
    monkeypatch.setattr(calibration, "MOST_IMAGES", most_images)
    likelihood = OfLabels() if has_several_labels else Likelihood()

    def calibrated(process: Process) -> dict:
        return calibrate(gather_scores(evaluated(process, has_several_labels), process), likelihood)

    (alone,) = Threads(1).run(calibrated)
    assert Threads(3).run(calibrated) == [alone] * 3
    logits, targets = make_scores(has_several_labels)
    every = 1 if most_images == 1000 else 3
    kept = [index for index in range(NUM_IMAGES) if index * 2654435761 % 2**32 * every < 2**32 and index != 7]
    assert abs(len(kept) - NUM_IMAGES / every) < 3
    targets = targets[kept].numpy().astype(bool) if has_several_labels else targets[kept].numpy()
    expected = fit_temperature(logits[kept].numpy(), targets, likelihood)
    assert np.atleast_1d(alone["temperature"]) == pytest.approx(expected, rel=1e-12)
    assert alone["figures"]["num_images"] == len(kept)


@pytest.mark.parametrize(
    ("scores", "reason"),
    [
        ((), "too many images and classes"),
        ((np.zeros((9, 3), np.float32), np.zeros(9, np.int64)), "9 validation images with finite logits, fewer"),
        ((np.zeros((20, 1), np.float32), np.zeros(20, np.int64)), "only one class"),
    ],
    ids=["no scores", "few images", "one class"],
)
def test_impossible_calibration_stores_its_reason(tmp_path, monkeypatch, scores, reason):
    monkeypatch.setattr(calibration, "gather_scores", lambda *given: scores)
    trainer = make_trainer(small_config(tmp_path))
    callback = Calibration(tmp_path, log := Lines(), trainer, {})
    trainer.best = replace(trainer.best, epoch=1)
    callback.on_epoch_end(trainer, EpochResult(None, {}, 0, 0.0, 0.0, images=SimpleNamespace(local=PerImage())))
    state = trainer.parts["calibration"].state()
    assert reason in state["reason"] and "temperature" not in state and len(log.noted) == 1


def start(yaml, output, *options, processes=1, **faults):
    words = ["-cfg", str(yaml), "-output", str(output), "-resume", "auto", "-batch_size", "32", *options]
    script = "main_single_gpu.py" if processes == 1 else "main_multi_gpu.py"
    return typed(script, *words, processes=processes, faults=faults)


def test_best_pth_has_the_temperature_that_fits_its_logits(calibrated):
    state = read_torch(calibrated / "best.pth")
    found = state["calibration"]
    assert (found["epoch"], found["step"], found["weights"]) == (state["epoch"] + 1, state["step"], state["preferred"])
    figures = found["figures"]
    assert figures["num_images"] == 90 and figures["nll_after"] < figures["nll_before"]
    record = json.loads((calibrated / "results.json").read_text())
    assert figures["nll_before"] == pytest.approx(record["loss"], abs=1e-5)
    right = round(record["value"] * 90 / 100)
    assert found["curve"][-1][1:] == [90, right]
    assert record["calibration"] == {"temperature": found["temperature"], **figures}


@pytest.mark.long
def test_weights_and_run_hash_are_the_same_without_calibration(tmp_path, small_yaml):
    for name, value in (("with", "true"), ("without", "false")):
        start(small_yaml, tmp_path / name, "-opts", f"CALIBRATE={value}").done()
    one, other = (run_folder(tmp_path / name) for name in ("with", "without"))
    assert run_hash(one) == run_hash(other)
    assert (read_torch(one / "last.pth").keys() ^ read_torch(other / "last.pth").keys()) == {"calibration"}
    assert "calibration" not in json.loads((other / "results.json").read_text())
    assert "calibration" in read_weights(one / "best.pth").record


STILL = "TRAIN.BASE_LR=1e-30"  # weights that never change: the first evaluation stays the best


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "fault"),
    [
        # best.pth is renamed before last.pth, so the resumed run repeats the epoch, but not as a new best.
        ([], {"kill_before": ["replace .last.pth.tmp last.pth", 6]}),
        ([STILL], {"signal_at": [16, signal.SIGKILL, [0]], "save_at_once": []}),
    ],
    ids=["between best.pth and last.pth", "in the next epoch"],
)
def test_killed_and_resumed_run_stores_the_same_calibration(tmp_path, small_yaml, options, fault):
    words = ("-opts", "SAVE_STEPS=5", *options)
    start(small_yaml, tmp_path / "whole", *words).done()
    killed = start(small_yaml, tmp_path / "killed", *words, **fault)
    assert killed.returncode == -signal.SIGKILL, killed.printed
    best = read_torch(run_folder(tmp_path / "killed") / "best.pth")
    assert best["epoch"] + 1 == (1 if options else 2)
    start(small_yaml, tmp_path / "killed", *words).done()
    whole, resumed = (run_folder(tmp_path / name) for name in ("whole", "killed"))
    assert run_hash(whole) == run_hash(resumed)
    for name in ("best.pth", "last.pth", *(["previous.pth"] if STILL in options else [])):
        one, other = (read_torch(folder / name)["calibration"] for folder in (whole, resumed))
        assert one["temperature"] and state_hash(one) == state_hash(other)
    records = [json.loads((folder / "results.json").read_text()) for folder in (whole, resumed)]
    assert records[0] == records[1] and "calibration" in records[0]

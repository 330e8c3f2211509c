"""Every program uses the better of raw and EMA weights, in whichever epoch they were, with their own temperature."""

import json
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from configs.schema import Config
from datasets import Normalize, build_eval_data
from engine import stages
from engine.confidence.temperature import Likelihood, fit_temperature
from engine.predict.classifier import Classifier, load_classifier
from models import build_model
from models.weights.load import load_pretrained
from models.weights.torch_files import read_torch
from tests.support.configs import CPU
from tests.support.opened import open_sets
from tests.support.runs import Ended, rows_of, run_folder, status_of, typed
from tests.support.weight_files import assert_same
from utils.distributed import Process

pytestmark = pytest.mark.long

RAW, EMA = "state_dict", "state_dict_ema"
FLAGS, WORDS = {RAW: "-raw", EMA: "-ema"}, {RAW: "raw", EMA: "EMA"}
# {the best weights: (rank of raw and EMA weights after each epoch, the best first; is calibrated; DATA.FOLD)}
CASES = {
    "EMA of the first epoch": ([{RAW: 2, EMA: 0}, {RAW: 3, EMA: 1}], True, "3/5"),
    "raw of the last epoch": ([{RAW: 3, EMA: 1}, {RAW: 0, EMA: 2}], True, "3/5"),
    "EMA of the last epoch": ([{RAW: 1, EMA: 2}, {RAW: 3, EMA: 0}], False, "3/5"),
}


class Trained(NamedTuple):
    folder: Path
    said: Ended
    epochs: list[dict[str, dict[str, Tensor]]]  # raw and EMA weights after each epoch
    best_epoch: int  # counted from 0
    best_key: str
    temperature: float | None  # of the best weights
    predictions: list[int]  # of the best weights
    top1: float
    last_key: str  # of the better weights of the last epoch

    def check(self, found: Classifier, epoch: int, key: str) -> None:
        """Assert that the classifier has weights `key` after this epoch, and their temperature if they are the best."""
        is_best = (epoch, key) == (self.best_epoch, self.best_key)
        assert_same(found.model.state_dict(), self.epochs[epoch][key])
        assert found.temperature == (self.temperature if is_best else None)


def ranked(trained: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Return weights that are worse for a greater rank, and need another temperature."""
    weight, bias = trained["fc.weight"], trained["fc.bias"]
    noise = weight.std() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    return trained | {"fc.weight": (weight + 4 * rank * noise) * (1 + rank), "fc.bias": bias * (1 + rank)}


@torch.no_grad()
def logits_of(config: Config, weights: dict[str, Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """Return the logits and labels of the validation images, computed without a run."""
    model = build_model(config, 10)
    model.load_state_dict(weights)
    normalize, data = Normalize(config.DATA), build_eval_data(config, open_sets(config)[1], Process(CPU))
    parts = [(model.eval()(normalize(each.images, torch.float32)), each.targets) for each in data]
    logits, labels = map(torch.cat, zip(*parts, strict=True))
    return logits.numpy(), labels.numpy()


@pytest.fixture(scope="module", params=CASES)
def trained(request, tmp_path_factory, convolutions, calibrated) -> Trained:
    """Run a training whose epochs end with the weights of the case."""
    ranks, is_calibrated, fold = CASES[request.param]
    good, output = read_torch(calibrated / "best.pth")["state_dict"], tmp_path_factory.mktemp("better")
    epochs = [{key: ranked(good, rank) for key, rank in each.items()} for each in ranks]

    def train_epoch(trainer, *arguments):
        result = original(trainer, *arguments)
        for key, model in ((RAW, trainer.model), (EMA, trainer.ema.model)):
            model.load_state_dict(epochs[trainer.epoch][key])
        return result

    original = stages.train_epoch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "train_epoch", train_epoch)
        patch.setattr("engine.features.doubts.MOST_JUDGED", 0)  # to count wrong labels takes seconds
        options = [f"CALIBRATE={str(is_calibrated).lower()}", f"DATA.FOLD={fold}"]
        words = ["-cfg", convolutions, "-output", output, "-epochs", len(epochs), "-batch_size", 90, "-opts", *options]
        said = typed("main_single_gpu.py", *words).done()
    folder = run_folder(output)
    best_epoch, best_key = next((number, key) for number, each in enumerate(ranks) for key in each if each[key] == 0)
    logits, labels = logits_of(load_classifier(folder).config, ranked(good, 0))
    temperature = pytest.approx(fit_temperature(logits, labels, Likelihood())[0], rel=1e-4) if is_calibrated else None
    predictions = logits.argmax(1)
    top1 = 100 * float(np.mean(predictions == labels))
    return Trained(
        folder,
        said,
        epochs,
        best_epoch,
        best_key,
        temperature,
        predictions.tolist(),
        top1,
        min(ranks[-1], key=ranks[-1].get),
    )


def test_files_of_a_run_describe_its_better_weights(trained):
    number, top1 = trained.best_epoch + 1, pytest.approx(trained.top1)
    assert f"epoch {number}, {'EMA' if trained.best_key == EMA else 'raw weights'}" in trained.said.stdout
    weights = "ema" if trained.best_key == EMA else "raw"
    assert status_of(trained.folder)["best"] == {"top1": top1, "epoch": number, "file": "best.pth", "weights": weights}
    results = json.loads((trained.folder / "results.json").read_text())
    found = results["epoch"], results["weights"], results["value"]
    assert found == (number, WORDS[trained.best_key].lower(), top1)
    assert results.get("calibration", {}).get("temperature") == trained.temperature
    rows = rows_of(trained.folder / "predictions.csv")
    assert [int(row["prediction"]) for row in rows] == trained.predictions


def test_better_weights_and_their_temperature_are_loaded_everywhere(trained, digits, tmp_path):
    run, epoch, key = trained.folder, trained.best_epoch, trained.best_key
    trained.check(load_classifier(run), epoch, key)
    trained.check(load_classifier(run, raw=True), epoch, RAW)
    trained.check(load_classifier(run / "last.pth"), len(trained.epochs) - 1, trained.last_key)
    other = RAW if key == EMA else EMA
    exports = {"x.safetensors": (key, []), "hf": (key, ["-to", "hf"]), "other.safetensors": (other, [FLAGS[other]])}
    for name, (exported, flags) in exports.items():
        typed("scripts/export.py", run, *flags, "-output", tmp_path / name).done()
        trained.check(load_classifier(tmp_path / name), epoch, exported)
    for source in (run, tmp_path / "x.safetensors", tmp_path / "hf"):
        load_pretrained(model := build_model(load_classifier(run).config, 10), str(source))
        assert_same(model.state_dict(), trained.epochs[epoch][key])
    typed("scripts/predict.py", run, next(digits.glob("*/*.png")), "-json", tmp_path / "x.json").done()
    facts = json.loads((tmp_path / "x.json").read_text())["model"]
    assert (facts["key"], facts["epoch"], facts["temperature"]) == (key, epoch + 1, trained.temperature)


def test_evaluation_report_and_comparison_show_the_better_weights(trained, calibrated, tmp_path, monkeypatch):
    number, word = trained.best_epoch + 1, WORDS[trained.best_key]
    typed("main_single_gpu.py", "-eval", "-pretrained", trained.folder, "-output", tmp_path).done()
    results = json.loads((run_folder(tmp_path) / "results.json").read_text())
    assert (results["weights"], results["value"]) == (word.lower(), pytest.approx(trained.top1))
    of_run = json.loads((trained.folder / "results.json").read_text())
    assert results["loss"] == of_run["loss"] and "calibration" not in results, "a score is without the temperature"
    monkeypatch.setattr("engine.report.plot.Plotter.draw", lambda *arguments, **options: None)
    typed("scripts/report.py", trained.folder).done()
    page = (trained.folder / "report.html").read_text()
    assert f"was epoch {number}, with the {word} weights" in page
    shown = [float(text) for text in re.findall("The temperature is ([0-9.]+)[.]<", page)]
    assert shown == ([pytest.approx(trained.temperature.expected, abs=6e-3)] if trained.temperature is not None else [])
    table = typed("scripts/compare.py", trained.folder, calibrated, "-any_data").done().stdout
    (row,) = (line for line in table.splitlines() if line.startswith("|") and str(trained.folder) in line)
    assert [cell.strip() for cell in row.split("|")][3:5] == [f"{trained.top1:.2f}", str(number)]

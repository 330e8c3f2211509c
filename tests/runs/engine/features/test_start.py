"""A new classifier of pretrained weights starts from zeros or a linear classifier, and the log says how good it is."""

import json
import math
import re
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from torch.nn import functional

from configs.schema import Config
from configs.values import flatten
from engine.features import compute
from engine.features.compute import Interruptible
from engine.features.linear import fit_linear
from engine.features.saved import FILE, PARTS
from engine.train.stop_conditions import Stopped
from models import build_model
from models.heads import output_layers
from models.weights.load import load_pretrained
from tests.support.configs import CONVOLUTIONS, small_config
from tests.support.refusals import assert_names
from tests.support.run_hash import run_hash
from tests.support.runs import Ended, epochs_of, last_sentence, run_folder, status_of, typed
from tests.support.several_labels import write_digits

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """Return a folder with digits.yaml and six.pth: weights for six classes, where the digits 0 to 4 are one class."""
    folder = tmp_path_factory.mktemp("start")
    (folder / "digits.yaml").write_text(CONVOLUTIONS)
    words = ("-cfg", folder / "digits.yaml", "-output", folder / "runs", "-opts", "MODEL_EMA=false")
    typed("main_single_gpu.py", *words[:-2], "-epochs", "8").done()
    state = torch.load(run_folder(folder / "runs") / "best.pth", weights_only=True)["state_dict"]
    rows = {name: state[name] for name in state if name.startswith("fc.")}
    state |= {name: torch.cat((each[:5].mean(0, keepdim=True), each[5:])) for name, each in rows.items()}
    torch.save(state, folder / "six.pth")
    return folder


def words(digits, *options: str) -> list[str]:
    few = ["TRAIN.NUM_EPOCHS=2", "TRAIN.BASE_LR=1e-3", "DATA.BATCH_SIZE=50", "MODEL.FROZEN_STATISTICS=true"]
    cfg = ["-cfg", str(digits / "digits.yaml"), "-pretrained", str(digits / "six.pth")]
    return [*cfg, "-opts", *few, *options]


def train(output: Path, flags: list[str], processes: int = 1, **faults: list) -> Ended:
    """Run without the seconds that counting wrong labels takes. test_named_doubts.py counts them."""
    script = "main_single_gpu.py" if processes == 1 else "main_multi_gpu.py"
    words = ["-output", str(output), *flags]
    return typed(script, *words, processes=processes, faults={"judge_no_labels": []} | faults)


def read_features(folder: Path) -> list[SimpleNamespace]:
    """Return the features of the training and of the validation images of a run."""
    columns = ("indices", "names", "targets", "features")
    with np.load(folder / FILE) as file:
        return [SimpleNamespace(**{name: file[f"{part}_{name}"] for name in columns}) for part in PARTS]


def assert_linear_classifier(folder: Path, top1: float) -> None:
    """Assert that a linear classifier of the saved features of all digits has this accuracy."""
    known, val = read_features(folder)
    assert (len(known.names), len(val.names)) == (360, 90)
    weight, bias = fit_linear(*map(torch.from_numpy, (known.features, known.targets)), 10, functional.cross_entropy)
    predicted = (torch.from_numpy(val.features).double() @ weight.T + bias).argmax(1).numpy()
    assert 100 * (predicted == val.targets).mean() == pytest.approx(top1, abs=1.2)  # one of 90 images is 1.1%


@pytest.mark.long
def test_linear_classifier_is_measured_and_training_starts_from_zeros(digits, tmp_path):
    ended = train(tmp_path, words(digits, "MODEL.NEW_CLASSIFIER=zeros", "REPORT=true", "DATA.BATCH_SIZE=8"))
    folder = run_folder(tmp_path)
    before, first, _ = epochs_of(folder)
    assert "fc starts from zeros" in ended.done().stdout
    assert f"before training: top-1 {before['eval_top1']:.2f}%" in ended.stdout
    assert ", by a linear classifier of the pretrained features" in ended.stdout
    assert before["epoch"] == -1 and before["eval_top1"] > 85
    sentence = last_sentence(ended.stdout)
    assert sentence.before == f"{before['eval_top1']:.2f}%"
    assert_names(sentence.rest, "10 classes", "held out by position")
    steps = (folder / "steps.csv").read_text().splitlines()
    column = steps[0].split(",").index("loss")
    assert float(steps[1].split(",")[column]) == pytest.approx(math.log(10), abs=1e-4)
    assert f"Before training, top-1 was {before['eval_top1']:.2f}%" in (folder / "report.html").read_text()
    assert_linear_classifier(folder, before["eval_top1"])


# {kind of start: the places at which a run is killed or stopped}. A linear start never sets weights to zero.
STOPS = {"zeros": ["features KILL", "fit TERM", "scored start KILL", "scored start TERM"], "linear": ["fit KILL"]}


@pytest.mark.long
@pytest.mark.parametrize("kind", STOPS)
def test_run_killed_in_any_place_of_its_start_ends_with_the_same_weights(digits, tmp_path, kind):
    """tests/faults/test_killed.py interrupts runs in their later parts."""
    flags = ["-resume", "auto", *words(digits, f"MODEL.NEW_CLASSIFIER={kind}", "TRAIN.NUM_EPOCHS=1")]
    train(tmp_path / "unbroken", flags).done()
    unbroken = run_folder(tmp_path / "unbroken")
    wanted, (before, first) = run_hash(unbroken), epochs_of(unbroken)
    assert before["eval_top1"] > 85 and (first["train_loss"] < 1.0) == (kind == "linear"), "where training starts"
    for place in STOPS[kind]:
        moment, _, name = place.rpartition(" ")
        fault = {"tell": [0, moment, signal.Signals[f"SIG{name}"]], "save_at_once": []}
        broken = train(tmp_path / place, flags, **fault)
        assert broken.returncode == (-signal.SIGKILL if name == "KILL" else 128 + signal.SIGTERM), broken.printed
        train(tmp_path / place, flags).done()
        folders = sorted((tmp_path / place).iterdir())
        assert run_hash(folders[-1]) == wanted, (place, folders)


@pytest.mark.long
@pytest.mark.parametrize("moment", ["start-up", "evaluation", "scored start"])
def test_run_stopped_before_its_first_update_keeps_the_scores_of_its_start(digits, tmp_path, moment):
    """The start is a linear classifier, or weights that know all classes. No epoch is better."""
    flags = ["-resume", "auto", *words(digits, "MODEL.NEW_CLASSIFIER=zeros", "TRAIN.NUM_EPOCHS=1", "TRAIN.BASE_LR=0.3")]
    if moment != "scored start":
        flags[flags.index("-pretrained") + 1] = str(run_folder(digits / "runs") / "best.pth")
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train(whole, flags).done()
    for _ in range(2):
        ended = train(stopped, flags, tell=[0, moment, signal.SIGTERM], save_at_once=[])
        assert ended.returncode == 128 + signal.SIGTERM, ended.printed
        moment = "start-up"
    ended, folders = train(stopped, flags).done(), [run_folder(whole), run_folder(stopped)]
    hashes, statuses = map(run_hash, folders), [status_of(folder)["before"] for folder in folders]
    assert len({*hashes}) == 1 and statuses[0] == statuses[1] and statuses[0]["top1"] > 85
    before = f"{statuses[0]['top1']:.2f}%"
    assert (
        "no epoch was better than the start" in ended.stdout and before in ended.stdout.splitlines()[-1] + ended.stdout
    )
    assert epochs_of(folders[1])[0]["epoch"] == -1
    if moment != "scored start":
        sentence = last_sentence(ended.stdout)
        assert before in (sentence.before or sentence.score)


@pytest.mark.long
def test_best_weights_are_the_linear_classifier_if_no_epoch_is_better(digits, tmp_path):
    flags = words(digits, "MODEL.NEW_CLASSIFIER=zeros", "TRAIN.BASE_LR=0.1", "REPORT=true")
    ended = train(tmp_path, flags, processes=2).done()
    folder = run_folder(tmp_path)
    before, *epochs = epochs_of(folder)
    assert before["eval_top1"] > max(each["eval_top1"] for each in epochs)
    assert_start_is_best(ended.stdout, before)
    assert ended.printed.count("no epoch was better than the start") == 1, "only the first process says it"
    status, results = status_of(folder), json.loads((folder / "results.json").read_text())
    assert status["best_epoch"] == results["epoch"] == 0
    assert status["best_top1"] == results["value"] == pytest.approx(before["eval_top1"], abs=1e-3)
    assert results["calibration"]["temperature"] > 0
    assert "None of 2 epochs was better than a linear classifier" in (folder / "report.html").read_text()
    again = train(tmp_path / "eval", ["-eval", "-resume", str(folder / "best.pth")]).done()
    top1 = float(re.search(r"top-1 ([\d.]+)%", again.stdout)[1])
    assert top1 == pytest.approx(before["eval_top1"], abs=1e-3)
    longer = typed("main_single_gpu.py", "-resume", str(folder), "-epochs", "8").done()
    assert_start_is_best(longer.stdout, before)
    assert epochs_of(folder)[0] == before


def assert_start_is_best(said: str, before: dict) -> None:
    sentence = last_sentence(said)
    assert sentence.score == f"top-1 {before['eval_top1']:.2f}%"
    assert (sentence.is_highest, sentence.epoch, sentence.before) == (True, 0, "")


def test_signal_ends_the_pass_after_the_batch_in_progress():
    seen = []

    def stop() -> None:
        if len(seen) == 2:
            raise Stopped(signal.SIGTERM)

    with pytest.raises(Stopped):
        for batch in Interruptible(range(5), stop):
            seen.append(batch)
    assert seen == [0, 1]


def test_classes_known_by_name_keep_their_rows(digits, tmp_path):
    flags = words(digits, "MODEL.NEW_CLASSIFIER=zeros", "TRAIN.NUM_EPOCHS=1")
    flags[3] = str(run_folder(digits / "runs") / "best.pth")
    ended = train(tmp_path, flags).done()
    assert "all 10 classes by name" in ended.stdout and "linear classifier" not in ended.stdout


def test_reasons_against_a_linear_classifier_are_logged(digits, tmp_path, monkeypatch):
    monkeypatch.setattr(compute, "MOST_PRODUCTS", 1000)
    flags = words(digits, "MODEL.NEW_CLASSIFIER=linear", "TRAIN.NUM_EPOCHS=1")
    ended = typed("main_single_gpu.py", "-output", tmp_path, *flags).done()
    assert "no linear classifier before training: it would take long with" in ended.stdout
    assert epochs_of(run_folder(tmp_path))[0]["epoch"] == 0


def test_divided_models_start_from_zeros_without_a_linear_classifier(tmp_path):
    torch.save(build_model(small_config(tmp_path), 6).state_dict(), tmp_path / "six.pth")
    cfg = ["-cfg", str(tmp_path / "small.yaml"), "-pretrained", str(tmp_path / "six.pth")]
    opts = ["MODEL.NEW_CLASSIFIER=zeros", "TRAIN.NUM_EPOCHS=1", "DIST.STRATEGY=fsdp2", "DATA.BATCH_SIZE=80"]
    ended = train(tmp_path / "o", [*cfg, "-opts", *opts], processes=2).done()
    assert "no linear classifier before training: the processes share the model" in ended.stdout
    assert epochs_of(run_folder(tmp_path / "o"))[0]["epoch"] == 0 and "Loss: 2.3026 (2.3026)" in ended.stdout


@pytest.mark.long
def test_statistics_of_batchnorm_stay_those_of_the_weights(digits, tmp_path):
    theirs = torch.load(digits / "six.pth", weights_only=True)
    for is_frozen in (True, False):
        output = tmp_path / str(is_frozen)
        flags = words(digits, f"MODEL.FROZEN_STATISTICS={is_frozen}", "TRAIN.NUM_EPOCHS=1", "TRAIN.LAYER_DECAY=0.75")
        said = train(output, flags).done().stdout
        assert ("use -cfg configs/finetune_batchnorm.yaml" in said) != is_frozen
        ours = torch.load(run_folder(output) / "last.pth", weights_only=True)["state_dict"]
        means = [name for name in theirs if name.endswith("running_mean")]
        assert means and all(torch.equal(ours[name], theirs[name]) == is_frozen for name in means)
        assert not torch.equal(ours["fc.weight"], torch.zeros_like(ours["fc.weight"]))


def test_images_with_several_labels_get_one_regression_for_each(digits, tmp_path):
    path, _ = write_digits(tmp_path, 400)
    data = ["DATA.DATASET=csv", f"DATA.DATA_PATH={path}", "DATA.LABEL_SEPARATOR=|", "TRAIN.NUM_EPOCHS=1"]
    flags = words(digits, "MODEL.NEW_CLASSIFIER=zeros", *data)
    ended = train(tmp_path / "o", flags).done()
    before, _ = epochs_of(run_folder(tmp_path / "o"))
    assert before["eval_map"] > 85 and "Loss: 0.6931 (0.6931)" in ended.stdout


# Small models of different families, each with its classifier in another place or form.
FAMILIES = """test_vit test_resnet test_efficientnet test_byobnet test_nfnet levit_128s dpn68
deit_tiny_distilled_patch16_224 repvit_m0_9 crossvit_tiny_240 efficientvit_b0""".split()


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
def test_first_loss_is_that_of_equal_probabilities(name, tmp_path):
    other = timm.create_model(name, num_classes=5)
    torch.save(other.state_dict(), tmp_path / "other.pth")
    model = timm.create_model(name, num_classes=8)
    settings = flatten(Config()) | {"MODEL.NEW_CLASSIFIER": "zeros"}
    lines = load_pretrained(model, str(tmp_path / "other.pth"), settings=settings)
    assert all("starts from zeros" in line for line in lines[1:]) and len(lines) == 1 + len(output_layers(model))
    size = (model.pretrained_cfg if hasattr(model, "pretrained_cfg") else model.default_cfg)["input_size"]
    logits = model.train()(torch.rand(2, *size))
    known = timm.create_model(name, num_classes=5)
    assert len(load_pretrained(known, str(tmp_path / "other.pth"))) == 1
    own = known.state_dict()
    assert all(torch.equal(own[key], value) for key, value in other.state_dict().items())
    for each in logits if isinstance(logits, tuple) else [logits]:
        assert functional.cross_entropy(each, torch.tensor([1, 6])).item() == pytest.approx(math.log(8), abs=1e-6)

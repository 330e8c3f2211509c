"""The weights that a run keeps at its end: the last epoch, unless another one is better by more than the noise."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engine.best_scores import BestScores
from engine.evaluate_weights import compare_with_start
from engine.evaluation.best import Best, Rival
from engine.record.saved_run import SavedRun
from engine.tasks.classes import ClassTally
from engine.tasks.labels import LabelTally
from engine.tasks.numbers import NumberTally, NumberTask
from tests.support.configs import CPU, small_config
from tests.support.image_sets import targets_only
from tests.support.planted import images_with
from tests.support.refusals import assert_names
from tests.support.run_hash import run_hash
from tests.support.runs import last_sentence, run_folder, status_of, typed
from utils.distributed import Process

slow = pytest.mark.slow
EMA = "TRAIN.MODEL_EMA=true"
# Right answers on ten images: eight, six and none.
EIGHT, SIX, NONE = "1111111100", "1110111000", "0000000000"


@pytest.fixture
def scored(tmp_path, small_yaml):
    """Train with evaluations that return these scores, and return the end of the log and the folder."""

    def train(*scores, words=(), processes=1, name="o", code=0, **faults):
        program = "main_single_gpu.py" if processes == 1 else "main_multi_gpu.py"
        given = f"-cfg {small_yaml} -output {tmp_path}/{name} -resume auto -batch_size 160 -opts".split()
        ended = typed(program, *given, *words, processes=processes, faults={"score": scores, **faults})
        assert ended.returncode == code, ended.stderr
        return ended.stdout.partition("\nnext:")[0].splitlines(), run_folder(tmp_path / name)

    return train


def read(path):
    return torch.load(path, weights_only=True)


def kept_in(folder):
    """Return epoch, weights and value of best.pth, which must agree with status.json and report."""
    state, status = read(folder / "best.pth"), status_of(folder)["best"]
    best = Best.from_state(state["progress"]["best"])
    assert (status["epoch"], status["weights"], status["top1"]) == (best.epoch, best.weights, best.value)
    assert state["preferred"] == f"state_dict{best.suffix}" and state["epoch"] == best.epoch - 1
    found = SavedRun.open(folder).best
    assert (found.epoch, found.suffix, found.rival) == (best.epoch, best.suffix, best.rival)
    return best.epoch, best.weights, best.value


@pytest.mark.long
@slow
@pytest.mark.parametrize(("processes", "words"), [(1, []), (2, []), (2, ["DIST.STRATEGY=fsdp2"])])
def test_last_average_replaces_highest_epoch_within_the_noise(scored, processes, words):
    scores = [80, 0.5, EIGHT], [70, 0.5, SIX], [50, 0.5, NONE], [60, 0.5, SIX]
    lines, folder = scored(*scores, words=[EMA, *words], processes=processes)
    assert kept_in(folder) == (2, "ema", 60)
    sentence = last_sentence(lines[-1])
    assert sentence[2:6] == ("top-1 60.00%", False, 2, "EMA")
    assert_names(sentence.facts[-1], "epoch 1", "raw weights", "80.00%", "10 images")


@slow
def test_highest_epoch_stays_if_it_is_clearly_better(scored):
    lines, folder = scored([80, 0.5, EIGHT], [70, 0.5, SIX], [50, 0.5, NONE], [0, 0.5, NONE], words=[EMA])
    assert kept_in(folder) == (1, "raw", 80)
    assert any("stays epoch 1, raw weights: better than epoch 2, EMA by more than the noise" in line for line in lines)


@slow
def test_setting_keeps_the_highest_epoch_as_before(scored):
    words = [EMA, "TRAIN.BEST_EPOCH=highest"]
    _, folder = scored([80, 0.5, EIGHT], [70, 0.5, SIX], [50, 0.5, NONE], [60, 0.5, SIX], words=words)
    assert kept_in(folder) == (1, "raw", 80) and "kept" not in read(folder / "last.pth")


@slow
def test_early_stop_keeps_last_epoch_and_the_run_stays_finished(scored):
    words = ["TRAIN.NUM_EPOCHS=5", "TRAIN.EARLY_STOP=1"]
    _, folder = scored([80, 0.5, EIGHT], [60, 0.5, SIX], words=words)
    assert kept_in(folder) == (2, "raw", 60)
    lines, _ = scored(words=words)
    assert any("already finished" in line for line in lines)


@pytest.mark.long
@slow
def test_longer_run_compares_with_the_weights_that_were_kept(scored):
    _, folder = scored([80, 0.5, EIGHT], [60, 0.5, SIX], words=["TRAIN.NUM_EPOCHS=2"])
    assert kept_in(folder) == (2, "raw", 60)
    _, folder = scored([70, 0.5, SIX], [0, 0.5, NONE], words=["TRAIN.NUM_EPOCHS=4"])
    assert kept_in(folder) == (3, "raw", 70)


@pytest.mark.long
@slow
def test_run_killed_between_best_and_last_ends_with_the_same_bits(scored, tmp_path):
    """The repeated epoch must not choose again, because best.pth no longer has the highest epoch."""
    scores, words = ([80, 0.5, EIGHT], [70, 0.5, SIX], [65, 0.4, SIX], [60, 0.5, SIX]), [EMA, "TRAIN.NUM_EPOCHS=2"]
    _, straight = scored(*scores, words=words, name="straight", list_operations=[str(tmp_path / "operations")])
    rows = [json.loads(line) for line in (tmp_path / "operations").read_text().splitlines()]
    save, number, _ = next(row for row in reversed(rows) if "last.pth" in row[2] and "best.pth" not in row[2])
    scored(*scores, words=words, name="killed", code=-9, kill_at=[save, number])
    assert Best.from_state(read(run_folder(tmp_path / "killed") / "best.pth")["progress"]["best"]).rival
    # At its end, the resumed run evaluates best.pth again for its tables.
    _, killed = scored(*scores[2:], scores[3], words=words, name="killed")
    assert run_hash(killed) == run_hash(straight) and kept_in(killed) == kept_in(straight)


@slow
def test_run_resumed_after_its_best_epoch_needs_no_evaluation_of_it(scored):
    """The scores of images are in the checkpoint: the highest epoch is clearly better than the last one."""
    scored([80, 0.5, EIGHT], words=["TRAIN.NUM_EPOCHS=1"])
    _, folder = scored([0, 0.5, NONE], words=["TRAIN.NUM_EPOCHS=2"])
    assert kept_in(folder) == (1, "raw", 80)


def kept(tmp_path, groups=None):
    images = targets_only([0] * 10, ["a"], copies=groups)
    plan = SimpleNamespace(
        eval_set=images,
        config=small_config(tmp_path),
        process=Process(CPU),
        inputs=SimpleNamespace(saved={}),
    )
    log = SimpleNamespace(say=lambda *lines: None, note=lambda *lines: None)
    return BestScores(plan, tmp_path / "best.pth", log)


def test_no_warning_of_a_useless_training_if_an_earlier_epoch_was_better_than_the_start():
    better = Best(88.0, 6, 0.4, metric="top1", rival=Rival(4, "", 90.7, "359 images"))
    assert compare_with_start(better, {"top1": 89.0, "loss": 0.5}) == []
    (line,) = compare_with_start(better, {"top1": 91.0, "loss": 0.5})
    assert_names(line, "warning", "91.00%")


def test_images_of_one_group_count_as_one_observation(tmp_path):
    """All images of one group are better: as images that is clear, as groups it may be chance."""
    results = [images_with(each).gather(Process(CPU)) for each in ("1111111100", "0000000000")]
    of_one = np.array([0] * 6 + [1, 2, 3, 4])
    for groups, is_kept in ((None, True), (of_one, False), (np.arange(10), True), (np.zeros(10, int), False)):
        weights = kept(tmp_path, groups)
        highest = Best(80, 1)
        weights.note(highest, results[0])
        assert (weights.choose(highest, Best(0, 2), results[1]) is highest) == is_kept, groups


def test_scores_of_images_have_the_metric_as_their_mean():
    generator = torch.Generator().manual_seed(0)
    logits, process = torch.randn(40, 5, generator=generator), Process(CPU)
    labels = torch.randint(0, 4, (40,), generator=generator)
    several = torch.randint(0, 2, (40, 5), generator=generator).float()
    for tally_of, targets in ((ClassTally, labels), (LabelTally, several)):
        tally = tally_of(CPU, torch.float64, 40)
        tally.add(logits, targets, 0)
        tally.per_image.indices = np.arange(40)
        scores = tally.result(process)
        images, measured = tally.per_image.gather(process), []
        for metric, value in {"loss": scores.loss, "top1": scores.top1, **scores.more()}.items():
            values = images.scores_of_images(metric, process)
            if values is not None:
                assert values.mean() == pytest.approx(value, rel=1e-5), (tally_of, metric)
                measured.append(metric)
        assert {"loss", "macro_recall", "macro_f1"} <= {*measured} and images.scores_of_images("top5", process) is None
        assert ("map" in measured and "micro_f1" in measured) == (tally_of is LabelTally)


def test_errors_of_images_have_the_metric_as_their_mean(tmp_path):
    config = small_config(
        tmp_path, "TRAIN.OBJECTIVE=numbers", "DATA.DATASET=csv", "DATA.TARGET_MEAN=[1,2]", "DATA.TARGET_STD=[2,3]"
    )
    generator, process = torch.Generator().manual_seed(0), Process(CPU)
    outputs, targets = torch.randn(2, 40, 2, generator=generator)
    targets[:7, 1] = torch.nan
    tally = NumberTally(NumberTask(config), CPU, torch.float64, 40)
    tally.add(outputs, targets, 0)
    tally.per_image.indices = np.arange(40)
    scores = tally.result(process)
    images = tally.per_image.gather(process)
    for metric in ("mae", "rmse", "r2"):
        assert images.scores_of_images(metric, process).mean() == pytest.approx(getattr(scores, metric)), metric
    assert images.scores_of_images("spearman", process) is None and images.scores_of_images("loss", process) is None
    bad = dataclasses.replace(images, predicted=np.full_like(images.predicted, np.nan))
    assert np.isinf(bad.scores_of_images("mae", process)).all()

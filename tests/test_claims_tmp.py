import gc
import json
import threading
import time

import numpy as np
import pytest
import torch
from torch import nn

import engine.record.image_results
import engine.session
from configs.load import load
from configs.schema import Data
from datasets import BadImages, Normalize, build_eval_data
from datasets.sources.images import ArrayImages
from datasets.transforms.crop import EvalTransform
from datasets.transforms.decode import PixelRules
from datasets.transforms.mix import ERASED_AREA, Boxes
from engine.evaluation.evaluate import evaluate
from engine.evaluation.scores import Best
from engine.evaluation.tally import ImageResults
from engine.precision.policy import Precision
from engine.record.image_results import ResultFiles
from engine.record.metrics import peak_memory
from engine.session import Status
from engine.train.loss import DistillationTargets, hits
from models.weights.metadata import preprocessing_of
from scripts.comparing.groups import speed
from scripts.sweeping.results import DONE, Result, read_result, table
from tests.support.configs import CPU, small_config
from tests.support.trainers import Lines
from utils import program
from utils.distributed import Process


def test_the_last_state_is_not_overwritten_by_a_sign_of_life_on_its_way(tmp_path, monkeypatch):
    run = threading.Thread.run
    monkeypatch.setattr(threading.Thread, "run", lambda thread: time.sleep(0.2) or run(thread))
    seconds = iter(range(0, 1000, 100))
    status = Status(tmp_path, pytest.fail, clock=lambda: next(seconds))
    status.beat(step=5)
    status.set("done", step=9)
    time.sleep(0.4)
    facts = json.loads((tmp_path / "status.json").read_text())
    assert (facts["state"], facts["step"]) == ("done", 9)


def test_the_memory_of_a_process_is_in_bytes():
    assert 50 * 2**20 < peak_memory(CPU) < 2**40


def test_while_tables_are_written_no_record_says_whose_they_are(tmp_path, monkeypatch):
    images = ArrayImages(np.zeros((2, 8, 8), np.uint8), np.array([0, 1]), ["a", "b"], PixelRules(1), "made up")
    numbers, shares = np.array([0, 1]), np.full(2, 0.5, np.float32)
    results = ImageResults(numbers, numbers, numbers, shares, shares, np.ones((3, 2), int))
    files = ResultFiles(tmp_path, images, Lines())
    files.write(results, Best(50.0, 1), with_pictures=False)
    assert files.are_of(Best(50.0, 1), with_pictures=False)

    def fails(*arguments):
        raise OSError("no room")

    monkeypatch.setattr(engine.record.image_results, "write_tables", fails)
    files.write(results, Best(60.0, 2), with_pictures=False)
    assert not files.are_of(Best(50.0, 1), with_pictures=False)


def test_running_statistics_are_those_of_process_0_before_anything_is_scored(tmp_path):
    class Second(Process):
        """Another process than that whose statistics are saved."""

        def spread(self, tensors):
            for tensor in tensors:
                tensor.fill_(1.0)

    config = small_config(tmp_path)
    rng = np.random.default_rng(0)
    images = ArrayImages(
        rng.integers(256, size=(9, 8, 8), dtype=np.uint8), rng.integers(2, size=9), ["a", "b"], PixelRules(1), "made up"
    )

    def loss(process: Process, mean: float) -> float:
        model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 2))
        torch.manual_seed(0)
        model[2].reset_parameters()
        model[1].running_mean.fill_(mean)
        data, normalize = build_eval_data(config, images, process), Normalize(config.DATA)
        precision = Precision(config, CPU)
        return evaluate(model, data, normalize, precision, process, BadImages(images, 1.0, pytest.fail)).scores.loss

    assert loss(Second(CPU), 5.0) == loss(Process(CPU), 1.0) != loss(Process(CPU), 5.0)


def test_the_mean_of_two_heads_is_what_is_right_or_wrong():
    heads = torch.tensor([[3.0, 0.0, 0.0], [2.0, 1.0, 0.0]]), torch.tensor([[0.0, 5.0, 0.0], [0.0, 0.5, 0.0]])
    targets = DistillationTargets(torch.tensor([1, 0]), torch.zeros(2, 3))
    assert hits(heads, targets).tolist() == [True, True]


def test_several_boxes_erase_as_much_together_as_one(tmp_path):
    def mean_area(count: int) -> float:
        boxes = Boxes(small_config(tmp_path, "DATA.IMAGE_SIZE=224", f"TRAIN.RANDOM_ERASE_COUNT={count}"))
        import random

        rng = random.Random(0)
        return (
            float(np.mean([sum(width * height for *_, width, height in boxes.boxes(rng)) for _ in range(2000)]))
            / 224**2
        )

    expected = sum(ERASED_AREA) / 2
    assert mean_area(1) == pytest.approx(expected, rel=0.05) and mean_area(3) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(
    ("side", "share", "resized"), [(384, 0.95, 404), (224, 0.875, 256), (224, 0.9, 248), (100, 0.6, 166)]
)
def test_evaluation_resizes_to_the_whole_pixels_below_as_timm_does(side, share, resized):
    assert EvalTransform(Data(IMAGE_SIZE=side, CROP_PCT=share)).resized_side == resized == int(side / share)


def test_standard_deviations_are_saved_as_such():
    data = Data(IMAGENET_MEAN=(0.1, 0.2, 0.3), IMAGENET_STD=(0.4, 0.5, 0.6))
    said = preprocessing_of(data)
    assert (said["mean"], said["std"]) == ([0.1, 0.2, 0.3], [0.4, 0.5, 0.6])


def test_the_seconds_of_a_trial_are_those_of_training_and_evaluation(tmp_path):
    (tmp_path / "status.json").write_text(
        json.dumps({"state": "done", "best_metric": "loss", "best": {"loss": 0.5, "epoch": 2}})
    )
    (tmp_path / "metrics.csv").write_text("epoch,train_seconds,eval_seconds\n0,10,1\n1,20,\n2,30,3\n")
    assert read_result(tmp_path).seconds == 64


def test_the_speed_of_a_run_is_that_of_its_usual_epoch():
    from types import SimpleNamespace

    assert speed(SimpleNamespace(epochs=[{"images_per_s": each} for each in (1.0, 100.0, 100.0)])) == 100


def test_garbage_is_collected_again_after_the_start():
    program.relax_gc()
    assert not gc.isenabled()
    program.restore_gc()
    assert gc.isenabled()


def test_a_vote_is_read_only_when_it_has_arrived(monkeypatch):
    class Work:
        def __init__(self, vote):
            self.vote = vote

        def wait(self):
            self.vote.fill_(15)

    process = Process(CPU)
    monkeypatch.setattr(process, "world_size", 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda vote, *arguments, **options: Work(vote))
    assert process.delayed_max(0) == 0
    assert process.delayed_max(0) == 15


def test_paddle_arrays_of_either_byte_order_are_the_same_numbers(tmp_path):
    from models.weights.paddle import read_pdparams
    from tests.support.weight_files import pickled

    numbers = np.array([1.5, -2.0, 3e-5], ">f4")
    found = read_pdparams(pickled({"x": numbers}, tmp_path / "x.pdparams"))["x"]
    assert found.tolist() == numbers.tolist()


def test_timm_loads_a_model_of_fixed_position_embeddings(tmp_path):
    import timm

    from scripts import export
    from tests.support.checkpoints import PLAIN, checkpoint

    source = checkpoint(tmp_path / "best.pth", PLAIN | {"POS_EMBED": "sincos2d"})
    assert program.exit_code(export.main, [str(source), "-to", "hf", "-output", str(tmp_path / "x")]) == 0
    timm.create_model(f"local-dir:{tmp_path / 'x'}", pretrained=True)


def test_a_mean_has_the_facts_of_the_latest_epoch(tmp_path):
    from models.weights.files import read_record
    from scripts import export
    from tests.support.checkpoints import checkpoint

    paths = []
    for epoch in (7, 3):
        path = checkpoint(tmp_path / f"{epoch}.pth")
        state = torch.load(path, weights_only=True)
        torch.save(state | {"epoch": epoch, "split": {"training": f"after {epoch}"}}, path)
        paths.append(str(path))
    for number, order in enumerate((paths, paths[::-1])):
        target = tmp_path / f"{number}.safetensors"
        assert program.exit_code(export.main, [*order, "-output", str(target)]) == 0
        assert read_record(target)["split"] == {"training": "after 7"}


@pytest.mark.parametrize("typed", ["micro_f1", None])
def test_several_labels_change_the_metric_only_where_none_was_typed(tmp_path, typed):
    words = ["-dataset", "csv", "-opts", "DATA.LABEL_SEPARATOR=|"] + ([f"TRAIN.BEST_METRIC={typed}"] if typed else [])
    config = load(words, needs_file=False).config
    assert config.TRAIN.BEST_METRIC == (typed or "map") and config.TRAIN.LOSS == "bce"


@pytest.mark.parametrize(("metric", "best"), [("loss", "1"), ("top1", "2")])
def test_the_best_point_of_a_sweep_is_the_first_of_its_table(small_yaml, metric, best):
    from scripts.sweeping.plan import Plan

    plan = Plan(["-cfg", str(small_yaml)], {"SEED": "1,2"}, [], points=[{"SEED": "1"}, {"SEED": "2"}])
    results = [Result(DONE, metric=metric, best=value, epoch=1) for value in (0.25, 0.75)]
    lines = [line for line in table(plan, results).splitlines() if "SEED=" in line]
    assert f"SEED={best}" in lines[0]


@pytest.mark.parametrize(
    "change",
    [
        {"flags": [3]},
        {"over": ["a"]},
        {"seeds": ["x"]},
        {"points": [[1]]},
        {"folds": "5"},
        {"flags": 3},
        {"cwd": None},
        "deep",
    ],
)
def test_a_plan_of_a_sweep_with_other_values_is_one_line(tmp_path, small_yaml, capsys, change):
    from scripts import sweep

    plan = {
        "version": 2,
        "flags": ["-cfg", str(small_yaml)],
        "over": {"TRAIN.BASE_LR": "1e-3,2e-3"},
        "seeds": [],
        "points": [{"TRAIN.BASE_LR": "1e-3"}],
    }
    (tmp_path / "s").mkdir()
    text = '{"version": ' + 20_000 * "[" if change == "deep" else json.dumps(plan | change)
    (tmp_path / "s/sweep.json").write_text(text)
    assert program.exit_code(sweep.main, ["-output", str(tmp_path / "s")]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and str(tmp_path / "s/sweep.json") in told

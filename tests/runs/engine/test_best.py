"""The choice of a run's best epoch and best weights."""

import json
import math
import shutil
from types import SimpleNamespace

import pytest
import torch

from configs.tables import METRICS, TASKS
from configs.values import flatten
from engine.eval_run import weights_to_score
from engine.evaluation.best import Best
from models import build_model
from models.weights.files import read_record
from tests.support import number_rows, several_labels
from tests.support.configs import SMALL, ema, small_config
from tests.support.refusals import assert_names
from tests.support.runs import rows, run_folder, status_of, typed
from tests.support.weight_files import saved

pytestmark = pytest.mark.slow

EMA = ema(0.99996, warm_up="false")


@pytest.fixture
def scored(tmp_path, small_yaml):
    """A run whose evaluations return these scores: its log lines up to the last one of the run, and its folder."""

    def train(*scores, words=()):
        given = f"-cfg {small_yaml} -output {tmp_path}/o -resume auto -batch_size 160 -opts".split()
        ended = typed("main_single_gpu.py", *given, *words, faults={"score": scores}).done()
        return ended.stdout.partition("\nnext:")[0].splitlines(), run_folder(tmp_path / "o")

    return train


def read(path):
    return torch.load(path, weights_only=True)


def test_unevaluated_checkpoint_keeps_last_choice_of_raw_or_ema_weights(scored):
    """Checkpoints record the choice: epochs 2 and 4 are evaluated, 3 is not, and the run is resumed after epoch 2."""
    words = [*EMA, "VALIDATE_FREQ=2", "SAVE_FREQ=1"]
    scored([70, 1.0], [20, 2.0], words=[*words, "TRAIN.NUM_EPOCHS=2"])
    _, folder = scored([20, 1.0], [70, 2.0], words=[*words, "TRAIN.NUM_EPOCHS=4"])
    preferred = [read(folder / f"checkpoint-{epoch}.pth")["preferred"] for epoch in (2, 3, 4)]
    assert preferred == ["state_dict", "state_dict", "state_dict_ema"]


def test_every_second_epoch_and_the_last_keep_their_checkpoints(scored):
    words = ["TRAIN.NUM_EPOCHS=5", "SAVE_FREQ=2", "KEEP_CHECKPOINTS=9"]
    _, folder = scored(*([each, 1.0] for each in (20, 50, 40, 30, 10)), words=words)
    assert {path.name for path in folder.glob("checkpoint-*.pth")} == {f"checkpoint-{epoch}.pth" for epoch in (2, 4, 5)}
    assert read(folder / "best.pth")["metric"] == 50


def test_smallest_loss_is_best_until_another_metric_is_chosen(scored):
    lines, folder = scored([60, 0.4], [70, 0.5], words=["TRAIN.BEST_METRIC=loss", "TRAIN.NUM_EPOCHS=2"])
    assert_names(lines[-1], "loss", "0.4000", "epoch 1")
    status = status_of(folder)
    assert (
        status["best"] == {"loss": 0.4, "epoch": 1, "file": "best.pth", "weights": "raw"} and "best_top1" not in status
    )
    assert read(folder / "best.pth")["metric"] == 0.4
    lines, folder = scored([50, 0.6], words=["TRAIN.NUM_EPOCHS=3"])
    assert read(folder / "best.pth")["epoch"] == 2 and read(folder / "best.pth")["metric"] == 50
    assert any("TRAIN.BEST_METRIC" in line for line in lines)


@pytest.mark.parametrize("names", [["state_dict"], ["state_dict", "state_dict_ema"], ["model", "model_ema"]])
def test_ema_weights_in_foreign_checkpoints_are_labelled(tmp_path, names):
    path = saved({name: {"head.weight": torch.ones(2, 2)} for name in names}, tmp_path / "x.pth")
    plan = SimpleNamespace(inputs=SimpleNamespace(saved={}, record=read_record(path)))
    ((name, _),) = weights_to_score(plan, lambda: None)
    assert name.strip() == ("EMA" if len(names) == 2 else "")


def test_weights_of_a_run_are_resized_to_the_images_of_an_evaluation(tmp_path):
    config, path = small_config(tmp_path, "MODEL.NUM_CLASSES=3"), tmp_path / "last.pth"
    weights = build_model(config, 3).state_dict()
    state = {"progress": {}, "config": flatten(config), "class_names": list("abc"), "state_dict": weights}
    larger = config.changed("DATA", IMAGE_SIZE=2 * config.DATA.IMAGE_SIZE)
    plan = SimpleNamespace(config=larger, inputs=SimpleNamespace(saved=state, checkpoint=path))
    ((_, model),) = weights_to_score(plan, lambda: None)
    found = model.state_dict()
    assert found["pos_embed"].shape[1] > weights["pos_embed"].shape[1]
    assert torch.equal(found["head.weight"], weights["head.weight"])


@pytest.fixture(scope="module")
def words_of(tmp_path_factory):
    """Return a function that returns flags and settings of a run whose task has this metric."""
    folder = tmp_path_factory.mktemp("tasks")

    def make(name: str):
        (folder / name).mkdir(exist_ok=True)
        return folder / name

    def words_of(metric: str) -> list[str]:
        options, cfg, data = [], folder / "x.yaml", None
        cfg.write_text(SMALL)
        if metric in ("micro_f1", "map"):
            data, options = several_labels.write_digits(make("labels"), 60)[0], ["DATA.LABEL_SEPARATOR=|"]
        if metric in TASKS["numbers"].metrics and metric != "loss":
            data = number_rows.write_digits(make("numbers"), 60, [])[0]
            options = ["TRAIN.OBJECTIVE=numbers", "DATA.COLUMNS=[path,digit,ink]"]
        options += ["DATA.DATASET=csv"] if data else []
        words = ["-cfg", str(cfg), *(["-data_path", str(data)] if data else []), "-epochs", "2"]
        return [*words, "-opts", *options, f"TRAIN.BEST_METRIC={metric}", "DIST.TIMEOUT=60"]

    return words_of


@pytest.mark.long
@pytest.mark.parametrize("metric", METRICS)
def test_two_processes_end_like_one_if_the_validation_loss_is_nan(words_of, tmp_path, metric):
    found, faults = [], {"spoil_evaluations": []}
    for processes in (1, 2):
        script, output = f"main_{'multi' if processes > 1 else 'single'}_gpu.py", tmp_path / str(processes)
        flags = ["-output", str(output), "-batch_size", str(32 // processes)]
        ended = typed(script, *flags, *words_of(metric), processes=processes, faults=faults).done()
        folder = run_folder(output)
        status = json.loads((folder / "status.json").read_text(), parse_constant=pytest.fail)
        assert "damaged" not in ended.printed and "process" not in ended.stderr, ended.printed
        best = read(folder / "best.pth")["progress"]["best"]
        assert status["best_epoch"] == best[1] and not math.isfinite(best[2]), "its loss"
        found.append((status["state"], status["best_epoch"], sorted(each.name for each in folder.iterdir())))
    one, two = found
    assert one[:2] == two[:2] and {*one[2]} <= {*two[2]}, "the other process has a log too"


OTHER_FOLD = "RESUME.ALLOW_CHANGED=[DATA.FOLD,NUM_IMAGES,IMAGES]"


@pytest.mark.long
def test_changed_validation_images_invalidate_the_best_epoch(scored, tmp_path, small_yaml):
    given = f"-cfg {small_yaml} -output {tmp_path}/o -resume auto -batch_size 160 -check -check_images 10".split()

    def check(part):
        words = [f"DATA.FOLD={part}", "TRAIN.NUM_EPOCHS=2", OTHER_FOLD]
        return rows(typed("main_single_gpu.py", *given, "-opts", *words).stdout)["resume"][1]

    _, folder = scored([90, 0.1], words=["TRAIN.NUM_EPOCHS=1", "DATA.FOLD=0/5"])
    state = read(folder / "last.pth")
    assert "best.pth" in check("1/5") and "best.pth" not in check("0/5")
    # Before the first evaluation, there is no best epoch that a changed validation set could invalidate.
    torch.save(state | {"progress": state["progress"] | {"best": Best().state()}}, folder / "last.pth")
    assert "best.pth" not in check("1/5")
    torch.save(state, folder / "last.pth")
    shutil.copytree(tmp_path / "o", tmp_path / "before")
    for part, epoch in (("0/5", 1), ("1/5", 2)):
        words = ["TRAIN.NUM_EPOCHS=2", OTHER_FOLD, f"DATA.FOLD={part}"]
        shutil.rmtree(tmp_path / "o")
        shutil.copytree(tmp_path / "before", tmp_path / "o")
        lines, folder = scored([50, 1.0], words=words)
        assert read(folder / "best.pth")["epoch"] == epoch - 1
        assert len([line for line in lines if "best.pth" in line and "90.00%" in line]) == (epoch == 2)


def test_other_validation_images_continue_a_run_that_stopped_early(scored):
    """The evaluations without improvement were of the old images, so they do not count for the new ones."""
    words = ["TRAIN.NUM_EPOCHS=4", "TRAIN.EARLY_STOP=2", "TRAIN.BEST_EPOCH=highest"]
    _, folder = scored([90, 0.1], [50, 1.0], [50, 1.0], words=[*words, "DATA.FOLD=0/5"])
    assert status_of(folder)["reason"] == "early stop"
    scored([40, 2.0], words=[*words, "DATA.FOLD=1/5", OTHER_FOLD])
    status = status_of(folder)
    assert (status["state"], status.get("reason"), status["epoch"], status["best_epoch"]) == ("done", None, 4, 4)


@pytest.mark.long
def test_repeated_best_epoch_counts_as_an_improvement(scored):
    """A run that was killed between best.pth and last.pth trains the best epoch again, and only equals its score."""
    words = ["TRAIN.EARLY_STOP=2", "TRAIN.BEST_EPOCH=highest"]
    _, folder = scored([50, 1.0], [90, 0.1], words=[*words, "TRAIN.NUM_EPOCHS=2"])
    (folder / "previous.pth").replace(folder / "last.pth")
    scored([90, 0.1], [50, 1.0], [50, 1.0], words=[*words, "TRAIN.NUM_EPOCHS=5"])
    assert status_of(folder)["epoch"] == 4

"""Settings of a model that learns numbers: what follows from TRAIN.OBJECTIVE, and what contradicts it."""

import pytest
import timm
import torch

from configs.load import load
from configs.values import flatten
from engine.settings import load_settings
from tests.support.cases import cases_of, names_of
from tests.support.configs import load_text
from tests.support.refusals import refused
from utils.errors import ConfigError

NUMBERS = "DATA: {DATASET: csv}\nTRAIN: {OBJECTIVE: numbers, %s}"


def words(options: str) -> list[str]:
    return ["-opts", *options.split()] if options else []


@pytest.mark.parametrize("options", cases_of("numbers-mistakes_of_settings"))
def test_setting_that_contradicts_numbers_is_refused(here, options):
    with refused(ConfigError, *names_of("numbers-mistakes_of_settings", options)):
        load_text(NUMBERS % "", *words(options))


@pytest.mark.parametrize(
    "options",
    [
        "DATA.COLUMNS=[path,age,ink]",
        "DATA.COLUMNS=[path,*] DATA.GROUP_BY=person",
        "TRAIN.MIXUP_ALPHA=0.8",
        "TRAIN.LOSS=l1",
        "TRAIN.BEST_METRIC=r2",
        "TRAIN.BEST_METRIC=loss",
        "TRAIN.SMOOTHING=0.0",
        "DATA.TARGET_MEAN=[1,-2.5] DATA.TARGET_STD=[1,2]",
        "TRAIN.DISTILLATION_TYPE=hard TRAIN.TEACHER_MODEL=a.pth -eval",
    ],
)
def test_setting_that_suits_numbers_is_accepted(here, options):
    assert load_text(NUMBERS % "", *words(options)).config.TRAIN.OBJECTIVE == "numbers"


def test_loss_and_metric_follow_from_numbers_unless_they_are_set(here):
    loaded = load_text(NUMBERS % "")
    assert (loaded.config.TRAIN.LOSS, loaded.config.TRAIN.BEST_METRIC) == ("smooth_l1", "mae")
    assert (
        "TRAIN.OBJECTIVE" in loaded.origins["TRAIN.LOSS"] and "TRAIN.OBJECTIVE" in loaded.origins["TRAIN.BEST_METRIC"]
    )
    train = load_text(NUMBERS % "LOSS: mse, BEST_METRIC: rmse").config.TRAIN
    assert (train.LOSS, train.BEST_METRIC) == ("mse", "rmse")


def test_smoothing_in_a_recipe_does_not_prevent_numbers(here):
    """A recipe for classes has it. Only on the command line it is a mistake."""
    assert load_text(NUMBERS % "SMOOTHING: 0.1").config.TRAIN.SMOOTHING == 0.1


@pytest.mark.parametrize("name", ["", "_batchnorm"])
def test_recipes_for_numbers_differ_from_those_for_classes_only_in_these_settings(name):
    ours, theirs = (flatten(load(["-cfg", f"configs/finetune{kind}{name}.yaml"]).config) for kind in ("_numbers", ""))
    changed = {key for key in ours if ours[key] != theirs[key]}
    implied = {"TRAIN.LOSS", "TRAIN.BEST_METRIC"}
    assert changed == {"DATA.DATASET", "TRAIN.OBJECTIVE", "TRAIN.BASE_LR", "TRAIN.SMOOTHING"} | implied
    assert ours["TRAIN.BASE_LR"] == theirs["TRAIN.BASE_LR"] / 4


@pytest.mark.parametrize(
    "model, file", [("test_vit", "finetune_numbers"), ("test_resnet", "finetune_numbers_batchnorm")]
)
def test_weights_without_settings_file_are_fine_tuned_by_the_recipe_for_numbers(model, file, here):
    torch.save(timm.create_model(model).state_dict(), "weights.pth")
    words = ["-pretrained", "weights.pth", "-dataset", "csv", "-data_path", "a.csv", "-opts", "MODEL.TYPE=timm"]
    loaded = load_settings([*words, f"MODEL.NAME={model}", "TRAIN.OBJECTIVE=numbers"])
    assert loaded.origins["TRAIN.BASE_LR"].endswith(f"configs/{file}.yaml")

"""Settings and models that do not work with learning features are refused with one line, also by -check."""

import shutil

import pytest
import torch

from engine.tasks.feature_training import make_feature_training
from models import build_model
from tests.engine.tasks.features.support import SMALL, digits_config, draw_photos, teacher_of
from tests.support.cases import cases_of, names_of
from tests.support.configs import CPU, replaced
from tests.support.refusals import refused
from tests.support.runs import rows, typed
from tests.support.trainers import make_trainer
from utils.distributed import Process
from utils.errors import ConfigError
from utils.log import Log

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """Return a function that returns the command line of a run with these options."""
    folder = tmp_path_factory.mktemp("photos")
    (folder / "features.yaml").write_text(SMALL)
    photos, teacher = draw_photos(folder / "photos"), teacher_of(folder)
    (folder / "labelled" / "only one").mkdir(parents=True)
    shutil.copy(photos / "trip 0" / "000.png", folder / "labelled" / "only one")

    def words(*options: str) -> list:
        options = [each.replace("FOLDER", str(folder)) for each in options]
        named = [] if any("TEACHER" in each for each in options) else [f"TRAIN.TEACHER_MODEL={teacher}"]
        flags = ["-cfg", folder / "features.yaml", "-data_path", photos, "-output", folder / "runs"]
        return [*flags, "-opts", *named, *options]

    words.folder = folder
    return words


@pytest.mark.parametrize("options", cases_of("unlabelled-mistakes"))
def test_setting_that_contradicts_learning_features_is_refused(words, options):
    typed("main_single_gpu.py", *words(*options.split())).refused(*names_of("unlabelled-mistakes", options))


def test_different_patch_grids_are_refused_unless_only_pooled_features_are_learned(words):
    typed("main_single_gpu.py", *words("MODEL.PATCH_SIZE=2")).refused("8 x 8", "4 x 4", "TRAIN.FEATURES=pooled")
    typed("main_single_gpu.py", *words("MODEL.PATCH_SIZE=2", "DATA.IMAGE_SIZE=8", "TRAIN.NUM_EPOCHS=1")).done()
    typed("main_single_gpu.py", *words("MODEL.PATCH_SIZE=2", "TRAIN.FEATURES=pooled", "TRAIN.NUM_EPOCHS=1")).done()


@pytest.mark.parametrize("option", ["MODEL.PATCH_SIZE=2", "DATA.LABELLED_PATH=FOLDER/labelled"])
def test_check_reports_the_same_error_as_the_run(words, option):
    checked = typed("main_single_gpu.py", *words(option), "REPORT=false", "CHECK=true")
    refusal = typed("main_single_gpu.py", *words(option)).stderr.removeprefix("error: ").strip()
    assert checked.returncode == 2 and rows(checked.stdout)["model"] == ("WRONG", refusal)


def test_check_of_a_sound_run_finds_nothing_wrong(words):
    verdicts = {
        verdict for verdict, _ in rows(typed("main_single_gpu.py", *words("CHECK=true")).done().stdout).values()
    }
    assert "WRONG" not in verdicts


def test_model_without_square_grid_needs_pooled_features(tmp_path):
    config = digits_config(tmp_path)
    model = build_model(config, 10)
    model.num_prefix_tokens = 0  # so that the class token counts as a patch
    with refused(ConfigError, "MODEL.NAME", "TRAIN.FEATURES=pooled"):
        make_feature_training(config, Process(CPU), Log(1)).change_model(model)
    make_feature_training(replaced(config, TRAIN={"FEATURES": "pooled"}), Process(CPU), Log(1)).change_model(model)
    assert [each.shape for each in model.train()(torch.zeros(2, 1, 8, 8))] == [(2, 24)]


def test_convolutional_student_learns_pooled_features_of_a_vit(tmp_path):
    model = "MODEL.TYPE=timm MODEL.NAME=test_resnet MODEL.PATCH_SIZE=16 MODEL.EMBED_DIM=768 MODEL.DEPTH=12 MODEL.NUM_HEADS=12"
    config = digits_config(tmp_path, "TRAIN.FEATURES=pooled", "DATA.IMAGE_SIZE=32", *model.split())
    assert make_trainer(config, classes=[]).model.feature_maps["pooled"].out_features == 24


def test_output_folder_inside_the_photos_is_refused(words):
    inside = words.folder / "photos" / "trip 0"
    command = [inside if each == words.folder / "runs" else each for each in words()]
    typed("main_single_gpu.py", *command).refused("SAVE", "-output")
    assert not any(path.is_dir() for path in inside.iterdir())

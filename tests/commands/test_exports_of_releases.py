"""Files that `export` of a release wrote are predicted, evaluated and exported again by this version.

`python -m tests.support.make_exports` made them; it belongs to each release.
"""

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from models.weights.files import read_record, read_state_dict
from tests.support.make_exports import BASE, EXPORTS, WITHOUT_ANSWERS, copy_images, predictions_of, write_data
from tests.support.runs import run_folder, typed
from tests.support.weight_files import assert_same

pytestmark = pytest.mark.slow

TOLERANCE = 2e-3  # processors round differently


class Exported(NamedTuple):
    """A file or a folder that a release exported, and its answers then."""

    kind: str
    path: Path
    expected: dict


ANSWERS = sorted(EXPORTS.glob("*/*.json"))
FILES = [file.with_suffix(".safetensors") for file in ANSWERS]
FOLDERS = [file.with_suffix("") for file in ANSWERS if file.with_suffix("").is_dir()]  # for Hugging Face


def named(paths: list[Path]) -> list:
    return [pytest.param(path, id=str(path.relative_to(EXPORTS))) for path in paths]


@pytest.fixture(params=named(FILES + FOLDERS))
def exported(request) -> Exported:
    answers = request.param.with_suffix(".json")
    return Exported(answers.stem, request.param, json.loads(answers.read_text()))


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """The folder of the images, in which a run finds them by the paths in its settings."""
    folder = tmp_path_factory.mktemp("data")
    write_data(folder)
    return folder


def numbers_in(answers: object) -> object:
    """Return the answers with each number as an approximate one, so that nested ones can be compared."""
    if isinstance(answers, float):
        return pytest.approx(answers, abs=TOLERANCE, rel=0)
    if isinstance(answers, dict):
        return {key: numbers_in(value) for key, value in answers.items()}
    return [numbers_in(value) for value in answers] if isinstance(answers, list) else answers


def test_exported_files_of_a_release_predict_as_its_run_did(exported, data, tmp_path):
    images = copy_images(exported.kind, data, tmp_path / "images")
    answers = predictions_of(exported.kind, exported.path, images)
    assert answers == numbers_in(exported.expected["images"])


def test_exported_files_of_a_release_are_exported_again_unchanged(exported, here):
    typed("scripts/export.py", exported.path, "-output", "again.safetensors").done()
    assert_same(read_state_dict(here / "again.safetensors"), read_state_dict(exported.path))
    file = exported.path / "model.safetensors" if exported.path.is_dir() else exported.path
    assert read_record(here / "again.safetensors") == read_record(file)


@pytest.mark.long
@pytest.mark.parametrize("exported", named([file for file in FILES if file.stem not in WITHOUT_ANSWERS]), indirect=True)
def test_exported_file_of_a_release_reaches_its_validation_score(exported, data, tmp_path, monkeypatch, all_digits):
    monkeypatch.chdir(data)
    typed("main_single_gpu.py", "-eval", "-pretrained", exported.path, "-output", tmp_path).done()
    results = json.loads((run_folder(tmp_path) / "results.json").read_text())
    assert results["metric"] == exported.expected["metric"]
    assert results["value"] == pytest.approx(exported.expected["value"], abs=0.3)


@pytest.mark.parametrize("exported", named([file for file in FILES if file.stem in WITHOUT_ANSWERS]), indirect=True)
def test_run_starts_from_exported_features_of_a_release(exported, data, tmp_path):
    (tmp_path / "base.yaml").write_text(BASE)
    words = ["-cfg", tmp_path / "base.yaml", "-pretrained", exported.path, "-epochs", 1, "-output", tmp_path / "runs"]
    words += ["-batch_size", 320, "-opts", "TRAIN.BASE_LR=1e-9", "TRAIN.WARMUP_EPOCHS=0", "TRAIN.WEIGHT_DECAY=0"]
    typed("main_single_gpu.py", *words).done()
    weights = read_state_dict(run_folder(tmp_path / "runs") / "last.pth")
    for name, start in read_state_dict(exported.path).items():
        torch.testing.assert_close(weights[name], start, rtol=0, atol=1e-5)

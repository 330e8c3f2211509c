"""halfstep models: the matching models of timm, their rows, and names without a match."""

import pytest
import torch

from engine import catalogue
from engine.catalogue import describe_models, find_names
from scripts import models as script
from tests.support.cases import cases_of, names_of, value_of
from tests.support.refusals import refused
from tests.support.runs import typed
from utils.errors import ConfigError

pytestmark = pytest.mark.slow


def test_model_search_requires_all_words_to_match():
    both = find_names(["VIT_small", "in1k"])
    assert both == [name for name in find_names(["vit_small"]) if "in1k" in name] != []
    assert find_names(["vit_tiny_patch16_224"])[0] in find_names(["vit_tiny_*_224"])
    assert all(name.startswith("swin_") and name.endswith("_in1k") for name in find_names(["swin_*_in1k"]))


@pytest.mark.parametrize("licence", cases_of("licences"))
def test_models_script_marks_noncommercial_licences(monkeypatch, licence):
    monkeypatch.setattr(catalogue, "count_parameters", lambda name: 7)
    model = describe_models(find_names(["vit_tiny_patch16_224"])[:1])[0]._replace(licence=licence.strip("()"))
    assert script.row_of(model)[-1] == value_of("licences", licence)


@pytest.mark.parametrize("words", cases_of("mistakes-of_models_script"))
def test_model_search_without_match_suggests_the_nearest_names(words):
    with refused(ConfigError, *names_of("mistakes-of_models_script", words)):
        find_names(words.split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the device")
@pytest.mark.parametrize("words", ["-opts DEVICE=cuda", "-device cuda"])
def test_candidates_are_not_timed_on_another_device_than_asked_for(here, words):
    ended = typed("scripts/models.py", "-data_path", "photos", "hub", "-output", "choice", *words.split())
    ended.refused("DEVICE", "cuda")

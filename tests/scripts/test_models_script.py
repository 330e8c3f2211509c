"""scripts/models.py: the matching models of timm, their rows, and names without a match."""

import pytest
import timm

from scripts import models as script
from scripts.models import describe_models, find_names
from tests.support.cases import assert_cases, cases_of, names_of, value_of
from tests.support.refusals import assert_names, refused
from tests.support.runs import typed
from utils.errors import ConfigError

pytestmark = pytest.mark.slow


def test_model_list_row_shows_size_and_image_preparation():
    found = {model.name: model for model in describe_models(find_names(["vit_tiny_patch16_224", "in21k"]))}
    assert set(found) == {f"vit_tiny_patch16_224.{tag}" for tag in ("augreg_in21k", "augreg_in21k_ft_in1k")}
    cells = script.row_of(found["vit_tiny_patch16_224.augreg_in21k_ft_in1k"])
    assert cells[1:] == ("5.7 M", "224", "1,000", "apache-2.0")


def test_models_script_lists_six_sizes_and_recommends_one():
    assert_cases("models", printed := typed("scripts/models.py").done().stdout)
    rows = {row.split()[0]: row for row in printed.splitlines()[1:7]}
    assert not set(rows) - set(timm.list_pretrained())
    for model in describe_models(list(rows)):
        assert_names(rows[model.name], script.row_of(model)[1])
        assert (model.licence, model.size) == ("apache-2.0", (224, 224))


def test_model_search_requires_all_words_to_match():
    both = find_names(["VIT_small", "in1k"])
    assert both == [name for name in find_names(["vit_small"]) if "in1k" in name] != []
    assert find_names(["vit_tiny_patch16_224"])[0] in find_names(["vit_tiny_*_224"])
    assert all(name.startswith("swin_") and name.endswith("_in1k") for name in find_names(["swin_*_in1k"]))


def test_matching_architectures_without_weights_are_listed():
    bare = next(each for each in timm.list_models("vit_small*") if not timm.models.is_model_pretrained(each))
    lines = typed("scripts/models.py", bare).done().stdout.splitlines()
    assert f"MODEL.NAME={bare}" in lines[-1] and "no weights" in lines[1]


def test_models_above_the_row_limit_are_counted_below_table(monkeypatch):
    monkeypatch.setattr(script, "LIMIT", 2)
    number = len(find_names(["vit_tiny"]))
    lines = typed("scripts/models.py", "vit_tiny").done().stdout.splitlines()
    assert lines.index("") == 1 + 2 < number
    assert lines[1].startswith("vit_tiny"), "must precede names such as crossvit_tiny_240"
    assert_names("\n".join(lines), number - 2, "-all", "configs/finetune.yaml")
    smallest = min(describe_models(find_names(["vit_tiny"])[:2]), key=lambda model: model.parameters)
    assert_names(lines[-1], smallest.name)


@pytest.mark.parametrize("licence", cases_of("licences"))
def test_models_script_marks_noncommercial_licences(monkeypatch, licence):
    monkeypatch.setattr(script, "count_parameters", lambda name: 7)
    model = describe_models(find_names(["vit_tiny_patch16_224"])[:1])[0]._replace(licence=licence.strip("()"))
    assert " | ".join([script.row_of(model)[-1], *script.notes([model], 0)[1:-1]]) == value_of("licences", licence)


def test_parameters_of_equal_architectures_are_counted_once(monkeypatch):
    counted = []
    monkeypatch.setattr(script, "count_parameters", lambda name: counted.append(name) or 7)
    names = [name for name in find_names(["vit_base_patch16_224"]) if name.endswith("in1k")]
    assert {model.parameters for model in describe_models(names)} == {7}
    assert 0 < len(counted) < len(names)


@pytest.mark.parametrize("words", cases_of("mistakes-of_models_script"))
def test_model_search_without_match_suggests_the_nearest_names(words):
    with refused(ConfigError, *names_of("mistakes-of_models_script", words)):
        find_names(words.split())

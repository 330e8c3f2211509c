"""scripts/models.py: which of timm's models match, what their rows say, and what cannot be found."""

import csv
import errno
import os

import pytest

from scripts import models as script
from scripts.models import KnownModel, data_of, describe_models, find_names
from tests.support.refusals import assert_names, refused
from utils.errors import ConfigError
from utils.program import exit_code


@pytest.fixture
def typed(capsys):
    """Types a command; returns its exit code, its lines and what went to the error stream."""

    def type_in(*words):
        code = exit_code(script.main, [str(word) for word in words])
        out, err = capsys.readouterr()
        return code, out.splitlines(), err

    return type_in


def test_the_row_of_a_model_says_its_size_and_how_its_images_are_prepared(tmp_path, typed):
    code, lines, _ = typed("vit_tiny_patch16_224", "in21k", "-csv", tmp_path / "found.csv")
    with open(tmp_path / "found.csv") as file:
        rows = {row["name"]: row for row in csv.DictReader(file)}
    assert code == 0 and set(rows) == {
        "vit_tiny_patch16_224.augreg_in21k",
        "vit_tiny_patch16_224.augreg_in21k_ft_in1k",
    }
    row = rows["vit_tiny_patch16_224.augreg_in21k_ft_in1k"]
    assert row["parameters"] == "5717416"  # ViT-Tiny/16 with 1000 classes
    assert (row["height"], row["width"], row["classes"]) == ("224", "224", "1000")
    assert row["mean"] == row["std"] == "0.5 0.5 0.5"
    assert row["licence"] == "apache-2.0" and row["non_commercial"] == "False"
    assert row["data"] == "ImageNet-21k, ImageNet-1k"


def test_all_words_are_required_and_a_pattern_is_of_the_whole_name_with_or_without_its_tag():
    both = find_names(["VIT_small", "in1k"])
    assert both == [name for name in find_names(["vit_small"]) if "in1k" in name] != []
    assert find_names(["vit_tiny_patch16_224"])[0] in find_names(["vit_tiny_*_224"])
    assert all(name.startswith("swin_") and name.endswith("_in1k") for name in find_names(["swin_*_in1k"]))


def test_architectures_without_weights_are_listed_by_a_flag(typed):
    names = find_names(["vit_small"], without_weights=True)
    bare = [each for each in names if "." not in each]
    assert bare and not set(bare) & set(find_names(["vit_small"]))
    code, lines, _ = typed(bare[0], "-without_weights")
    assert code == 0 and f"MODEL.NAME={bare[0]}" in lines[-1]
    code, _, err = typed(bare[0])
    assert code == 2
    assert_names(err, bare[0], "-without_weights")


def test_more_than_the_limit_are_counted_below_the_table_and_the_next_command_is_shown(typed, monkeypatch):
    monkeypatch.setattr(script, "LIMIT", 2)
    number = len(find_names(["vit_tiny"]))
    code, lines, _ = typed("vit_tiny")
    assert code == 0 and lines.index("") == 1 + 2 < number
    assert lines[1].startswith("vit_tiny"), "not one of which it is a part further on, as of crossvit_tiny_240"
    assert_names("\n".join(lines), number - 2, "-all", "configs/finetune.yaml")
    assert lines[1].split()[0] in lines[-1]


@pytest.mark.parametrize(
    ("licence", "marked", "own_terms"),
    [
        ("apache-2.0", False, False),
        ("cc-by-4.0", False, False),
        ("cc-by-nc-4.0", True, False),
        ("fair-noncommercial-research-license", True, False),
        ("apple-amlr", True, False),
        ("dinov3-license", False, True),
        ("unknown", False, False),
        ("", False, False),
    ],
)
def test_licences_that_forbid_commercial_use_stand_out(licence, marked, own_terms):
    row = KnownModel("x", 1, (2, 3), (0.5,), (0.5,), 0, "", licence, has_weights=True)
    assert ("NON-COMMERCIAL" in script.row_of(row)[-1]) == marked
    assert any(licence in line for line in script.notes([row], 0)[1:-1]) == (marked or own_terms)
    assert (row.is_non_commercial, row.has_own_terms) == (marked, own_terms)


def test_the_data_of_weights_is_read_from_their_tag():
    assert data_of("augreg_in21k_ft_in1k") == "ImageNet-21k, ImageNet-1k"
    assert data_of("laion2b_ft_in12k_in1k_384") == "LAION-2B, ImageNet-12k, ImageNet-1k"
    assert data_of("mae") == ""


def test_weights_of_one_shape_are_counted_once(monkeypatch):
    from scripts import models as catalogue

    counted = []
    monkeypatch.setattr(catalogue, "count_parameters", lambda name: counted.append(name) or 7)
    names = [name for name in find_names(["vit_base_patch16_224"]) if name.endswith("in1k")]
    assert len(names) > len(counted) == 0
    assert {row.parameters for row in describe_models(names)} == {7}
    assert 0 < len(counted) < len(names)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["dinov4"], ["dinov4", "dinov3"]),
        (["vit_smal_patch16_224"], ["vit_small_patch16_224"]),
        (["vit_small", "dinov9"], ["dinov9", "dinov3"]),
        (["vit_small", "resnet"], ["vit_small", "resnet"]),
    ],
)
def test_what_matches_nothing_is_answered_with_the_nearest_names(words, names):
    with refused(ConfigError, *names):
        find_names(words)


def test_a_full_disk_is_told(typed, tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    code, _, err = typed("vit_tiny_patch16_224", "-csv", tmp_path / "x.csv")
    assert code == 2 and not any(tmp_path.iterdir())
    assert_names(err, "-csv", "x.csv", "disk", "full")


def test_a_table_that_cannot_be_written_is_told_before_any_work(typed, tmp_path):
    for place in (tmp_path / "not" / "there.csv", tmp_path):
        code, lines, err = typed("vit_tiny", "-csv", place)
        assert code == 2 and not lines
        assert_names(err, "-csv")

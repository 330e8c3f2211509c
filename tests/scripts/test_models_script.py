"""scripts/models.py: which of timm's models match, what their rows say, and what cannot be found."""

import csv
import errno
import os

import pytest

from scripts import models as script
from scripts.models import describe_models, find_names
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
    tags = {"augreg_in21k", "augreg_in21k_ft_in1k"}
    assert code == 0 and set(rows) == {f"vit_tiny_patch16_224.{tag}" for tag in tags}
    row = rows["vit_tiny_patch16_224.augreg_in21k_ft_in1k"]
    assert row["parameters"] == "5717416"  # ViT-Tiny/16 with 1000 classes
    assert (row["height"], row["width"], row["classes"]) == ("224", "224", "1000")
    assert row["mean"] == row["std"] == "0.5 0.5 0.5"
    assert row["licence"] == "apache-2.0" and row["non_commercial"] == "False"


def test_all_words_are_required_and_a_pattern_is_of_the_whole_name_with_or_without_its_tag():
    both = find_names(["VIT_small", "in1k"])
    assert both == [name for name in find_names(["vit_small"]) if "in1k" in name] != []
    assert find_names(["vit_tiny_patch16_224"])[0] in find_names(["vit_tiny_*_224"])
    assert all(name.startswith("swin_") and name.endswith("_in1k") for name in find_names(["swin_*_in1k"]))


def test_architectures_without_weights_are_listed_by_a_flag(typed):
    bare = next(each for each in find_names(["vit_small"], without_weights=True) if "." not in each)
    code, lines, _ = typed(bare, "-without_weights")
    assert code == 0 and f"MODEL.NAME={bare}" in lines[-1]
    with refused(ConfigError, bare, "-without_weights"):
        find_names([bare])


def test_more_than_the_limit_are_counted_below_the_table_and_the_next_command_is_shown(typed, monkeypatch):
    monkeypatch.setattr(script, "LIMIT", 2)
    number = len(find_names(["vit_tiny"]))
    code, lines, _ = typed("vit_tiny")
    assert code == 0 and lines.index("") == 1 + 2 < number
    assert lines[1].startswith("vit_tiny"), "not one of which it is a part further on, as of crossvit_tiny_240"
    assert_names("\n".join(lines), number - 2, "-all", "configs/finetune.yaml")
    assert lines[1].split()[0] in lines[-1]


@pytest.mark.parametrize(
    ("licence", "is_marked", "has_own_terms"),
    [
        ("apache-2.0", False, False),
        ("cc-by-nc-4.0", True, False),
        ("fair-noncommercial-research-license", True, False),
        ("apple-amlr", True, False),
        ("dinov3-license", False, True),
        ("", False, False),
    ],
)
def test_licences_that_forbid_commercial_use_stand_out(monkeypatch, licence, is_marked, has_own_terms):
    monkeypatch.setattr(script, "count_parameters", lambda name: 7)
    name = find_names(["vit_tiny_patch16_224"])[0]
    (row,) = describe_models([name])
    row |= {"licence": licence, "non_commercial": script.is_non_commercial(licence)}
    assert ("NON-COMMERCIAL" in script.row_of(row)[-1]) == is_marked
    assert any(licence in line for line in script.notes([row], 0)[1:-1]) == (is_marked or has_own_terms)


def test_weights_of_one_shape_are_counted_once(monkeypatch):
    counted = []
    monkeypatch.setattr(script, "count_parameters", lambda name: counted.append(name) or 7)
    names = [name for name in find_names(["vit_base_patch16_224"]) if name.endswith("in1k")]
    assert {row["parameters"] for row in describe_models(names)} == {7}
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


def test_a_table_that_cannot_be_written_is_refused_before_any_work_and_a_full_disk_after_it(
    typed, tmp_path, monkeypatch
):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for place in ("not/there.csv", ".", "x.csv"):
        code, lines, err = typed("vit_tiny_patch16_224", "-csv", tmp_path / place)
        assert code == 2 and not lines and not any(tmp_path.iterdir())
        assert_names(err, "-csv")

"""Every mistake a user can make ends a run with exit code 2 and one message that names it and its remedy."""

from unittest.mock import Mock

import pytest

from tests.support.configs import SMALL
from tests.support.mistakes import IN_A_RUN
from tests.support.refusals import assert_names
from tests.support.runs import rows, typed
from utils.program import exit_code


@pytest.fixture
def person(tmp_path, signal_handlers):
    """Types a command with the settings file; returns the message that it ended with, having checked that it did."""

    def type_in(*flags, exit_with=2):
        path = tmp_path / "settings.yaml"
        path.write_text(SMALL)
        there = set(tmp_path.rglob("*"))
        ended = typed("main_single_gpu.py", "-cfg", path, "-output", tmp_path / "output", "-epochs", "1", *flags)
        assert ended.returncode == exit_with and "Traceback" not in ended.stderr, ended.printed
        if "-check" in flags:
            assert ended.stderr == ""
            return " ".join(text for verdict, text in rows(ended.stdout).values() if verdict == "WRONG")
        if exit_with == 2:
            assert ended.stderr.startswith("error: ") or "\nerror: " in ended.stderr
            assert set(tmp_path.rglob("*")) <= there, "only a run that began leaves a folder"
        return ended.stderr if exit_with else ended.stdout

    return type_in


@pytest.mark.parametrize(("words", "names"), IN_A_RUN.items())
def test_a_mistake_that_only_a_run_can_see_is_named_with_the_remedy_also_by_check(person, here, words, names):
    (here / "file").write_text("")
    for told in (person(*words.split()), person(*words.split(), "-check")):
        assert_names(told, *names.split())


def test_a_run_starts_with_what_is_doubtful_about_it_and_no_more(person):
    told = person(exit_with=0).splitlines()  # one epoch, and one of warm-up
    (line,) = [line for line in told if line.startswith("check: ")]
    assert_names(line, "warm-up", "TRAIN.WARMUP_EPOCHS", "TRAIN.BASE_LR")
    assert "check: " not in person("-opts", "TRAIN.WARMUP_EPOCHS=0.5", exit_with=0)


def test_torchvision_that_does_not_fit_torch_says_what_to_do(monkeypatch, capsys):
    assert exit_code(Mock(side_effect=RuntimeError("operator torchvision::nms does not exist")), []) == 2
    assert "pip install -r requirements.txt" in capsys.readouterr().err


def test_our_own_mistake_ends_with_1_and_a_traceback(capsys):
    assert exit_code(lambda arguments: 1 // 0, []) == 1
    assert "ZeroDivisionError" in capsys.readouterr().err

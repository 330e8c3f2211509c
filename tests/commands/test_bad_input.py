"""Every user mistake ends a run with exit code 2 and one message that names the mistake and its remedy."""

from pathlib import Path
from unittest.mock import Mock

import pytest

from scripts import predict, sweep
from scripts.command_line import check_no_input
from tests.support.cases import cases_of, names_of
from tests.support.configs import RESNET, SMALL
from tests.support.refusals import assert_names, refused
from tests.support.runs import rows, typed
from utils.errors import ConfigError
from utils.program import exit_code


@pytest.fixture
def person(tmp_path, signal_handlers):
    """Return a function that runs a command with the settings file, checks how it ended, and returns its message."""

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
            assert set(tmp_path.rglob("*")) <= there, "a refused run must not leave a folder"
        return ended.stderr if exit_with else ended.stdout

    return type_in


@pytest.mark.slow
@pytest.mark.parametrize("words", cases_of("mistakes-in_a_run"))
def test_check_reports_the_same_mistake_as_a_run(person, here, words):
    (here / "file").write_text("")
    typed_words = words.replace("RESNET", RESNET).split()
    told = person(*typed_words).partition("error: ")[2]
    assert_names(told, *names_of("mistakes-in_a_run", words))
    checked = person(*typed_words, "-check", "-check_images", "10")
    assert " ".join(told.partition(";")[0].split()) in " ".join(checked.split())


@pytest.mark.slow
def test_doubtful_setting_warns_once_and_run_still_starts(person):
    told = person(exit_with=0).splitlines()  # one epoch, with one warm-up epoch
    (line,) = [line for line in told if line.startswith("check: ")]
    assert_names(line, "warm-up", "TRAIN.WARMUP_EPOCHS")
    assert "check: " not in person("-opts", "TRAIN.WARMUP_EPOCHS=0.5", exit_with=0)


def test_error_for_torchvision_not_matching_torch_suggests_a_remedy(monkeypatch, capsys):
    assert exit_code(Mock(side_effect=RuntimeError("operator torchvision::nms does not exist")), []) == 2
    assert "pip install -r requirements.txt" in capsys.readouterr().err


def test_program_exits_with_1_and_traceback_after_an_internal_error(capsys):
    assert exit_code(lambda arguments: 1 // 0, []) == 1
    assert "ZeroDivisionError" in capsys.readouterr().err


PHOTOS = "scripts/benchmarks/photos.py"
WRITERS = {"scripts/make_shards.py": ["-dataset", "digits"], PHOTOS: ["-train", "2", "-val", "1", "-drawn", "10"]}


@pytest.mark.parametrize("script", WRITERS)
def test_unwritable_output_is_named_by_every_script(tmp_path, script):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file" / "out", Path("/proc/halfstep/out")):
        typed(script, *WRITERS[script], "-out", out).refused(out)


@pytest.mark.parametrize("name", ["link.pth", "../x/best.pth"])
def test_output_never_overwrites_its_input_under_another_name(tmp_path, monkeypatch, name):
    (tmp_path / "x").mkdir()
    monkeypatch.chdir(tmp_path / "x")
    Path("best.pth").touch()
    Path("link.pth").symlink_to("best.pth")
    with refused(ConfigError, "-output", name):
        check_no_input("-output", Path(name), [Path("best.pth")])


def test_repeated_script_flag_adds_values_or_overrides():
    assert predict.parse("RUN x.jpg -opts A=1 -opts B=2 C=3".split()).opts == ["A=1", "B=2", "C=3"]
    assert sweep.parse("-over A=1,2 -over B=3,4".split())[0].over == ["A=1,2", "B=3,4"]
    assert predict.parse("RUN x.jpg -csv a.csv -csv b.csv".split()).csv == Path("b.csv")


@pytest.mark.parametrize("rounds", ["0", "9" * 30])
def test_benchmark_with_impossible_number_of_rounds_is_refused(rounds):
    typed("scripts/benchmarks/loader.py", "run", "-rounds", rounds).refused("-rounds", rounds)

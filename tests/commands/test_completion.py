"""The files of scripts/completions: they are current, the words after Tab, and what bash does with the words."""

import re
import subprocess

import pytest

from configs.flags import FLAGS
from configs.schema import Arguments
from configs.tables import METRICS, SOURCES
from configs.values import ALL_SETTINGS
from configs.yaml_files import shipped_files
from halfstep.__main__ import COMMANDS
from scripts.completion import SHELLS, WORDS
from scripts.maintenance.make_completion import with_tables
from scripts.models import FIRST
from tests.support.runs import typed
from utils.runs import is_run_folder

RUN = "output/train-20260102-03-04-05"
# Names that would do harm, or break a word, in a shell that evaluates them.
NAMES = ["two words.pth", "it's.pth", 'a"quote.pth', "$(touch done).pth", "`touch done`.pth", "x;touch done", "-x.pth"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Return the working folder, with a run, settings and files."""
    folder = tmp_path / "here"
    (folder / RUN).mkdir(parents=True)
    (folder / "output/other").mkdir()
    for name in (f"{RUN}/status.json", f"{RUN}/config.yaml", "mine.yaml", "lite.pth", "names.txt", *NAMES):
        (folder / name).touch()
    monkeypatch.chdir(folder)
    return folder


def test_tables_are_those_of_the_parsers():
    text = WORDS.read_text()
    assert text == with_tables(text), "run python scripts/maintenance/make_completion.py"


@pytest.mark.parametrize("shell", SHELLS)
def test_printed_code_quotes_the_program_of_the_words(shell):
    program, code = WORDS.read_text(), typed("scripts/completion.py", shell).done().stdout
    assert f"'{program}'" in code and "'" not in program and "\\\\" not in program


def words(typed_words: list[str]) -> list[str]:
    """Return the words that can be the last typed word."""
    done = subprocess.run(["sh", "-c", WORDS.read_text(), "halfstep", *typed_words], stdout=subprocess.PIPE, timeout=60)
    return done.stdout.decode(errors="surrogateescape").splitlines()


def test_commands_and_flags_of_the_program_complete_its_first_word():
    assert words([""]) == [*COMMANDS, "-h", "-version"]
    assert words(["mo"]) == ["models"]
    assert words(["unknown", ""]) == words(["-h", ""]) == []


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("train -opts TRAIN.LOS", {"TRAIN.LOSS="}),
        ("train -epochs 5 -opts AMP=true MODEL.KW", {"MODEL.KWARGS."}),
        ("predict latest -opts TRAIN.LOSS=b", {"TRAIN.LOSS=bce"}),
        ("sweep -over AMP=", {"AMP=true", "AMP=false", "AMP=auto"}),
        ("train -opts TRAIN.BASE_LR=", set()),
        ("train -opts MODEL.PRETRAINED=li", {"MODEL.PRETRAINED=lite.pth"}),
        ("train -opts AMP=true -epo", {"-epochs"}),
        ("train -opts DATA.DATASET=cifar", {"DATA.DATASET=cifar10", "DATA.DATASET=cifar100"}),
        ("make-shards -dataset tor", {"torchvision/"}),
        ("train -amp_dtype b", {"bfloat16"}),
        ("train -data_path ", set()),
        ("train -cfg vit_dig", {"vit_digits"}),
        ("train -cfg m", {"mine.yaml"}),
        ("train -cfg l", {"linear_probe", "lora"}),  # not lite.pth
        ("train -pretrained l", {"latest", "lite.pth"}),
        ("check -pretrained w", {"weights/tf_efficientnet_lite0.safetensors"}),
        ("evaluate o", {"output/", RUN}),
        ("predict output/", {"output/other/", RUN}),
        (f"predict {RUN}/c", {f"{RUN}/config.yaml"}),
        ("predict latest n", {"names.txt"}),
        ("predict -flip -top 3 la", {"latest"}),
        ("report ", {"latest", RUN}),
        ("resume ", {"latest", RUN}),
        ("train -resume ", {"latest", "auto", RUN}),
        ("compare latest o", {RUN}),
        ("completion ", {*SHELLS}),
        ("predict $", {"$(touch done).pth"}),
    ],
)
def test_words_that_can_follow_the_typed_words(here, typed, found):
    assert {*words(typed.split(" "))} == found


def test_words_are_those_of_the_tables(here):
    assert is_run_folder(RUN)
    assert {*words(["train", "-cfg", ""])} >= {path.stem for path in shipped_files()}
    assert {*words(["train", "-dataset", ""])} == {name.replace("NAME", "") for name in SOURCES}
    assert {*words(["train", "-pretrained", ""])} >= {*FIRST, *NAMES[:-1], "mine.yaml"}
    assert {each.partition("=")[2] for each in words(["train", "-opts", "TRAIN.BEST_METRIC="])} == {*METRICS}


@pytest.mark.parametrize("name", ["two\nlines.pth", "red\x1b[31m.pth"])
def test_names_that_do_not_fit_on_a_line_are_left_to_the_shell(here, name):
    (here / name).touch()
    found = words(["predict", ""])
    assert "lite.pth" in found and name not in found


@pytest.mark.long
def test_every_setting_and_its_values_follow_opts(here):
    kinds = {key: setting.kind for key, setting in ALL_SETTINGS.items()}
    assert words(["train", "-opts", ""]) == [key + (".", "=")[kinds[key] is not Arguments] for key in ALL_SETTINGS]
    for key in kinds.keys() - {"DATA.DATASET", "MODEL.PRETRAINED", "MODEL.RESUME"}:
        values = {*ALL_SETTINGS[key].choices, *ALL_SETTINGS[key].special}
        values |= {"true", "false"} if kinds[key] is bool else set()
        assert {*words(["train", "-opts", f"{key}="])} == {f"{key}={value}" for value in values}
    for flag, (key, _) in ((flag, row) for group in FLAGS.values() for flag, row in group.items()):
        assert [f"{key}={each}" for each in words(["train", flag, ""])] == words(["train", "-opts", f"{key}="])


def test_flags_of_a_command_are_its_own_and_those_of_its_runs():
    assert {"-top", "-into", "-h", "-version"} <= {*words(["predict", "-"])}
    assert {"-over", "-epochs"} <= {*words(["sweep", "-"])} and "-over" not in words(["train", "-"])
    assert words(["train", "-"]) == words(["check", "-"]) == words(["resume", "-"])
    for command in COMMANDS:
        assert "--help" not in words([command, "-"])


def test_from_timm_completes_none_of_the_many_arguments_of_timm():
    assert words(["from-timm", "-"]) == ["-h", "-version"]


def printed(*command):
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=True, timeout=300).stdout


def completed(here, line):
    """Return the words that bash inserts for a line, of which the function gets what interactive bash gives it."""
    line_words = re.findall(r"[=:]|(?:\\.|[^\s=:])+", line) + ([""] if line.endswith(" ") else [])
    code = typed("scripts/completion.py", "bash").done().stdout
    code += 'COMP_LINE=$1 COMP_POINT=${#1}; shift; COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)); _halfstep\n'
    code += "complete -p halfstep; printf '%s\\n' \"${COMPREPLY[@]}\""
    first, *found = printed("bash", "--norc", "-c", code, "bash", line, *line_words).splitlines()
    assert first == "complete -o default -F _halfstep halfstep" and not (here / "done").exists()
    return [each for each in found if each]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("halfstep mod", ["models"]),
        ("halfstep export latest -ca", ["-calibrated"]),
        ("halfstep train -opts TRAIN.LOSS=b", ["bce"]),  # bash keeps TRAIN.LOSS=
        ("halfstep train -opts TRAIN.LR_SCHEDULER.NAME=co", ["cosine", "constant"]),
        ("halfstep train -opts AMP=", ["true", "false", "auto"]),
        ("halfstep train -opts AMP=false DATA.PIX", ["DATA.PIXELS="]),
        ("halfstep report ", ["latest", RUN]),
        ("halfstep train -data_path /", []),
        (r"halfstep predict two\ w", []),  # the shell completes words with quotes
    ],
)
def test_bash_inserts_the_words(here, line, found):
    assert sorted(completed(here, line)) == sorted(found)


@pytest.mark.parametrize("name", NAMES)
def test_bash_inserts_a_file_name_as_one_word_and_executes_nothing(here, name):
    (here / "folder").mkdir()
    (here / "folder" / name).touch()
    (inserted,) = completed(here, "halfstep predict folder/")
    assert printed("bash", "-c", f"printf %s {inserted}") == f"folder/{name}"

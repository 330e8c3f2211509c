"""scripts/completion.py: the words after Tab, the flags of all commands, and what bash does with the words."""

import importlib
import re
import shlex
import subprocess
import sys

import pytest

from configs.flags import FLAGS, build_parser
from configs.schema import Arguments
from configs.tables import METRICS, SOURCES
from configs.values import ALL_SETTINGS
from configs.yaml_files import shipped_files
from halfstep.__main__ import COMMANDS
from scripts.command_line import Parser
from scripts.completion import CODE, words
from scripts.models import FIRST
from tests.support.forks import ROOT
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
        ("sweep -over AMP=", {"AMP=true", "AMP=false"}),
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
        ("completion ", {*CODE}),
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


@pytest.mark.parametrize("name", ["two\nlines.pth", "red\x1b[31m.pth", "\udcff.pth"])
def test_names_that_do_not_fit_on_a_line_are_left_to_the_shell(here, name):
    (here / name).touch()
    found = words(["predict", ""])
    assert "lite.pth" in found and name not in found


def test_every_setting_and_its_values_follow_opts(here):
    kinds = {key: setting.kind for key, setting in ALL_SETTINGS.items()}
    assert words(["train", "-opts", ""]) == [key + (".", "=")[kinds[key] is not Arguments] for key in ALL_SETTINGS]
    for key in kinds.keys() - {"DATA.DATASET", "MODEL.PRETRAINED", "MODEL.RESUME"}:
        values = {*ALL_SETTINGS[key].choices, *ALL_SETTINGS[key].special}
        values |= {"true", "false"} if kinds[key] is bool else set()
        assert {*words(["train", "-opts", f"{key}="])} == {f"{key}={value}" for value in values}
    for flag, (key, _) in ((flag, row) for group in FLAGS.values() for flag, row in group.items()):
        assert [f"{key}={each}" for each in words(["train", flag, ""])] == words(["train", "-opts", f"{key}="])


class Made(Exception):
    """Has the parser of a script, before it parses anything."""


def flags_of_parser(script, monkeypatch):
    """Return the flags that a program's parser takes, with one of several names for -h."""
    if script.startswith("main_"):
        parser = build_parser()
    else:

        def stop(parser, *_):
            raise Made(parser)

        monkeypatch.setattr(Parser, "parse_known_args", stop)  # with which every way of parsing begins
        with pytest.raises(Made) as made:
            importlib.import_module(script.removesuffix(".py").replace("/", ".")).main([])
        parser = made.value.args[0]
    return {*parser._option_string_actions} - {"--help", "-help", "--local-rank", "--local_rank"}


@pytest.mark.parametrize("command", [each for each in COMMANDS if each != "from-timm"])
def test_flags_of_a_command_are_those_of_its_parser(command, monkeypatch):
    expected = flags_of_parser(COMMANDS[command][0], monkeypatch) | {"-version"}
    if command == "sweep":  # it passes other flags to the runs
        expected |= flags_of_parser("main_single_gpu.py", monkeypatch)
    assert {*words([command, "-"])} == expected


def test_from_timm_completes_none_of_the_many_arguments_of_timm():
    assert words(["from-timm", "-"]) == ["-h", "-version"]


@pytest.fixture
def installed(tmp_path):
    """Return the path of the script in a folder like that of an installation, whose name needs quotes."""
    folder = tmp_path / "it's installed"
    folder.mkdir()
    for name in ("configs", "docs", "scripts", "utils", "weights", "halfstep/__main__.py"):
        (folder / name.rpartition("/")[2]).symlink_to(ROOT / name)
    return folder / "scripts/completion.py"


def printed(*command):
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=True, timeout=300).stdout


@pytest.mark.parametrize("shell", CODE)
def test_printed_code_of_each_shell_calls_this_file_without_loading_packages(installed, shell):
    code = printed(sys.executable, installed, shell)
    call = shlex.join([sys.executable, "-I", "-S", str(installed), "-words"])
    assert f"({call} " in code and "CALL" not in code
    command = shlex.split(call)
    command.insert(1, "-Ximporttime")
    done = subprocess.run([*command, "train", "-opts", "A"], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["AMP="]
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "re" in loaded and not loaded & {"torch", "yaml", "argparse", "utils", "configs", "scripts"}


def completed(installed, here, line):
    """Return the words that bash inserts for a line, of which the function gets what interactive bash gives it."""
    typed = re.findall(r"[=:]|(?:\\.|[^\s=:])+", line) + ([""] if line.endswith(" ") else [])
    program = f"source <({shlex.join([sys.executable, str(installed), 'bash'])})\n"
    program += 'COMP_LINE=$1 COMP_POINT=${#1}; shift; COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)); _halfstep\n'
    program += "complete -p halfstep; printf '%s\\n' \"${COMPREPLY[@]}\""
    first, *found = printed("bash", "--norc", "-c", program, "bash", line, *typed).splitlines()
    assert first == "complete -o default -F _halfstep halfstep" and not (here / "done").exists()
    return [each for each in found if each]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("halfstep mod", ["models"]),
        ("halfstep export latest -ca", ["-calibrated"]),
        ("halfstep train -opts TRAIN.LOSS=b", ["bce"]),  # bash keeps TRAIN.LOSS=
        ("halfstep train -opts TRAIN.LR_SCHEDULER.NAME=co", ["cosine", "constant"]),
        ("halfstep train -opts AMP=", ["true", "false"]),
        ("halfstep train -opts AMP=false DATA.PIX", ["DATA.PIXELS="]),
        ("halfstep report ", ["latest", RUN]),
        ("halfstep train -data_path /", []),
        (r"halfstep predict two\ w", []),  # the shell completes words with quotes
    ],
)
def test_bash_inserts_the_words(installed, here, line, found):
    assert sorted(completed(installed, here, line)) == sorted(found)


@pytest.mark.parametrize("name", NAMES)
def test_bash_inserts_a_file_name_as_one_word_and_executes_nothing(installed, here, name):
    (here / "folder").mkdir()
    (here / "folder" / name).touch()
    (inserted,) = completed(installed, here, "halfstep predict folder/")
    assert printed("bash", "-c", f"printf %s {inserted}") == f"folder/{name}"

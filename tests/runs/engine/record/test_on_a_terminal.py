"""A run as a user sees it on a terminal: the table, the progress bar, and the suggested commands at its end."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from engine.stages import train_epoch
from tests.support.configs import SMALL, small_config
from tests.support.forks import ROOT
from tests.support.runs import epochs_of, last_sentence, run
from tests.support.terminal import Screen, open_terminal, read_all, run_on_terminal
from tests.support.trainers import make_trainer, update
from utils.log import Log
from utils.program import StopSignal

pytestmark = pytest.mark.slow

ODD = 'it\'s a "folder" of $HOME'
COLUMNS = 80


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> tuple[Path, Screen]:
    """Return the folder of a run of two epochs on a terminal, and the screen at its end."""
    folder = tmp_path_factory.mktemp("seen") / ODD
    folder.mkdir()
    (folder / "small.yaml").write_text(SMALL)
    flags = ["-cfg", str(folder / "small.yaml"), "-output", str(folder), "-name", "mine", "-epochs", "2", "-amp"]
    faults = {"draw_each_update": []}
    code, screen = run_on_terminal("main_single_gpu.py", *flags, columns=COLUMNS, faults=faults)
    assert code == 0, screen.lines()
    return folder / "mine", screen


@pytest.mark.long
def test_terminal_shows_a_table_with_one_row_per_epoch(seen):
    folder, screen = seen
    lines = screen.lines()
    head = next(number for number, line in enumerate(lines) if line.startswith("epoch"))
    titles = re.split("  +", lines[head])
    assert titles == ["epoch", "loss", "val loss", "top-1", "best", "images/s", "left"]
    epochs = epochs_of(folder)
    for number, (line, epoch) in enumerate(zip(lines[head + 1 : head + 3], epochs, strict=True), start=1):
        best = max(each["eval_top1"] for each in epochs[:number])
        is_best = best not in [each["eval_top1"] for each in epochs[: number - 1]]
        row = dict(zip(titles, line.split(), strict=True))
        assert row["epoch"] == f"{number}/2"
        losses = [float(row["loss"]), float(row["val loss"])]
        assert losses == pytest.approx([epoch["train_loss"], epoch["eval_loss"]], abs=6e-5)
        assert row["top-1"] == f"{epoch['eval_top1']:.2f}%"
        assert row["best"] == ("*" if is_best else "") + f"{best:.2f}%"
        assert float(row["images/s"].replace(",", "")) == pytest.approx(epoch["images_per_s"], abs=0.6)
        assert re.fullmatch(r"\d+:\d\d", row["left"])
    assert lines[head - 1] == f"writing to {folder}" and last_sentence(lines[head + 3]).end == "done"


def test_bar_counts_the_images_of_each_epoch_on_one_row(seen):
    folder, screen = seen
    bar = re.compile(
        r"epoch (?P<epoch>\d)/2: +(?P<percent>\d+)%\|(?P<bar>.*)\| (?P<images>\d+)/352 images(?P<facts>.*)"
    )
    drawn = [found for text in screen.shown if (found := bar.fullmatch(text))]
    for number, epoch in enumerate(epochs_of(folder), start=1):
        bars = [found for found in drawn if found["epoch"] == str(number)]
        assert [*dict.fromkeys(int(found["images"]) for found in bars)] == [*range(0, 352 + 1, 32)]
        for found in bars:
            share = int(found["images"]) / 352
            assert abs(int(found["percent"]) - 100 * share) < 1
            assert abs(len(found["bar"].rstrip()) - len(found["bar"]) * share) <= 1
            assert len(found[0]) < COLUMNS
        facts = re.fullmatch(r", \d+:\d\d left, loss (\d\.\d{3}), acc (\d+\.\d)%", bars[-1]["facts"])
        assert float(facts[1]) == pytest.approx(epoch["train_loss"], abs=6e-4)
        assert float(facts[2]) == pytest.approx(epoch["train_top1"], abs=0.06)


def test_bar_of_a_resumed_epoch_begins_at_its_images_and_ends_full(tmp_path, signal_handlers):
    trainer, log = update(make_trainer(small_config(tmp_path)), 4), Mock()
    train_epoch(trainer, trainer.data.windows(4, 11), log, StopSignal(), lambda: None)
    total, initial, title = log.start_bar.call_args.args
    assert (initial, total, title) == (4 * 32, 11 * 32, "epoch 1/2")
    assert sum(call.args[0] for call in log.move_bar.call_args_list) == total - initial


def test_line_is_printed_above_the_bar(monkeypatch):
    person, program = open_terminal(COLUMNS)
    screen = Screen(COLUMNS)
    with open(program, "w") as stream:
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, stream)
        monkeypatch.setenv("TERM", "xterm")
        log = Log(rank=0)
        log.start_bar(total=100, initial=0, title="epoch 1/1")
        log.move_bar(40)
        log.say("a line")
        screen.write(read_all(person, program).decode())
        line, bar = screen.lines()
        assert line == "a line" and re.fullmatch(r"epoch 1/1:  40%\|█.* \| 40/100 images", bar)
        log.end_bar()
        screen.write(read_all(person, program).decode())
    os.close(person)
    assert [text for text in screen.lines() if text] == ["a line"]


def test_bars_disappear_when_their_work_is_done(seen):
    _, screen = seen
    assert any(re.match(r"evaluating: 100%\|█+\| 90/90", text) for text in screen.shown)
    assert not [line for line in screen.lines() if "%|" in line]


def test_suggested_next_commands_work_in_a_shell(seen):
    folder, screen = seen
    lines = screen.lines()
    commands = dict(re.split("  +", line.strip(), maxsplit=1) for line in lines[lines.index("next:") + 1 :] if line)
    assert set(commands) >= {"export", "train longer"}
    assert shlex.split(commands["train longer"])[-4:] == ["resume", str(folder), "-epochs", "4"]
    words = ["sh", "-c", f"printf '%s\\0' {commands['export']}"]
    program, command, *arguments = subprocess.check_output(words, cwd=ROOT, text=True).split("\0")[:-1]
    assert (program, command) == ("halfstep", "export")
    assert run("scripts/export.py", *arguments).returncode == 0 and (folder / "best.safetensors").is_file()

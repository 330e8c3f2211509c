"""Quantities and names in messages."""

import io
import sys

import pytest

from utils.log import Log
from utils.text import counted, first_of, format_duration, problem_of


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (1, "image", "1 image"),
        (0, "image", "0 images"),
        (1437, "image", "1,437 images"),
        (2, "loader process", "2 loader processes"),
        (2, "micro-batch", "2 micro-batches"),
        (2, "epoch", "2 epochs"),
    ],
)
def test_one_is_singular_and_the_rest_plural(number, noun, text):
    assert counted(number, noun) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0 s"), (11.7, "11.7 s"), (312, "5 min 12 s"), (12_000, "3 h 20 min"), (187_200, "2 d 4 h")],
)
def test_a_duration_has_its_two_largest_units(seconds, text):
    assert format_duration(seconds) == text


def test_names_that_are_not_shown_are_counted():
    assert [first_of("abc", limit=limit) for limit in (2, 3)] == ["a, b and 1 more", "a, b, c"]
    assert first_of("abc", limit=3, total=1503) == "a, b, c and 1,500 more"


@pytest.mark.parametrize("place", ["me:hunter2@host/x", ":hunter2@host/x", "hunter2@host/x", "host/x?by=hunter2"])
def test_a_url_with_what_may_be_a_secret_is_refused_without_quoting_it(place):
    problem = problem_of(f"https://{place}")
    assert problem and "hunter2" not in problem
    assert problem_of("https://host/x") is None


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_names_that_are_no_text_end_no_run_and_command_no_terminal(tmp_path, monkeypatch, encoding):
    screen = io.TextIOWrapper(io.BytesIO(), encoding)
    monkeypatch.setattr(sys, "stdout", screen)
    log = Log(0)
    log.open(tmp_path)
    log.say("cannot read caf\udce9/\x1b[2J\t猫\nnext")
    log.close()
    printed, written = screen.buffer.getvalue().decode(encoding), (tmp_path / "log.txt").read_text(encoding="utf-8")
    assert printed == "cannot read caf\\udce9/\\x1b[2J\t猫\nnext\n".replace(
        "猫", {"ascii": "\\u732b"}.get(encoding, "猫")
    )
    assert "\x1b" not in written
    assert "\t猫\n" in written


def test_a_warning_of_any_process_is_printed_and_in_its_file(tmp_path, capsys):
    for rank in (0, 1):
        log = Log(rank, world_size=2)
        log.open(tmp_path)
        log.warn(f"disk {rank} full")
        log.close()
        log.warn("a line behind the end is no error")
        assert f"disk {rank} full" in (tmp_path / f"log_{rank}.txt").read_text()
    printed = capsys.readouterr()
    assert "disk 0 full" in printed.out and "disk 1 full" in printed.err

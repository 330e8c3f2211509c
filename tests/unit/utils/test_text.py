"""Names, URLs and cells in messages and tables."""

import io
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cases import cases_of, value_of
from tests.support.properties import examples
from utils import text
from utils.log import Log


@pytest.mark.parametrize("call", cases_of("written_as_text"))
def test_names_urls_and_cells_are_written_safely(call):
    assert repr(eval(call, vars(text))) == value_of("written_as_text", call)


UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86400, "bytes": 1, "MiB": 2**20, "GiB": 2**30}


def amount(quantity: str) -> tuple[float, float]:
    """Return the value of a text such as 1.5 GiB or 3 h 20 min, and the size of its last digit."""
    numbers, units = quantity.replace(",", "").split(" ")[::2], quantity.split(" ")[1::2]
    values = [float(number) * UNITS[unit] for number, unit in zip(numbers, units, strict=True)]
    return sum(values), UNITS[units[-1]] / 10 ** len(numbers[-1].partition(".")[2])


@given(st.floats(0, 1e6))
@examples(100)
def test_durations_are_read_back_to_their_last_digit(seconds):
    for number, step in ((1.0, 0.1), (60.0, 1), (3600.0, 60), (48 * 3600.0, 3600)):
        value, digit = amount(text.format_duration(number + seconds))
        assert digit <= max(step, (number + seconds) / 40)
        assert -digit < value - round(number + seconds, 1) <= max(digit / 2, 0.5)
    days, _, rest = text.format_time(seconds).rpartition(" d ")
    values = [int(each) for each in re.findall("[0-9]+", rest)]
    value = sum(each * 60**place for place, each in enumerate(reversed(values))) * (3600 if days else 1)
    assert abs(value + 86400 * int(days or 0) - seconds) <= (3600 if days else 0.5)
    assert all(each < 60 for each in values) and bool(days) == (round(seconds) >= 86400)


@given(st.integers(0, 40), st.integers(0, 2**41) | st.just(2**30), st.integers(-(2**24), 2**24))
@examples(200)
def test_compared_sizes_are_written_differently_if_they_differ(shift, one, change):
    one, other = one >> shift, max((one >> shift) + (change >> shift % 25), 0)
    texts = text.format_bytes_apart(one, other)
    assert (texts[0] == texts[1]) == (one == other)
    assert ["GiB" in text.format_bytes(each) for each in (one, other)] == [one >= 2**30, other >= 2**30]
    for size, written in zip((one, other), texts, strict=True):
        value, digit = amount(written)
        assert abs(value - size) <= digit and (value >= size or "." in written), "whole units are rounded up"
        assert text.format_bytes(size) == written or one != other


@pytest.mark.parametrize(("encoding", "cat"), [("utf-8", "猫"), ("ascii", "\\u732b")])
def test_undecodable_names_are_escaped_for_log_and_terminal(tmp_path, monkeypatch, encoding, cat):
    screen = io.TextIOWrapper(io.BytesIO(), encoding)
    monkeypatch.setattr(sys, "stdout", screen)
    log = Log(0)
    log.open(tmp_path)
    log.say("cannot read caf\udce9/\x1b[2J\t猫\nnext")
    log.close()
    printed, written = screen.buffer.getvalue().decode(encoding), (tmp_path / "log.txt").read_text(encoding="utf-8")
    assert printed == f"cannot read caf\\udce9/\\x1b[2J\t{cat}\nnext\n"
    assert "\x1b" not in written and "\t猫\n" in written


def test_warning_of_any_rank_is_printed_and_logged(tmp_path, capsys):
    for rank in (0, 1):
        log = Log(rank, world_size=2)
        log.say("said before there is a folder")
        log.open(tmp_path)
        log.warn(f"disk {rank} full")
        log.close()
        log.warn("a line behind the end is no error")
        lines = [line[20:] for line in (tmp_path / f"log_{rank}.txt").read_text().splitlines()]
        assert lines == ["said before there is a folder", f"warning: disk {rank} full"]
    printed = capsys.readouterr()
    assert "disk 0 full" in printed.out and "disk 1 full" in printed.err

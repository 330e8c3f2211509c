"""Names, URLs and cells in messages and tables."""

import io
import sys

import pytest

from tests.support.cases import cases_of, value_of
from utils import text
from utils.log import Log


@pytest.mark.parametrize("call", cases_of("written_as_text"))
def test_names_urls_and_cells_are_written_safely(call):
    assert repr(eval(call, vars(text))) == value_of("written_as_text", call)


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

"""Quantities and names in messages."""

import io
import sys
from functools import partial

import pytest

from utils import text
from utils.log import Log

LONG = 8_000 * "x"
WRITTEN = [
    (text.counted, (1, "image"), "1 image"),
    (text.counted, (0, "image"), "0 images"),
    (text.counted, (1437, "image"), "1,437 images"),
    (text.counted, (2, "loader process"), "2 loader processes"),
    (text.counted, (2, "micro-batch"), "2 micro-batches"),
    (text.counted, (2, "epoch"), "2 epochs"),
    (text.counted, (2, "box"), "2 boxes"),
    (text.format_duration, (0,), "0.0 s"),
    (text.format_duration, (11.7,), "11.7 s"),
    (text.format_duration, (60,), "1 min 0 s"),
    (text.format_duration, (312,), "5 min 12 s"),
    (text.format_duration, (3600,), "1 h 0 min"),
    (text.format_duration, (172_799,), "47 h 59 min"),
    (text.format_duration, (187_200,), "2 d 4 h"),
    (text.format_time, (7.4,), "0:07"),
    (text.format_time, (760,), "12:40"),
    (text.format_time, (7392,), "2:03:12"),
    (text.format_time, (266_400,), "3 d 2 h"),
    (text.format_bytes, (1,), "1 MiB"),
    (text.format_bytes, (3 * 2**20,), "3 MiB"),
    (text.format_bytes, (2**30,), "1.0 GiB"),
    (text.format_bytes, (5000 * 2**30,), "5,000.0 GiB"),
    (text.first_of, ("abc", ", ", 2), "a, b and 1 more"),
    (text.first_of, ("abc", "; ", 3), "a; b; c"),
    (text.first_of, ("abc", ", ", 3, 1503), "a, b, c and 1,500 more"),
    (partial(sorted, key=text.natural), (["b1", "a10b2", "a9", "10", "2"],), ["2", "10", "a9", "a10b2", "b1"]),
    (text.cut, (LONG,), LONG),
    (text.cut, (LONG + "1234",), LONG + " ... (4 more characters)"),
    (text.printable, ("a\x1b\u202e\udce9\t猫\n",), "a\\x1b\\u202e\\udce9\t猫\n"),
    (text.one_line, ("a\tb\nc\x07",), "a\\tb\\nc\\x07"),
    (
        text.redacted,
        ("'https://me:pw@h/x?sig=1' s3://b#k AKIA" + 12 * "B",),
        "'https://***@h/x?***' s3://b?*** AKIA***",
    ),
    (text.redacted, ("me@h, x?y=1",), "me@h, x?y=1"),
    (text.csv_cell, ("=1+2",), "'=1+2"),
    (text.csv_cell, ("a=b",), "a=b"),
    (text.csv_cell, (-1,), -1),
    (text.csv_cell, ("",), ""),
    (text.csv_text, ([["a", None], ['b,"c', "d\re"]],), 'a,\n"b,""c","d\re"\n'),
    (
        text.align,
        ([("name", "n"), ("7", "3"), ("a", "12"), ("b", "x")],),
        ["name  n", "7      3", "a     12", "b     x"],
    ),
    (text.markdown_table, (("a", "b"), [("1", "long")]), "| a   | b    |\n| --- | ---- |\n| 1   | long |"),
]


@pytest.mark.parametrize(("write", "given", "expected"), WRITTEN)
def test_quantities_names_and_tables_are_written_as_a_reader_expects(write, given, expected):
    assert write(*given) == expected


@pytest.mark.parametrize(
    ("is_one", "is_accepted", "places"),
    [
        (True, True, "https://h/x s3://bucket/x"),
        (True, False, "HTTP:/h/x s3:bucket ftp://h/x https:///x https://h:a/x https://h/x#hunter2 s3://b/x?by=hunter2"),
        (True, False, "https://me:hunter2@h/x https://:hunter2@h/x https://hunter2@h/x"),
        (False, False, "C:/x a/b:c"),
    ],
)
def test_what_is_a_url_and_what_with_a_secret_in_it_is_refused_without_quoting_it(is_one, is_accepted, places):
    for place in places.split():
        problem = text.problem_of(place)
        assert (text.is_url(place), problem is None) == (is_one, is_accepted) and "hunter2" not in str(problem)


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

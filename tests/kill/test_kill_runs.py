"""tests/kill/kill_runs.py in its smallest form, and that it notices what it is there to notice."""

import contextlib

import pytest

from tests.kill import kill_harness as tormented
from tests.kill import kill_runs as torture
from tests.kill.kill_harness import EPOCH, EVALUATION, EXIT, SAVE, START_UP, Found, Shot, Tormented, Way, tell_place
from tests.support.processes import alive, wait_until

STEP, LAST_STEP, SCORES = (
    "Epoch[001/002], Step[0020/0044], Lr",
    "Epoch[001/002], Step[0043/0044], Lr",
    "----- Epoch[001",
)


def cell(text: str, column: str) -> str:
    heads, _, row = ([each.strip() for each in line.split("|")] for line in text.splitlines() if line.startswith("|"))
    return row[heads.index(column)]


def test_a_killed_run_ends_with_the_hash_of_an_unbroken_one_and_another_hash_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torture, "EPOCHS", 1)
    monkeypatch.setattr(torture.tempfile, "TemporaryDirectory", lambda prefix: contextlib.nullcontext(str(tmp_path)))
    real, seen = torture.torture, []
    monkeypatch.setattr(torture, "torture", lambda *words: seen.extend(real(*words)) or seen)
    flags = ["-kills", "1", "-processes", "1", "-seed", "1"]
    code = torture.main([*flags, "-output", str(tmp_path / "table.md")])
    said = capsys.readouterr()
    assert code == 0, said.err
    assert (cell(said.out, "kills"), cell(said.out, "lost"), cell(said.out, "other hash")) == ("1", "0", "0")
    assert (tmp_path / "table.md").read_text() == said.out
    ((_, _, found),) = seen
    metrics = found[-1].folder / "metrics.csv"
    metrics.write_text(metrics.read_text().replace("train_loss", "train_lost", 1))
    monkeypatch.setattr(torture, "torture", lambda *words: seen)
    assert torture.main(flags) == 1
    said = capsys.readouterr()
    assert cell(said.out, "other hash") == "1" and f"ANOTHER HASH: {metrics.parent}" in said.err


@pytest.mark.parametrize(
    ("status", "is_writing", "said", "place"),
    [
        ({}, False, "", START_UP),
        ({"pid": 6, "state": "training"}, True, STEP, START_UP),  # what an earlier start left
        ({"pid": 7, "state": "training"}, False, "", EPOCH),
        ({"pid": 7, "state": "training"}, False, STEP, EPOCH),
        ({"pid": 7, "state": "training"}, True, STEP, SAVE),
        ({"pid": 7, "state": "training"}, False, f"{STEP}\n{LAST_STEP}", EVALUATION),
        ({"pid": 7, "state": "training"}, False, f"{LAST_STEP}\n{SCORES}", EPOCH),
        ({"pid": 7, "state": "done"}, True, LAST_STEP, EXIT),
    ],
)
def test_where_a_kill_hit_is_told_by_the_files(status, is_writing, said, place):
    assert tell_place(status, [7], is_writing, said) == place


def torment(tmp_path, program: str, most: int = 0, is_aimed: bool = False) -> Found:
    """A program in place of the run; `folder` is where it writes."""
    head = "import json, os, pathlib, subprocess, sys, time; folder = pathlib.Path(sys.argv[4])\n"
    run = Tormented(Way("program", ("-c", head + program), 1), tmp_path / "none.yaml", tmp_path / "o")
    return run.torment(lambda number: Shot(0.0 if is_aimed else 0.5, 0, is_aimed), most)


def test_a_run_that_fails_by_itself_is_lost_and_its_words_are_told(tmp_path):
    assert torment(tmp_path, "sys.exit('no room')").lost == "it ended with exit code 1, and not by a kill\nno room"


def test_a_run_that_began_anew_is_lost(tmp_path):
    program = "for name in 'ab': (folder / f'train-{name}').mkdir(); (folder / f'train-{name}/last.pth').touch()"
    assert "it began anew: 2 folders" in torment(tmp_path, program).lost


def test_a_run_that_goes_on_from_an_older_step_than_was_saved_is_lost(tmp_path):
    program = """
step = 3 if (folder / "train-a").exists() else 5
(folder / "train-a").mkdir(exist_ok=True)
(folder / "train-a/log.txt").touch()
(folder / "train-a/status.json").write_text(json.dumps({"pid": os.getpid(), "state": "training", "step": step}))
time.sleep(60)
"""
    found = torment(tmp_path, program, most=9)
    assert found.lost == "it went on from step 3, but step 5 was saved" and found.places[-1] == EPOCH


def test_a_process_that_a_run_leaves_behind_is_counted_and_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(tormented, "GRACE", 0.1)
    program = "child = subprocess.Popen(['sleep', '60']); (folder / 'child').write_text(str(child.pid))"
    assert torment(tmp_path, program).orphans == 1
    wait_until(lambda: not alive(int((tmp_path / "o/child").read_text())))


def test_an_aimed_kill_waits_for_the_next_save_and_is_told_as_such(tmp_path):
    program = """
run = folder / "train-a"
if run.exists():
    sys.exit((run / "last.pth").touch())
run.mkdir()
(run / "log.txt").touch()
(run / "status.json").write_text(json.dumps({"pid": os.getpid(), "state": "training", "step": 5}))
time.sleep(0.3)
(run / ".last.pth.tmp").touch()
time.sleep(60)
"""
    found = torment(tmp_path, program, most=1, is_aimed=True)
    assert (found.lost, found.places, found.aimed) == ("", [SAVE], [SAVE])
    row, is_wrong = torture.judge(
        Way("way", (), 1), "", [Found(found.places + [EPOCH], found.aimed + [EPOCH], lost="so")]
    )
    told = dict(zip(torture.COLUMNS, row, strict=True))
    assert is_wrong and (
        told["kills"],
        told["in a save"],
        told["aimed at a save"],
        told["of these in a save"],
    ) == tuple("2121")


def test_the_quick_form_is_asked_for_either_way():
    assert torture.parse(["-quick"]).quick and torture.parse(["--quick"]).quick and not torture.parse([]).quick

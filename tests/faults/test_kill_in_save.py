"""kill -9 in the middle of a save, before each thing that it does to files."""

import json
import shutil
import signal

import pytest

from engine.checkpoint.format import read_checkpoint
from tests.support.run_hash import run_hash
from tests.support.runs import run_folder

FIRST_EPOCH, SECOND_EPOCH = 4, 8  # updates when they end


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, start) -> tuple[str, list]:
    """The hash of a run that nothing stopped, and what its second save did to files."""
    folder = tmp_path_factory.mktemp("unbroken")
    assert start(folder / "o", list_operations=[str(folder / "operations")]).returncode == 0
    places = [json.loads(line) for line in (folder / "operations").read_text().splitlines()]
    return run_hash(run_folder(folder / "o")), [what for save, _, what in places if save == 2]


def test_killed_at_any_point_of_a_save_a_checkpoint_loads_and_the_rerun_ends_as_if_nothing_had_been(
    tmp_path, start, unbroken
):
    expected, operations = unbroken
    text = "\n".join(operations)
    for kind in (
        "open .last",
        "write .last",
        "fsync",
        "best.pth",
        "checkpoint-2",
        "previous",
        ".tmp last.pth",
        "status",
    ):
        assert kind in text
    assert operations[-1] == "unlink checkpoint-1.pth"
    assert start(tmp_path / "before", kill_at=[2, 0]).returncode == -signal.SIGKILL
    found = []
    for number, what in enumerate(operations):
        output = tmp_path / str(number)
        shutil.copytree(tmp_path / "before", output)
        assert start(output, kill_at=[1, number]).returncode == -signal.SIGKILL, what
        folder = run_folder(output)
        found.append(read_checkpoint(folder / "last.pth")["step"])
        assert json.loads((folder / "status.json").read_text())["step"] <= found[-1], what
        again = start(output)
        assert again.returncode == 0, (what, again.printed)
        assert run_hash(folder) == expected, what
        held = sorted(path.name for path in folder.glob("*.pth"))
        assert {"best.pth", "checkpoint-2.pth", "last.pth", "previous.pth"} <= set(held), what
        assert read_checkpoint(folder / "best.pth")["step"] == SECOND_EPOCH, what
    renamed = operations.index("replace .last.pth.tmp last.pth")
    assert found == [FIRST_EPOCH] * (renamed + 1) + [SECOND_EPOCH] * (len(operations) - renamed - 1)

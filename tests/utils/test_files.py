"""A file takes the place of another file, and of nothing else."""

import os
import stat
from pathlib import Path

import pytest

from utils.files import refuse_special, replacing


def test_a_pipe_is_not_replaced_by_a_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="pipe"), replacing(tmp_path / "pipe") as file:
        file.write(b"text")
    (left,) = tmp_path.iterdir()
    assert stat.S_ISFIFO(left.stat().st_mode)


@pytest.mark.parametrize("name", ["null", "stdout", "nothing"])
def test_nothing_in_the_folder_of_devices_is_replaced(name):
    with pytest.raises(OSError, match="device"):
        refuse_special(Path("/dev", name))

"""An elastic run loses one of its two nodes, continues alone, and takes the node back."""

import os
import re
import subprocess
from pathlib import Path
from signal import SIGCONT, SIGSTOP, SIGTERM

import pytest
import torch

from tests.support.networks import needs_networks
from tests.support.nodes import Node, assert_done, node_status
from tests.support.runs import Run, wait_until


def has_pending_term(pid: int) -> bool:
    pending = re.search(r"ShdPnd:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())[1]
    return bool(int(pending, 16) >> (SIGTERM - 1) & 1)


@needs_networks
@pytest.mark.parametrize("is_cut", [False, True])
def test_run_with_lost_and_returning_node_matches_unbroken_run(small_yaml, tmp_path, two_hosts, is_cut):
    options = "TRAIN.NUM_EPOCHS=8 SAVE_STEPS=5 KEEP_CHECKPOINTS=0 MODEL.DROPPATH=0 DIST.TIMEOUT=20".split()
    flags = ["-cfg", str(small_yaml), "-name", "x", "-resume", "auto", "-opts", *options]
    Run("main_multi_gpu.py", *flags, f"SAVE={tmp_path / 'unbroken'}", processes=2).wait().done()
    output, flags = tmp_path / "o", [*flags, f"SAVE={tmp_path / 'o'}"]
    stays, goes = (Node(rank, host, tmp_path, True, flags) for rank, host in enumerate(two_hosts))
    first, _ = stays.start(), goes.start()
    wait_until(lambda: node_status(output).get("step", 0) >= 20 and node_status(output)["about"]["processes"] == 2)
    saved = node_status(output)["step"]
    subprocess.run(["ip", "-n", two_hosts[1][0], "link", "set", goes.cable, "down"] if is_cut else ["true"], check=True)
    if not is_cut:
        goes.kill()
    wait_until(lambda: node_status(output)["about"]["processes"] == 1 and node_status(output)["step"] > saved)
    alone = node_status(output)["pid"]
    os.kill(alone, SIGSTOP)  # so that it does not finish before the other node is back
    goes.kill()
    subprocess.run(["ip", "-n", two_hosts[1][0], "link", "set", goes.cable, "up"], check=True)
    back = goes.start()
    wait_until(lambda: has_pending_term(alone), runs=[first, back])
    os.kill(alone, SIGCONT)
    assert_done(first, back)
    said = (output / "x" / "log.txt").read_text()
    assert re.findall(r"32 x (\d) process", said)[-3:] == ["2", "1", "2"]
    ours, theirs = (
        torch.load(folder / "x" / "last.pth", weights_only=True) for folder in (output, tmp_path / "unbroken")
    )
    assert ours["step"] == theirs["step"]
    worst = max((ours["state_dict"][name] - theirs["state_dict"][name]).abs().max() for name in ours["state_dict"])
    assert worst < 1e-3

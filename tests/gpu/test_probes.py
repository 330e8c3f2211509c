"""The probes of scripts/benchmarks/gpu_session.py as tests: attention kernels, torch.compile, DDP over NCCL, CUDA graphs."""

import json
import subprocess

import pytest

from scripts.benchmarks.session.plan import GROUPS, part_command


@pytest.mark.parametrize("group", GROUPS[:-1])
def test_no_probe_fails(tmp_path, group):
    subprocess.run(part_command(group, tmp_path, dry=False), check=False)
    rows = [json.loads(line) for line in (tmp_path / "session.jsonl").read_text().splitlines()]
    # A single query never gets to a fused kernel here: whether that would be right is a fact about torch.
    ours = [row for row in rows if "a single query" not in row["probe"]]
    assert ours and not [row for row in ours if row["verdict"] not in ("passed", "unavailable")]

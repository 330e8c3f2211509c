"""The resources that the machine or its container grants a program, and their form in messages."""

import math
import subprocess
import sys

import pytest
import torch

from tests.support.cases import cases_of, value_of
from tests.support.runs import ROOT, run
from utils import host
from utils.distributed import Process
from utils.host import cpu_quota, free_host_memory, share_of_cores

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("local", cases_of("shares_of_cores"))
def test_cores_are_divided_among_processes_allowed_on_them(local):
    masks = [set(cores) for cores in eval(local)]
    assert str([share_of_cores(mask, masks) for mask in masks]) == value_of("shares_of_cores", local)


CORES = """
import os, socket
rank = int(os.environ["RANK"])
host, first = [("one", 0), ("one", 4), ("two", 0)][rank]
os.sched_getaffinity = lambda _: set(range(first, first + 8))
socket.gethostname = lambda: host
from utils import distributed
from utils.launch import find_launched_rank
distributed.cpu_quota = lambda: 10 if host == "one" else 20
process = distributed.Process.start("cpu", find_launched_rank(os.environ))
shares = process.join([(process.num_cores, process.local_size)])
print(shares if process.is_first else "")
process.close()
"""


def test_core_share_counts_only_processes_on_the_same_machine(tmp_path):
    (tmp_path / "program.py").write_text(CORES)
    done = run(str(tmp_path / "program.py"), processes=3)
    assert done.stdout.strip() == "[(5, 2), (5, 2), (8, 1)]", done.printed


@pytest.mark.parametrize(
    ("line", "folder", "files"),
    [
        ("0::/pod/job", "pod/job", {"cpu.max": "{} 100000"}),
        ("4:cpu,cpuacct:/pod/job", "cpu/pod/job", {"cpu.cfs_quota_us": "{}", "cpu.cfs_period_us": "100000"}),
    ],
)
def test_core_count_respects_the_container_and_job_quota(tmp_path, line, folder, files):
    (tmp_path / "membership").write_text(f"7:pids:/\n{line}\n")
    job = tmp_path / "cgroup" / folder
    job.mkdir(parents=True)

    def quota(of_job: str, of_pod: str) -> float:
        for group, value in ((job, of_job), (job.parent, of_pod)):
            for name, text in files.items():
                (group / name).write_text(text.format(value) + "\n")
        return cpu_quota(tmp_path / "cgroup", tmp_path / "membership")

    none = "max" if "cpu.max" in files else "-1"
    assert [quota("250000", none), quota(none, "800000"), quota("900000", "800000")] == [2.5, 8, 8]
    assert quota(none, none) == cpu_quota(tmp_path / "nowhere", tmp_path / "nothing") == math.inf


def test_torch_uses_no_more_threads_than_the_quota_allows(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr(host, "cpu_quota", lambda: 2.5)
    monkeypatch.setattr(host, "available_cores", lambda: set(range(64)))
    try:
        torch.set_num_threads(64)
        assert Process.start("cpu").num_cores == torch.get_num_threads() == 2
        torch.set_num_threads(1)
        Process.start("cpu")
        assert torch.get_num_threads() == 1, "fewer threads stay"
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("line", "base", "names"),
    [
        ("0::/job/step", "", ("memory.max", "memory.current", "inactive_file")),
        ("", "", ("memory.max", "memory.current", "inactive_file")),  # in a container, whose own group is the base
        (
            "4:cpu,memory:/job/step",
            "memory",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ),
    ],
)
def test_free_memory_respects_the_container_and_job_limit(tmp_path, line, base, names):
    meminfo, membership, groups = (tmp_path / name for name in ("meminfo", "membership", "cgroup"))
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\nHugePages_Total: 0\n")
    membership.write_text(f"7:pids:/\n{line}".strip())
    assert free_host_memory(meminfo, groups, membership) == 8000 * 1024
    job = groups / base / "job" if line else groups
    job.mkdir(parents=True)
    (job / names[1]).write_text("6000\n")
    (job / "memory.stat").write_text(f"anon 5000\n{names[2]} 900\n")
    for limit, expected in (("7000", 1900), ("99999999", 8000 * 1024), ("5000", 0)):
        (job / names[0]).write_text(f"{limit}\n")
        assert free_host_memory(meminfo, groups, membership) == expected
    assert free_host_memory(tmp_path / "none", groups) > 2**28


FAULTS = """
import resource, sys
import torch
from utils.host import keep_freed_memory
keep_freed_memory(torch.device("cpu"))
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    before = faults()
    tensors = [torch.ones(4_000_000) for _ in range(8)]
    print(faults() - before)
    del tensors
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="tests glibc")
def test_memory_freed_by_tensors_is_reused_without_new_page_faults():
    done = subprocess.run([sys.executable, "-c", FAULTS], cwd=ROOT, capture_output=True, text=True, check=True)
    # Skip the second number, because the layout of memory varies at first. In some layouts two of the eight tensors are
    # new.
    first, *_, last = map(int, done.stdout.split())
    assert last < first / 3 and first > 1000, done.stdout

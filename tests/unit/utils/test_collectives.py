"""The collectives of real processes on one, two and three machines, and the values that each process receives."""

import json

import pytest
import torch

from tests.support.configs import CPU
from tests.support.runs import run
from utils.distributed import Process

PROGRAM = """
import json, os, sys
import torch
from utils.distributed import Process
from utils.errors import AlreadyReportedError, ConfigError
from utils.launch import find_launched_rank

process = Process.start("cpu", find_launched_rank(os.environ))
rank, last = process.rank, process.rank == process.world_size - 1
floats, count = torch.full((2,), 1.0 + rank), torch.tensor(7 * rank)
process.broadcast([floats, count])
parts = {}
for kind in (torch.float32, torch.bfloat16, torch.int64):
    mine = torch.arange(5 * process.world_size - 1).view(-1, 1).to(kind)[5 * rank : 5 * rank + 5]
    whole = process.gather(mine, 5 * process.world_size - 1)
    parts[str(kind)] = None if whole is None else whole.flatten().tolist()

def fail():
    raise ConfigError(f"of process {rank}")

def lose_a_file():
    raise FileNotFoundError

def note():
    with open(sys.argv[1], "a") as file:
        print(rank, file=file)
    return f"made by {rank}"

try:
    process.first(fail)
except (ConfigError, AlreadyReportedError) as error:
    failure = [type(error).__name__, str(error), error.code]
try:
    process.first(lose_a_file)
except (FileNotFoundError, AlreadyReportedError) as error:
    failure.append(getattr(error, "code", 1))
found = {
    "sum": process.sum(torch.tensor([1.0 + rank, 10.0])).tolist(),
    "max": process.max(torch.tensor([1.0 * rank, -1.0 * rank])).tolist(),
    "spread": [*floats.tolist(), count.item()],
    "gather": parts,
    "join": process.join([rank, f"of {rank}"]),
    "all_true": [process.all_true(True), process.all_true(rank != 0), process.all_true(not last)],
    "host_min": process.host_min(-rank),
    "delayed_max": [process.delayed_max([number, -number]) for number in (rank, 10 * rank, 0, 0)],
    "first": process.first(lambda: f"made by {rank}"),
    "failure": failure,
    "after_first": process.after_first(note),
    "local": process.join([[process.local_rank, process.local_size]]),
}
print(json.dumps(found) if rank == 0 else "", end="", flush=True)
process.join([])
print(json.dumps(found) if last else "", end="", flush=True)
process.close()
assert not torch.distributed.is_initialized()
"""


@pytest.mark.long
@pytest.mark.parametrize(("world_size", "per_host"), [(2, 2), (4, 2), (3, 1)])
def test_collectives_combine_the_values_of_all_processes(tmp_path, world_size, per_host):
    (tmp_path / "program.py").write_text(PROGRAM)
    ended = run(
        str(tmp_path / "program.py"), str(tmp_path / "notes"), processes=world_size, faults={"name_hosts": [per_host]}
    ).done()
    first, last = map(json.loads, ended.stdout.replace("}{", "}\n{").splitlines())
    ranks, top = range(world_size), world_size - 1
    whole = [*range(5 * world_size - 1)]
    expected = {
        "sum": [sum(1.0 + rank for rank in ranks), 10.0 * world_size],
        "max": [float(top), 0.0],
        "spread": [1.0, 1.0, 0],
        "join": [each for rank in ranks for each in (rank, f"of {rank}")],
        "all_true": [True, False, False],
        "host_min": -top,
        "delayed_max": [[0, 0], [top, 0], [10 * top, 0], [0, 0]],
        "first": "made by 0",
    }
    assert {name: first[name] for name in expected} == expected
    assert {name: last[name] for name in expected} == expected
    assert [*first["gather"].values()] == [whole] * 3 and [*last["gather"].values()] == [None] * 3
    assert (first["failure"], last["failure"]) == (
        ["ConfigError", "of process 0", 2, 1],
        ["AlreadyReportedError", "of process 0", 2, 1],
    )
    assert (first["after_first"], last["after_first"]) == ("made by 0", f"made by {top}")
    noted = (tmp_path / "notes").read_text().splitlines()
    assert noted[0] == "0" and sorted(noted) == [str(rank) for rank in ranks]
    firsts = [str(rank) for rank in ranks if rank % per_host == 0]
    assert sorted(noted[: len(firsts)]) == firsts, "the first process of each machine before the others"
    assert first["local"] == [[rank % per_host, per_host] for rank in ranks]


def test_single_process_collectives_return_their_input():
    process, rows = Process(CPU), torch.arange(4.0)
    process.broadcast([rows])
    assert process.sum(rows) is rows and process.max(rows) is rows
    assert rows.tolist() == [0, 1, 2, 3]
    assert process.join([5]) == [5] and process.host_min(-3) == -3 and process.delayed_max([9, 0]) == [9, 0]
    assert process.all_true(True) and not process.all_true(False)
    assert process.first(lambda: "a") == "a" and process.after_first(lambda: "b") == "b"
    process.close()

"""Which rank a process has: every launcher's environment variables, and the flags."""

import contextlib
import shlex
import socket
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
from torch.distributed import TCPStore

from configs.load import load
from tests.support.forks import ROOT
from tests.support.modules import imported_at_the_top
from tests.support.printed import cases_of, same_message
from tests.support.refusals import assert_names, refused
from tests.support.runs import free_port
from utils.engines import Nodes, find_nodes, launch_on_node, meet_nodes
from utils.errors import ConfigError, LostProcess
from utils.launch import (
    NODE_VARIABLES,
    LaunchedRank,
    LaunchOptions,
    find_launched_rank,
    rank_in_environment,
)

SLURM = {"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "gpu[07-08,11],login"}
SLURM_TASK = SLURM | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0"}
TORCHELASTIC = {"TORCHELASTIC_RUN_ID": "x", "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}


def nodes_of(environment: dict[str, str]) -> Nodes | None:
    """Return the nodes as main_multi_gpu.py asks for them."""
    return find_nodes(environment) if NODE_VARIABLES & environment.keys() else None


def environment_of(words: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in shlex.split(words, comments=True) if "=" in word)


@pytest.mark.parametrize("words", cases_of("launchers"))
def test_every_launchers_and_engines_variables_are_read(words):
    environment = environment_of(words)
    if launched := find_launched_rank(environment):
        assert launched.parent_is_launcher == (launched.launcher in ("torchrun", "Open MPI"))
        assert rank_in_environment(environment) == launched.rank, "one process alone reports a mistake"
    same_message(f"{launched or nodes_of(environment)}", "launchers", words)


def test_starts_by_torchrun_or_no_launcher_import_nothing_for_the_others():
    """A run of one process imports neither of them, and nothing to meet other processes."""
    ask = f"import sys; from utils.launch import *; find_launched_rank({{}}); find_launched_rank({TORCHELASTIC})"
    ask += "; print({'utils.launchers', 'utils.engines'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", ask], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr
    names = imported_at_the_top(ROOT / "main_multi_gpu.py") | imported_at_the_top(ROOT / "utils/rendezvous.py")
    assert not {"utils.launchers", "utils.engines"} & names
    names = imported_at_the_top(ROOT / "main_single_gpu.py") | imported_at_the_top(ROOT / "utils/distributed.py")
    assert not {"utils.launch", "utils.rendezvous"} & names


def test_each_start_by_torchrun_is_told_from_those_before_it():
    """Their processes meet in the same store."""
    for count in ("0", "2"):
        launched = find_launched_rank(TORCHELASTIC | {"TORCHELASTIC_RESTART_COUNT": count})
        assert launched.restart_count == int(count)


@pytest.mark.parametrize(
    ("words", "range_", "most"),
    [("", "", 0), ("", "2", 0), ("", "1:4", 16), ("--nnodes 1:3 caf\udce9", "2", 12), ("--nnodes=2", "1:4", 0)],
)
def test_the_processes_of_all_nodes_that_may_come_are_counted_by_torchruns_words_or_else_its_variable(
    words, range_, most
):
    environment = TORCHELASTIC | {"GROUP_WORLD_SIZE": "2", "PET_NNODES": range_}
    ask = f"from utils.launch import *; print(find_launched_rank({environment}).most)"
    launcher = ["sh", "-c", 'python="$1"; "$python" -c "$2"; :', "sh", sys.executable, ask, *words.split(), "main.py"]
    assert subprocess.run(launcher, cwd=ROOT, capture_output=True, text=True).stdout == f"{most}\n"


def test_nobodys_worker_starts_the_others_itself():
    for environment in ({}, {"RANK": "0"}, SLURM | {"ENVIRONMENT": "BATCH", "SLURM_PROCID": "0"}):
        assert find_launched_rank(environment) is None
    for environment in ({"RANK": "3"}, SLURM_TASK | {"SLURM_PROCID": "x"}):
        assert rank_in_environment(environment) == 0, "nobody would report a mistake"
    one = SLURM_TASK | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    assert find_launched_rank(one, LaunchOptions(num_local=2)) is None, "in a shell that srun opened"


def test_every_job_has_a_port_of_its_own_that_all_its_processes_know():
    def port(**more):
        return find_launched_rank(SLURM_TASK | more).port

    assert port() == port(SLURM_PROCID="0") and 10000 <= port() < 30000
    assert len({port(), port(SLURM_JOB_ID="18"), port(SLURM_STEP_ID="1"), port(MASTER_PORT="99")}) == 4
    assert port(MASTER_PORT="99") == 99


def test_flags_stand_alone_or_fill_in_what_the_launcher_leaves_open():
    launched = find_launched_rank({}, LaunchOptions("tcp://[::1]:99", 4, 2))
    assert launched == LaunchedRank("the command line", 2, 4, None, "::1", 99)
    assert find_launched_rank(SLURM_TASK, LaunchOptions("tcp://head:99")).host == "head"
    assert find_launched_rank({"MASTER_ADDR": "h", "MASTER_PORT": "8"}, LaunchOptions("env://", 4, 2)).port == 8


@pytest.mark.parametrize("words", cases_of("mistakes/of_launchers"))
def test_what_contradicts_or_is_missing_is_refused_with_its_name_and_nodes_are_never_taken_for_one(words):
    environment = environment_of(words)
    start = load([word for word in shlex.split(words) if "=" not in word], needs_file=False).config.START
    with refused(ConfigError, page="mistakes/of_launchers", case=words):
        find_launched_rank(environment, LaunchOptions(start.URL, start.WORLD_SIZE, start.RANK, start.NGPUS))
        nodes_of(environment)


@pytest.mark.parametrize(("hosts", "is_alone"), [("a\na\n", True), ("a\nb\n", False)])
def test_the_nodes_of_pbs_are_counted_by_their_names(tmp_path, hosts, is_alone):
    (tmp_path / "nodes").write_text(hosts)
    with contextlib.nullcontext() if is_alone else refused(ConfigError, "PBS_NODEFILE", 2):
        assert find_nodes({"PBS_NODEFILE": str(tmp_path / "nodes")}) is None


@pytest.mark.parametrize("words", cases_of("mistakes/of_absent_nodes"))
def test_a_node_that_does_not_come_is_named_in_time_and_a_retry_may_help(words):
    rank, *hosts = words.split()
    nodes = Nodes("SkyPilot", 2, 2, int(rank), tuple(hosts), free_port())
    with refused(LostProcess, nodes.port, page="mistakes/of_absent_nodes", case=words):
        launch_on_node(nodes, "main_multi_gpu.py", [], 1, timeout=1.0)


@pytest.mark.parametrize(
    ("others", "error", "names"),
    [
        ({"rank": 0}, ConfigError, ["node 0 of 2", "a", "b"]),
        ({"rank": 1, "least": 3, "most": 3}, ConfigError, ["the number of nodes"]),
        ({"rank": 1}, None, []),
    ],
)
def test_nodes_that_contradict_each_other_are_refused_on_all_of_them(monkeypatch, others, error, names):
    monkeypatch.setattr(socket, "gethostname", lambda: threading.current_thread().name[-1])
    first, found = Nodes("dstack", 2, 2, 0, ("127.0.0.1",), free_port()), {}

    def meet(name, nodes):
        try:
            found[name] = meet_nodes(nodes, 20.0)
        except Exception as caught:
            found[name] = caught

    second = replace(first, **others)
    threads = [threading.Thread(target=meet, args=each, name=each[0]) for each in (("a", first), ("b", second))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if error:
        assert all(isinstance(each, error) for each in found.values()), found
        assert_names(str(found["a"]), *names)
    else:
        meet("c", second)
        assert isinstance(found["c"], LostProcess), "a node was started again before the others have ended"


def test_a_node_that_starts_again_while_it_waits_counts_once():
    nodes = Nodes("dstack", 3, 3, 1, ("127.0.0.1",), free_port())
    first = TCPStore("127.0.0.1", nodes.port, is_master=True, wait_for_workers=False)
    for _ in range(nodes.least):
        with pytest.raises(LostProcess) as refusal:
            meet_nodes(nodes, 0.5)
        assert_names(str(refusal.value), "0, 2")
    assert not first.check(["node 0"])


@pytest.mark.usefixtures("signal_handlers")
@pytest.mark.parametrize(("codes", "starts"), [([137, 0], 2), ([1, 2], 2)])
def test_where_nodes_may_come_and_go_processes_start_again_only_where_that_can_help(
    tmp_path, monkeypatch, codes, starts
):
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "")
    lines = ["import os, sys", "open(sys.argv[1], 'a').write('+')", "n = os.path.getsize(sys.argv[1]) - 1"]
    (tmp_path / "x.py").write_text("\n".join([*lines, f"os._exit({codes}[n])"]))
    no_route = lambda *_: (_ for _ in ()).throw(OSError("Network is unreachable"))  # noqa: E731
    monkeypatch.setattr("socket.socket.connect", no_route)
    nodes = Nodes("Kubeflow", 1, 2, None, ("127.0.0.1",), free_port(), 1, 9, {"last_call_timeout": "1"})
    assert launch_on_node(nodes, str(tmp_path / "x.py"), [str(tmp_path / "starts")], 1, 60.0) == codes[-1]
    assert (tmp_path / "starts").read_text() == "+" * starts

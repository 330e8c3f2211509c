"""The ranks from srun and mpirun, and the nodes of engines: their environment variables, and how nodes meet."""

import contextlib
import shlex
import socket
import threading
from dataclasses import replace

import pytest
from torch.distributed import TCPStore

from configs.load import load
from extras.launchers.engines import Nodes, find_nodes, launch_on_node, meet_nodes
from tests.support.cases import cases_of, names_of
from tests.support.launch_variables import environment_of, launched_rank_of
from tests.support.refusals import assert_names, refused
from tests.support.runs import free_port
from utils.errors import ConfigError, LostProcess
from utils.launch import LaunchOptions, find_launched_rank, may_have_other_nodes, rank_in_environment

pytestmark = pytest.mark.slow

SLURM = {"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "gpu[07-08,11],login"}
SLURM_TASK = SLURM | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0"}


def nodes_of(environment: dict[str, str]) -> Nodes | None:
    """Return the nodes as main_multi_gpu.py does."""
    return find_nodes(environment) if may_have_other_nodes(environment) else None


@pytest.mark.parametrize("words", cases_of("launchers-launchers"))
def test_rank_or_node_list_is_read_from_variables_of_every_launcher(words):
    found = launched_rank_of(words) or nodes_of(environment_of(words))
    assert_names(f"{found}", *names_of("launchers-launchers", words))


@pytest.mark.parametrize("words", cases_of("launchers-mistakes_of_launchers"))
def test_contradictory_or_missing_launcher_variables_are_refused(words):
    environment = environment_of(words)
    start = load([word for word in shlex.split(words) if "=" not in word], needs_file=False).config.START
    with refused(ConfigError, *names_of("launchers-mistakes_of_launchers", words)):
        find_launched_rank(environment, LaunchOptions(start.URL, start.WORLD_SIZE, start.RANK, start.NGPUS))
        nodes_of(environment)


def test_slurm_job_script_is_not_taken_for_a_rank():
    assert find_launched_rank(SLURM | {"ENVIRONMENT": "BATCH", "SLURM_PROCID": "0"}) is None
    assert rank_in_environment(SLURM_TASK | {"SLURM_PROCID": "x"}) == 0, "otherwise no process reports the mistake"
    one = SLURM_TASK | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    assert find_launched_rank(one, LaunchOptions(num_local=2)) is None, "as in a shell opened by srun"


def test_all_processes_of_a_slurm_job_share_its_port():
    def port(**more):
        return find_launched_rank(SLURM_TASK | more).port

    assert port() == port(SLURM_PROCID="0") and 10000 <= port() < 30000
    assert len({port(), port(SLURM_JOB_ID="18"), port(SLURM_STEP_ID="1"), port(MASTER_PORT="99")}) == 4
    assert port(MASTER_PORT="99") == 99


def test_address_in_the_flags_overrides_address_of_the_job():
    assert find_launched_rank(SLURM_TASK, LaunchOptions("tcp://head:99")).host == "head"


@pytest.mark.parametrize(("hosts", "is_alone"), [("a\na\n", True), ("a\nb\n", False)])
def test_pbs_job_with_several_node_names_is_refused(tmp_path, hosts, is_alone):
    (tmp_path / "nodes").write_text(hosts)
    with contextlib.nullcontext() if is_alone else refused(ConfigError, "PBS_NODEFILE", 2):
        assert find_nodes({"PBS_NODEFILE": str(tmp_path / "nodes")}) is None


@pytest.mark.parametrize("words", cases_of("launchers-mistakes_of_absent_nodes"))
def test_absent_node_is_named_within_timeout_in_retryable_error(words):
    rank, *hosts = words.split()
    nodes = Nodes("SkyPilot", 2, 2, int(rank), tuple(hosts), free_port())
    with refused(LostProcess, nodes.port, *names_of("launchers-mistakes_of_absent_nodes", words)):
        launch_on_node(nodes, "main_multi_gpu.py", [], 1, timeout=1.0)


@pytest.mark.parametrize(
    ("others", "error", "names"),
    [
        ({"rank": 0}, ConfigError, ["node 0 of 2", "a", "b"]),
        ({"rank": 1, "least": 3, "most": 3}, ConfigError, ["the number of nodes"]),
        ({"rank": 1}, None, []),
    ],
)
def test_nodes_with_contradictory_settings_are_refused_on_every_node(monkeypatch, others, error, names):
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
        assert isinstance(found["c"], LostProcess), "a node was restarted before the others ended"


def test_node_restarting_while_others_are_awaited_counts_once():
    nodes = Nodes("dstack", 3, 3, 1, ("127.0.0.1",), free_port())
    first = TCPStore("127.0.0.1", nodes.port, is_master=True, wait_for_workers=False)
    for _ in range(nodes.least):
        with pytest.raises(LostProcess) as refusal:
            meet_nodes(nodes, 0.5)
        assert_names(str(refusal.value), "0, 2")
    assert not first.check(["node 0"])


@pytest.mark.usefixtures("signal_handlers")
@pytest.mark.parametrize(("codes", "starts"), [([137, 0], 2), ([1, 2], 2)])
def test_elastic_processes_restart_after_retryable_exit_codes_but_not_after_2(tmp_path, monkeypatch, codes, starts):
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "")
    lines = ["import os, sys", "open(sys.argv[1], 'a').write('+')", "n = os.path.getsize(sys.argv[1]) - 1"]
    (tmp_path / "x.py").write_text("\n".join([*lines, f"os._exit({codes}[n])"]))
    no_route = lambda *_: (_ for _ in ()).throw(OSError("Network is unreachable"))  # noqa: E731
    monkeypatch.setattr("socket.socket.connect", no_route)
    nodes = Nodes("Kubeflow", 1, 2, None, ("127.0.0.1",), free_port(), 1, 9, {"last_call_timeout": "1"})
    assert launch_on_node(nodes, str(tmp_path / "x.py"), [str(tmp_path / "starts")], 1, 60.0) == codes[-1]
    assert (tmp_path / "starts").read_text() == "+" * starts

"""Finds this process's rank in a run, and starts the processes of this machine through torchrun.

utils/launchers.py handles launchers other than torchrun.
"""

import contextlib
import logging
import os
import re
import signal
import sys
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from utils.errors import ConfigError
from utils.program import hangup_is_ignored

# If none of these is set, no launcher other than torchrun gave this process a rank.
LAUNCHER_VARIABLES = {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "RANK"}
# Variables in which Kubeflow, SkyPilot, dstack and Slurm pass the number of nodes.
NODE_COUNTS = ("PET_NNODES", "SKYPILOT_NUM_NODES", "DSTACK_NODES_NUM", "SLURM_NNODES")


@dataclass(frozen=True)
class LaunchOptions:
    """Settings that tell a process its rank and its peers. None means the launcher's value."""

    url: str | None = None
    world_size: int | None = None
    rank: int | None = None
    num_local: int | None = None  # number of processes to start on this machine if no launcher started any


@dataclass(frozen=True)
class LaunchedRank:
    """The rank that a launcher gave this process, and the address where the processes meet."""

    launcher: str  # name of the launcher in messages
    rank: int
    world_size: int
    local_rank: int | None = None  # None: unknown until the processes meet
    host: str = ""  # the host on which process 0 listens; "": torch finds the store through torchrun's variables
    port: int = 0
    local_size: int | None = None  # number of processes on this machine; None: unknown
    restart_count: int = 0  # number of restarts by torchrun
    max_world_size: int = 0  # the largest number of processes of an elastic run; 0: not elastic

    @property
    def parent_is_launcher(self) -> bool:
        """Return whether the parent is the launcher. If so, this process must end with it. Otherwise it may be a shell."""
        return self.launcher in ("torchrun", "Open MPI")


def find_launched_rank(environment: Mapping[str, str], options: LaunchOptions = LaunchOptions()) -> LaunchedRank | None:
    """Return this process's rank, or None if neither a launcher nor a flag gives it one."""
    ranks = _ranks_in_environment(environment)
    has_flags = (options.url, options.world_size, options.rank) != (None, None, None)
    if not ranks and not has_flags:
        return None
    if "TORCHELASTIC_RUN_ID" in environment and not has_flags:
        return ranks[0]
    from utils.launchers import choose_rank, rank_by_flags

    if has_flags:
        ranks.append(rank_by_flags(options, ranks[0] if ranks else None))
    return choose_rank(environment, options, ranks)


def check_single_node(environment: Mapping[str, str]) -> None:
    """Raise ConfigError if the job has several nodes. Without a launcher, each node would train its own model."""
    counts = [(name, environment[name]) for name in NODE_COUNTS if environment.get(name, "1") != "1"]
    if path := environment.get("PBS_NODEFILE"):
        try:
            num_nodes = len(set(Path(path).read_text().split()))
        except OSError:  # only the first node has this file
            num_nodes = 0
        if num_nodes != 1:
            counts.append(("PBS_NODEFILE", path))
    for name, value in counts:
        raise ConfigError(
            f"{name} in the environment is {value}, so the job has several nodes, and each would train its own model: "
            "start this program with srun, mpirun, or on each node with torchrun --nnodes N --nproc_per_node gpu --rdzv_id "
            f"JOB --rdzv_backend c10d --rdzv_endpoint FIRST_NODE:29500 main_multi_gpu.py ...; or unset {name}"
        )


def rank_in_environment(environment: Mapping[str, str]) -> int:
    """Return this process's rank, or 0 if the environment has none. Only rank 0 reports mistakes in the settings."""
    with contextlib.suppress(ConfigError):
        if ranks := _ranks_in_environment(environment):
            return ranks[0].rank
    return 0


def _ranks_in_environment(environment: Mapping[str, str]) -> list[LaunchedRank]:
    """Return the ranks that launchers gave this process, the innermost launcher's first."""
    if "TORCHELASTIC_RUN_ID" in environment:
        return [_rank_by_torchrun(environment)]  # a launcher that started torchrun numbers the processes differently
    if not LAUNCHER_VARIABLES & environment.keys():
        return []
    from utils.launchers import ranks_in_environment

    return ranks_in_environment(environment)


def _rank_by_torchrun(environment: Mapping[str, str]) -> LaunchedRank:
    """Return the rank that torchrun, or `launch`, gave this process."""
    restart_count = int(environment.get("TORCHELASTIC_RESTART_COUNT", 0))
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "False":
        restart_count = 0  # each start has its own store, and the nodes' restart counts may differ
    launched = read_rank(environment, "torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    num_nodes = int(environment.get("GROUP_WORLD_SIZE", 1))
    max_world_size = launched.world_size * _most_nodes(environment) // num_nodes
    return replace(launched, restart_count=restart_count, max_world_size=max_world_size)


def read_rank(
    environment: Mapping[str, str], launcher: str, rank: str, world_size: str, local_rank: str, local_size: str
) -> LaunchedRank:
    """Return the rank from a launcher's variables with these names. The last two variables may be missing."""
    num_here = re.match("[0-9]*", environment.get(local_size, ""))[0]  # for example 8 from Slurm's 8(x2),4
    return LaunchedRank(
        launcher,
        number_of(environment, rank),
        number_of(environment, world_size),
        local_rank=number_of(environment, local_rank) if local_rank in environment else None,
        local_size=int(num_here) if num_here else None,
    )


def number_of(environment: Mapping[str, str], name: str) -> int:
    """Return the value of a variable, and raise ConfigError if it is not a whole number."""
    text = environment.get(name)
    if text is None or not re.fullmatch(r"-?[0-9]+", text):
        value = "is not set" if text is None else f"is {text!r}"
        raise ConfigError(f"{name} in the environment {value}, but it must be a whole number; let the launcher set it")
    return int(text)


def _most_nodes(environment: Mapping[str, str]) -> int:
    """Return the maximum number of nodes of an elastic run (4 for `torchrun --nnodes 1:4`), or 0 if it is not elastic.

    The maximum is read from torchrun's command line or PET_NNODES: torchrun passes on only the current number.
    """
    nodes = environment.get("PET_NNODES", "")
    with contextlib.suppress(OSError):  # this is not Linux
        words = Path(f"/proc/{os.getppid()}/cmdline").read_text(errors="replace")
        if given := re.search(r"\0--nnodes[=\0]([^\0]*)\0", words):
            nodes = given[1]
    most = nodes.partition(":")[2]
    return int(most) if most.isdecimal() else 0


def launch(script: str, arguments: list[str], num_processes: int) -> int:
    """Run workers on this machine. Return 0, or the exit code of the worker that caused the failure."""
    # The workers report the error; torchrun's own report would bury it.
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    if num_processes > 1:
        # Without this variable, every process would use all cores. torchrun itself would set it to 1.
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // num_processes)))
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,  # torchrun would restart after any failure, including a mistake in the settings
        nproc_per_node=num_processes,
        monitor_interval=0.1,
        # torchrun forwards these signals to the workers, which then save.
        signals_to_handle="SIGTERM,SIGINT,SIGQUIT,SIGUSR1" + ("" if hangup_is_ignored() else ",SIGHUP"),
    )
    try:
        elastic_launch(config, sys.executable)("-u", script, *arguments)
    except ChildFailedError as error:
        return root_cause(error.failures.values())
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    return 0


def root_cause(failures: Collection) -> int:
    """Return the exit code of the process that failed first, from torchrun's list of failures.

    When a process dies, the others lose their connection and exit with 1, or torchrun ends them. This often happens
    before torchrun's next poll, and then all failures have the same timestamp, in whole seconds.
    """
    first = min(failure.timestamp for failure in failures)
    codes = [failure.exitcode for failure in failures if failure.timestamp <= first + 1]
    codes = [code if code > 0 else 128 - code for code in codes]
    consequences = [1, 128 + signal.SIGTERM]
    return min(codes, key=lambda code: consequences.index(code) if code in consequences else -1)

"""Finds this process's rank in a run, and starts the processes of this machine through torchrun.

utils/rendezvous.py then lets the processes meet. It is a separate file, because it imports torch.
"""

import contextlib
import logging
import os
import re
import signal
import sys
import tempfile
import uuid
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from utils.errors import ConfigError, cause_of
from utils.program import hangup_is_ignored
from utils.text import counted

TORCHRUN, OPEN_MPI, MPI, SLURM = "torchrun", "Open MPI", "MPI (PMI)", "Slurm (srun)"
VARIABLES, FLAGS = "RANK and WORLD_SIZE in the environment", "the command line"
OF_TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# {launcher: its variables for the rank, the number of processes, the rank on this machine, and the number of processes
# on this machine}. The last two may be missing.
RANK_VARIABLES = {
    TORCHRUN: OF_TORCH,
    OPEN_MPI: tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    MPI: ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH, Intel's mpirun, srun --mpi=pmi2
    SLURM: ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    VARIABLES: OF_TORCH,  # also set by Kubernetes' PyTorchJob
}
# Variables in which Kubeflow, SkyPilot, dstack and Slurm pass the number of nodes.
NODE_COUNTS = ("PET_NNODES", "SKYPILOT_NUM_NODES", "DSTACK_NODES_NUM", "SLURM_NNODES")
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"  # the network interface that other machines cannot reach
# Variable with the file in which the processes of our own launcher meet. The file has the name of torchrun's run id.
STORE_FILE = "HALFSTEP_STORE"
SEVERAL = {SLURM: "srun --ntasks N", OPEN_MPI: "mpirun -np N", MPI: "mpirun -np N"}  # commands that start N processes


@dataclass(frozen=True)
class LaunchedRank:
    """The rank that a launcher gave this process, and the address where the processes meet."""

    launcher: str  # name of the launcher in messages
    rank: int
    world_size: int
    local_rank: int | None = None  # None: unknown until the processes meet
    host: str = ""  # the host on which process 0 listens; "": the store is `file`, or that of torchrun's variables
    port: int = 0
    file: str = ""  # the file in which the processes of this program's own launcher meet
    local_size: int | None = None  # number of processes on this machine; None: unknown
    restart_count: int = 0  # number of restarts by torchrun
    max_world_size: int = 0  # the largest number of processes of an elastic run; 0: not elastic

    @property
    def parent_is_launcher(self) -> bool:
        """Return whether the parent is the launcher.

        If so, this process must end with it. Otherwise it may be a shell.
        """
        return self.launcher in (TORCHRUN, OPEN_MPI)


def find_launched_rank(
    environment: Mapping[str, str],
    url: str | None = None,
    world_size: int | None = None,
    rank: int | None = None,
    num_local: int | None = None,
) -> LaunchedRank | None:
    """Return this process's rank, with the address of process 0. Raise ConfigError if launchers and flags disagree.

    `url`, `world_size` and `rank`: DIST.URL, DIST.WORLD_SIZE and DIST.RANK; `num_local`: -ngpus. Return None if nothing
    gives the process a rank, or if a launcher started one process that -ngpus tells to start the others.
    """
    ranks = [_read_rank(environment, launcher) for launcher in _launchers_in(environment)]
    if (url, world_size, rank) != (None, None, None):
        ranks.append(_rank_by_flags(url, world_size, rank, ranks[0] if ranks else None))
    if not ranks:
        return None
    launched = ranks[0]
    _check_ranks(ranks)
    if launched.launcher == TORCHRUN and url is None:
        return launched  # torchrun provides the store
    if launched.world_size > 1:
        host, port = _find_address(environment, launched, url)
        return replace(launched, host=host, port=port, restart_count=0)  # every start has a new store
    if num_local is not None and world_size != 1:
        return None
    how = SEVERAL.get(launched.launcher, "-world_size N and a different -rank for each")
    raise ConfigError(
        f"-world_size: {launched.launcher} started only one process; for several processes, start several ({how}), "
        "or let this process start them on its machine with -ngpus N; for one process, run halfstep train "
        "without -world_size"
    )


def rank_in_environment(environment: Mapping[str, str]) -> int:
    """Return this process's rank, or 0 if the environment has none. Only rank 0 reports mistakes in the settings."""
    with contextlib.suppress(KeyError, ValueError):
        for launcher in _launchers_in(environment):
            return _read_rank(environment, launcher).rank
    return 0


def is_one_of_several(environment: Mapping[str, str]) -> bool:
    """Return whether a launcher started this process as one of several, or as one of an elastic run."""
    with contextlib.suppress(KeyError, ValueError):  # the program reports wrong variables
        ranks = [_read_rank(environment, launcher) for launcher in _launchers_in(environment)]
        return any(max(each.world_size, each.max_world_size) > 1 for each in ranks)
    return True


def check_single_node(environment: Mapping[str, str]) -> None:
    """Raise ConfigError if the job has several nodes. Without a launcher, each node would train its own model."""
    counts = [(name, environment[name]) for name in NODE_COUNTS if environment.get(name, "1") != "1"]
    for name, value in counts:
        raise ConfigError(
            f"{name} in the environment is {value}, so the job has several nodes, and each would train its own model: "
            "start this program with srun, mpirun, or on each node with torchrun --nnodes N --nproc_per_node gpu "
            "--rdzv_id JOB --rdzv_backend c10d --rdzv_endpoint FIRST_NODE:29500 --no-python halfstep train ...; or "
            f"unset {name}"
        )


# --- the rank ---


def _launchers_in(environment: Mapping[str, str]) -> list[str]:
    """Return the launchers that gave this process a rank, the innermost one first."""
    if "TORCHELASTIC_RUN_ID" in environment:
        return [TORCHRUN]  # a launcher that started torchrun numbers the processes differently
    launchers = [launcher for launcher in (OPEN_MPI, MPI) if RANK_VARIABLES[launcher][0] in environment]
    # An sbatch script has most of Slurm's variables, but no SLURM_STEP_*. If srun started mpirun, only mpirun's rank
    # counts.
    has_step = any(name.startswith("SLURM_STEP_") for name in environment)
    is_task = "SLURM_PROCID" in environment and (has_step or environment.get("ENVIRONMENT") != "BATCH")
    if is_task and not launchers:
        launchers.append(SLURM)
    # RANK without WORLD_SIZE belongs to another program, and Kubeflow's RANK may be the rank of a node.
    is_of_node = environment.get("PET_NNODES", "1") != "1"
    if {"RANK", "WORLD_SIZE"} <= environment.keys() and not is_of_node:
        launchers.append(VARIABLES)
    return launchers


def _read_rank(environment: Mapping[str, str], launcher: str) -> LaunchedRank:
    """Return the rank in a launcher's variables."""
    rank, world_size, local_rank, local_size = RANK_VARIABLES[launcher]
    if "SLURM_STEP_NUM_TASKS" in environment and launcher == SLURM:
        world_size = "SLURM_STEP_NUM_TASKS"  # a step may have fewer tasks than its job
    num_here = re.match("[0-9]*", environment.get(local_size, ""))[0]  # for example 8 from Slurm's 8(x2),4
    launched = LaunchedRank(
        launcher,
        int(environment[rank]),
        int(environment[world_size]),
        local_rank=int(environment[local_rank]) if local_rank in environment else None,
        local_size=int(num_here) if num_here else None,
    )
    if launcher != TORCHRUN:
        return launched
    restart_count = int(environment.get("TORCHELASTIC_RESTART_COUNT", 0))
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "False":
        restart_count = 0  # each start has its own store, and the nodes' restart counts may differ
    num_nodes = int(environment.get("GROUP_WORLD_SIZE", 1))
    max_world_size = launched.world_size * _most_nodes(environment) // num_nodes
    file = environment.get(STORE_FILE, "")
    if Path(file).name != environment["TORCHELASTIC_RUN_ID"]:
        file = ""  # left over from another launcher, such as the one that started the shell of this torchrun
    return replace(launched, restart_count=restart_count, max_world_size=max_world_size, file=file)


def _most_nodes(environment: Mapping[str, str]) -> int:
    """Return the maximum number of nodes of an elastic run (4 for `torchrun --nnodes 1:4`), or 0 if it is not elastic.

    The maximum is read from torchrun's command line or PET_NNODES: torchrun passes on only the current number.
    """
    nodes = environment.get("PET_NNODES", "")
    with contextlib.suppress(OSError):  # this is not Linux
        words = Path(f"/proc/{os.getppid()}/cmdline").read_text(errors="replace")
        if match := re.search(r"\0--nnodes[=\0]([^\0]*)\0", words):
            nodes = match[1]
    most = nodes.partition(":")[2]
    return int(most) if most.isdecimal() else 0


def _rank_by_flags(
    url: str | None, world_size: int | None, rank: int | None, launched: LaunchedRank | None
) -> LaunchedRank:
    """Return the rank that the flags give. Values without a flag come from the launcher."""
    if launched:
        rank = launched.rank if rank is None else rank
        world_size = launched.world_size if world_size is None else world_size
        url = url or "env://"
    needed = {"-dist_url": url, "-world_size": world_size, "-rank": rank}
    missing = [flag for flag, value in needed.items() if value is None]
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)} must be given: without a launcher, every process needs "
            "-dist_url tcp://HOST:PORT -world_size N -rank R, with its own rank from 0 to N-1"
        )
    return LaunchedRank(FLAGS, rank, world_size)


def _check_ranks(ranks: list[LaunchedRank]) -> None:
    """Raise ConfigError if launchers and flags disagree about the rank, or if there is no such rank."""
    launched = ranks[0]
    for other in ranks[1:]:
        if (other.rank, other.world_size) != (launched.rank, launched.world_size):
            raise ConfigError(
                f"this is process {launched.rank} of {launched.world_size} according to {launched.launcher}, but "
                f"process {other.rank} of {other.world_size} according to {other.launcher}; unset the variables or "
                "leave out the flags that are wrong"
            )
    if not 0 <= launched.rank < launched.world_size:
        raise ConfigError(
            f"-rank: {launched.launcher} says {launched.rank}, of {counted(launched.world_size, 'process')}; "
            f"ranks go from 0 to {launched.world_size - 1}"
        )


# --- the address of process 0 ---


def _find_address(environment: Mapping[str, str], launched: LaunchedRank, url: str | None) -> tuple[str, int]:
    """Return host and port of process 0: from -dist_url, from MASTER_ADDR and MASTER_PORT, or from the job."""
    if url not in (None, "env://"):
        with contextlib.suppress(ValueError):  # the port is not a number from 0 to 65535
            parts = urlsplit(url)
            if parts.scheme == "tcp" and parts.hostname and parts.port:
                return parts.hostname, parts.port
        raise ConfigError(
            f"DIST.URL is {url!r}; it must be tcp://HOST:PORT, the machine of process 0 and a free port there, or "
            "env://"
        )
    host = environment.get("MASTER_ADDR") or _default_host(environment, launched)
    # The default port is the same for all processes of a job, and below the ephemeral ports.
    job = environment.get("PMIX_NAMESPACE") if launched.launcher == OPEN_MPI else None
    job = job or f"{environment.get('SLURM_JOB_ID', '')}.{environment.get('SLURM_STEP_ID', '')}"
    return host, int(environment.get("MASTER_PORT") or 10000 + zlib.crc32(job.encode()) % 20000)


def _default_host(environment: Mapping[str, str], launched: LaunchedRank) -> str:
    """Return the first machine of a Slurm job, or of its step, or this machine if all processes are on it."""
    if launched.launcher != VARIABLES:
        names = ["SLURM_JOB_NODELIST", "SLURM_NODELIST"]
        if launched.launcher == SLURM:
            names.insert(0, "SLURM_STEP_NODELIST")
        if nodes := next(filter(None, map(environment.get, names)), ""):
            first = re.match(r"([^,\[]|\[[^]]*\])*", nodes)[0]  # for example node[01-03,7] of node[01-03,7],gpu5
            return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", first)
        if launched.local_size == launched.world_size:
            return "127.0.0.1"
    raise ConfigError(
        f"MASTER_ADDR is not set, and the machine of process 0 cannot be determined from {launched.launcher}; "
        "set MASTER_ADDR and MASTER_PORT for all processes (mpirun -x MASTER_ADDR=HOST ...), "
        "or give -dist_url tcp://HOST:PORT"
    )


# --- starting the processes of this machine ---


def launch(script: str, arguments: list[str], num_processes: int) -> int:
    """Run workers on this machine. Return 0, or the exit code of the worker that caused the failure."""
    # The workers report the error; torchrun's own report would bury it.
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from utils.host import count_cores
    from utils.one_machine import BACKEND

    if num_processes > 1:
        # Without this variable, every process would use all cores. torchrun itself would set it to 1.
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, count_cores() // num_processes)))
    # torchrun forwards these signals to the workers, which then save.
    signals = "SIGTERM,SIGINT,SIGQUIT,SIGUSR1" + ("" if hangup_is_ignored() else ",SIGHUP")
    run_id = uuid.uuid4().hex
    with _private_folder() as folder:
        store = Path(folder, run_id)
        store.touch(mode=0o700)
        os.environ[STORE_FILE] = str(store)
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = LOOPBACK
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            run_id=run_id,
            rdzv_backend=BACKEND,
            max_restarts=0,  # torchrun would restart after any failure, including a mistake in the settings
            nproc_per_node=num_processes,
            monitor_interval=0.1,
            signals_to_handle=signals,
            logs_specs=DefaultLogsSpecs(log_dir=folder),  # otherwise torchrun leaves a folder behind
        )
        try:
            elastic_launch(config, sys.executable)("-u", script, *arguments)
        except ChildFailedError as error:
            return root_cause(error.failures.values())
        except SignalException as stopped:
            return 128 + int(stopped.sigval)
    return 0


def _private_folder() -> tempfile.TemporaryDirectory:
    """Create a folder that only this user can open, and that is removed at the end."""
    try:
        return tempfile.TemporaryDirectory(prefix="halfstep-", ignore_cleanup_errors=True)
    except OSError as error:
        raise ConfigError(
            f"TMPDIR: the processes have no folder for the file in which they meet ({cause_of(error)}); set TMPDIR to "
            "a folder in which you can write"
        ) from error


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

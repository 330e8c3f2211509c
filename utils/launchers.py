"""Reads ranks from flags, from RANK and WORLD_SIZE, and from srun and mpirun, and finds the address of process 0."""

import re
import socket
import time
import zlib
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from utils.errors import ConfigError
from utils.launch import LaunchedRank, LaunchOptions, read_rank
from utils.text import counted

if TYPE_CHECKING:
    from torch.distributed import TCPStore

SLURM, OPEN_MPI, MPI, VARIABLES = "Slurm (srun)", "Open MPI", "MPI (PMI)", "RANK and WORLD_SIZE in the environment"


def ranks_in_environment(environment: Mapping[str, str]) -> list[LaunchedRank]:
    """Return the ranks that launchers gave this process, the innermost launcher's first."""
    return [rank for rank in (*ranks_by_srun_or_mpirun(environment), variables(environment)) if rank]


def ranks_by_srun_or_mpirun(environment: Mapping[str, str]) -> list[LaunchedRank]:
    """Return this process's rank from each launcher that set one. If srun started mpirun, only mpirun's rank counts."""
    by_mpi = [rank for rank in (open_mpi(environment), mpi(environment)) if rank]
    innermost = by_mpi or [slurm(environment)]
    return [rank for rank in innermost if rank]


def slurm(environment: Mapping[str, str]) -> LaunchedRank | None:
    """Return the rank of an srun task."""
    if not is_task_of_srun(environment):
        return None
    world_size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    return read_rank(environment, SLURM, "SLURM_PROCID", world_size, "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")


def open_mpi(environment: Mapping[str, str]) -> LaunchedRank | None:
    """Return the rank of a process of Open MPI's mpirun."""
    names = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    return read_rank(environment, OPEN_MPI, *names) if "OMPI_COMM_WORLD_RANK" in environment else None


def mpi(environment: Mapping[str, str]) -> LaunchedRank | None:
    """Return the rank of a process of MPICH's or Intel's mpirun, or of `srun --mpi=pmi2`."""
    names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    return read_rank(environment, MPI, *names) if "PMI_RANK" in environment else None


def first_host(environment: Mapping[str, str], launcher: str) -> str:
    """Return the first machine of the Slurm job, or of its step if srun is the launcher. Return '' outside of Slurm."""
    nodes = environment.get("SLURM_STEP_NODELIST") if launcher == SLURM else None
    nodes = nodes or environment.get("SLURM_JOB_NODELIST") or environment.get("SLURM_NODELIST")
    return _first_of(nodes) if nodes else ""


def _first_of(nodes: str) -> str:
    """Return the first host of a Slurm node list, for example node01 for node[01-03,7],gpu5."""
    match = re.fullmatch(r"((?:[^,\[\]]|\[[^\[\]]+\])+)(,.*)?", nodes)
    host = re.sub(r"\[([^],-]+)[^]]*\]", r"\1", match[1]) if match else ""
    if not re.fullmatch(r"[\w.-]+", host):
        raise ConfigError(
            f"SLURM_JOB_NODELIST is {nodes!r}, which is not a list of hosts; set MASTER_ADDR and MASTER_PORT"
        )
    return host


def is_task_of_srun(environment: Mapping[str, str]) -> bool:
    """Return whether srun started this process. An sbatch script has most of these variables, but no SLURM_STEP_*."""
    has_step = any(name.startswith("SLURM_STEP_") for name in environment)
    return "SLURM_PROCID" in environment and (has_step or environment.get("ENVIRONMENT") != "BATCH")


def variables(environment: Mapping[str, str]) -> LaunchedRank | None:
    """Return the rank from RANK and WORLD_SIZE, which torch also reads and Kubernetes' PyTorchJob sets.

    RANK without WORLD_SIZE belongs to another program, and Kubeflow's RANK may be the rank of a node.
    """
    is_node = environment.get("PET_NNODES", "1") != "1"
    if "RANK" not in environment or "WORLD_SIZE" not in environment or is_node:
        return None
    return read_rank(environment, VARIABLES, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def rank_by_flags(options: LaunchOptions, launched: LaunchedRank | None) -> LaunchedRank:
    """Return the rank that the flags give. Values without a flag come from the launcher."""
    rank, world_size, url = options.rank, options.world_size, options.url
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
    return LaunchedRank("the command line", rank, world_size)


def choose_rank(
    environment: Mapping[str, str], options: LaunchOptions, ranks: list[LaunchedRank]
) -> LaunchedRank | None:
    """Return the rank on which all launchers and flags agree, with the address of process 0.

    Return None if a launcher started one process and -ngpus tells this process to start the others.
    """
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
    if launched.launcher == "torchrun" and options.url is None:
        return launched  # torchrun provides the store
    if launched.world_size > 1:
        host, port = _find_address(environment, launched, options.url)
        return replace(launched, host=host, port=port, restart_count=0)  # every start has a new store
    if options.num_local is not None and options.world_size != 1:
        return None
    known = {SLURM: "srun --ntasks N", OPEN_MPI: "mpirun -np N", MPI: "mpirun -np N"}
    how = known.get(launched.launcher, "-world_size N and a different -rank for each")
    raise ConfigError(
        f"-world_size: {launched.launcher} started only one process; for several processes, start several ({how}), "
        "or let this process start them on its machine with -ngpus N; for one process, run main_single_gpu.py"
    )


def port_of(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise ConfigError(f"MASTER_PORT in the environment is {text!r}; it must be a port from 1 to 65535, or unset")
    return int(text)


def _find_address(environment: Mapping[str, str], launched: LaunchedRank, url: str | None) -> tuple[str, int]:
    """Return host and port of process 0: from -dist_url, from MASTER_ADDR and MASTER_PORT, or from the job."""
    if url not in (None, "env://"):
        return _parse_url(url)
    host, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    return host or _default_host(environment, launched), port_of(port) if port else _default_port(environment, launched)


def _parse_url(url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:  # the port is not a number from 0 to 65535
        host = port = None
    if not host or not port or parts.scheme != "tcp":
        raise ConfigError(
            f"DIST.URL is {url!r}; it must be tcp://HOST:PORT, the machine of process 0 and a free port there, or "
            "env://"
        )
    return host, port


def _default_host(environment: Mapping[str, str], launched: LaunchedRank) -> str:
    host = ""
    if launched.launcher != VARIABLES and any(name.startswith("SLURM_") for name in environment):
        host = first_host(environment, launched.launcher)
    if host:
        return host
    if launched.local_size == launched.world_size and launched.launcher != VARIABLES:
        return "127.0.0.1"
    raise ConfigError(
        f"MASTER_ADDR is not set, and the machine of process 0 cannot be determined from {launched.launcher}; "
        "set MASTER_ADDR and MASTER_PORT for all processes (mpirun -x MASTER_ADDR=HOST ...), "
        "or give -dist_url tcp://HOST:PORT"
    )


def _default_port(environment: Mapping[str, str], launched: LaunchedRank) -> int:
    """Return a port derived from the job: the same for all processes of the job, and below the ephemeral ports."""
    job = environment.get("PMIX_NAMESPACE") if launched.launcher == OPEN_MPI else None
    job = job or f"{environment.get('SLURM_JOB_ID', '')}.{environment.get('SLURM_STEP_ID', '')}"
    return 10000 + zlib.crc32(job.encode()) % 20000


def open_store(host: str, port: int, is_host: bool, timeout: float) -> "TCPStore":
    """Return the key-value store on process 0. Its server may start later than this process."""
    from torch.distributed import TCPStore

    deadline = time.monotonic() + timeout
    while not is_host:
        # TCPStore would wait twice as long, and then print a C++ stack trace (torch 2.15).
        try:
            socket.create_connection((host, port), timeout=timeout).close()
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
    # With wait_for_workers, an error would not name the missing process.
    return TCPStore(host, port, None, is_host, timedelta(seconds=timeout), wait_for_workers=False)

"""Reads ranks from the variables of srun and mpirun, and the machine of process 0 from a Slurm job."""

import re
from collections.abc import Mapping

from utils.errors import ConfigError
from utils.launch import LaunchedRank, read_rank
from utils.launchers import MPI, OPEN_MPI, SLURM, is_task_of_srun


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

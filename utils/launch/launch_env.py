"""Which of a run's processes this one is: what a launcher wrote into the environment, and what the command line says."""

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from utils.errors import ConfigError

# Each launcher's variables: rank, number of processes, rank on this machine. The first that is there counts.
_VARIABLES = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "MPI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    "Slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    "variables": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
}
_TITLES = {
    "MPI": "MPI (PMI)",
    "Slurm": "Slurm (srun)",
    "variables": "RANK and WORLD_SIZE in the environment",
}


@dataclass(frozen=True)
class Asked:
    """What the settings say about a run's processes. None: what the launcher says."""

    url: str | None = None
    world_size: int | None = None
    rank: int | None = None
    num_here: int | None = None  # to be started on this machine, where no launcher did
    timeout: float = 1800.0  # seconds


@dataclass(frozen=True)
class Place:
    """This process among the others, and where they meet."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int | None  # None: nobody said; found out when they meet
    host: str = ""  # where process 0 listens; "" where torchrun does it for them
    port: int = 0
    attempt: int = 0  # how many times torchrun has started the processes before

    @property
    def title(self) -> str:
        return _TITLES.get(self.launcher, self.launcher)

    @property
    def is_watched(self) -> bool:
        """Whether its parent is the launcher, without which it is not to live on; a shell may go."""
        return self.launcher in ("torchrun", "Open MPI")


def told_rank(environment: Mapping[str, str]) -> str:
    """This process's number as far as the environment says it, for a mistake that only one process is to tell."""
    return next((environment[rank] for rank, *_ in _VARIABLES.values() if rank in environment), "0")


def count_local(environment: Mapping[str, str], world_size: int) -> int:
    """Processes on this machine; a launcher that does not say has no other machine."""
    names = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_TASKS_PER_NODE")
    text = next((environment[name] for name in names if name in environment), str(world_size))
    return int(re.match("[0-9]*", text)[0] or world_size)  # Slurm: 8(x2),4


def find_place(environment: Mapping[str, str], asked: Asked) -> Place | None:
    """Where this process stands in a run of several, or None where nobody started it as one of them."""
    found = _read_all(environment)
    if (asked.url, asked.world_size, asked.rank) != (None, None, None):
        found.append(_read_flags(asked, found[0] if found else None))
    if not found:
        return None
    first = found[0]
    for other in found[1:]:
        if (other.rank, other.world_size) != (first.rank, first.world_size):
            raise ConfigError(
                f"{first.title} says that this is process {first.rank} of {first.world_size}, and {other.title} that it "
                f"is process {other.rank} of {other.world_size}; unset the variables or leave out the flags that are wrong"
            )
    if not 0 <= first.rank < first.world_size:
        raise ConfigError(
            f"-rank: {first.title} says {first.rank}, but there are {first.world_size} processes; "
            f"ranks go from 0 to {first.world_size - 1}"
        )
    if first.launcher == "torchrun" and asked.url is None:
        return first  # the processes meet where torchrun tells them to; a single one may be what others have left
    if first.world_size == 1:
        return _alone(first, asked)
    host, port = _address(environment, first, asked.url)
    return replace(first, host=host, port=port)


def _read_all(environment: Mapping[str, str]) -> list[Place]:
    """What the launchers say, the innermost first: srun may start torchrun or mpirun, which count otherwise then."""
    if "TORCHELASTIC_RUN_ID" in environment:
        attempt = int(environment.get("TORCHELASTIC_RESTART_COUNT", 0))
        return [replace(_read(environment, "torchrun"), attempt=attempt)]
    names = [name for name in ("Open MPI", "MPI", "variables") if _VARIABLES[name][0] in environment]
    if "Open MPI" not in names and "MPI" not in names and _is_slurm_task(environment):
        names.insert(0, "Slurm")
    # RANK alone is a common name, and no launcher's.
    return [_read(environment, name) for name in names if name != "variables" or "WORLD_SIZE" in environment]


def _is_slurm_task(environment: Mapping[str, str]) -> bool:
    """Whether srun started this. A script of sbatch's has most of the same variables, but no step."""
    has_step = any(name.startswith("SLURM_STEP_") for name in environment)
    return "SLURM_PROCID" in environment and (has_step or environment.get("ENVIRONMENT") != "BATCH")


def _read(environment: Mapping[str, str], launcher: str) -> Place:
    rank, world_size, local_rank = _VARIABLES[launcher]
    if launcher == "Slurm" and world_size not in environment:
        world_size = "SLURM_NTASKS"
    local = _number(environment, local_rank) if local_rank in environment else None
    return Place(launcher, _number(environment, rank), _number(environment, world_size), local)


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name)
    if text is None or not re.fullmatch(r"-?[0-9]+", text):
        shown = "is not set" if text is None else f"is {text!r}"
        raise ConfigError(
            f"{name} in the environment {shown}, but a launcher sets it to a whole number; start anew with one"
        )
    return int(text)


def _read_flags(asked: Asked, launched: Place | None) -> Place:
    """The flags, where they are silent with the launcher's numbers."""
    rank = launched.rank if asked.rank is None and launched else asked.rank
    world_size = launched.world_size if asked.world_size is None and launched else asked.world_size
    needed = {"-dist_url": asked.url or launched, "-world_size": world_size, "-rank": rank}
    missing = [flag for flag, value in needed.items() if value is None]
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)}: not given; without a launcher every process needs "
            "-dist_url tcp://HOST:PORT -world_size N -rank R, with a rank of its own from 0 to N-1"
        )
    return Place("the command line", rank, world_size, launched.local_rank if launched else None)


def _alone(place: Place, asked: Asked) -> None:
    """One process is no group: with -ngpus it starts the others, without it somebody forgot to."""
    if asked.num_here is None or asked.world_size == 1:
        how = "srun --ntasks N" if place.launcher == "Slurm" else "mpirun -np N" if "MPI" in place.launcher else "N"
        raise ConfigError(
            f"-world_size: {place.title} started one process only; for several ask for them ({how}), or have this one "
            "start them on its machine with -ngpus N; for one use main_single_gpu.py"
        )


def _address(environment: Mapping[str, str], place: Place, url: str | None) -> tuple[str, int]:
    """Host and port on which process 0 is met: -dist_url, or MASTER_ADDR and MASTER_PORT, or what follows from the job."""
    if url not in (None, "env://"):
        return _parse_url(url)
    host, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    return host or _default_host(environment, place), _port(port) if port else _default_port(environment, place)


def _parse_url(url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:  # a port that is none
        host = port = None
    if not host or not port or parts.scheme != "tcp":
        raise ConfigError(
            f"DIST.URL is {url!r}; it must be tcp://HOST:PORT, the machine of process 0 and a free port there, or env://"
        )
    return host, port


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise ConfigError(f"MASTER_PORT in the environment is {text!r}; it must be a port from 1 to 65535, or unset")
    return int(text)


def _default_host(environment: Mapping[str, str], place: Place) -> str:
    nodes = environment.get("SLURM_STEP_NODELIST") if place.launcher == "Slurm" else None
    nodes = nodes or environment.get("SLURM_JOB_NODELIST") or environment.get("SLURM_NODELIST")
    if nodes and place.launcher != "variables":
        return first_host(nodes)
    num_here = environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") or environment.get("MPI_LOCALNRANKS")
    if num_here == str(place.world_size):
        return "127.0.0.1"
    raise ConfigError(
        f"MASTER_ADDR: not set, and {place.title} does not say on which machine process 0 is; set MASTER_ADDR and "
        "MASTER_PORT for all processes (mpirun -x MASTER_ADDR=HOST ...), or give -dist_url tcp://HOST:PORT"
    )


def _default_port(environment: Mapping[str, str], place: Place) -> int:
    """The same for all processes of a job, another for each job, below the ports that systems give out themselves."""
    job = environment.get("PMIX_NAMESPACE") if place.launcher == "Open MPI" else None
    job = job or "{SLURM_JOB_ID}.{SLURM_STEP_ID}".format_map({"SLURM_JOB_ID": "", "SLURM_STEP_ID": "", **environment})
    return 10000 + zlib.crc32(job.encode()) % 20000


def first_host(nodes: str) -> str:
    """The first of a list as Slurm writes it: node01 of node[01-03,7],gpu5."""
    found = re.fullmatch(r"((?:[^,\[\]]|\[[^\[\]]+\])+)(,.*)?", nodes)
    host = re.sub(r"\[([^],-]+)[^]]*\]", r"\1", found[1]) if found else ""
    if not re.fullmatch(r"[\w.-]+", host):
        raise ConfigError(
            f"SLURM_JOB_NODELIST is {nodes!r}, which is no list of machines; set MASTER_ADDR and MASTER_PORT"
        )
    return host

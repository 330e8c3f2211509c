"""Which of a run's processes this one is, by a launcher's environment variables and the command line; and how torchrun starts them."""

import contextlib
import logging
import os
import re
import signal
import socket
import sys
import uuid
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from utils.errors import ConfigError, LostProcess
from utils.program import hangup_is_ignored
from utils.text import counted

# Each launcher's variables: rank, number of processes, rank on this machine. The first that is set wins.
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


# The variables of engines that start this program once on each node: the number of nodes, the rank of this one, the
# address of the first or of all, and the processes of each.
_ENGINES = {
    "Kubeflow": ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_NPROC_PER_NODE"),
    "SkyPilot": ("SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS", "SKYPILOT_NUM_GPUS_PER_NODE"),
    "dstack": ("DSTACK_NODES_NUM", "DSTACK_NODE_RANK", "DSTACK_MASTER_NODE_IP", "DSTACK_GPUS_PER_NODE"),
}
NODE_PORT = "29500"  # torchrun's
FINAL = (2, 3, 4)  # exit codes of processes after which the same start would end in the same way
TORCHRUN = (
    "torchrun --nnodes {} --nproc_per_node gpu --rdzv_id JOB --rdzv_backend c10d --rdzv_endpoint FIRST_NODE:29500 "
    "main_multi_gpu.py ..."
)


@dataclass(frozen=True)
class Nodes:
    """The nodes on each of which an engine started this program."""

    engine: str = ""
    least: int = 1
    most: int = 1  # more than `least`: nodes may come and go
    rank: int | None = 0  # of this one; None: the engine does not say, and they are numbered when they meet
    hosts: tuple[str, ...] = ("localhost",)  # the first one, or all
    port: int = 0
    num_local: int | None = None  # processes on each; None: the engine does not say
    restarts: int = 0  # of the processes, when nodes have come or gone
    timing: Mapping[str, str] = field(default_factory=dict)  # of torchrun's rendezvous

    @property
    def are_fixed(self) -> bool:
        return bool(self.engine) and self.rank is not None and self.least == self.most

    @property
    def first(self) -> str:
        return f"{self.hosts[0]}:{self.port}"


THIS_MACHINE = Nodes()


@dataclass(frozen=True)
class LaunchOptions:
    """What the settings say about a run's processes. None: use the launcher's value."""

    url: str | None = None
    world_size: int | None = None
    rank: int | None = None
    num_local: int | None = None  # processes to start on this machine when no launcher did
    timeout: float = 1800.0  # seconds


@dataclass(frozen=True)
class LaunchedRank:
    """The rank that a launcher gave this process, and where the ranks rendezvous."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int | None  # None: the launcher did not say; counted at the rendezvous
    host: str = ""  # where process 0 listens; "" if torchrun provides the store
    port: int = 0
    restart_count: int = 0  # of torchrun
    most: int = 0  # processes that the run may have, if nodes may come and go

    @property
    def title(self) -> str:
        return _TITLES.get(self.launcher, self.launcher)

    @property
    def parent_is_launcher(self) -> bool:
        """Whether this process must die with its parent. Under other launchers the parent may be a shell."""
        return self.launcher in ("torchrun", "Open MPI")


def rank_in_environment(environment: Mapping[str, str]) -> int:
    """This process's rank as far as the environment says it, so that one process alone reports a mistake."""
    with contextlib.suppress(ConfigError):
        if found := _ranks_in_environment(environment):
            return found[0].rank
    return 0


def count_local(environment: Mapping[str, str], world_size: int) -> int:
    """The number of processes on this machine; a launcher that does not say runs on one machine."""
    names = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_TASKS_PER_NODE")
    text = next((environment[name] for name in names if name in environment), str(world_size))
    return int(re.match("[0-9]*", text)[0] or world_size)  # Slurm: 8(x2),4


def find_launched_rank(environment: Mapping[str, str], options: LaunchOptions) -> LaunchedRank | None:
    """This process's rank, or None if nothing started it as one of several processes."""
    candidates = _ranks_in_environment(environment)
    if (options.url, options.world_size, options.rank) != (None, None, None):
        candidates.append(_rank_from_flags(options, candidates[0] if candidates else None))
    if not candidates:
        return None
    first = candidates[0]
    for other in candidates[1:]:
        if (other.rank, other.world_size) != (first.rank, first.world_size):
            raise ConfigError(
                f"{first.title} says that this is process {first.rank} of {first.world_size}, and {other.title} "
                f"that it is process {other.rank} of {other.world_size}; unset the variables or leave out the flags that "
                "are wrong"
            )
    if not 0 <= first.rank < first.world_size:
        raise ConfigError(
            f"-rank: {first.title} says {first.rank}, of {counted(first.world_size, 'process')}; "
            f"ranks go from 0 to {first.world_size - 1}"
        )
    is_torchrun = first.launcher == "torchrun" and options.url is None
    if is_torchrun and (first.world_size == 1 or environment.get("TORCHELASTIC_USE_AGENT_STORE") != "False"):
        return first  # torchrun provides the store; a single process may be what an elastic run has left
    if first.world_size == 1:
        return _refuse_single_process(first, options)
    host, port = _master_address(environment, first, options.url)
    return replace(first, host=host, port=port, restart_count=0)  # the store is new, and nodes may count differently


def _ranks_in_environment(environment: Mapping[str, str]) -> list[LaunchedRank]:
    """What each launcher says, the innermost first: srun may start torchrun or mpirun, which number differently."""
    if "TORCHELASTIC_RUN_ID" in environment:
        restart_count = int(environment.get("TORCHELASTIC_RESTART_COUNT", 0))
        found = _rank_from_variables(environment, "torchrun")
        most = found.world_size * _most_nodes(environment) // int(environment.get("GROUP_WORLD_SIZE", 1))
        return [replace(found, restart_count=restart_count, most=most)]
    names = [name for name in ("Open MPI", "MPI", "variables") if _VARIABLES[name][0] in environment]
    if "Open MPI" not in names and "MPI" not in names and _is_slurm_task(environment):
        names.insert(0, "Slurm")
    # RANK without WORLD_SIZE is some other program's variable, and Kubeflow's are a node's.
    if "variables" in names and ("WORLD_SIZE" not in environment or environment.get("PET_NNODES", "1") != "1"):
        names.remove("variables")
    return [_rank_from_variables(environment, name) for name in names]


def _most_nodes(environment: Mapping[str, str]) -> int:
    """The 4 of `torchrun --nnodes 1:4`, else of PET_NNODES; 0 if nodes do not come and go. torchrun tells its processes how many there are now."""
    with contextlib.suppress(OSError):  # not Linux
        words = Path(f"/proc/{os.getppid()}/cmdline").read_text(errors="replace")
        if given := re.search(r"\0--nnodes[=\0]([^\0]*)\0", words):
            environment = {"PET_NNODES": given[1]}
    most = environment.get("PET_NNODES", "").partition(":")[2]
    return int(most) if most.isdecimal() else 0


def find_nodes(environment: Mapping[str, str]) -> Nodes:
    """The nodes of an engine, or this machine alone. ConfigError if there are several and nothing tells them apart."""
    for engine, names in _ENGINES.items():
        count, *others, per_node = names
        if environment.get(count, "1") == "1":
            continue
        endpoint = environment.get("PET_RDZV_ENDPOINT") if engine == "Kubeflow" else None
        if endpoint:  # a PyTorchJob with an elasticPolicy: its nodes have no ranks
            host, _, port = endpoint.partition(":")
            environment = environment | {"PET_NODE_RANK": "0", "PET_MASTER_ADDR": host, "PET_MASTER_PORT": port}
        if missing := [name for name in others if not environment.get(name)]:
            raise ConfigError(
                f"{count} in the environment is {environment[count]}, but {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not "
                f"set: {engine} sets them together; set all, or unset {count} to train on this machine alone"
            )
        numbers = re.fullmatch(r"(\d+)(?::(\d+))?", environment[count])
        least, most = (int(each) for each in (numbers[1], numbers[2] or numbers[1])) if numbers else (0, 0)
        rank, hosts = _number(environment, others[0]), tuple(environment[others[1]].split())
        if not 0 < least <= most or not 0 <= rank < most or len(hosts) not in (1, most):
            raise ConfigError(
                f"{count} in the environment is {environment[count]!r}, {others[0]} {rank}, and {others[1]} has "
                f"{counted(len(hosts), 'address')}: they contradict each other; ranks go from 0 to the number of nodes less one"
            )
        local = environment.get(per_node, "")
        if not re.fullmatch(r"\d*|auto|gpu|cpu", local):
            raise ConfigError(f"{per_node} in the environment is {local!r}; it must be a number of processes, or auto")
        port = _port(environment.get("PET_MASTER_PORT") or environment.get("MASTER_PORT") or NODE_PORT)
        restarts = _number({"PET_MAX_RESTARTS": "100", **environment}, "PET_MAX_RESTARTS") if most > least else 0
        timing = dict(re.findall(r"(\w+)=(\w+)", environment.get("PET_RDZV_CONF", "")))
        num_local = int(local) if local.strip("0").isdecimal() else None
        return Nodes(engine, least, most, None if endpoint else rank, hosts, port, num_local, restarts, timing)
    if int(environment.get("SLURM_NNODES", 1)) > 1:
        raise ConfigError(
            f"SLURM_NNODES is {environment['SLURM_NNODES']}, but srun did not start this program, so it would train on this "
            f"node alone: srun {TORCHRUN.format('$SLURM_NNODES')}; or unset SLURM_NNODES"
        )
    if nodes := environment.get("PBS_NODEFILE"):
        try:
            count = len(set(Path(nodes).read_text().split()))
        except OSError:  # it is on the first node alone
            count = 0
        if count != 1:
            raise ConfigError(
                f"PBS_NODEFILE names {counted(count, 'node') if count else 'a file of another node'}, and each would train a "
                f"model of its own: use mpirun, or on each node {TORCHRUN.format(count or 'N')}; or unset PBS_NODEFILE"
            )
    return THIS_MACHINE


def _is_slurm_task(environment: Mapping[str, str]) -> bool:
    """Whether srun started this process. An sbatch script has most of the same variables, but no step."""
    has_step = any(name.startswith("SLURM_STEP_") for name in environment)
    return "SLURM_PROCID" in environment and (has_step or environment.get("ENVIRONMENT") != "BATCH")


def _rank_from_variables(environment: Mapping[str, str], launcher: str) -> LaunchedRank:
    rank, world_size, local_rank = _VARIABLES[launcher]
    if launcher == "Slurm" and world_size not in environment:
        world_size = "SLURM_NTASKS"
    local = _number(environment, local_rank) if local_rank in environment else None
    return LaunchedRank(launcher, _number(environment, rank), _number(environment, world_size), local)


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name)
    if text is None or not re.fullmatch(r"-?[0-9]+", text):
        value = "is not set" if text is None else f"is {text!r}"
        raise ConfigError(f"{name} in the environment {value}, but must be a whole number; start with a launcher")
    return int(text)


def _rank_from_flags(options: LaunchOptions, launched: LaunchedRank | None) -> LaunchedRank:
    """The rank that the flags give; the launcher's numbers fill in what they leave out."""
    rank = launched.rank if options.rank is None and launched else options.rank
    world_size = launched.world_size if options.world_size is None and launched else options.world_size
    needed = {"-dist_url": options.url or launched, "-world_size": world_size, "-rank": rank}
    missing = [flag for flag, value in needed.items() if value is None]
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)}: not given; without a launcher every process needs "
            "-dist_url tcp://HOST:PORT -world_size N -rank R, with its own rank from 0 to N-1"
        )
    return LaunchedRank("the command line", rank, world_size, launched.local_rank if launched else None)


def _refuse_single_process(launched: LaunchedRank, options: LaunchOptions) -> None:
    """A launcher that started one process: fine if -ngpus asks us to start the others, otherwise a mistake."""
    if options.num_local is None or options.world_size == 1:
        known = {"Slurm": "srun --ntasks N", "Open MPI": "mpirun -np N", "MPI": "mpirun -np N"}
        how = known.get(launched.launcher, "-world_size N and a -rank each")
        raise ConfigError(
            f"-world_size: {launched.title} started only one process; to use several, start several ({how}) or let "
            "this one start them on its machine with -ngpus N; to use one, run main_single_gpu.py"
        )


def _master_address(environment: Mapping[str, str], launched: LaunchedRank, url: str | None) -> tuple[str, int]:
    """Host and port of process 0: from -dist_url, from MASTER_ADDR and MASTER_PORT, or derived from the job."""
    if url not in (None, "env://"):
        return _parse_url(url)
    host, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    return host or _default_host(environment, launched), _port(port) if port else _default_port(environment, launched)


def _parse_url(url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:  # not a port number
        host = port = None
    if not host or not port or parts.scheme != "tcp":
        raise ConfigError(
            f"DIST.URL is {url!r}; it must be tcp://HOST:PORT, the machine of process 0 and a free port there, or "
            "env://"
        )
    return host, port


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise ConfigError(f"MASTER_PORT in the environment is {text!r}; it must be a port from 1 to 65535, or unset")
    return int(text)


def _default_host(environment: Mapping[str, str], launched: LaunchedRank) -> str:
    nodes = environment.get("SLURM_STEP_NODELIST") if launched.launcher == "Slurm" else None
    nodes = nodes or environment.get("SLURM_JOB_NODELIST") or environment.get("SLURM_NODELIST")
    if nodes and launched.launcher != "variables":
        return first_host(nodes)
    num_local = environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") or environment.get("MPI_LOCALNRANKS")
    if num_local == str(launched.world_size):
        return "127.0.0.1"
    raise ConfigError(
        f"MASTER_ADDR: not set, and {launched.title} does not say which machine process 0 is on; set MASTER_ADDR and "
        "MASTER_PORT for all processes (mpirun -x MASTER_ADDR=HOST ...), or give -dist_url tcp://HOST:PORT"
    )


def _default_port(environment: Mapping[str, str], launched: LaunchedRank) -> int:
    """One port per job, the same for all of its processes, below the range that systems assign by themselves."""
    job = environment.get("PMIX_NAMESPACE") if launched.launcher == "Open MPI" else None
    job = job or "{SLURM_JOB_ID}.{SLURM_STEP_ID}".format_map({"SLURM_JOB_ID": "", "SLURM_STEP_ID": "", **environment})
    return 10000 + zlib.crc32(job.encode()) % 20000


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: node01 of node[01-03,7],gpu5."""
    match = re.fullmatch(r"((?:[^,\[\]]|\[[^\[\]]+\])+)(,.*)?", nodes)
    host = re.sub(r"\[([^],-]+)[^]]*\]", r"\1", match[1]) if match else ""
    if not re.fullmatch(r"[\w.-]+", host):
        raise ConfigError(
            f"SLURM_JOB_NODELIST is {nodes!r}, which is not a list of hosts; set MASTER_ADDR and MASTER_PORT"
        )
    return host


def launch(
    script: str, arguments: list[str], num_processes: int, nodes: Nodes = THIS_MACHINE, timeout: float = 1800.0
) -> int:
    """Run `num_processes` workers on this machine, and on the other nodes; return 0, or the exit code of the worker that
    caused the failure. `timeout`: seconds to wait for the nodes."""
    # The workers report what is wrong; torchrun's own report would bury it.
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    if num_processes > 1:
        # Unset, every process would use all cores; torchrun itself would set it to 1.
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // num_processes)))
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=nodes.least,
        max_nodes=nodes.most,
        nproc_per_node=num_processes,
        run_id=nodes.engine or uuid.uuid4().hex,
        rdzv_endpoint=nodes.first,
        max_restarts=nodes.restarts,  # torchrun would restart after any failure, a mistake in the settings too
        monitor_interval=0.1,
        # Forwarded to the workers, which save.
        signals_to_handle="SIGTERM,SIGINT,SIGQUIT,SIGUSR1" + ("" if hangup_is_ignored() else ",SIGHUP"),
        **_how_to_meet(nodes, timeout),
    )
    try:
        if nodes.are_fixed:
            from utils.rendezvous import meet_nodes

            store = meet_nodes(nodes, timeout)  # noqa: F841  (serves until the run ends)
        elastic_launch(config, sys.executable)("-u", script, *arguments)
    except ChildFailedError as error:
        return root_cause(error.failures.values())
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    except RendezvousClosedError as error:
        raise LostProcess(f"{nodes.engine}: another node has ended this run; its log says why") from error
    except (RendezvousError, DistError, OSError) as error:
        if not nodes.engine:
            raise
        raise LostProcess(
            f"{nodes.engine}: {counted(nodes.least, 'node')} did not meet at {nodes.first} within {timeout:g} s (DIST.TIMEOUT), or "
            f"lost it ({next(iter(str(error.__cause__ or error).splitlines()), '')}): start this command on every node, open the port"
        ) from error
    return 0


def _how_to_meet(nodes: Nodes, timeout: float) -> dict[str, Any]:
    """Settings of torchrun's for how the nodes find each other."""
    if nodes.are_fixed:
        return {"rdzv_backend": "static", "rdzv_configs": {"rank": nodes.rank, "timeout": timeout}}
    # Up to 60 s pass before a lost node is missed and those that are left do not wait for others.
    # A node that was missed once is never seen again, and the next begins a run of its own. Having waited for others it has
    # been silent for 10 s, on a busy machine longer: torchrun's 3 beats of 5 s are few. More frequent beats keep others out.
    configs = {"join_timeout": max(600, timeout + 60), "last_call_timeout": 10, "keep_alive_max_attempt": 5}
    configs, address = configs | nodes.timing, None
    if nodes.engine:
        from utils.torch_internals import end_restarts_after

        end_restarts_after(lambda failures: root_cause(failures) in FINAL)
        # In a store that torchrun's agents share a node that comes later waits in vain for an address (torch 2.14).
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        configs |= {} if nodes.rank is None else {"is_host": nodes.rank == 0}
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((nodes.hosts[0], nodes.port))  # sends nothing
            address = nodes.hosts[0] if nodes.rank == 0 else probe.getsockname()[0]
    return {"rdzv_backend": "c10d", "rdzv_configs": configs, "local_addr": address}


def root_cause(failures: Collection) -> int:
    """The exit code of the process that took the others down, from torchrun's list of failures.

    When one dies, the others lose their connection and exit with 1, or torchrun ends them, often before it polls: it
    then gives all of them the same second.
    """
    first = min(failure.timestamp for failure in failures)
    codes = [failure.exitcode for failure in failures if failure.timestamp <= first + 1]  # whole seconds
    codes = [code if code > 0 else 128 - code for code in codes]
    consequences = [1, 128 + signal.SIGTERM]
    return min(codes, key=lambda code: consequences.index(code) if code in consequences else -1)

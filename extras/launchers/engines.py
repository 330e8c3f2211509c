"""Starts runs on several nodes where an engine (Kubeflow, SkyPilot, dstack) started this program once per node."""

import contextlib
import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.errors import ConfigError, LostProcess
from utils.launch import launch, number_of, root_cause
from utils.launchers import open_store, port_of
from utils.text import counted

if TYPE_CHECKING:
    from torch.distributed import TCPStore

NODE_PORT = "29500"  # torchrun's default
FINAL = (2, 3, 4)  # exit codes after which a restart would fail in the same way
TORCHRUN = (
    "torchrun --nnodes {} --nproc_per_node gpu --rdzv_id JOB --rdzv_backend c10d --rdzv_endpoint FIRST_NODE:29500 "
    "main_multi_gpu.py ..."
)


@dataclass(frozen=True)
class Nodes:
    """The nodes of a run, as an engine describes them to this node."""

    engine: str
    least: int
    most: int  # if larger than `least`, nodes may join and leave
    rank: int | None  # rank of this node; None: the engine gives no ranks, and nodes are numbered when they meet
    hosts: tuple[str, ...]  # address of the first node, or addresses of all nodes
    port: int
    num_local: int | None = None  # processes per node; None: the engine does not say
    restarts: int = 0  # how often the processes may restart after nodes joined or left
    timing: Mapping[str, str] = field(default_factory=dict)  # timeouts of torchrun's rendezvous

    @property
    def first(self) -> str:
        return f"{self.hosts[0]}:{self.port}"


def find_nodes(environment: Mapping[str, str]) -> Nodes | None:
    """Return the nodes, or None if there is only one node. Raise ConfigError if each node would train its own model."""
    nodes = kubeflow(environment) or skypilot(environment) or dstack(environment)
    if nodes is None:
        refuse_slurm(environment)
        refuse_pbs(environment)
    return nodes


def kubeflow(environment: Mapping[str, str]) -> Nodes | None:
    """Return the nodes of a TrainJob, or of a PyTorchJob with an elasticPolicy, which sets an endpoint but no ranks."""
    endpoint = environment.get("PET_RDZV_ENDPOINT")
    if endpoint:
        host, _, port = endpoint.partition(":")
        environment = environment | {"PET_NODE_RANK": "0", "PET_MASTER_ADDR": host, "PET_MASTER_PORT": port}
    names = ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_NPROC_PER_NODE")
    nodes = _read_nodes(environment, "Kubeflow", *names)
    if nodes and endpoint:
        nodes = replace(nodes, rank=None)
    if nodes and nodes.least < nodes.most:
        restarts = number_of({"PET_MAX_RESTARTS": "100", **environment}, "PET_MAX_RESTARTS")
        timing = dict(re.findall(r"(\w+)=(\w+)", environment.get("PET_RDZV_CONF", "")))
        nodes = replace(nodes, restarts=restarts, timing=timing)
    return nodes


def skypilot(environment: Mapping[str, str]) -> Nodes | None:
    """Return the nodes of a SkyPilot cluster. SkyPilot lists the addresses of all nodes."""
    names = ("SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS", "SKYPILOT_NUM_GPUS_PER_NODE")
    return _read_nodes(environment, "SkyPilot", *names)


def dstack(environment: Mapping[str, str]) -> Nodes | None:
    """Return the nodes of a dstack task."""
    names = ("DSTACK_NODES_NUM", "DSTACK_NODE_RANK", "DSTACK_MASTER_NODE_IP", "DSTACK_GPUS_PER_NODE")
    return _read_nodes(environment, "dstack", *names)


def _read_nodes(
    environment: Mapping[str, str], engine: str, count: str, rank: str, hosts: str, per_node: str
) -> Nodes | None:
    """Return the nodes that an engine's variables describe, or None if this node is the only one."""
    if environment.get(count, "1") == "1":
        return None
    if missing := [name for name in (rank, hosts) if not environment.get(name)]:
        raise ConfigError(
            f"{count} in the environment is {environment[count]}, but {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set: {engine} sets them together; set all, or unset {count} "
            "to train only on this machine"
        )
    numbers = re.fullmatch(r"(\d+)(?::(\d+))?", environment[count])  # 4, or a range such as 2:4
    least, most = (int(numbers[1]), int(numbers[2] or numbers[1])) if numbers else (0, 0)
    own_rank, addresses = number_of(environment, rank), tuple(environment[hosts].split())
    if not 0 < least <= most or not 0 <= own_rank < most or len(addresses) not in (1, most):
        raise ConfigError(
            f"{count} in the environment is {environment[count]!r}, {rank} {own_rank}, and {hosts} has "
            f"{counted(len(addresses), 'address')}, which contradict each other; set ranks from 0 to the number of "
            "nodes - 1, and one address, or one for each node"
        )
    num_local = environment.get(per_node, "")
    if not re.fullmatch(r"\d*|auto|gpu|cpu", num_local):
        raise ConfigError(f"{per_node} in the environment is {num_local!r}; it must be a number of processes, or auto")
    port = port_of(environment.get("PET_MASTER_PORT") or environment.get("MASTER_PORT") or NODE_PORT)
    is_number = num_local.strip("0").isdecimal()
    return Nodes(engine, least, most, own_rank, addresses, port, int(num_local) if is_number else None)


def refuse_slurm(environment: Mapping[str, str]) -> None:
    """Raise ConfigError if Slurm gave the job several nodes but srun did not start this program."""
    nodes = environment.get("SLURM_NNODES", "1")
    if int(nodes) > 1:
        raise ConfigError(
            f"SLURM_NNODES is {nodes}, but srun did not start this program, so it would train only on this node: use "
            f"srun {TORCHRUN.format('$SLURM_NNODES')}; or unset SLURM_NNODES"
        )


def refuse_pbs(environment: Mapping[str, str]) -> None:
    """Raise ConfigError if PBS gave the job several nodes. Only the first node has the file that lists them."""
    path = environment.get("PBS_NODEFILE")
    try:
        count = len(set(Path(path).read_text().split())) if path else 1
    except OSError:
        count = 0
    if count != 1:
        found = f"lists {counted(count, 'node')}" if count else "is a file on another node"
        raise ConfigError(
            f"PBS_NODEFILE {found}, and each node would train its own model: use mpirun, or run on each node "
            f"{TORCHRUN.format(count or 'N')}; or unset PBS_NODEFILE"
        )


def launch_on_node(nodes: Nodes, script: str, arguments: list[str], num_processes: int, timeout: float) -> int:
    """Wait for all nodes, at most `timeout` seconds, and run this node's workers as `launch` does."""
    from torch.distributed import DistError
    from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError

    several = {"run_id": nodes.engine, "min_nodes": nodes.least, "max_nodes": nodes.most, "rdzv_endpoint": nodes.first}
    try:
        if nodes.rank is not None and nodes.least == nodes.most:
            store = meet_nodes(nodes, timeout)  # noqa: F841  (keeps the store open until the run ends)
            several |= {"rdzv_backend": "static", "rdzv_configs": {"rank": nodes.rank, "timeout": timeout}}
        else:
            several |= elastic_settings(nodes, timeout)
        return launch(script, arguments, num_processes, **several)
    except RendezvousClosedError as error:
        raise LostProcess(f"{nodes.engine}: another node has ended this run; see that node's log") from error
    except (RendezvousError, DistError, OSError) as error:
        reason = next(iter(str(error.__cause__ or error).splitlines()), "")
        raise LostProcess(
            f"{nodes.engine}: {counted(nodes.least, 'node')} did not meet at {nodes.first} within {timeout:g} s "
            f"(DIST.TIMEOUT), or lost the connection ({reason}): start this command on every node, and open the port"
        ) from error


def elastic_settings(nodes: Nodes, timeout: float) -> dict[str, Any]:
    """Return torchrun's settings for nodes that may join and leave, or that have no ranks."""
    from utils.torch_internals import end_restarts_after

    end_restarts_after(lambda failures: root_cause(failures) in FINAL)
    # If torchrun's agents share a store, a node that joins later never gets an address (torch 2.14).
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    # join_timeout: nodes may take `timeout` to notice that a node was lost, and then wait up to 60 s more for it.
    # keep_alive_max_attempt: a node that waited for others sent no heartbeat for 10 s, longer on a busy machine. With
    # torchrun's default (3 heartbeats of 5 s) such a node may count as lost; it can then never rejoin, and starts its
    # own run. Rejected: more frequent heartbeats, because they would keep other nodes out.
    configs = {"join_timeout": max(600, timeout + 60), "last_call_timeout": 10, "keep_alive_max_attempt": 5}
    configs |= nodes.timing
    if nodes.rank is not None:
        configs["is_host"] = nodes.rank == 0
    own = {"max_restarts": nodes.restarts, "local_addr": _own_address(nodes)}
    return {"rdzv_backend": "c10d", "rdzv_configs": configs, **own}


def _own_address(nodes: Nodes) -> str | None:
    """Return this node's address for other nodes, or None if there is no route; torchrun then guesses an address."""
    if nodes.rank == 0:
        return nodes.hosts[0]
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((nodes.hosts[0], nodes.port))  # sends nothing
        return probe.getsockname()[0]
    return None


def meet_nodes(nodes: Nodes, timeout: float) -> "TCPStore":
    """Wait for all nodes, and return the store through which they met.

    If nodes contradict each other, raise ConfigError on all of them. If a node is missing, raise LostProcess.
    torchrun's static rendezvous does not name a missing node, and nodes that disagree train wrongly or wait in vain.
    """
    from torch.distributed import DistStoreError

    is_first = nodes.rank == 0
    # torchrun's own store in this process will use the same port and the same server.
    store = open_store(nodes.hosts[0], nodes.port, is_first, timeout)
    if store.check(["met"]):
        raise LostProcess(
            f"{nodes.engine}: an earlier run still uses {nodes.first}; wait until it has ended, and start again"
        )
    contradiction = _contradiction(store, nodes)
    if contradiction:
        store.set("wrong", contradiction)
    places = [f"node {rank}" for rank in range(nodes.least)]
    if contradiction or store.check(places):
        store.set("met", "")  # ends the wait of all nodes
    try:
        store.wait(["met"], timedelta(seconds=timeout))
    except DistStoreError as error:
        missing = [rank for rank, place in enumerate(places) if not store.check([place])]
        where = ", ".join(nodes.hosts[rank] if nodes.hosts[1:] else str(rank) for rank in missing)
        raise LostProcess(
            f"{nodes.engine}: {counted(nodes.least, 'node')} are expected, but these did not reach {nodes.first} "
            f"within {timeout:g} s (DIST.TIMEOUT): {where}; start this command on them too, and open the port"
        ) from error
    if store.check(["wrong"]):
        contradiction = store.get("wrong").decode()
        time.sleep(is_first)  # the first node serves the store, so the others need time to read the text
        raise ConfigError(
            f"{nodes.engine}: {contradiction}; give each node its own rank, and set the same number of nodes on all of them"
        )
    return store


def _contradiction(store: "TCPStore", nodes: Nodes) -> str:
    """Register this node in the store. Return how it contradicts an earlier node, or an empty string."""
    host, place = socket.gethostname(), f"node {nodes.rank}"
    for name, value in (("the number of nodes", str(nodes.least)), (place, host)):
        other = store.compare_set(name, "", value).decode()
        if other != value:
            return f"{host} is {place} of {nodes.least}, but another node says that {name} is {other}"
    return ""

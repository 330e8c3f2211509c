"""Two simulated machines, on which torchrun starts a run."""

import json
from pathlib import Path

from tests.support.forks import MARK, ROOT, find_processes, kill
from tests.support.runs import TORCHRUN, Run, wait_until


class Node:
    """One of two machines on which torchrun starts a run. The same command can start it again."""

    def __init__(self, rank: int, host: tuple[str, str], output: Path, is_elastic: bool, flags: list[str]):
        name, self.cable = host
        self.mark = output / f"node{rank}"
        meet = ["--nnodes", "2", "--node_rank", str(rank), "--master_addr", "10.77.0.1", "--master_port", "29500"]
        if is_elastic:
            conf = f"keep_alive_max_attempt=5,is_host={rank == 0}"
            meet = [
                "--nnodes",
                "1:2",
                "--rdzv_id",
                "17",
                "--rdzv_backend",
                "c10d",
                "--rdzv_endpoint",
                "10.77.0.1:29500",
            ]
            meet += ["--rdzv_conf", conf, "--local-addr", f"10.77.0.{rank + 1}", "--max-restarts", "3"]
        meet += ["--nproc_per_node", "1", "--monitor-interval", "0.1"]
        self.words = [*meet, str(ROOT / "main_multi_gpu.py"), *flags]
        environment = {"GLOO_SOCKET_IFNAME": self.cable, MARK: str(self.mark)}
        environment |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if is_elastic else {}
        self.options = {"environment": environment, "faults": {"enter_network": [name], "start_python_as_forks": []}}

    def start(self) -> Run:
        self.run = Run(TORCHRUN, *self.words, **self.options)
        return self.run

    def kill(self) -> None:
        """Kill the launcher and its processes, as when the machine is lost."""
        kill([self.run.processes[0].pid, *find_processes(self.mark)])


def node_status(output: Path) -> dict:
    path = output / "x" / "status.json"
    return json.loads(path.read_text()) if path.exists() else {}


def assert_done(*runs: Run) -> list[str]:
    """Wait for the runs, and return the output of each."""
    wait_until(lambda: all(process.exitcode == 0 for each in runs for process in each.processes), runs=runs)
    return [each.wait().stdout for each in runs]

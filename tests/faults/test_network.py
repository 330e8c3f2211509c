"""On one machine, processes meet without a network: nothing listens for others, and nothing that others send is run."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.forks import MARK, find_processes
from tests.support.networks import listening, needs_networks
from tests.support.runs import Run, run, run_folder, status_of, wait_until

pytestmark = pytest.mark.slow

NOBODY = 65534


def start(number: int, small_yaml: Path, output: Path, **faults: list) -> Run:
    """Start a run that ends only after a signal. After 30 updates it waits, without using the processor, for `end`."""
    words = ["-ngpus", str(number), "-cfg", str(small_yaml), "-output", str(output), "-epochs", "9000"]
    environment = {MARK: str(output.parent)}
    faults |= {"start_python_as_forks": [], "hold": [str(output.parent), [30]]}
    return Run("main_multi_gpu.py", *words, environment=environment, faults=faults)


def ports_until_training(started: Run, output: Path) -> set[tuple[str, int]]:
    """Return all addresses and ports on which the processes of a run listened before it was at its third update."""
    places = set()

    def trains() -> bool:
        launcher = started.processes[0].pid
        places.update(listening([launcher, *find_processes(output.parent)]))
        (folder,) = output.iterdir() if output.exists() else (None,)
        return folder is not None and (folder / "steps.csv").exists()

    wait_until(trains, runs=[started])
    return places


def end(started: Run, output: Path) -> None:
    """Stop the run, and assert that it saves as usual."""
    (output.parent / "go").touch()
    os.kill(started.processes[0].pid, signal.SIGTERM)
    ended = started.wait()
    assert ended.returncode == 128 + signal.SIGTERM, ended.printed
    assert status_of(run_folder(output))["state"] == "stopped"


@pytest.mark.parametrize("number", [1, 2])
def test_nothing_listens_beyond_the_loopback_interface(small_yaml, tmp_path, number):
    output = tmp_path / "o"
    started = start(number, small_yaml, output)
    places = ports_until_training(started, output)
    end(started, output)
    assert {address for address, _ in places} == ({"127.0.0.1"} if number > 1 else set())


@pytest.mark.long
@needs_networks
@pytest.mark.parametrize("attacker", ["machine", "user"])
def test_attack_on_the_ports_of_a_run_changes_nothing(small_yaml, tmp_path, two_hosts, attacker):
    (victim, _), (other, _) = two_hosts
    output, file = tmp_path / "o", tmp_path / "made by an attacker"
    started = start(2, small_yaml, output, enter_network=[victim])
    ports = {str(port) for _, port in ports_until_training(started, output)}
    where = [str(NOBODY), str(file), "127.0.0.1"] if attacker == "user" else ["0", str(file), "10.77.0.1"]
    network = victim if attacker == "user" else other
    said = run("tests.support.programs.attack", *where, *ports, faults={"enter_network": [network]}).done().stdout
    if "set" in said:
        time.sleep(10)  # the launcher reads its state every 5 seconds
    assert not file.exists() and "set" not in said and "read" not in said
    assert ("denied" in said and "open" in said) if attacker == "user" else "open" not in said
    end(started, output)

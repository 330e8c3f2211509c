"""Several processes of one run: starting them, waiting for them, and looking at what the system says of them."""

import time
from collections.abc import Callable, Hashable
from pathlib import Path

from tests.support.configs import SMALL
from tests.support.forks import DEADLINE
from tests.support.runs import run

TORCHRUN = "torch.distributed.run"  # the module


def launch(module: str, world_size: int, settings: Path, out: Path, *arguments: str) -> dict:
    """What the module saved into `out`."""
    ended = run(module, str(settings), str(out), *arguments, processes=world_size)
    assert ended.codes == [0] * world_size, ended.stderr
    import torch  # late: most tests that start processes need none here

    return torch.load(out, weights_only=True)


def fp64_weights(folder: Path, cases: dict[Hashable, tuple[int, str]]) -> dict[Hashable, dict]:
    """The weights that train_fp64.py comes to, for each case with its number of processes."""
    (folder / "settings.yaml").write_text(SMALL)
    found = {}
    for world_size in {number for number, _ in cases.values()}:
        wanted = {key: case for key, (number, case) in cases.items() if number == world_size}
        words = folder / "settings.yaml", folder / f"{world_size}.pth", *sorted(set(wanted.values()))
        weights = launch("tests.support.programs.train_fp64", world_size, *words)
        found |= {key: weights[case] for key, case in wanted.items()}
    return found


def stat(pid: int) -> list[str]:
    """State, parent and so on of a process, or nothing when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return []


def wait_until(condition: Callable[[], object], seconds: float = DEADLINE):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def alive(pid: int) -> bool:
    return stat(pid)[:1] not in ([], ["Z"], ["X"])

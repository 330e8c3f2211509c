"""main_multi_gpu.py under every launcher, and what happens when a process dies or hangs."""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import main_single_gpu
from datasets import ImageSet
from datasets.batch_order import Order
from engine.checkpoint.resume import global_batch_to_keep
from tests.support.configs import SMALL, small_config
from tests.support.ports import free_port
from tests.support.processes import TORCHRUN, alive, children, start, wait_until
from tests.support.refusals import assert_names
from tests.support.run_hash import run_hash
from tests.support.runs import ROOT, command, run_folder
from utils.program import exit_code


def test_the_flags_for_several_processes_are_refused_where_there_is_one(settings, capsys):
    assert exit_code(main_single_gpu.main, ["-cfg", str(settings), "-world_size", "2"]) == 2
    assert_names(capsys.readouterr().err, "-world_size", "main_multi_gpu.py")


@pytest.mark.parametrize("num_processes", [[4, 2], [2, 4], [4, 3, 1]])
@pytest.mark.parametrize("drop_last", [True, False])
def test_with_other_numbers_of_processes_every_remaining_image_is_seen_once(num_processes, drop_last):
    """An epoch of 203 images in updates of 32, begun by the first number of processes and finished by the others."""
    begun = Order(
        203, 32 // num_processes[0], num_processes[0], 1, drop_last, 3, ImageSet([0] * 203, ["a"]).epoch_order
    )
    seen = []
    for step in range(begun.steps_per_epoch):
        world_size = num_processes[min(step // 2, len(num_processes) - 1)]
        order = dataclasses.replace(begun, world_size=world_size, resumed_global_batch=begun.global_batch)
        pieces = [piece for rank in range(world_size) for piece in order.pieces(step, rank) if piece.num_samples]
        images = np.concatenate([piece.indices for piece in pieces])
        assert (
            sorted(images) == sorted(begun.window(step))
            and max(len(piece.indices) for piece in pieces) <= begun.batch_size
        )
        seen += list(images)
    assert len(set(seen)) == len(seen) == (192 if drop_last else 203)


# Real processes. All runs are of these settings, so that each must end with the same hash.
OPTIONS = (
    "TRAIN.NUM_EPOCHS=6 SAVE_STEPS=10 SAVE_FREQ=1 KEEP_CHECKPOINTS=9 MODEL.DROPPATH=0.2 TRAIN.MODEL_EMA=true".split()
)


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    path = tmp_path_factory.mktemp("settings") / "small.yaml"
    path.write_text(SMALL)
    return path


def arguments(settings: Path, output: Path, *flags: str) -> list[str]:
    return ["-cfg", str(settings), "-output", str(output), *flags, "-opts", *OPTIONS]


@pytest.fixture(scope="module")
def by_flags(tmp_path_factory, settings) -> Path:
    """The folder of a run that -dist_url, -world_size and -rank started."""
    output, port = tmp_path_factory.mktemp("flags"), free_port()
    started = [
        start(
            command(
                "main_multi_gpu.py",
                *["-dist_url", f"tcp://127.0.0.1:{port}", "-world_size", "2", "-rank", str(rank)],
                *arguments(settings, output),
            )
        )
        for rank in (0, 1)
    ]
    said = [process.communicate(timeout=180)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    assert "2 processes on 1 machine, started by the command line" in said[0] and not said[1]
    return run_folder(output)


def test_flags_that_say_which_process_this_is_are_not_saved_as_settings_to_repeat(by_flags):
    text = (by_flags / "config.yaml").read_text()
    assert "TIMEOUT: 1800.0" in text and "tcp://" not in text and "RANK: null" in text and "WORLD_SIZE: null" in text


def test_srun_starts_the_same_run(by_flags, settings, tmp_path):
    fake = [sys.executable, str(ROOT / "tests/support/programs/fake_srun.py"), "--ntasks", "2"]
    flags = arguments(settings, tmp_path / "o")
    process = start([*fake, *command("main_multi_gpu.py", *flags)], SLURM_JOB_ID=str(os.getpid()))
    said, _ = process.communicate(timeout=180)
    assert process.returncode == 0 and "2 processes on 1 machine, started by Slurm (srun)" in said, said
    assert run_hash(run_folder(tmp_path / "o")) == run_hash(by_flags)


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun here (apt-get install openmpi-bin)")
def test_mpirun_starts_the_same_run(by_flags, settings, tmp_path):
    mpirun = ["mpirun", "--oversubscribe", *["--allow-run-as-root"] * (os.getuid() == 0), "-np", "2"]
    process = start([*mpirun, *command("main_multi_gpu.py", *arguments(settings, tmp_path / "o"))])
    said, _ = process.communicate(timeout=180)
    assert process.returncode == 0 and "2 processes on 1 machine, started by Open MPI" in said, said
    assert run_hash(run_folder(tmp_path / "o")) == run_hash(by_flags)


def ranks_of(process: subprocess.Popen) -> dict[int, int]:
    """{rank: pid} of the workers of a launcher."""
    found = {}
    for pid in children(process.pid):
        with contextlib.suppress(OSError):  # it ended just now
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            found |= {int(text[5:]): pid for text in variables if text.startswith(b"RANK=")}
    return found


def saved_step(output: Path) -> int:
    return max((torch.load(path, weights_only=True)["step"] for path in output.glob("*/last.pth")), default=0)


def test_killed_processes_are_started_again_by_torchrun_and_the_run_ends_with_the_same_hash(
    by_flags, settings, tmp_path
):
    """kill -9 of the second of two, and once the run has gone on, of the first."""
    launcher = [*TORCHRUN, "--standalone", "--nproc_per_node", "2", "--max-restarts", "2", "--monitor-interval", "0.1"]
    flags = arguments(settings, tmp_path / "o", "-resume", "auto")
    process = start([*launcher, *command("main_multi_gpu.py", *flags)[1:]])
    killed = []
    for victim in (1, 0):
        before = saved_step(tmp_path / "o")
        wait_until(lambda before=before: saved_step(tmp_path / "o") > before)
        workers = ranks_of(process)
        os.kill(workers[victim], signal.SIGKILL)
        killed += workers.values()
        wait_until(lambda: len(set(ranks_of(process).values()) - set(killed)) == 2, 30)  # noqa: B023
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert said.count("resume: ") == 2 and run_hash(run_folder(tmp_path / "o")) == run_hash(by_flags)
    assert not any(alive(pid) for pid in killed)


def test_a_hung_process_is_named_and_the_run_ends_within_the_timeout(settings, tmp_path):
    timeout = 12
    flags = arguments(settings, tmp_path / "o", "-epochs", "5000", "-ngpus", "2")
    process = start([*command("main_multi_gpu.py", *flags), "TRAIN.NUM_EPOCHS=5000", f"DIST.TIMEOUT={timeout}"])
    wait_until(lambda: saved_step(tmp_path / "o"))
    workers = ranks_of(process)
    os.kill(workers[1], signal.SIGSTOP)
    stopped = time.monotonic()
    said, _ = process.communicate(timeout=60)
    assert time.monotonic() - stopped < timeout + 10, said  # nor left to the launcher, which would take 30 s more
    assert process.returncode != 0
    names = ("process 1 of 2", socket.gethostname(), f"{timeout} s", "DIST.TIMEOUT")
    assert_names(said, *names)
    status = json.loads((run_folder(tmp_path / "o") / "status.json").read_text())
    assert status["state"] == "failed"
    assert_names(status["reason"], *names)
    assert not any(alive(pid) for pid in workers.values())


def test_fewer_processes_go_on_with_the_same_images_an_update(by_flags, settings, tmp_path, capsys):
    """Two processes began, one finishes; the weights are those of two to what sums in another order make."""
    folder = tmp_path / "o" / by_flags.name
    folder.mkdir(parents=True)
    for name in ("config.yaml", "metrics.csv", "metrics.jsonl", "steps.csv", "checkpoint-4.pth"):
        shutil.copy(by_flags / name, folder / name)
    flags = arguments(settings, tmp_path / "o", "-resume", "auto")
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    try:
        code = exit_code(main_single_gpu.main, flags)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    said = capsys.readouterr()
    assert code == 0, said.err
    assert "an epoch is 22 updates of 64 images (32 x 1 processes x 2 micro-batches)" in said.out
    ours, theirs = (torch.load(each / "last.pth", weights_only=True) for each in (folder, by_flags))
    assert ours["step"] == theirs["step"] == 6 * 22
    assert (
        max((ours["state_dict"][name] - theirs["state_dict"][name]).abs().max() for name in ours["state_dict"]) < 0.02
    )
    # Who gives another batch size has done the sum anew; a file of another system's says nothing of it.
    assert global_batch_to_keep(small_config(tmp_path), ours) == 64
    assert global_batch_to_keep(small_config(tmp_path, "DATA.BATCH_SIZE=16"), ours) is None
    assert global_batch_to_keep(small_config(tmp_path), {"config": ours["config"]}) is None


def can_make_networks() -> bool:
    tools = shutil.which("ip") and shutil.which("unshare")
    return bool(tools) and subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode == 0


@pytest.fixture
def two_hosts():
    """Two network namespaces with a cable between them: as two machines, but for the name and the disk."""
    names, here = [f"halfstep{os.getpid()}{letter}" for letter in "ab"], os.getpid()
    cables = [f"hs{here}{letter}"[-14:] for letter in "ab"]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
        for number, (name, cable) in enumerate(zip(names, cables, strict=True), start=1):
            ip("link", "set", cable, "netns", name)
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", cable)
            ip("-n", name, "link", "set", cable, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield list(zip(names, cables, strict=True))
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.mark.skipif(not can_make_networks(), reason="network namespaces need root and ip (apt-get install iproute2)")
def test_torchrun_on_two_machines_makes_the_same_run(by_flags, settings, tmp_path, two_hosts):
    flags = arguments(settings, tmp_path / "o")
    started = []
    for number, (name, cable) in enumerate(two_hosts, start=1):
        # Both bear this machine's name, by which torchrun would know which of them it is to meet on.
        here = ["--rdzv_conf", f"is_host={number == 1}", "--local-addr", f"10.77.0.{number}"]
        rendezvous = ["--rdzv_id", "17", "--rdzv_backend", "c10d", "--rdzv_endpoint", "10.77.0.1:29500"]
        torchrun = [*TORCHRUN, "--nnodes", "2", "--nproc_per_node", "1", *rendezvous, *here]
        worker = command("main_multi_gpu.py", *flags)[1:]
        started.append(start(["ip", "netns", "exec", name, *torchrun, *worker], GLOO_SOCKET_IFNAME=cable))
    said = [process.communicate(timeout=180)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    assert run_hash(run_folder(tmp_path / "o")) == run_hash(by_flags)

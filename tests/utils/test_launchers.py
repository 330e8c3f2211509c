"""main_multi_gpu.py as a worker of every launcher, and what happens when a process does not come, dies or hangs."""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import main_single_gpu
from datasets import ImageSet
from datasets.batch_order import Order
from engine.checkpoint.resume import global_batch_to_keep
from tests.support.configs import SMALL, small_config
from tests.support.processes import TORCHRUN, alive, children, free_port, start, wait_until
from tests.support.run_hash import run_hash
from tests.support.runs import ROOT, command, run_folder
from utils import distributed
from utils.errors import ConfigError, exit_code
from utils.launch.launch_env import Asked, Place, find_place, first_host
from utils.launch.rendezvous import Meeting

SLURM = {"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "gpu[07-08,11],login"}
SLURM_TASK = SLURM | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
INTEL_MPI = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MASTER_ADDR": "a", "MASTER_PORT": "5"}
TORCHELASTIC = {"TORCHELASTIC_RUN_ID": "x", "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
VARIABLES = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "head", "MASTER_PORT": "77"}


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node01", "node01"),
        ("node[01-03,7],gpu5", "node01"),
        ("gpu5,node[01-03]", "gpu5"),
        ("rack[2-3]n[4,6-9].cluster", "rack2n4.cluster"),
        ("a-[12]-ib,b", "a-12-ib"),
    ],
)
def test_the_first_host_of_slurms_list_of_nodes(nodes, host):
    assert first_host(nodes) == host


@pytest.mark.parametrize("nodes", ["", ",", "node[", "[]", "node[1-2", "a b"])
def test_what_is_no_list_of_nodes_is_refused(nodes):
    with pytest.raises(ConfigError, match="SLURM_JOB_NODELIST"):
        first_host(nodes)


@pytest.mark.parametrize(
    ("environment", "launcher", "numbers", "host"),
    [
        (SLURM_TASK, "Slurm", (1, 4, 0), "gpu07"),
        (SLURM, "Slurm", (1, 4, 0), "gpu07"),
        (SLURM_TASK | {"SLURM_STEP_NODELIST": "gpu08"}, "Slurm", (1, 4, 0), "gpu08"),
        (SLURM_TASK | {"MASTER_ADDR": "other"}, "Slurm", (1, 4, 0), "other"),
        (SLURM_TASK | {"RANK": "1", "WORLD_SIZE": "4"}, "Slurm", (1, 4, 0), "gpu07"),  # as many scripts export them
        (SLURM_TASK | {"RANK": "9"}, "Slurm", (1, 4, 0), "gpu07"),  # a common name, without WORLD_SIZE nobody's
        (OPEN_MPI, "Open MPI", (1, 2, 1), "127.0.0.1"),
        (SLURM_TASK | OPEN_MPI, "Open MPI", (1, 2, 1), "gpu07"),  # Slurm's variables are those of mpirun's own helpers
        (INTEL_MPI, "MPI", (3, 4, 1), "a"),
        (SLURM_TASK | {"PMI_RANK": "1", "PMI_SIZE": "4"}, "MPI", (1, 4, None), "gpu07"),  # srun --mpi=pmi2
        (VARIABLES, "variables", (1, 2, None), "head"),
        (TORCHELASTIC, "torchrun", (5, 8, 1), ""),
        (SLURM_TASK | OPEN_MPI | TORCHELASTIC, "torchrun", (5, 8, 1), ""),  # whoever started torchrun
    ],
)
def test_every_launchers_variables_are_read(environment, launcher, numbers, host):
    place = find_place(environment, Asked())
    assert (place.launcher, place.rank, place.world_size, place.local_rank, place.host) == (launcher, *numbers, host)


def test_nobodys_worker_starts_the_others_itself():
    for environment in ({}, {"RANK": "0"}, SLURM | {"ENVIRONMENT": "BATCH", "SLURM_PROCID": "0"}):
        assert find_place(environment, Asked()) is None
    one = SLURM_TASK | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    assert find_place(one, Asked(num_here=2)) is None, "in a shell that srun opened"


def test_every_job_has_a_port_of_its_own_that_all_its_processes_know():
    def port(**more):
        return find_place(SLURM_TASK | more, Asked()).port

    assert port() == port(SLURM_PROCID="0") and 10000 <= port() < 30000
    assert len({port(), port(SLURM_JOB_ID="18"), port(SLURM_STEP_ID="1"), port(MASTER_PORT="99")}) == 4
    assert port(MASTER_PORT="99") == 99


def test_flags_stand_alone_or_fill_in_what_the_launcher_leaves_open():
    place = find_place({}, Asked("tcp://[::1]:99", 4, 2))
    assert (place.rank, place.world_size, place.local_rank, place.host, place.port) == (2, 4, None, "::1", 99)
    assert find_place(SLURM_TASK, Asked("tcp://head:99")).host == "head"
    assert find_place({"MASTER_ADDR": "h", "MASTER_PORT": "8"}, Asked("env://", 4, 2)).port == 8


@pytest.mark.parametrize(
    ("environment", "asked", "message"),
    [
        ({}, Asked("tcp://a:1", 2, 2), "-rank: the command line says 2, but there are 2 processes"),
        ({}, Asked("tcp://a:1", 2), "-rank: not given"),
        ({}, Asked(world_size=2), "-dist_url and -rank: not given"),
        ({}, Asked("a:1", 2, 0), "DIST.URL is 'a:1'; it must be tcp://HOST:PORT"),
        ({}, Asked("tcp://a:b", 2, 0), "DIST.URL is 'tcp://a:b'"),
        ({}, Asked("tcp://a:1", 1, 0), "-world_size: the command line started one process only.*main_single_gpu"),
        (SLURM_TASK, Asked(rank=0), "Slurm .* process 1 of 4, and the command line .* process 0 of 4"),
        (SLURM_TASK | VARIABLES, Asked(), "Slurm .* process 1 of 4, and RANK and WORLD_SIZE .* process 1 of 2; unset"),
        (OPEN_MPI | INTEL_MPI, Asked(), "Open MPI .* process 1 of 2, and MPI .* process 3 of 4"),
        (SLURM_TASK | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, Asked(), "srun --ntasks N.*-ngpus N"),
        (SLURM_TASK | {"SLURM_PROCID": "x"}, Asked(), "SLURM_PROCID in the environment is 'x'"),
        (VARIABLES | {"MASTER_PORT": "x"}, Asked(), "MASTER_PORT in the environment is 'x'"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, Asked(), "MASTER_ADDR: not set"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, Asked(), "MASTER_ADDR: not set.*mpirun -x"),
    ],
)
def test_what_contradicts_or_is_missing_is_told_with_its_remedy(environment, asked, message):
    with pytest.raises(ConfigError, match=message):
        find_place(environment, asked)


def test_a_process_that_is_shown_one_device_takes_it_unless_torchrun_showed_all(monkeypatch):
    monkeypatch.setattr(distributed, "find_devices", lambda setting: ("cuda", 1))
    assert distributed.choose_device("auto", 3, "Slurm") == torch.device("cuda", 0)
    with pytest.raises(ConfigError, match="process 4 of this machine has no cuda device"):
        distributed.choose_device("auto", 3, "torchrun")


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (0, "-world_size: process 1 of 2 did not come to 127.0.0.1:{} within 1 s.*DIST.TIMEOUT"),
        (1, "-dist_url: process 1 could not reach process 0 at 127.0.0.1:{} within 1 s.*DIST.TIMEOUT"),
    ],
)
def test_a_process_that_does_not_come_is_named_in_time(rank, message):
    port = free_port()
    with pytest.raises(ConfigError, match=message.format(port)):
        Meeting(Place("test", rank, 2, None, "127.0.0.1", port), timeout=1.0)


def test_who_meets_without_a_launcher_counts_the_processes_of_its_machine():
    port, meetings = free_port(), {}

    def meet(rank):
        meetings[rank] = Meeting(Place("test", rank, 3, None, "127.0.0.1", port), timeout=60.0)

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [meetings[rank].local_rank for rank in range(3)] == [0, 1, 2]
    # Those that lost each other: the second and third say so, the first does not.
    calls = [threading.Thread(target=meetings[rank].find_silent, args=(0.5,)) for rank in (1, 2)]
    for call in calls:
        call.start()
    for call in calls:
        call.join()
    assert meetings[1].find_silent(0.0) == [0]


def test_a_process_with_a_fault_of_its_own_blames_no_other():
    process = distributed.Process(torch.device("cpu"), 1, 1, 2, _meeting=object())
    error = RuntimeError("CUDA out of memory")
    assert process.explain(error) is error


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[/third_party/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 2000ms for recv", "did not arrive"),
        ("Application timeout caused pair closure", "did not arrive"),
        ("[/third_party/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:80", "broke off"),
    ],
)
def test_whatever_gloo_calls_it_the_silent_process_is_named(text, told):
    meeting = SimpleNamespace(
        timeout=9.0,
        patience=0.1,
        hosts=["a", "b"],
        find_silent=lambda seconds: [1],
        kill=lambda ranks: None,
    )
    process = distributed.Process(torch.device("cpu"), world_size=2, _meeting=meeting)
    assert f"process 1 of 2, on b, {told}" in str(process.explain(RuntimeError(text)))


def test_the_flags_for_several_processes_are_refused_where_there_is_one(settings, capsys):
    assert exit_code(main_single_gpu.main, ["-cfg", str(settings), "-world_size", "2"]) == 2
    assert "use main_multi_gpu.py" in capsys.readouterr().err


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
        order = dataclasses.replace(begun, world_size=world_size, kept=begun.global_batch)
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
    message = f"process 1 of 2, on {socket.gethostname()}, did not arrive within {timeout} s (DIST.TIMEOUT)"
    assert process.returncode != 0 and message in said, said
    status = json.loads((run_folder(tmp_path / "o") / "status.json").read_text())
    assert status["state"] == "failed" and message in status["reason"]
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


@pytest.fixture
def cluster(tmp_path):
    """A PATH on which sbatch runs a script at once, and srun and scontrol write down how they were called."""
    tools = {
        "sbatch": "export SLURM_SUBMIT_DIR=$PWD SLURM_JOB_ID=17 SLURM_NNODES=2 SLURM_GPUS_ON_NODE=8\n"
        'export SLURM_CPUS_PER_TASK=64 SLURM_JOB_NODELIST="gpu[1-2]"; exec bash "$@"',
        "srun": 'echo "srun $*" >> calls; mkdir -p output/train-1-job17\n'
        'echo "$STATUS" > output/train-1-job17/status.json; exit "$CODE"',
        "scontrol": 'echo "scontrol $*" >> calls; [ "$1" = requeue ] || printf "gpu1\\ngpu2\\n"',
    }
    (tmp_path / "bin").mkdir()
    for name, text in tools.items():
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)

    def submit(*flags: str, **environment: str) -> tuple[int, list[str]]:
        (tmp_path / "calls").unlink(missing_ok=True)
        variables = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"} | environment
        script = ["sbatch", str(ROOT / "scripts/train_slurm.sh"), *flags]
        code = subprocess.run(script, cwd=tmp_path, env=variables, capture_output=True).returncode
        calls = tmp_path / "calls"
        return code, calls.read_text().splitlines() if calls.exists() else []

    return submit


def test_the_slurm_script_starts_both_ways_and_queues_again_what_was_told_to_stop(cluster):
    code, calls = cluster("-batch_size", "64", CODE="1", STATUS='{"signal": 10}')
    assert code == 1 and calls[0] == "scontrol show hostnames gpu[1-2]" and calls[2] == "scontrol requeue 17"
    assert "torchrun --nnodes 2 --nproc_per_node 8 " in calls[1] and " --rdzv_endpoint gpu1:29500 " in calls[1]
    assert "SIGUSR1 main_multi_gpu.py " in calls[1] and calls[1].endswith("-resume auto -amp -batch_size 64")
    code, calls = cluster(CODE="138", STATUS='{"signal": 10}', LAUNCHER="srun")
    assert code == 138 and calls[1:] == ["scontrol requeue 17"]
    assert "--ntasks 16 --ntasks-per-node 8 --cpus-per-task 8 python -u main_multi_gpu.py " in calls[0]
    _, limited = cluster(CODE="0", STATUS='{"state": "stopped", "reason": "time limit"}', LAUNCHER="srun")
    assert limited[1:] == ["scontrol requeue 17"]
    assert cluster(CODE="0", STATUS='{"state": "done"}', LAUNCHER="srun") == (0, calls[:1])
    assert cluster(CODE="0", STATUS="", LAUNCHER="mpi") == (2, [])


def test_the_slurm_script_asks_for_the_warning_and_to_be_queued_again():
    lines = (ROOT / "scripts/train_slurm.sh").read_text().splitlines()
    assert {"#SBATCH --signal=USR1@120", "#SBATCH --requeue"} <= set(lines)

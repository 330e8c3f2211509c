"""main_multi_gpu.py under every launcher, and with processes that die or hang."""

import json
import os
import shutil
import socket
import subprocess
from pathlib import Path
from signal import SIGKILL, SIGSTOP

import pytest
import torch

from engine.checkpoint.resume import global_batch_to_keep
from tests.support.configs import small_config
from tests.support.forks import DEADLINE, MARK, ROOT, find_processes
from tests.support.networks import needs_networks
from tests.support.nodes import Node, assert_done, node_status
from tests.support.refusals import assert_names
from tests.support.run_hash import run_hash
from tests.support.runs import (
    TORCHRUN,
    Run,
    command,
    free_port,
    run,
    run_folder,
    run_fresh,
    status_of,
    typed,
    wait_until,
)

pytestmark = pytest.mark.slow


def test_multi_process_flags_are_refused_for_one_process(small_yaml):
    typed("main_single_gpu.py", "-cfg", small_yaml, "-world_size", "2").refused("-world_size", "main_multi_gpu.py")


# Real processes. All runs use these settings, so all must end with the same hash.
OPTIONS = (
    "TRAIN.NUM_EPOCHS=2 DATA.BATCH_SIZE=16 SAVE_STEPS=5 SAVE_FREQ=1 KEEP_CHECKPOINTS=9 MODEL.DROPPATH=0.2 "
    "TRAIN.MODEL_EMA=true".split()
)


def arguments(settings: Path, output: Path, *flags: str) -> list[str]:
    return ["-cfg", str(settings), "-output", str(output), *flags, "-opts", *OPTIONS]


@pytest.fixture(scope="module")
def by_flags(tmp_path_factory, small_yaml) -> Path:
    """Return the folder of a run started with -dist_url, -world_size and -rank."""
    output, url = tmp_path_factory.mktemp("flags"), f"tcp://127.0.0.1:{free_port()}"
    flags = ["-dist_url", url, "-world_size", "2", "-rank"]
    ranks = [Run("main_multi_gpu.py", *flags, str(rank), *arguments(small_yaml, output)) for rank in (0, 1)]
    first, second = assert_done(*ranks)
    assert "2 processes on 1 machine, started by the command line" in first and not second
    return run_folder(output)


@pytest.mark.long
def test_rank_flags_are_not_saved_as_settings(by_flags):
    text = (by_flags / "config.yaml").read_text()
    assert "TIMEOUT: 1800.0" in text and "tcp://" not in text and "WORLD_SIZE" not in text


@pytest.mark.long
@pytest.mark.parametrize("program", ["main_single_gpu.py", "main_multi_gpu.py"])
def test_main_program_ignores_an_installed_package_named_datasets(program, small_yaml, tmp_path):
    stub = tmp_path / "site" / "datasets"
    stub.mkdir(parents=True)
    (stub / "__init__.py").write_text("raise ImportError('this is the public package')")
    options = {"cwd": tmp_path, "environment": {"PYTHONPATH": str(tmp_path / "site")}}
    words = ["-cfg", str(small_yaml), "-output", str(tmp_path / "o"), "-epochs", "1", "-batch_size", "160"]
    if program == "main_single_gpu.py":
        run(program, *words, **options, faults={"forget_our_modules": []}).done()
    else:
        run_fresh(program, *words, "-ngpus", "2", **options).done()


@pytest.mark.long
def test_run_that_starts_its_processes_itself_matches_run_started_by_flags(by_flags, small_yaml, tmp_path):
    flags = arguments(small_yaml, tmp_path, "-ngpus", "2")
    run("main_multi_gpu.py", *flags, faults={"start_python_as_forks": []}).done()
    folder = run_folder(tmp_path)
    assert run_hash(folder) == run_hash(by_flags)
    assert all((folder / f"log_{rank}.txt").stat().st_size > 0 for rank in (0, 1))


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun here (apt-get install openmpi-bin)")
def test_run_started_by_mpirun_matches_run_started_by_flags(by_flags, small_yaml, tmp_path):
    mpirun = ["mpirun", "--oversubscribe", *["--allow-run-as-root"] * (os.getuid() == 0), "-np", "2"]
    program = command("main_multi_gpu.py", *arguments(small_yaml, tmp_path / "o"))
    ended = subprocess.run([*mpirun, *program], capture_output=True, text=True, timeout=DEADLINE)
    assert ended.returncode == 0 and "2 processes on 1 machine, started by Open MPI" in ended.stdout, ended
    assert run_hash(run_folder(tmp_path / "o")) == run_hash(by_flags)


@pytest.mark.long
def test_run_restarted_by_torchrun_after_kills_matches_unbroken_run(by_flags, small_yaml, tmp_path):
    """Kill the second of two processes with kill -9, and after the restart the first."""
    kills = [{"signal_at": [7, SIGKILL, [1]]}, {"signal_at": [17, SIGKILL, [0]]}, {}]
    launcher = ["--standalone", "--nproc_per_node", "2", "--max-restarts", "2", "--monitor-interval", "0.1"]
    worker = ["-m", "tests.support.programs.faulty", json.dumps(kills), str(ROOT / "main_multi_gpu.py")]
    flags = arguments(small_yaml, tmp_path / "o", "-resume", "auto", "--local-rank=0")
    launched = Run(
        TORCHRUN, *launcher, *worker, *flags, environment={MARK: str(tmp_path)}, faults={"start_python_as_forks": []}
    )
    (said,) = assert_done(launched)
    assert said.count("resume: ") == 2 and run_hash(run_folder(tmp_path / "o")) == run_hash(by_flags)
    assert not find_processes(tmp_path)


@pytest.mark.long
def test_hung_process_is_killed_within_the_timeout(small_yaml, tmp_path):
    flags = ["-cfg", str(small_yaml), "-output", str(tmp_path), "-opts", "DIST.TIMEOUT=20"]
    ended = run("main_multi_gpu.py", *flags, processes=2, faults={"signal_at": [2, SIGSTOP, [1]]})
    assert ended.codes == [1, -SIGKILL]
    names = ("process 1 of 2", socket.gethostname(), "20 s", "DIST.TIMEOUT")
    assert_names(ended.stderr, *names)
    status = status_of(run_folder(tmp_path))
    assert status["state"] == "failed"
    assert_names(status["reason"], *names)


@pytest.mark.usefixtures("signal_handlers")
def test_fewer_processes_continue_with_the_same_global_batch(small_yaml, tmp_path):
    """Two processes start, one finishes. The weights equal those of two processes, up to the order of sums."""
    flags = [*arguments(small_yaml, tmp_path / "two"), "MODEL.DROPPATH=0"]  # drop path differs between processes
    run("main_multi_gpu.py", *flags, processes=2).done()
    unbroken = run_folder(tmp_path / "two")
    folder = tmp_path / "one" / unbroken.name
    folder.mkdir(parents=True)
    for name in ("config.yaml", "metrics.csv", "metrics.jsonl", "steps.csv", "checkpoint-1.pth"):
        shutil.copy(unbroken / name, folder / name)
    flags = [*arguments(small_yaml, tmp_path / "one", "-resume", "auto"), "MODEL.DROPPATH=0"]
    said = typed("main_single_gpu.py", *flags).done().stdout
    assert "an epoch is 11 updates of 32 images (16 x 1 process x 2 micro-batches)" in said
    ours, theirs = (torch.load(path / "last.pth", weights_only=True) for path in (folder, unbroken))
    assert ours["step"] == theirs["step"] == 2 * 11
    for key in ("state_dict", "state_dict_ema"):
        for name, weight in theirs[key].items():  # another order of the images changes weights by 1e-2
            torch.testing.assert_close(ours[key][name], weight, rtol=0, atol=1e-4, msg=f"{key}: {name}")
    # A user who sets a batch size wants that one. A file of another program has no batch size.
    assert global_batch_to_keep(small_config(tmp_path, "DATA.BATCH_SIZE=16"), ours) == 32
    assert global_batch_to_keep(small_config(tmp_path), ours) is None
    assert global_batch_to_keep(small_config(tmp_path), {"config": ours["config"]}) is None


@pytest.mark.long
def test_elastic_run_on_one_node_uses_full_global_batch(small_yaml, tmp_path):
    one = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "PET_NNODES": "1:2"}
    for flags in ([], ["-check", "-check_images", "10"]):
        said = run("main_multi_gpu.py", *arguments(small_yaml, tmp_path, *flags), environment=one).done().stdout
        assert "11 updates of 32 images" in said and ("16 x 1 process x 2 micro-batches" in said or flags)


@pytest.mark.long
@needs_networks
@pytest.mark.parametrize("lost", [0, 1])
def test_run_resumed_by_restarted_nodes_matches_unbroken_run(by_flags, small_yaml, tmp_path, two_hosts, lost):
    flags = arguments(small_yaml, tmp_path / "o", "-name", "x", "-resume", "auto")
    nodes = [Node(rank, host, tmp_path, False, flags) for rank, host in enumerate(two_hosts)]
    started = [node.start() for node in nodes]
    wait_until(lambda: node_status(tmp_path / "o").get("step", 0) >= 5)
    nodes[lost].kill()
    assert started[1 - lost].wait().codes == [1], "exit code 1: restarting both can fix it"
    assert_done(*[node.start() for node in nodes])
    assert run_hash(tmp_path / "o" / "x") == run_hash(by_flags)

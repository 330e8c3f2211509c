"""The rank of a process, from every launcher's environment variables and from the flags."""

import logging
import os
import shlex
import subprocess
import sys
import tempfile

import pytest

from configs.load import load
from tests.support.cases import cases_of, names_of, value_of
from tests.support.forks import ROOT
from tests.support.modules import imported_at_the_top
from tests.support.refusals import refused
from utils.errors import ConfigError
from utils.launch import (
    STORE_FILE,
    LaunchedRank,
    check_single_node,
    find_launched_rank,
    launch,
    rank_in_environment,
)


def environment_of(words: str) -> dict[str, str]:
    """Return the variables of a shell command such as "RANK=0 WORLD_SIZE=2 -ngpus 1"."""
    return dict(word.split("=", 1) for word in shlex.split(words, comments=True) if "=" in word)


def launched_rank_of(words: str) -> str:
    """Return the rank in the variables of a launcher as text, after assertions that hold for every launcher."""
    environment = environment_of(words)
    launched = find_launched_rank(environment)
    if launched:
        assert launched.parent_is_launcher == (launched.launcher in ("torchrun", "Open MPI"))
        assert rank_in_environment(environment) == launched.rank, "only one process may report a mistake"
    return described(launched)


def described(launched: LaunchedRank | None) -> str:
    if launched is None:
        return "None"
    ranks = f"{launched.rank} of {launched.world_size}, local {launched.local_rank} of {launched.local_size}"
    ends = f"restart {launched.restart_count}, at most {launched.max_world_size}"
    return f"{launched.launcher}: {ranks}, at {launched.host}:{launched.port}, {ends}"


TORCHELASTIC = {"TORCHELASTIC_RUN_ID": "x", "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
SLURM = {"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "gpu[07-08,11],login"}
SLURM_TASK = SLURM | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0"}


@pytest.mark.parametrize("words", cases_of("launchers"))
def test_rank_is_read_from_the_variables_of_every_launcher(words):
    assert launched_rank_of(words) == value_of("launchers", words)


def test_run_of_one_process_imports_no_launcher():
    names = imported_at_the_top(ROOT / "main_single_gpu.py") | imported_at_the_top(ROOT / "utils/distributed.py")
    assert not {"utils.launch", "utils.rendezvous"} & names
    assert "utils.rendezvous" not in imported_at_the_top(ROOT / "main_multi_gpu.py"), "it imports torch"


def test_torchrun_restart_count_is_read_from_its_variable():
    """The restarted processes meet in the same store."""
    for count in ("0", "2"):
        launched = find_launched_rank(TORCHELASTIC | {"TORCHELASTIC_RESTART_COUNT": count})
        assert launched.restart_count == int(count)


def test_file_of_another_launcher_is_not_where_processes_meet():
    """A worker passes its variables on, for example to a shell in which somebody starts torchrun."""
    assert find_launched_rank(TORCHELASTIC | {STORE_FILE: "/tmp/halfstep-1/y"}).file == ""
    assert find_launched_rank(TORCHELASTIC | {STORE_FILE: "/tmp/halfstep-1/x"}).file == "/tmp/halfstep-1/x"


def test_start_without_a_folder_for_temporary_files_names_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    monkeypatch.setattr(logging.getLogger("torch.distributed"), "level", logging.WARNING)  # which a launch changes
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with refused(ConfigError, "TMPDIR", "No such file"):
        launch("main_multi_gpu.py", [], 2)


@pytest.mark.long
def test_processes_meet_in_a_folder_of_their_user_that_is_removed(tmp_path):
    """The launcher and torchrun leave no files behind."""
    script, temporary = tmp_path / "script.py", tmp_path / "temporary files"
    script.write_text(
        "import os\nfrom pathlib import Path\n"
        f"store = Path(os.environ['{STORE_FILE}'])\nfolder = store.parent\n"
        "line = f'{store.stat().st_mode:#o} {folder.stat().st_mode:#o} {folder.parent}\\n'\n"
        "os.write(1, line.encode())"  # in one piece, because both processes print at the same time
    )
    temporary.mkdir()
    start = "import sys; from utils.launch import launch; sys.exit(launch(sys.argv[1], [], 2))"
    environment = os.environ | {"TMPDIR": str(temporary)}
    words = [sys.executable, "-c", start, script]
    ended = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, f"0o100700 0o40700 {temporary}\n" * 2), ended.stderr
    assert not [*temporary.glob("halfstep*"), *temporary.glob("torchelastic*")]


@pytest.mark.parametrize(
    ("words", "range_", "most"),
    [("", "", 0), ("", "2", 0), ("", "1:4", 16), ("--nnodes 1:3 caf\udce9", "2", 12), ("--nnodes=2", "1:4", 0)],
)
def test_elastic_maximum_of_processes_comes_from_torchrun(words, range_, most):
    environment = TORCHELASTIC | {"GROUP_WORLD_SIZE": "2", "PET_NNODES": range_}
    ask = f"from utils.launch import *; print(find_launched_rank({environment}).max_world_size)"
    launcher = ["sh", "-c", 'python="$1"; "$python" -c "$2"; :', "sh", sys.executable, ask, *words.split(), "main.py"]
    assert subprocess.run(launcher, cwd=ROOT, capture_output=True, text=True).stdout == f"{most}\n"


def test_launch_flags_work_alone_or_with_launcher_variables():
    launched = find_launched_rank({}, "tcp://[::1]:99", 4, 2)
    assert launched == LaunchedRank("the command line", 2, 4, None, "::1", 99)
    assert find_launched_rank({"MASTER_ADDR": "h", "MASTER_PORT": "8"}, "env://", 4, 2).port == 8


@pytest.mark.parametrize("words", cases_of("mistakes-of_launchers"))
def test_contradictory_or_missing_launch_variables_are_refused(words):
    environment = environment_of(words)
    config = load([word for word in shlex.split(words) if "=" not in word], needs_file=False).config
    with refused(ConfigError, *names_of("mistakes-of_launchers", words)):
        find_launched_rank(environment, config.DIST.URL, config.DIST.WORLD_SIZE, config.DIST.RANK, config.NGPUS)


def test_process_without_launcher_variables_is_not_taken_for_a_rank():
    for environment in ({}, {"RANK": "0"}, {"SLURM_PROCID": "0", "ENVIRONMENT": "BATCH"}):
        assert find_launched_rank(environment) is None
    assert rank_in_environment({"RANK": "3"}) == 0, "otherwise no process reports the mistake"


@pytest.mark.parametrize("words", ["SLURM_NNODES=2", "PET_NNODES=1:2", "SKYPILOT_NUM_NODES=2", "DSTACK_NODES_NUM=2"])
def test_start_without_a_launcher_on_several_nodes_is_refused(words):
    with refused(ConfigError, *words.split("=")):
        check_single_node(environment_of(words))
    check_single_node({"SLURM_NNODES": "1", "PET_NNODES": "1"})


# --- Slurm


def test_slurm_job_script_is_not_taken_for_a_rank():
    assert find_launched_rank(SLURM | {"ENVIRONMENT": "BATCH", "SLURM_PROCID": "0"}) is None
    assert rank_in_environment(SLURM_TASK | {"SLURM_PROCID": "x"}) == 0, "otherwise no process reports the mistake"
    one = SLURM_TASK | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    assert find_launched_rank(one, num_local=2) is None, "as in a shell opened by srun"


def test_all_processes_of_a_slurm_job_share_its_port():
    def port(**more):
        return find_launched_rank(SLURM_TASK | more).port

    assert port() == port(SLURM_PROCID="0") and 10000 <= port() < 30000
    assert len({port(), port(SLURM_JOB_ID="18"), port(SLURM_STEP_ID="1"), port(MASTER_PORT="99")}) == 4
    assert port(MASTER_PORT="99") == 99


def test_address_in_the_flags_overrides_address_of_the_job():
    assert find_launched_rank(SLURM_TASK, "tcp://head:99").host == "head"


def test_processes_share_all_cores_where_none_are_bound(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)  # macOS has no such function
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", lambda *_: lambda *_: None)
    monkeypatch.setattr(os, "environ", {})
    assert launch("program.py", [], 2) == 0
    assert os.environ["OMP_NUM_THREADS"] == "3"

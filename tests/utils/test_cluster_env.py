"""The ranks from srun and mpirun, by their environment variables."""

import shlex

import pytest

from configs.load import load
from tests.support.cases import cases_of, names_of, value_of
from tests.support.launch_variables import environment_of, launched_rank_of
from tests.support.refusals import refused
from utils.errors import ConfigError
from utils.launch import LaunchOptions, find_launched_rank, rank_in_environment

SLURM = {"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "gpu[07-08,11],login"}
SLURM_TASK = SLURM | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0"}


@pytest.mark.parametrize("words", cases_of("launchers-launchers"))
def test_rank_is_read_from_variables_of_every_launcher(words):
    assert launched_rank_of(words) == value_of("launchers-launchers", words)


@pytest.mark.parametrize("words", cases_of("launchers-mistakes_of_launchers"))
def test_contradictory_or_missing_launcher_variables_are_refused(words):
    environment = environment_of(words)
    start = load([word for word in shlex.split(words) if "=" not in word], needs_file=False).config.START
    with refused(ConfigError, *names_of("launchers-mistakes_of_launchers", words)):
        find_launched_rank(environment, LaunchOptions(start.URL, start.WORLD_SIZE, start.RANK, start.NGPUS))


def test_slurm_job_script_is_not_taken_for_a_rank():
    assert find_launched_rank(SLURM | {"ENVIRONMENT": "BATCH", "SLURM_PROCID": "0"}) is None
    assert rank_in_environment(SLURM_TASK | {"SLURM_PROCID": "x"}) == 0, "otherwise no process reports the mistake"
    one = SLURM_TASK | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    assert find_launched_rank(one, LaunchOptions(num_local=2)) is None, "as in a shell opened by srun"


def test_all_processes_of_a_slurm_job_share_its_port():
    def port(**more):
        return find_launched_rank(SLURM_TASK | more).port

    assert port() == port(SLURM_PROCID="0") and 10000 <= port() < 30000
    assert len({port(), port(SLURM_JOB_ID="18"), port(SLURM_STEP_ID="1"), port(MASTER_PORT="99")}) == 4
    assert port(MASTER_PORT="99") == 99


def test_address_in_the_flags_overrides_address_of_the_job():
    assert find_launched_rank(SLURM_TASK, LaunchOptions("tcp://head:99")).host == "head"

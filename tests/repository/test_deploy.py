"""The commands in the files of deploy/ start torchrun with flags that halfstep knows.

tests/release/test_deploy.py parses the files with the packages of their engines.
"""

import os
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

from configs.load import load
from tests.support.modules import ROOT

DEPLOY = ROOT / "deploy"


def documents(name: str) -> list[dict]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


# The variables that each engine sets on the second of two nodes.
VARIABLES = {
    "trainjob.yaml": {
        "NNODES": "2",
        "NPROC_PER_NODE": "8",
        "NODE_RANK": "1",
        "MASTER_ADDR": "n0",
        "MASTER_PORT": "29500",
    },
    "skypilot.yaml": {"NUM_NODES": "2", "NUM_GPUS_PER_NODE": "8", "NODE_RANK": "1", "NODE_IPS": "n0\nn1"},
    "dstack.yml": {"NODES_NUM": "2", "GPUS_PER_NODE": "8", "NODE_RANK": "1", "MASTER_NODE_IP": "n0"},
}
PREFIXES = {"trainjob.yaml": "PET_", "skypilot.yaml": "SKYPILOT_", "dstack.yml": "DSTACK_"}


def shell_command(name: str) -> str:
    task = documents(name)[-1]
    if name == "trainjob.yaml":
        return shlex.join([*task["spec"]["trainer"]["command"], *task["spec"]["trainer"]["args"]])
    return task["run"] if name == "skypilot.yaml" else task["commands"][0]


def arguments_of_torchrun(name: str, folder: Path, variables: dict[str, str]) -> list[str]:
    """Run the command of a file with a torchrun that only prints its arguments."""
    stub = folder / ".venv/bin/torchrun"
    stub.parent.mkdir(parents=True)
    stub.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    stub.chmod(0o755)
    environment = {"PATH": f"{stub.parent}:{os.environ['PATH']}"} | variables
    words = ["sh", "-c", shell_command(name)]
    return subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, check=True
    ).stdout.splitlines()


@pytest.mark.parametrize("name", VARIABLES)
def test_deployment_command_starts_torchrun_on_each_node(name, tmp_path, monkeypatch):
    variables = {PREFIXES[name] + key: value for key, value in VARIABLES[name].items()}
    for key, value in variables.items():
        monkeypatch.setenv(key, value)  # torchrun itself reads PET_*
    words = get_args_parser().parse_args(arguments_of_torchrun(name, tmp_path, variables))
    assert (words.nnodes, words.nproc_per_node, int(words.node_rank)) == ("2", "8", 1)
    assert (words.master_addr, int(words.master_port), words.training_script) == ("n0", 29500, "main_multi_gpu.py")
    monkeypatch.chdir(ROOT)
    config = load(words.training_script_args).config
    assert (config.MODEL.RESUME, config.NAME, config.SAVE) == ("auto", "exp1", "/shared/output")

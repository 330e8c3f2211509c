"""timm's pretrained weights by the name of a model, from its cache or the network."""

import os

import timm
import torch
from huggingface_hub import constants, snapshot_download
from huggingface_hub.utils import get_session

from models.formats.common import Weights
from models.pretrained.timm_tags import pretrained_cfg, timm_name
from utils.errors import ConfigError

PATIENCE = 5.0  # seconds until a server counts as out of reach


def fetch(source: str) -> Weights:
    """timm's pretrained weights of that name, loaded by timm from the network or its cache."""
    known, name = pretrained_cfg(source), timm_name(source)
    # timm reads some of its older files without weights_only; with this, torch does so nowhere in this process.
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    repository = known.get("hf_hub_id")
    try:
        _check_network(repository)
        # Elsewhere than on the model's device, and without moving the random numbers on.
        with torch.device("cpu"), torch.random.fork_rng(devices=[]):
            state = timm.create_model(name, pretrained=True).state_dict()
    except Exception as error:  # of whichever library downloads
        address = f" (from {constants.ENDPOINT}/{repository})" if repository else ""
        raise ConfigError(
            f"the weights of {name} could not be fetched ({type(error).__name__}: {str(error).splitlines()[0]}). "
            f"Without a network, fetch them on another machine{address} and give the file: -pretrained path/to/model.safetensors"
        ) from None
    return Weights(state)


def _check_network(repository: str | None) -> None:
    """Raise the error of a server out of reach, unless the weights are cached: the hub would try again for a minute."""
    if repository:
        try:
            get_session().head(constants.ENDPOINT, timeout=PATIENCE)
        except Exception as error:  # of whichever library the hub uses
            try:
                snapshot_download(repository, local_files_only=True)
            except OSError:
                raise error from None

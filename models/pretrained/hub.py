"""timm's pretrained weights by the name of a model, from its cache or the network."""

import os

import timm
import torch
from huggingface_hub import constants, snapshot_download
from huggingface_hub.utils import get_session
from torch import Tensor

from models.formats.files import SUFFIXES
from utils.errors import ConfigError, did_you_mean

PATIENCE = 5.0  # seconds until a server counts as out of reach


def fetch(name: str) -> dict[str, Tensor]:
    """timm's pretrained weights of that name, loaded by timm from the network or its cache."""
    nearest = did_you_mean(name, timm.list_pretrained() if "." in name else timm.list_models())
    if not timm.is_model(name):
        tried = f"no file at {name}, nor with {', '.join(SUFFIXES)} added"
        raise ConfigError(f"{tried}, and timm has no model of this name{nearest}")
    if not timm.models.is_model_pretrained(name):
        raise ConfigError(
            f"timm has no pretrained weights of {name}{nearest or '; start from random weights without it'}"
        )
    # timm reads some of its older files without weights_only; with this, torch does so nowhere in this process.
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    repository = timm.get_pretrained_cfg(name).hf_hub_id
    try:
        _check_network(repository)
        # Elsewhere than on the model's device, and without moving the random numbers on.
        with torch.device("cpu"), torch.random.fork_rng(devices=[]):
            return timm.create_model(name, pretrained=True).state_dict()
    except Exception as error:  # of whichever library downloads
        address = f" (from {constants.ENDPOINT}/{repository})" if repository else ""
        raise ConfigError(
            f"the weights of {name} could not be fetched ({type(error).__name__}: {str(error).splitlines()[0]}). "
            f"Without a network, fetch them on another machine{address} and give the file: -pretrained path/to/model.safetensors"
        ) from None


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

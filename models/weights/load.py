"""Loads pretrained weights from a file or timm's hub: adapts them to the model, or refuses them."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from unicodedata import normalize

import torch
from torch import Tensor, nn

from models.parts import classifier_names
from models.weights.files import find_file, read_weights
from models.weights.metadata import ARCHITECTURE, classes_of_weights
from models.weights.state import Weights
from models.weights.timm_tags import is_imagenet_by_other_names, pretrained_cfg, timm_name
from utils.errors import ConfigError
from utils.text import counted, first_of


def differences(record: dict, settings: dict, keys: Sequence[str]) -> list[str]:
    """Which of these settings differ from those that the weights were trained with, where the file says."""
    saved = record.get("config", {})
    is_label = settings["MODEL.TYPE"] == saved.get("MODEL.TYPE") == "vit"  # MODEL.NAME
    return [
        f"{key}: {saved[key]} in the file, {settings[key]} here"
        for key in keys
        if key in saved and saved[key] != settings[key] and not (is_label and key == "MODEL.NAME")
    ]


def load_pretrained(
    model: nn.Module,
    source: str,
    setting: str = "MODEL.PRETRAINED",
    needs_head: bool = False,
    classes: Sequence[str] = (),
    settings: dict | None = None,
) -> list[str]:
    """Load a file, or else the timm model of that name. Returns what to tell the user, a line each.

    `needs_head`: weights whose classifier does not fit are refused, as they are of no use without further training.
    `classes`: the class of each output of the model, to be found in a file that names its classes.
    `settings`: those of the model by their full names, for the message about another architecture.
    """
    try:
        path = find_file(source)
        weights = read_weights(path) if path else fetch(source)
        if "class_names" not in weights.record and not is_imagenet_by_other_names(classes):
            weights = weights._replace(record=weights.record | {"class_names": classes_of_weights(source)})
        first = f"{setting}: weights of {path or source}{f' ({weights.key})' if weights.key else ''}"
        return [first, *_load(model, weights, needs_head, classes, settings)]
    except ConfigError as error:
        raise ConfigError(f"{setting}: {error}") from None


def _load(
    model: nn.Module, weights: Weights, needs_head: bool, classes: Sequence[str], settings: dict | None
) -> list[str]:
    # Resizing in the half precision of a file would round what the model keeps in fp32.
    half = (torch.float16, torch.bfloat16)
    state = {name: tensor.float() if tensor.dtype in half else tensor for name, tensor in weights.state.items()}
    heads = classifier_names(model)
    by_name = [] if needs_head else _match_heads(model, state, heads, weights.record.get("class_names"), classes)
    lines = _drop_heads(model, state, [head for head in heads if f"{head}.weight" in state or not by_name])
    if lines and needs_head:
        raise ConfigError(
            f"there is nothing to evaluate: {lines[0].strip()}; set -num_classes to what the weights have"
        )
    lines += by_name
    state = _fit_image_size(model, state, lines)
    _fit_channels(model, state, lines)
    changed = differences(weights.record, settings, ARCHITECTURE) if settings else []
    _check_same_architecture(model, state, heads, changed)
    model.load_state_dict(state, strict=False)
    return lines


def _match_heads(
    model: nn.Module, state: dict[str, Tensor], heads: list[str], theirs: list[str] | None, mine: Sequence[str]
) -> list[str]:
    """Order the rows of the classifiers by the names of the classes. Returns a line; none if the file names no classes.

    A new class gets the mean of the rows that are taken over: its logit is then never the largest, so at the start the
    model classifies images of the known classes as before. Without a known class the heads are dropped.
    """
    heads = [head for head in heads if f"{head}.weight" in state and len(state[f"{head}.weight"]) >= len(theirs or ())]
    if not (theirs and mine and heads) or not all(isinstance(name, str) for name in theirs):
        return []
    theirs, mine = ([normalize("NFC", name) for name in names] for names in (theirs, mine))  # a Mac writes ä as two
    number = {name: row for row, name in enumerate(theirs)}
    known, new = [name for name in mine if name in number], [name for name in mine if name not in number]
    in_heads = tuple(f"{head}." for head in heads)
    for name, own in model.state_dict().items():
        if name.startswith(in_heads) and name in state and (mine != theirs or len(state[name]) != len(own)):
            rows = state.pop(name)
            if known:
                mean = rows[[number[each] for each in known]].mean(0, keepdim=True)
                chosen = [number.get(each, -1) for each in mine] + [-1] * (len(own) - len(mine))
                state[name] = torch.cat([rows, mean])[chosen]
    if not known:
        return [f"  head starts from random weights: the file has none of these classes (it has {first_of(theirs)})"]
    gone = [name for name in theirs if name not in mine]
    what = f"{len(known)} of {len(mine)}" if new else f"all {len(mine)}"
    more = [f"; {title}: {first_of(names)}" for title, names in (("new", new), ("not used", gone)) if names]
    return [f"  head: {what} classes by name{''.join(more)}"]


def _drop_heads(model: nn.Module, state: dict[str, Tensor], heads: list[str]) -> list[str]:
    """Remove heads that do not fit from the state. Returns a line for each."""
    own = model.state_dict()
    # Old ViTs have a hidden layer before the classifier and timm's have not; neither is of use without the other.
    hidden = [name for name in state if name.startswith("pre_logits.") and name not in own]
    lines = []
    for head in heads:
        key = f"{head}.weight"
        if key not in state:
            reason = "the file has none"
        elif hidden:
            reason = "the one in the file has a hidden layer, which timm's model has not"
        elif len(state[key]) != len(own[key]):
            reason = f"the one in the file has {counted(len(state[key]), 'class')}, this model has {len(own[key])}"
        else:
            continue
        lines.append(f"  {head} starts from random weights: {reason}")
        hidden += [name for name in state if name.startswith(f"{head}.")]
    for name in hidden:
        del state[name]
    return lines


def _fit_image_size(model: nn.Module, state: dict[str, Tensor], lines: list[str]) -> dict[str, Tensor]:
    """Resize what depends on the number or size of patches, as timm does for its own pretrained weights.

    For a ViT that is the position embedding (bicubic, antialiased, class token untouched) and the patch kernel, for
    a Swin its position biases.
    """
    own = model.state_dict()
    resize = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    if resize is None or all(name in own and own[name].shape == tensor.shape for name, tensor in state.items()):
        return state
    try:
        fitted = resize(dict(state), model)
    except Exception:  # not made for weights of another architecture; what differs is said by the comparison below
        return state
    changed = [name for name in fitted if name in state and fitted[name].shape != state[name].shape]
    if changed:
        name, others = changed[0], f" (and {len(changed) - 1} more)" if changed[1:] else ""
        lines.append(f"  {name}{others} resized from {list(state[name].shape)} to {list(fitted[name].shape)}")
    return fitted


def _fit_channels(model: nn.Module, state: dict[str, Tensor], lines: list[str]) -> None:
    """Adapt the first convolution from RGB to this model's channels: for grey images the sum over the three."""
    from timm.models import adapt_input_conv

    for name, module in model.named_modules():
        kernel = state.get(f"{name}.weight")
        if isinstance(module, nn.Conv2d) and kernel is not None and kernel.ndim == 4:
            channels = module.weight.shape[1]
            if kernel.shape[1] == 3 != channels:
                state[f"{name}.weight"] = adapt_input_conv(channels, kernel)
                lines.append(f"  {name} made from 3 channels to {channels}")
            return


def _check_same_architecture(
    model: nn.Module, state: dict[str, Tensor], heads: list[str], changed: Sequence[str] = ()
) -> None:
    """`changed`: settings that differ from those of the file."""
    own = model.state_dict()
    # Files from before torch 0.4.1 lack these counters, which nothing here reads.
    optional = tuple(f"{head}." for head in heads)
    missing = [name for name in own if name not in state and not name.startswith(optional)]
    missing = [name for name in missing if not name.endswith("num_batches_tracked")]
    unexpected = [name for name in state if name not in own]
    reshaped = [
        f"{name} ({list(tensor.shape)} in the file, {list(own[name].shape)} in the model)"
        for name, tensor in state.items()
        if name in own and tensor.shape != own[name].shape
    ]
    whole = [
        name
        for name in own.keys() & state
        if own[name].dtype.is_floating_point and not state[name].dtype.is_floating_point
    ]
    found = [("only in the file", unexpected), ("only in the model", missing), ("of another shape", reshaped)]
    found.append(("not of floating-point numbers", whole))
    if any(names for _, names in found):
        found = "; ".join(f"{what}: {first_of(names, limit=3)}" for what, names in found if names)
        remedy = "set MODEL to what the file was made with"
        if "dist_token" in unexpected:
            remedy = "it is a distilled DeiT: use MODEL.TYPE timm and, for instance, MODEL.NAME deit_base_distilled_patch16_224"
        known = f" ({'; '.join(changed)})" if changed else ""
        raise ConfigError(f"the weights are of another architecture{known}; {found}. Remedy: {remedy}")


def load_exactly(model: nn.Module, state: dict[str, Tensor], path: Path) -> None:
    """Load weights that fit exactly: nothing is resized, dropped or left random."""
    check_exactly(model, state, path)
    model.load_state_dict(state)


def check_exactly(model: nn.Module, state: dict[str, Tensor], path: Path) -> None:
    """Refuse weights that do not fit exactly."""
    try:
        _check_same_architecture(model, state, heads=[])
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


PATIENCE = 5.0  # seconds until a server counts as out of reach


def fetch(source: str) -> Weights:
    """timm's pretrained weights of that name, loaded by timm from the network or its cache."""
    import timm  # these two take seconds
    from huggingface_hub import constants

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
        from huggingface_hub import constants, snapshot_download
        from huggingface_hub.utils import get_session

        try:
            get_session().head(constants.ENDPOINT, timeout=PATIENCE)
        except Exception as error:  # of whichever library the hub uses
            try:
                snapshot_download(repository, local_files_only=True)
            except OSError:
                raise error from None

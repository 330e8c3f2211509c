"""Loads pretrained weights from a file or timm's hub. The weights are adapted to the model, or refused."""

import contextlib
import itertools
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from unicodedata import normalize

import torch
from torch import Tensor, nn

from configs.schema import Data, Shape
from configs.tables import TASKS
from models.heads import output_layers, set_to_zero
from models.parts import classifier_names, first_convolutions
from models.weights.files import find_file, read_weights
from models.weights.grids import Sized, resize_from
from models.weights.metadata import (
    ARCHITECTURE,
    SHIPPED_FILE,
    classes_of_weights,
    is_imagenet_by_other_names,
    metadata_of,
    pretrained_cfg,
    shipped_weights,
    timm_name,
)
from models.weights.state import Weights
from utils.changed_facts import changed_facts
from utils.errors import ConfigError, naming_damage
from utils.files import short_name
from utils.text import counted, first_of
from utils.torch_internals import import_timm


def differences(record: dict, settings: dict, keys: Sequence[str]) -> list[str]:
    """Return the settings that differ from the settings stored with the weights, with the value there and here."""
    saved = record.get("config", {})
    # With MODEL.TYPE vit, MODEL.NAME is only a label.
    is_label = settings["MODEL.TYPE"] == saved.get("MODEL.TYPE") == "vit"
    here = {key: settings[key] for key in keys if not (is_label and key == "MODEL.NAME")}
    return [f"{key}: {values}" for key, values in changed_facts(saved, here).items()]


def load_pretrained(
    model: nn.Module,
    source: str,
    setting: str = "MODEL.PRETRAINED",
    needs_head: bool = False,
    classes: Sequence[str] = (),
    settings: dict | None = None,
    sized: Sized | None = None,
) -> list[str]:
    """Load the weights in a file, or the timm weights of this name if there is no such file. Return lines for the user.

    timm's weights that come with halfstep are read from its folder, without the network.

    With `needs_head`, weights whose classifier does not fit are refused, because a random classifier is useless.
    `classes` are the classes of the model's outputs, which are matched by name if the file names its classes.
    `settings` are the settings by full names: for the error message about another architecture, and for
    MODEL.NEW_CLASSIFIER. A frozen classifier never starts from zeros, because it would stay zero. `sized`: the
    shape of the model's images; None: squares.
    """
    is_frozen = not all(layer.weight.requires_grad for layer in output_layers(model).values())
    zeros = bool(settings) and settings["MODEL.NEW_CLASSIFIER"] != "random" and not is_frozen
    try:
        path = find_file(source) or shipped_weights(source)
        weights = read_weights(path) if path else fetch(source)
        name = short_name(path) if path else source
        shipped = f", which comes with halfstep ({path})" if path and name != str(path) else ""
        lines = [f"{setting}: weights of {name}{shipped}{f' ({weights.key})' if weights.key else ''}"]
        their_classes = weights.record.get("class_names")
        if their_classes is None and not is_imagenet_by_other_names(classes):
            their_classes = classes_of_weights(source)
        # Convert before resizing: resizing in the file's half precision would round values that the model has in fp32.
        half = (torch.float16, torch.bfloat16)
        state = {name: tensor.float() if tensor.dtype in half else tensor for name, tensor in weights.state.items()}
        with naming_damage(path or source):
            reason = "" if needs_head else _why_other_task(weights.record, settings or {})
            if reason:
                state = without_heads(model, state)
            start = "zeros" if zeros else "random weights"
            lines += _fit_heads(model, state, [] if reason else their_classes or [], classes, needs_head, start, reason)
        state = fit_image_size(model, state, lines, shape_of_weights(source, weights.record), sized)
        has_colours = weights.record.get("config", {}).get("DATA.PIXELS", Data.PIXELS) == Data.PIXELS
        rgb = tuple((settings or {}).get("DATA.RGB", ())) if has_colours else ()
        _fit_channels(model, state, lines, (settings or {}).get("DATA.IMAGE_CHANNELS"), rgb)
        changed = differences(weights.record, settings, ARCHITECTURE) if settings else []
        _check_same_architecture(model, state, classifier_names(model), changed)
    except ConfigError as error:
        raise ConfigError(f"{setting}: {error}") from None
    model.load_state_dict(state, strict=False)
    for path, layer in output_layers(model).items() if zeros else ():
        if f"{path}.weight" not in state:
            set_to_zero(layer)
    return lines


def _fit_heads(
    model: nn.Module,
    state: dict[str, Tensor],
    file_classes: list[str],
    classes: Sequence[str],
    needs_head: bool,
    start: str,
    why_missing: str = "",
) -> list[str]:
    """Order the classifiers' rows by class names, and remove classifiers that do not fit. Return lines for the user.

    `start` says how a removed classifier starts; `why_missing`: why all of them were removed.
    """
    heads, own = list(output_layers(model)), model.state_dict()
    named = [head for head in heads if f"{head}.weight" in state and len(state[f"{head}.weight"]) >= len(file_classes)]
    by_name = []
    if file_classes and classes and named and not needs_head:
        by_name = [_match_classes(own, state, tuple(f"{head}." for head in named), file_classes, classes, start)]
    # Old ViTs have a hidden layer before the classifier; timm's ViTs do not. The two layers are useful only together.
    dropped = [name for name in state if name.startswith("pre_logits.") and name not in own]
    lines = []
    for head in heads:
        key = f"{head}.weight"
        if key not in state:
            reason = "" if by_name else why_missing or "the file has none"
        elif dropped:
            reason = "the classifier in the file has a hidden layer, which timm's model does not have"
        elif len(state[key]) != len(own[key]):
            in_file = counted(len(state[key]), "class")
            reason = f"the classifier in the file has {in_file}, but this model has {len(own[key])}"
        else:
            continue
        if reason:
            lines.append(f"  {head} starts from {start}: {reason}")
        dropped += [name for name in state if name.startswith(f"{head}.")]
    if lines and needs_head:
        raise ConfigError(
            f"there is nothing to evaluate: {lines[0].strip()}; set -num_classes to the number of classes of the "
            "weights"
        )
    for name in dropped:
        del state[name]
    return lines + by_name


def _why_other_task(record: dict, settings: dict) -> str:
    """Return why the classifier of the weights is of no use, or an empty string."""
    key = "TRAIN.OBJECTIVE"
    there = record.get("config", {}).get(key, "classes")
    here = settings.get(key, there)
    first, second = (TASKS.get(each, TASKS["classes"]) for each in (here, there))
    is_other = first.has_classes != second.has_classes
    return f"the weights were trained for {there}, not for {here} ({key})" if is_other else ""


def without_heads(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    heads = tuple(f"{name}." for name in classifier_names(model))
    return {name: tensor for name, tensor in state.items() if not name.startswith(heads)}


def _match_classes(
    own: dict[str, Tensor],
    state: dict[str, Tensor],
    heads: tuple[str, ...],
    file_classes: list[str],
    classes: Sequence[str],
    start: str,
) -> str:
    """Reorder the rows of the classifiers `heads` from the file's classes to the classes of the model.

    Return a line for the user. A new class gets the mean of the known rows. Its logit is then never above all others,
    so at the start the model classifies known classes as before. If no class is known, the classifiers are removed.
    """
    # Normalize the names, because macOS may write ä in a file name as two characters.
    file_classes, classes = ([normalize("NFC", name) for name in names] for names in (file_classes, classes))
    number = {name: row for row, name in enumerate(file_classes)}
    known, new = [name for name in classes if name in number], [name for name in classes if name not in number]
    for name in [each for each in state if each.startswith(heads) and each in own]:
        if classes != file_classes or len(state[name]) != len(own[name]):
            rows = state.pop(name)
            if known:
                mean = rows[[number[each] for each in known]].mean(0, keepdim=True)
                chosen = [number.get(each, -1) for each in classes] + [-1] * (len(own[name]) - len(classes))
                state[name] = torch.cat([rows, mean])[chosen]
    if not known:
        return f"  head starts from {start}: the file has none of these classes (it has {first_of(file_classes)})"
    unused = [name for name in file_classes if name not in classes]
    what = f"{len(known)} of {len(classes)}" if new else f"all {len(classes)}"
    more = [f"; {title}: {first_of(names)}" for title, names in (("new", new), ("not used", unused)) if names]
    return f"  head: {what} classes by name{''.join(more)}"


def shape_of_weights(source: str, record: dict) -> Shape | None:
    """Return the shape of the images of the weights, or None if neither `record` nor the source names it."""
    size = record.get("config", {}).get("DATA.IMAGE_SIZE")
    if size is None:
        with contextlib.suppress(ConfigError):
            size = metadata_of(source).images.get("DATA.IMAGE_SIZE")
    return size and Data(IMAGE_SIZE=size).shape


def fit_image_size(
    model: nn.Module, state: dict[str, Tensor], lines: list[str], old: Shape | None, sized: Sized | None
) -> dict[str, Tensor]:
    """Resize the weights that depend on the number or size of patches, as timm does for its own pretrained weights.

    For a ViT, these are the position embedding (bicubic, antialiased, class token unchanged) and the patch kernel. For
    a Swin, they are the position biases. `old`, `sized`: the shapes of the images of the weights and of the model;
    None: squares. Grids of different shapes can have the same number of patches.
    """
    own = model.state_dict()
    resize = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    is_fitting = all(name in own and own[name].shape == tensor.shape for name, tensor in state.items())
    has_squares = not any(shape and shape.height != shape.width for shape in (old, sized and sized.shape))
    if (is_fitting and has_squares) or (sized and old == sized.shape and not has_squares):
        return state
    if sized and old and (is_fitting or old.height != old.width):
        fitted = resize_from(old, state, model, sized)
        changed = [name for name, tensor in fitted.items() if not torch.equal(tensor, state[name])]
        change = f"from images of {old} to {sized.shape}"
    elif resize is None:
        return state
    else:
        try:
            fitted = resize(dict(state), model)
        except Exception:  # weights of another architecture: _check_same_architecture reports the differences
            return state
        changed = [name for name in fitted if name in state and fitted[name].shape != state[name].shape]
        change = changed and f"from {list(state[changed[0]].shape)} to {list(fitted[changed[0]].shape)}"
    if changed:
        others = f" (and {len(changed) - 1} more)" if changed[1:] else ""
        lines.append(f"  {changed[0]}{others} resized {change}")
    return fitted


def _fit_channels(
    model: nn.Module, state: dict[str, Tensor], lines: list[str], num_channels: int | None, rgb: tuple[int, ...]
) -> None:
    """Adapt the first convolutions from RGB to this model's channels. For grey images, sum their weights over RGB.

    `num_channels`: the channels of an image, or None if the convolutions read no others. `rgb`: the channels that get
    the weights of red, green and blue; all others get the mean of the three. Without it, the three are repeated.
    NaFlexVit has a linear layer instead, whose inputs are [P, P, C].
    """
    from timm.models import adapt_input_conv

    def fitted(channels: int, kernel: Tensor) -> Tensor:
        if not rgb:
            return adapt_input_conv(channels, kernel)
        changed = kernel.mean(1, keepdim=True).repeat(1, channels, 1, 1)
        changed[:, rgb] = kernel
        return changed * (3 / channels)  # like timm: the sum over the channels keeps its size

    embeds, weight = getattr(model, "embeds", None), state.get("embeds.proj.weight")
    is_rgb = embeds is not None and weight is not None and weight.shape[1:] == (3 * math.prod(embeds.patch_size),)
    if is_rgb and (embeds.in_chans != 3 or rgb):
        kernel = fitted(embeds.in_chans, weight.unflatten(1, (*embeds.patch_size, 3)).permute(0, 3, 1, 2))
        state["embeds.proj.weight"] = kernel.permute(0, 2, 3, 1).flatten(1)
        lines.append(f"  embeds.proj adapted from 3 to {counted(embeds.in_chans, 'channel')}")

    layers = _first_layers(model)
    for name, layer in layers.items():
        kernel, inputs = state.get(f"{name}.weight"), layer.weight.shape[1]
        channels = num_channels or inputs
        pixels = inputs // channels  # TResNet reads blocks of 4 x 4 pixels, whose channels are its inputs [16, C]
        is_rgb = kernel is not None and kernel.ndim == 4 and kernel.shape[1] == 3 * pixels
        if not is_rgb or (channels == 3 and not rgb):
            continue
        by_pixel = fitted(channels, kernel.unflatten(1, (pixels, 3)).flatten(0, 1))
        state[f"{name}.weight"] = by_pixel.unflatten(0, (-1, pixels)).flatten(1, 2)
        if channels > 1 and pixels == len(layers) == 1:
            keep_rgb(model, kernel)
        lines.append(f"  {name} adapted from 3 to {counted(channels, 'channel')}")


def keep_rgb(model: nn.Module, kernel: Tensor) -> None:
    """Keep the first layer's weights for red, green and blue, so that a new classifier can start with one channel."""
    next(iter(_first_layers(model).values())).rgb = kernel


def _first_layers(model: nn.Module) -> dict[str, nn.Conv2d]:
    """Return {path: layer} of the convolutions that images go into; by default, the first convolution."""
    in_order = ((name, module) for name, module in model.named_modules() if isinstance(module, nn.Conv2d))
    return first_convolutions(model) or dict(itertools.islice(in_order, 1))


def rgb_layer(model: nn.Module) -> nn.Conv2d | None:
    """Return the layer whose weights were adapted from red, green and blue to several channels.

    `.rgb`: the weights before.
    """
    return next((each for each in model.modules() if hasattr(each, "rgb")), None)


def _check_same_architecture(
    model: nn.Module, state: dict[str, Tensor], heads: Sequence[str] = (), changed: Sequence[str] = ()
) -> None:
    """Raise ConfigError if names or shapes of the weights differ from the model's.

    `heads` are modules that the state may lack. `changed` lists the settings that differ from the settings in the file.
    """
    own = model.state_dict()
    # num_batches_tracked may be missing too: files from before torch 0.4.1 lack it, and nothing reads it here.
    optional = tuple(f"{head}." for head in heads)
    shared = [name for name in state if name in own]
    kinds = {
        "only in the file": [name for name in state if name not in own],
        "only in the model": [
            name
            for name in own
            if name not in state and not name.startswith(optional) and not name.endswith("num_batches_tracked")
        ],
        "of another shape": [
            f"{name} ({list(state[name].shape)} in the file, {list(own[name].shape)} in the model)"
            for name in shared
            if state[name].shape != own[name].shape
        ],
        "not of floating-point numbers": [
            name for name in shared if own[name].dtype.is_floating_point and not state[name].dtype.is_floating_point
        ],
    }
    different = "; ".join(f"{what}: {first_of(names, limit=3)}" for what, names in kinds.items() if names)
    if different:
        known = f" ({'; '.join(changed)})" if changed else ""
        raise ConfigError(
            f"the weights are from another architecture{known}; {different}. Remedy: set MODEL to the file's "
            "architecture"
        )


def load_exactly(model: nn.Module, state: dict[str, Tensor], path: Path) -> None:
    """Load weights that fit the model exactly. Nothing is resized, dropped or left random."""
    if model.num_classes and not any(f"{path}.weight" in state for path in output_layers(model)):
        raise ConfigError(
            f"{path}: these weights have no classifier; fine-tune them with labelled images (-pretrained), or compare "
            "images with halfstep embed"
        )
    check_exactly(model, state, path)
    with naming_damage(path):
        model.load_state_dict(state)


def check_exactly(model: nn.Module, state: dict[str, Tensor], path: Path) -> None:
    """Raise ConfigError for weights that do not fit the model exactly."""
    try:
        with naming_damage("the weights"):
            _check_same_architecture(model, state)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def fetch(source: str) -> Weights:
    """Return timm's pretrained weights of this name, loaded by timm from the network or its cache."""
    timm = import_timm()
    name, repository = timm_name(source), pretrained_cfg(source).get("hf_hub_id")
    # timm reads some older files without weights_only. This variable makes torch use weights_only in the whole process.
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    try:
        if repository:
            _reach_hub(repository)
        # timm builds a second model. Build it on the CPU to save device memory, and keep the run's random state.
        with torch.device("cpu"), torch.random.fork_rng(devices=[]):
            return Weights(timm.create_model(name, pretrained=True).state_dict())
    except Exception as error:  # the type depends on the download library
        lines = str(error).splitlines()
        reason = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        address = f" (from https://huggingface.co/{repository})" if repository else ""
        raise ConfigError(
            f"the weights of {name} could not be fetched ({reason}). "
            f"Without a network, fetch them on another machine{address} and pass the file instead of the name, or name "
            f"{SHIPPED_FILE.stem}, whose weights come with halfstep"
        ) from None


def _reach_hub(repository: str) -> None:
    """Raise the library's error at once if a repository is neither cached nor reachable. timm tries for a minute."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        snapshot_download(repository, local_files_only=True)
    except LocalEntryNotFoundError:
        get_hf_file_metadata(hf_hub_url(repository, "config.json"))  # a file that all of timm's repositories have

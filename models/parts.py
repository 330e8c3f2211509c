"""Parts of a model: modules by name patterns, frozen parts, the classifier, the first layer, running statistics."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from types import MethodType

from torch import Tensor, nn

from utils.errors import ConfigError, did_you_mean


def covers(pattern: str, path: str) -> bool:
    """Return whether the pattern matches the path of a module or tensor, or of a part of the model that contains it."""
    parts = path.split(".")
    return bool(path) and any(fnmatchcase(".".join(parts[:length]), pattern) for length in range(1, len(parts) + 1))


def classifier_names(model: nn.Module) -> list[str]:
    """Return the name of the classifier's module, or the names of both classifiers for a distilled DeiT."""
    classifier = model.get_classifier()
    classifiers = classifier if isinstance(classifier, tuple) else (classifier,)
    return [name for name, module in model.named_modules() if any(module is each for each in classifiers)]


def has_running_statistics(module: nn.Module) -> bool:
    return getattr(module, "running_mean", None) is not None


def statistics_of(model: nn.Module) -> list[Tensor]:
    return [
        buffer
        for module in model.modules()
        if has_running_statistics(module)
        for buffer in module.buffers(recurse=False)
    ]


def first_convolutions(model: nn.Module) -> dict[str, nn.Conv2d]:
    """Return {path: layer} of the convolutions that images go into, according to timm's `first_conv`."""
    # A ViT built from our settings has no `first_conv`. If images go into several layers, it is a tuple.
    paths = getattr(model, "pretrained_cfg", {}).get("first_conv", "patch_embed.proj") or ()
    modules = dict(model.named_modules())
    paths = (paths,) if isinstance(paths, str) else paths
    return {path: modules[path] for path in paths if isinstance(modules.get(path), nn.Conv2d)}


def starts_with_convolution(model: nn.Module) -> bool:
    """Return whether images go into a single convolution."""
    return len(first_convolutions(model)) == 1


# --- frozen parts ---


CLASSIFIER = "classifier"  # names the model's classifier in MODEL.FREEZE


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters that match these patterns.

    Later patterns win, as in .gitignore: `*` then `!classifier` trains only the classifier, for any model.
    """
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    heads = classifier_names(model) if any(pattern.removeprefix("!") == CLASSIFIER for pattern in patterns) else []
    frozen: set[str] = set()
    for pattern in patterns:
        glob = pattern.removeprefix("!")
        globs = heads if glob == CLASSIFIER else [glob]
        matched = {name for name in tensors if any(covers(each, name) for each in globs)}
        if not matched:
            known = [*tensors, *(path for path, _ in model.named_modules())]
            raise ConfigError(
                f"MODEL.FREEZE: {pattern} matches no parameter and no module{did_you_mean(glob.strip('*.'), known)}"
            )
        frozen = frozen - matched if pattern.startswith("!") else frozen | matched

    parameters = dict(model.named_parameters())
    if frozen.issuperset(parameters):
        raise ConfigError(f"MODEL.FREEZE: {list(patterns)} leaves nothing to train; exempt a part, such as !classifier")
    for name in frozen & parameters.keys():
        parameters[name].requires_grad_(False)
    for path, module in model.named_modules():
        if has_running_statistics(module) and _all_frozen(path, module, frozen):
            _keep_in_evaluation(module)


def freeze_statistics(model: nn.Module) -> None:
    """Let every BatchNorm normalize with its running statistics in training too, and never update them."""
    for module in model.modules():
        if has_running_statistics(module):
            _keep_in_evaluation(module)


def _all_frozen(path: str, module: nn.Module, frozen: set[str]) -> bool:
    own = [name for name, _ in module.named_parameters(recurse=False)]
    own = own or [name for name, _ in module.named_buffers(recurse=False)]
    return all(f"{path}.{name}" in frozen for name in own)


def _keep_in_evaluation(module: nn.Module) -> None:
    # A method set on the module survives copy.deepcopy, DDP and torch.compile. Rejected: resetting these norms
    # after each model.train(), which new callers would forget.
    module.train = MethodType(_stay_in_evaluation, module)
    module.train()


def _stay_in_evaluation(module: nn.Module, mode: bool = True) -> nn.Module:
    """Keep a frozen norm in evaluation mode when model.train() is called. This replaces the norm's method `train`."""
    return type(module).train(module, False)

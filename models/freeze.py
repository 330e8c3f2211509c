"""MODEL.FREEZE freezes parameters, and the running statistics of norms whose parameters are all frozen."""

from collections.abc import Sequence
from types import MethodType

from torch import nn

from models.parts import classifier_names, covers, has_running_statistics
from utils.errors import ConfigError, did_you_mean

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
            # A method set on the module survives copy.deepcopy, DDP and torch.compile. Rejected: resetting these norms
            # after each model.train(), which new callers would forget.
            module.train = MethodType(_stay_in_evaluation, module)
            module.train()


def _all_frozen(path: str, module: nn.Module, frozen: set[str]) -> bool:
    own = [name for name, _ in module.named_parameters(recurse=False)]
    own = own or [name for name, _ in module.named_buffers(recurse=False)]
    return all(f"{path}.{name}" in frozen for name in own)


def _stay_in_evaluation(module: nn.Module, mode: bool = True) -> nn.Module:
    """Keep a frozen norm in evaluation mode when model.train() is called. This replaces the norm's method `train`."""
    return type(module).train(module, False)

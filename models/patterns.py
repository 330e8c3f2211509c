"""How settings name parts of a model: MODEL.FREEZE, MODEL.LORA.TARGETS, PRECISION.CUSTOM_BLACK_LIST and CUSTOM_WHITE_LIST."""

from fnmatch import fnmatchcase

from torch import nn


def covers(pattern: str, path: str) -> bool:
    """Whether the pattern matches this module or tensor, or a module that it is inside of; the model itself never."""
    parts = path.split(".")
    return bool(path) and any(fnmatchcase(".".join(parts[:length]), pattern) for length in range(1, len(parts) + 1))


def classifier_names(model: nn.Module) -> list[str]:
    """The classifier's module, whatever timm calls it, or both of a distilled DeiT."""
    classifier = model.get_classifier()
    classifiers = classifier if isinstance(classifier, tuple) else (classifier,)
    return [name for name, module in model.named_modules() if any(module is each for each in classifiers)]

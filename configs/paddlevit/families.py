"""PaddleViT's other families: a file of Swin, CaiT and so on becomes timm's model of that name if their fields agree."""

from dataclasses import dataclass, replace
from pathlib import Path

from configs.paddlevit.fields import DEFAULTS, FIELDS
from configs.values import BOOLS, Text, is_none, quoted
from configs.yaml_files import Layer
from utils.errors import ConfigError

_SECTIONS = ("", "TRANS.", "TRANS.ENCODER.", "CNN.", "MIXER.")  # where a field may be, below MODEL
_OLD_NAMES = {"HIDDEN_SIZE": "EMBED_DIM", "NUM_LAYERS": "DEPTH"}  # in 2021
_PRETRAINING = "MODEL.MAE_PRETRAIN"
_DISTILLATION = "TRAIN.DISTILLATION_TYPE"


@dataclass(frozen=True)
class Family:
    """A model of another family, as PaddleViT's file describes it."""

    kind: str  # MODEL.TYPE in lower case
    origin: str  # the file with MODEL.TYPE
    fields: dict[str, tuple[str, Text]]  # {field: (its key in the file, its value)}

    def agree(self, name: str) -> str:
        """The line that timm's model of this name is what the file describes; an error if it is not."""
        import timm  # takes seconds, as torch, and only these files need it
        import torch

        name = name.partition(".")[0]  # without the tag of its weights
        if not timm.is_model(name):
            raise ConfigError(
                f"MODEL.NAME is {name!r}, but timm has no such model; leave it out for {self.origin}'s own"
            )
        try:
            with torch.device("meta"):
                model = timm.create_model(name)
        except RuntimeError:  # timm 1.0.20 reads values while it builds some of its models
            model = timm.create_model(name)
        readers = FIELDS[self.kind]
        for field, (key, text) in self.fields.items():
            reader = readers[field]
            if reader and not _is_same(text, found := reader(model)):
                raise ConfigError(
                    f"{self.origin}: {key} is {quoted(text)}, but timm's {name} has {found}; {self._remedy(name, key)}"
                )
        compared = [field for field in self.fields if readers[field]]
        others = [field for field in self.fields if not readers[field]]
        parameters = sum(parameter.numel() for parameter in model.parameters())
        return (
            f"{self.origin}: MODEL.TYPE {self.kind} is built as timm's {name}, {parameters:,} parameters with 1000 "
            f"classes; compared with the file: {', '.join(compared) or 'nothing, it has no fields'}"
            + (f"; as timm sets them, because the model does not show them: {', '.join(others)}" if others else "")
        )

    def _remedy(self, name: str, key: str) -> str:
        named_as_file = _timm_name(Path(self.origin).stem)
        if named_as_file and named_as_file != name:
            return f"if the file's name is right, set MODEL.NAME: {named_as_file}"
        return f"correct MODEL.NAME, or remove {key} to train timm's model"


def take_family(files: list[Layer], command_line: list[Layer]) -> tuple[list[Layer], Family | None]:
    """Put timm's model in place of another family's in the layers of files, and PaddleViT's defaults for it below them.

    Returns the layers and the family; the layers as they are and None if the model is not of a family that timm has.
    """
    typed = next((layer for layer in reversed(files) if "MODEL.TYPE" in layer.texts), None)
    kind = _word(typed.texts["MODEL.TYPE"]) if typed else ""
    name = _timm_name(_last(files, "MODEL.NAME")) if kind in DEFAULTS else ""
    if not name:
        return files, None
    if _word(_last(files, _PRETRAINING)) in ("true", "yes", "on"):
        raise ConfigError(
            f"{typed.origin}: {_PRETRAINING} is true, and masked pretraining is not available; name a file for fine-tuning"
        )
    if _word(_last(command_line, "MODEL.TYPE")) not in ("", "timm"):
        raise ConfigError(f"MODEL.TYPE on the command line is not timm, but {typed.origin} has {kind}; leave it out")
    distillation = _last([*files, *command_line], _DISTILLATION)
    if kind == "deit" and not is_none(distillation):
        name = _timm_name(name.replace("_patch", "_distilled_patch")) or name
    fields: dict[str, tuple[str, Text]] = {}
    layers = [Layer(f"PaddleViT's defaults for {kind}", DEFAULTS[kind])]
    for layer in files:
        texts = dict(layer.texts)
        for key in layer.texts:
            if key in ("MODEL.TYPE", "MODEL.NAME"):
                del texts[key]
            elif field := _field(key, kind):
                fields[field] = (key, texts.pop(key))
        if layer is typed:
            texts |= {"MODEL.TYPE": "timm", "MODEL.NAME": name}
        layers.append(replace(layer, texts=texts))
    return layers, Family(kind, typed.origin, fields)


def _field(key: str, kind: str) -> str | None:
    """The family's field that a key is, or None."""
    for section in _SECTIONS:
        name = key.removeprefix(f"MODEL.{section}")
        name = _OLD_NAMES.get(name, name)
        if name in FIELDS[kind]:
            return name
    return None


def _timm_name(text: Text | None) -> str:
    """timm's model of the name that PaddleViT writes with capitals and hyphens, or an empty text."""
    import timm

    name = _word(text).replace("-", "_")
    return name if timm.is_model(name) else ""


def _last(layers: list[Layer], key: str) -> Text:
    """The text of the last layer that has the key; empty if none has."""
    return next((layer.texts[key] for layer in reversed(layers) if key in layer.texts), "")


def _word(text: Text | None) -> str:
    return text.strip().lower() if isinstance(text, str) else ""


def _is_same(text: Text, found: object) -> bool:
    """Whether a file's text says what was found in timm's model."""
    if isinstance(found, list):
        members = text if isinstance(text, list) else text.strip("()[] ").split(",")
        return len(members) == len(found) and all(map(_is_same, members, found))
    word = _word(text)
    if isinstance(found, bool):
        return BOOLS.get(word) is found
    if isinstance(found, str):
        return word == found.lower()
    try:
        return float(word) == found
    except ValueError:
        return False

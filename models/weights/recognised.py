"""Recognises the timm model of weights that do not name it: by the name of the file, or else by their shapes.

A model is accepted only if names and shapes of all its weights are those in the file, except its classifier and what
depends on the image size.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from models.parts import classifier_names
from models.weights.files import IN_A_FOLDER, read_state_dict
from models.weights.metadata import USUAL, Settings, image_settings, model_settings
from utils.torch_internals import import_timm
from utils.without_values import build_without_values

# Models without twins: others of the same shapes, such as tv_resnet50, compute the same. (efficientnet_b0 and
# tf_efficientnet_b0 have the same shapes and another padding, so only a name tells them apart.)
BY_SHAPES = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
OF_THE_SIZE = re.compile(r"pos_embed|relative_position|rel_pos|attn_mask|num_batches_tracked")
Shapes = Mapping[str, tuple[int, ...]]


class Recognised(NamedTuple):
    """A timm model, and how it was recognised."""

    name: str  # with the tag of timm's weights if the file's name has one
    how: str
    size: int | None  # the side of the images that its position embedding is for

    @property
    def model(self) -> Settings:
        return model_settings(self.name.partition(".")[0])

    @property
    def images(self) -> Settings:
        """The preprocessing of timm's weights of this name."""
        known = import_timm().get_pretrained_cfg(self.name)
        images = image_settings(known.to_dict()) if known else {}
        return images | ({"DATA.IMAGE_SIZE": self.size} if images and self.size else {})


def recognise(path: Path) -> Recognised | None:
    """Return the model of the weights in a file, or None if neither its name nor the shapes say it."""
    shapes = {name: tuple(tensor.shape) for name, tensor in read_state_dict(path).items()}
    text = path.parent.name if path.name in IN_A_FOLDER else path.stem
    for name in names_in(text):
        if fits(name, shapes):
            return Recognised(name, "by its name", size_of(shapes))
    for name in names_by_shapes(shapes):
        if fits(name, shapes):
            return Recognised(name, "by the shapes of its weights", size_of(shapes))
    return None


def names_in(text: str) -> Iterator[str]:
    """Yield timm's names in the name of a file, the longest first: resnet18 in my_resnet18-f37072fd."""
    timm = import_timm()
    pieces = re.split(r"([-_.])", text)
    spans = itertools.combinations(range(0, len(pieces) + 2, 2), 2)  # from piece to piece, without the last separator
    texts = {"".join(pieces[start : stop - 1]) for start, stop in spans}
    for name in sorted(texts, key=lambda name: (-len(name), name)):
        architecture = name.partition(".")[0]
        if timm.is_model(architecture) and (name == architecture or timm.models.is_model_pretrained(name)):
            yield name


def names_by_shapes(shapes: Shapes) -> Iterator[str]:
    """Yield the names of the models that these weights may be of."""
    kernel = shapes.get("patch_embed.proj.weight", ())
    if len(kernel) == 4 and kernel[0] in USUAL:
        word, patch = USUAL[kernel[0]][0], kernel[2]
        yield from (f"vit_{word}_patch{patch}_{side}" for side in (size_of(shapes), 224))
    elif "layer1.0.conv1.weight" in shapes:
        yield from BY_SHAPES


def size_of(shapes: Shapes) -> int | None:
    """Return the side of the square images of a ViT with class token, or None for other models."""
    kernel, tokens = shapes.get("patch_embed.proj.weight", ()), shapes.get("pos_embed", ())
    if len(kernel) != 4 or len(tokens) != 3 or "cls_token" not in shapes:
        return None
    num_patches = tokens[1] - len({"cls_token", "dist_token"} & shapes.keys())
    side = math.isqrt(num_patches)
    return side * kernel[2] if side**2 == num_patches else None


def fits(name: str, shapes: Shapes) -> bool:
    """Return whether the weights are those of this model, up to the classifier and what depends on the image size."""
    timm = import_timm()
    if not timm.is_model(name):
        return False
    model = build_without_values(lambda: timm.create_model(name))
    heads = tuple(f"{head}." for head in classifier_names(model))
    own = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}

    def of_the_body(weights: Shapes) -> dict[str, tuple[int, ...]]:
        others = (key for key in weights if not key.startswith(heads) and not OF_THE_SIZE.search(key))
        return {key: weights[key] for key in others}

    return of_the_body(own) == of_the_body(shapes)

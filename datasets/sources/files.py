"""Chooses the kind of an image set by its files: a file for each image, or a file for each channel of an image."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from datasets.index import Texts
from datasets.pixels import Pixels, readers
from datasets.sources.images import FileImages
from utils.errors import ConfigError
from utils.text import counted


def images_of_files(
    root: Path,
    paths: Sequence[str] | Texts,
    targets: Any,
    classes: list[str],
    pixels: Pixels,
    *,
    confined: bool = False,
) -> FileImages:
    """Return the images in these files. With DATA.CHANNEL_FILES, the paths name the file of the first channel."""
    kind = FileImages
    if pixels.channel_files:
        from datasets.sources.channel_files import ChannelFiles as kind
    return kind(root, paths, targets, classes, pixels, confined=confined)


def unlabelled_files(paths: Sequence[str], pixels: Pixels, root: Path = Path()) -> FileImages:
    """Return the images in these files, which have no labels."""
    return images_of_files(root, paths, np.zeros(len(paths), np.uint8), [], pixels)


def images_among(paths: list[str], pixels: Pixels, report: Callable[[str], Any]) -> list[str]:
    """Return the paths of the images among the files of a folder, which was listed before the model was known."""
    if pixels.channel_files:
        from datasets.sources.channel_files import grouped

        kept, num_others = grouped(paths, pixels.channel_files)
        why = f"whose names are not {pixels.channel_files}"
    else:
        own = pixels.own_endings
        others = {ending: kind.name for ending, kind in readers().items() if ending not in own}
        kept = [path for path in paths if not path.lower().endswith(tuple(others))]
        left_out = {path.lower() for path in {*paths}.difference(kept)}
        names = {name for ending, name in others.items() if any(each.endswith(ending) for each in left_out)}
        num_others = len(paths) - len(kept)
        why = f"that only a model with DATA.PIXELS={' or '.join(sorted(names))} takes"
    if not kept and paths:
        raise ConfigError(f"none of {counted(len(paths), 'file')} is an image for this model: left out those {why}")
    if num_others:
        report(f"left out {counted(num_others, 'file')} {why}")
    return kept


def refuse_copies(pixels: Pixels) -> None:
    """Raise ConfigError for -into if an image has several files, because a copy would need them all."""
    if pixels.channel_files:
        raise ConfigError(
            "-into: an image of this model has a file for each channel (DATA.CHANNEL_FILES), and would be copied in part; "
            "leave -into out, and use -csv"
        )

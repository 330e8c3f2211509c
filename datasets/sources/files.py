"""Chooses the kind of an image set by its files: a file for each image, or a file for each channel of an image."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from datasets.index import Texts
from datasets.pixels.decode import NATIVE_ENDINGS
from datasets.pixels.rules import PixelRules
from datasets.sources.images import FileImages
from utils.errors import ConfigError
from utils.text import counted


def channel_files_of(rules: PixelRules) -> str | None:
    """Return DATA.CHANNEL_FILES if each channel of an image has a file of its own."""
    return rules.native and rules.native.channel_files


def images_of_files(
    root: Path,
    paths: Sequence[str] | Texts,
    targets: Any,
    classes: list[str],
    rules: PixelRules,
    *,
    confined: bool = False,
) -> FileImages:
    """Return the images in these files. With DATA.CHANNEL_FILES, the paths name the file of the first channel."""
    kind = FileImages
    if channel_files_of(rules):
        from datasets.sources.channel_files import ChannelFiles as kind
    return kind(root, paths, targets, classes, rules, confined=confined)


def images_among(paths: list[str], rules: PixelRules, report: Callable[[str], Any]) -> list[str]:
    """Return the paths of the images among the files of a folder, which was listed before the model was known."""
    kept, why = paths, ""
    if channel_files := channel_files_of(rules):
        from datasets.sources.channel_files import grouped

        kept, num_others = grouped(paths, channel_files)
        why = f"whose names are not {channel_files}"
    elif not rules.native:
        kept = [path for path in paths if not path.lower().endswith(NATIVE_ENDINGS)]
        num_others, why = len(paths) - len(kept), "that only a model with DATA.PIXELS=native takes"
    if not kept and paths:
        raise ConfigError(f"none of {counted(len(paths), 'file')} is an image for this model: left out those {why}")
    if why and num_others:
        report(f"left out {counted(num_others, 'file')} {why}")
    return kept


def refuse_copies(rules: PixelRules) -> None:
    """Raise ConfigError for -into if an image has several files, because a copy would need them all."""
    if channel_files_of(rules):
        raise ConfigError(
            "-into: an image of this model has a file for each channel (DATA.CHANNEL_FILES), and would be copied in part; "
            "leave -into out, and use -csv"
        )

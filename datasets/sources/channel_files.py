"""DATA.CHANNEL_FILES: images whose channels are files of their own, such as scene1_B02.tif and scene1_B03.tif."""

import functools
import io
import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from datasets.sources.images import FileImages
from datasets.types import ImageReadError

ID, LIST = "{id}", re.compile(r"\{(?!id\})([^{}]+)\}")


class ChannelPattern:
    """The names of the files of an image, such as {id}_{B02,B03}.tif: {id} is any text, and each channel has a name."""

    def __init__(self, pattern: str):
        self.names = [name.strip() for name in LIST.search(pattern)[1].split(",")]
        before, after = LIST.split(pattern)[::2]
        self.parts = before, after
        between = "|".join(map(re.escape, self.names))
        start, end = (re.escape(each).replace(re.escape(ID), "(?P<id>.*)") for each in self.parts)
        self.regex = re.compile(f"{start}(?P<channel>{between}){end}", re.DOTALL)

    def match(self, path: str) -> tuple[str, str] | None:
        """Return the folder and id of the image that a file belongs to, or None if it is no channel."""
        depth = "".join(self.parts).count("/") + 1
        steps = path.split("/")
        folder, name = "/".join(steps[:-depth]), "/".join(steps[-depth:])
        found = self.regex.fullmatch(name)
        return found and (folder, found["id"])

    def path(self, folder: str, image: str, channel: int = 0) -> str:
        """Return the path of the file of one channel."""
        before, after = (each.replace(ID, image) for each in self.parts)
        return "/".join(filter(None, (folder, f"{before}{self.names[channel]}{after}")))


@functools.cache
def pattern_of(channel_files: str) -> ChannelPattern:
    """Return the pattern of DATA.CHANNEL_FILES, which each image needs several times."""
    return ChannelPattern(channel_files)


class ChannelFiles(FileImages):
    """Images with a file for each channel. The path of an image is the path of its first channel's file."""

    channel: int | None = None  # the channel that this set reads; None: all channels

    def read(self, index: int) -> np.ndarray:
        if self.channel is not None:
            return super().read(index)
        if not self.pattern.match(path := super()._path(index)):
            raise ImageReadError(
                f"{path} is not the name of a channel's file; DATA.CHANNEL_FILES is {self.pixels.channel_files}"
            )
        layers = []
        for number, name in enumerate(self.pattern.names):
            layer = self.layer(number)
            try:
                layers.append(layer.read(index))
            except ImageReadError as error:
                raise ImageReadError(f"channel {name}, {layer.name(index)}: {error}") from error
            if (found := layers[-1].shape[:2]) != (first := layers[0].shape[:2]):
                shapes = (f"{width} x {height} pixels" for height, width in (found, first))
                raise ImageReadError(
                    f"channel {name} has {next(shapes)}, channel {self.pattern.names[0]} {next(shapes)}"
                )
        if len({each.dtype for each in layers}) > 1:
            raise ImageReadError(f"its channels have different types: {', '.join(each.dtype.name for each in layers)}")
        return np.concatenate(layers, 2)

    @property
    def pattern(self) -> ChannelPattern:
        return pattern_of(self.pixels.channel_files)

    def layer(self, channel: int) -> "ChannelFiles":
        """Return the set of the files of one channel."""
        return self.with_facts(channel=channel, pixels=replace(self.pixels, num_channels=1))

    def _path(self, index: int) -> str:
        path = super()._path(index)
        if self.channel is None:
            return path
        found = self.pattern.match(path)
        return self.pattern.path(*found, self.channel) if found else path

    def stamp(self, index: int) -> str:
        if self.channel is not None:
            return super().stamp(index)
        return "\0".join(self.layer(number).stamp(index) for number in range(len(self.pattern.names)))

    def file(self, index: int) -> tuple[str, bytes]:
        """Return the file of one channel, or all channels as one .npy file."""
        if self.channel is not None:
            return super().file(index)
        content = io.BytesIO()
        np.save(content, self.read(index))
        return ".npy", content.getvalue()


def grouped(paths: Sequence[str], channel_files: str) -> tuple[list[str], int]:
    """Return the path of the first channel of each image among these files, and the number of other files."""
    pattern = pattern_of(channel_files)
    found = [pattern.match(path) for path in paths]
    images = {each: pattern.path(*each) for each in found if each}
    return list(images.values()), found.count(None)

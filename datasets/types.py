"""What a data set is: targets, class names, and images read one at a time, from files or from memory."""

import io
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from datasets.shuffle import shuffled
from datasets.transforms.decode import ImageReadError, decode, to_array
from utils.errors import DataError, not_a_file


class ImageSet:
    """Images with a class each. `targets[i]` is the class number of image i, `classes[number]` its name."""

    in_memory = False
    root: Path | None = None  # the folder of its files, where they are known
    notes: tuple[str, ...] = ()  # what whoever starts a run should know; the validation set's are for both

    def __init__(self, targets: Sequence[int] | np.ndarray, classes: list[str]):
        self.targets = np.asarray(targets, dtype=np.int64)
        self.classes = classes

    def __len__(self) -> int:
        return len(self.targets)

    def read(self, index: int) -> np.ndarray:
        """The image as uint8 [H, W, channels]; ImageReadError when that cannot be done. Threads call it at once."""
        raise NotImplementedError

    def file(self, index: int) -> tuple[str, bytes]:
        """The image as a file: its ending and its bytes. Where there is no file, a PNG of the pixels."""
        pixels, png = self.read(index), io.BytesIO()
        Image.fromarray(pixels if pixels.shape[2] > 1 else pixels[:, :, 0]).save(png, "PNG")
        return ".png", png.getvalue()

    def stamp(self, index: int) -> str:
        """Below `root`, what changes when the file of this image does: its name, size and date."""
        raise NotImplementedError

    def epoch_order(self, seed: int, epoch: int) -> np.ndarray:
        """The order in which an epoch goes through the images, each once: a function of seed and epoch alone."""
        return shuffled(len(self), seed, epoch)

    def name(self, index: int) -> str:
        """What messages call this image."""
        raise NotImplementedError

    def take(self, indices: np.ndarray) -> "ImageSet":
        """A set of these images alone, with the same class numbers."""
        raise NotImplementedError


class FileImages(ImageSet):
    """Images in files below one folder.

    The paths lie in one bytes object, not in a list of strings: a million small objects would be copied into every
    loader process as soon as their reference counts are touched.
    """

    def __init__(
        self,
        root: Path,
        paths: list[str],
        targets: Sequence[int] | np.ndarray,
        classes: list[str],
        num_channels: int,
        *,
        confined: bool = False,
    ):
        """`paths` are relative to `root`; `confined`: they come from a list, and no link may lead out of `root`."""
        super().__init__(targets, classes)
        encoded = [os.fsencode(path) for path in paths]
        self.root, self.num_channels, self.confined = root, num_channels, confined
        self._paths = b"".join(encoded)
        self._ends = np.cumsum([len(path) for path in encoded], dtype=np.int64)

    def name(self, index: int) -> str:
        return os.path.join(self.root, self._path(index))

    def stamp(self, index: int) -> str:
        try:
            status = os.stat(self.name(index))
        except OSError:
            return f"{self._path(index)}\0missing"
        return f"{self._path(index)}\0{status.st_size}\0{status.st_mtime_ns}"

    def _path(self, index: int) -> str:
        start = self._ends[index - 1] if index else 0
        return os.fsdecode(self._paths[start : self._ends[index]])

    def read(self, index: int) -> np.ndarray:
        return decode(self.file(index)[1], self.num_channels)

    def file(self, index: int) -> tuple[str, bytes]:
        path = self.name(index)
        # The folders were looked at when the list was read; a link to a file shows only here.
        if self.confined and os.path.islink(path) and not is_within(self.root, path):
            raise DataError(f"{path}: this link leads out of {self.root}; a list may only name files inside it")
        try:
            with open(path, "rb", opener=_without_waiting) as file:
                if not (kind := not_a_file(file.fileno())):
                    return os.path.splitext(path)[1], file.read()
            raise ImageReadError(f"it is {kind}")
        except OSError as error:
            raise ImageReadError(f"{type(error).__name__}: {error}") from error

    def take(self, indices: np.ndarray) -> "FileImages":
        paths = [self._path(index) for index in indices.tolist()]
        return FileImages(
            self.root, paths, self.targets[indices], self.classes, self.num_channels, confined=self.confined
        )


class ArrayImages(ImageSet):
    """Images in memory: uint8 [N, H, W] or [N, H, W, 3]."""

    in_memory = True

    def __init__(self, images: np.ndarray, targets: np.ndarray, classes: list[str], num_channels: int, title: str):
        super().__init__(targets, classes)
        self.images, self.num_channels, self.title = images, num_channels, title

    def name(self, index: int) -> str:
        return f"{self.title} image {index}"

    def read(self, index: int) -> np.ndarray:
        pixels = self.images[index]
        if pixels.ndim == 3 and pixels.shape[2] == self.num_channels:
            return pixels
        return to_array(Image.fromarray(pixels), self.num_channels)

    def take(self, indices: np.ndarray) -> "ArrayImages":
        return ArrayImages(self.images[indices], self.targets[indices], self.classes, self.num_channels, self.title)


def _without_waiting(path: str, flags: int) -> int:
    """Nor for somebody to write to a pipe: it is not read, but that shows only when it is open."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def is_within(root: str | Path, path: str | Path) -> bool:
    """Whether a path, all links followed, is inside a folder, its links followed too."""
    root, path = os.path.realpath(root), os.path.realpath(path)
    return os.path.commonpath([root, path]) == root

"""CIFAR-10 and CIFAR-100: the binary version, fetched when it is missing, or the Python version that is there already."""

import hashlib
import os
import shutil
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from configs.schema import Config
from datasets.sources.cifar_python import read_pickled
from datasets.sources.images import ArrayImages
from datasets.types import ImageSet
from utils.errors import DataError

NUM_PIXELS = 3 * 32 * 32  # a record: the label bytes, then all red, all green, all blue pixels


@dataclass(frozen=True)
class Layout:
    """Names of folder and files."""

    folder: str
    train_files: tuple[str, ...]
    val_file: str
    names_file: str

    @property
    def files(self) -> tuple[str, ...]:
        return (*self.train_files, self.val_file, self.names_file)


@dataclass(frozen=True)
class Version:
    """What one of the two data sets looks like on disk."""

    title: str
    url: str  # of the binary version
    md5: str
    binary: Layout
    num_labels: int  # label bytes of an image there; the last is the class
    python: Layout
    labels_key: str  # of the Python version's dictionaries
    names_key: str


CIFAR10 = Version(
    title="cifar10",
    url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    md5="c32a1d4ab5d03f1284b67883e8d87530",
    binary=Layout(
        "cifar-10-batches-bin",
        tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
        "test_batch.bin",
        "batches.meta.txt",
    ),
    num_labels=1,
    python=Layout(
        "cifar-10-batches-py",
        tuple(f"data_batch_{number}" for number in range(1, 6)),
        "test_batch",
        "batches.meta",
    ),
    labels_key="labels",
    names_key="label_names",
)
CIFAR100 = Version(
    title="cifar100",
    url="https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
    md5="03b5dce01913d631647c71ecec9e9cb8",
    binary=Layout("cifar-100-binary", ("train.bin",), "test.bin", "fine_label_names.txt"),
    num_labels=2,
    python=Layout("cifar-100-python", ("train",), "test", "meta"),
    labels_key="fine_labels",
    names_key="fine_label_names",
)


def read_cifar10(config: Config) -> tuple[ImageSet | None, ImageSet]:
    """cifar-10-batches-bin/ below DATA_PATH."""
    return read_version(config, CIFAR10)


def read_cifar100(config: Config) -> tuple[ImageSet | None, ImageSet]:
    """cifar-100-binary/ below DATA_PATH; the 100 fine classes."""
    return read_version(config, CIFAR100)


def read_version(config: Config, version: Version) -> tuple[ImageSet | None, ImageSet]:
    """Training and validation images in memory."""
    root = Path(config.DATA.DATA_PATH).expanduser()
    if not _has_all(root, version.binary) and _has_all(root, version.python):
        layout, read_file = version.python, _read_python_file
        names = read_pickled(root / layout.folder / layout.names_file).get(version.names_key, [])
    else:
        layout, read_file = version.binary, _read_binary_file
        _make_present(root, version, config.DATA.DOWNLOAD)
        names = (root / layout.folder / layout.names_file).read_text(encoding="utf-8", errors="replace").split()

    def gather(part: str, files: tuple[str, ...]) -> ArrayImages:
        contents = [read_file(root / layout.folder / file, version) for file in files]
        images, targets = (np.concatenate(each) for each in zip(*contents, strict=True))
        if len(targets) and not 0 <= targets.min() <= targets.max() < len(names):
            raise DataError(
                f"{root / layout.folder}: labels {targets.min()}..{targets.max()} for {len(names)} class names; the "
                "files are damaged, remove the folder"
            )
        images = np.ascontiguousarray(images.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
        return ArrayImages(images, targets, names, config.DATA.IMAGE_CHANNELS, f"{version.title} {part}")

    train = None if config.EVAL else gather("training", layout.train_files)
    return train, gather("validation", (layout.val_file,))


def _has_all(root: Path, layout: Layout) -> bool:
    return all((root / layout.folder / name).is_file() for name in layout.files)


def _read_binary_file(file: Path, version: Version) -> tuple[np.ndarray, np.ndarray]:
    """Pixels uint8 [N, 3072] and labels [N]."""
    content = np.fromfile(file, dtype=np.uint8)
    length = version.num_labels + NUM_PIXELS
    if len(content) % length:
        raise DataError(f"{file}: {len(content)} bytes are no whole number of images ({length} bytes each); remove it")
    records = content.reshape(-1, length)
    return records[:, version.num_labels :], records[:, version.num_labels - 1].astype(np.int64)


def _read_python_file(file: Path, version: Version) -> tuple[np.ndarray, np.ndarray]:
    """Pixels uint8 [N, 3072] and labels [N]."""
    content = read_pickled(file)
    images, labels = content.get("data"), content.get(version.labels_key)
    right = isinstance(images, np.ndarray) and images.dtype == np.uint8 and images.shape[1:] == (NUM_PIXELS,)
    if not right or not isinstance(labels, list) or len(labels) != len(images):
        raise DataError(f"{file}: this is no batch of {version.title}; remove its folder to fetch the data again")
    return images, np.array(labels, dtype=np.int64)


def _make_present(root: Path, version: Version, may_download: bool) -> None:
    """See to it that the binary version is unpacked below `root`. Whoever looks meanwhile sees all of it or nothing."""
    archive = root / PurePosixPath(version.url).name
    if _has_all(root, version.binary):
        return
    if not archive.is_file():
        if not may_download:
            raise DataError(
                f"DATA.DATA_PATH: {root} has no {version.binary.folder}/ with {' '.join(version.binary.files)}, and "
                f"DATA.DOWNLOAD is off; put {version.url} into {root}, or set DATA.DOWNLOAD=true"
            )
        root.mkdir(parents=True, exist_ok=True)
        _download(archive, version)
    elif _md5(archive) != version.md5:
        raise DataError(f"{archive}: its MD5 is not {version.md5}, so it is damaged; remove it and start again")
    _unpack(archive, root, version.binary)


def _download(archive: Path, version: Version) -> None:
    import http.client  # here: most runs fetch nothing
    import urllib.request

    print(f"{version.title}: fetching {version.url} to {archive}", flush=True)
    partial = archive.with_name(f"{archive.name}.{os.getpid()}.partial")
    try:
        with urllib.request.urlopen(version.url, timeout=60) as source, open(partial, "wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
        if _md5(partial) != version.md5:
            raise OSError("what came is not the archive: its MD5 is another")
        os.replace(partial, archive)
    except (OSError, http.client.HTTPException) as error:
        raise DataError(
            f"{version.title}: fetching {version.url} failed ({error}); fetch it by other means and put it at {archive}"
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def _md5(file: Path) -> str:
    with open(file, "rb") as content:
        return hashlib.file_digest(content, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _unpack(archive: Path, root: Path, layout: Layout) -> None:
    """Write the files that are wanted, and no others: a name in an archive never becomes a path."""
    folder = root / layout.folder
    with tempfile.TemporaryDirectory(dir=root, prefix=f".{layout.folder}.") as temporary:
        unpacked = Path(temporary) / layout.folder
        unpacked.mkdir()
        with tarfile.open(archive) as members:
            for member in members:
                path = PurePosixPath(member.name)
                if member.isfile() and path.parent == PurePosixPath(layout.folder) and path.name in layout.files:
                    with members.extractfile(member) as source, open(unpacked / path.name, "wb") as target:
                        shutil.copyfileobj(source, target)
        if not _has_all(Path(temporary), layout):
            raise DataError(f"{archive}: it does not hold {' '.join(layout.files)}")
        if not _has_all(root, layout):  # nor has another process been faster
            shutil.rmtree(folder, ignore_errors=True)  # what somebody else's unpacking left half done
            os.rename(unpacked, folder)

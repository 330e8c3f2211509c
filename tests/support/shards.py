"""Tar shards of small images whose shade is their number."""

import io
import tarfile
from pathlib import Path

from PIL import Image


def png(shade: int) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (6, 5), (shade, 0, 0)).save(content, "PNG")
    return content.getvalue()


def write_tar(path: Path, files: dict[str, bytes], tar_format: int = tarfile.USTAR_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=tar_format) as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def samples(first: int, count: int, num_classes: int = 3) -> dict[str, bytes]:
    """Samples whose shade is their number."""
    files = {}
    for number in range(first, first + count):
        files |= {f"{number:04d}.cls": str(number % num_classes).encode(), f"{number:04d}.png": png(number)}
    return files


def make_set(root: Path, num_shards: int = 3, count: int = 10) -> None:
    for shard in range(num_shards):
        write_tar(root / f"train-{shard:06d}.tar", samples(shard * count, count))
    write_tar(root / "val-000000.tar", samples(200, 6))

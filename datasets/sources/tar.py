"""Read tar files in place: the position of each file, and bytes from any position. Nothing is unpacked."""

import os
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from utils.errors import DataError, not_a_file

MOST_EXTENDED = 1 << 16  # bytes; the largest extended header (such as a long name) that is accepted
TOO_MANY_DIGITS = re.compile(rb"\d{256}")  # a file name never has this many digits
BLOCK = 512  # bytes; a block of zeros ends a tar


class Member(NamedTuple):
    """A file in a tar: its content is `size` bytes from `offset` on."""

    name: str
    offset: int
    size: int


class Tar:
    """An open tar. It keeps no position, so threads and forked processes can read from it concurrently."""

    def __init__(self, path: Path, title: str = ""):
        """Open a tar. `title` is its name in messages, by default the path. Raise DataError if this is not a file."""
        self.path, self.title = path, title or str(path)
        kind = not_a_file(path)
        if kind:
            raise DataError(f"{self.title} is {kind}, not a tar; remove or rename it")
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        stat = os.fstat(self.descriptor)
        self.size, self.mtime_ns = stat.st_size, stat.st_mtime_ns

    def __del__(self):
        if hasattr(self, "descriptor"):  # __init__ may have failed earlier
            os.close(self.descriptor)

    def read(self, offset: int, size: int) -> bytes:
        """Return `size` bytes, or fewer at the end of the file."""
        data = os.pread(self.descriptor, size, offset)
        while len(data) < size and (more := os.pread(self.descriptor, size - len(data), offset + len(data))):
            data += more
        return data

    def members(self) -> Iterator[Member]:
        """Yield the files in their order. Raise DataError if the tar is damaged or its end is missing."""
        end, last, problem = 0, "nothing", None
        try:
            with tarfile.open(fileobj=_Headers(self), mode="r:") as headers:
                for member in headers:
                    end = headers.offset
                    if end > self.size:
                        break
                    if member.isreg():
                        last = member.name
                        yield self._checked(member)
        # Errors other than TarError come from extended headers of impossible sizes, or from too many of them in a row.
        except (tarfile.TarError, ValueError, OverflowError, MemoryError, RecursionError) as error:
            problem = error
        # tarfile ends silently at a damaged header, so the files after it would be missing from the data.
        if problem or end > self.size or self.read(end, BLOCK) != bytes(BLOCK):
            raise DataError(
                f"{self.title}: no tar header at byte {end}, after {last}; the file is truncated, damaged or "
                "compressed: restore or unpack it"
            ) from problem

    def _checked(self, member: tarfile.TarInfo) -> Member:
        if member.issparse() or member.name.startswith("/") or ".." in member.name.split("/"):
            raise DataError(
                f"{self.title}: the member {member.name!r} points outside the tar or is sparse; make the tar with "
                "relative names, without '..' and without --sparse"
            )
        return Member(member.name, member.offset_data, member.size)


class _Headers:
    """The file from which `tarfile` reads a tar's headers. Refuses headers that stall older Pythons or fill memory."""

    def __init__(self, tar: Tar):
        self.tar, self.position = tar, 0

    def tell(self) -> int:
        return self.position

    def seek(self, position: int) -> None:
        self.position = position

    def read(self, size: int) -> bytes:
        if not 0 <= size <= MOST_EXTENDED:
            raise tarfile.ReadError(f"a header of {size:,} bytes; at most {MOST_EXTENDED:,} are accepted")
        content = self.tar.read(self.position, size)
        self.position += len(content)
        if size > BLOCK and TOO_MANY_DIGITS.search(content):
            raise tarfile.ReadError("a header has a number with 256 or more digits")
        return content

"""Tar files that are read in place: the position of each file, and bytes from any position. Nothing is unpacked.

Python's tarfile ends silently at a damaged header, and what follows would be missing from the data.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from utils.errors import DataError, not_a_file

BLOCK = 512  # bytes; headers and contents begin at multiples of it
READ_AHEAD = 8192  # bytes: a read of a header includes a label and the header after it
MAX_HEADER = 1 << 20  # bytes of a long name or of pax records; more means damage
REGULAR, LONG_NAME, LONG_LINK, PAX, PAX_GLOBAL, SPARSE = (b"0", b"\0", b"7"), b"L", b"K", b"x", b"g", b"S"
WITHOUT_CONTENT = (b"1", b"2", b"3", b"4", b"5", b"6")  # links, devices, folders, pipes: skipped
PACKED = {b"\x1f\x8b": "gunzip", b"BZh": "bunzip2", b"\xfd7zXZ": "unxz", b"\x28\xb5\x2f\xfd": "unzstd"}


class Member(NamedTuple):
    """A file in a tar: its content is `size` bytes from `offset` on."""

    name: str
    offset: int
    size: int


class Tar:
    """An open tar. It keeps no position, so threads and forked processes can read from it concurrently."""

    def __init__(self, path: Path, title: str = ""):
        """`title`: what messages call it, if not its path. DataError when the path is not a file."""
        self.title = title or str(path)
        kind = not_a_file(path)
        if kind:
            raise DataError(f"{self.title} is {kind}, not a tar; remove or rename it")
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        stat = os.fstat(self.descriptor)
        self.size, self.mtime_ns = stat.st_size, stat.st_mtime_ns

    def __del__(self):
        if hasattr(self, "descriptor"):  # __init__ got that far
            os.close(self.descriptor)

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes, or fewer at the end of the file."""
        data = os.pread(self.descriptor, size, offset)
        while len(data) < size and (more := os.pread(self.descriptor, size - len(data), offset + len(data))):
            data += more
        return data


class HeaderReader:
    """Walks through the headers of a tar. It skips the contents, but can read small ones on the way."""

    def __init__(self, tar: Tar):
        self.tar = tar
        self._ahead, self._start = b"", 0
        self._last = "nothing"

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes of the tar."""
        start = offset - self._start
        if start < 0 or start + size > len(self._ahead):
            self._ahead, self._start, start = self.tar.read(offset, max(size, READ_AHEAD)), offset, 0
        data = self._ahead[start : start + size]
        if len(data) < size:
            raise self._truncated()
        return data

    def members(self) -> Iterator[Member]:
        """The files in their order. DataError where the tar is damaged, or its end is missing."""
        offset, name, records = 0, None, {}
        while any(header := self.read(offset, BLOCK)):
            kind, size = self._kind_and_size(header, offset)
            offset += BLOCK
            if kind in (LONG_NAME, LONG_LINK, PAX, PAX_GLOBAL):
                extra = self._extra(offset, size)
                if kind == LONG_NAME:
                    name = _text(extra)
                elif kind == PAX:
                    records = self._records(extra, offset)
            else:
                name, size = records.get("path", name), int(records.get("size", size))
                name = _name(header) if name is None else name
                self._check_name(name)
                if kind == SPARSE or any(key.startswith("GNU.sparse") for key in records):
                    raise DataError(
                        f"{self.tar.title}: {name!r} is stored as a sparse file; make the tar without --sparse"
                    )
                size = 0 if kind in WITHOUT_CONTENT else size
                if offset + size > self.tar.size:
                    raise self._truncated()
                if kind in REGULAR and not name.endswith("/"):  # old tars mark folders this way
                    self._last = name
                    yield Member(name, offset, size)
                name, records = None, {}
            offset += -(-size // BLOCK) * BLOCK

    def _kind_and_size(self, header: bytes, offset: int) -> tuple[bytes, int]:
        try:
            # The checksum is computed with blanks in its own field.
            if _number(header[148:156]) == sum(header) - sum(header[148:156]) + 8 * ord(" "):
                return header[156:157], _number(header[124:136])
        except ValueError:
            pass
        unpack = next((tool for magic, tool in PACKED.items() if not offset and header.startswith(magic)), None)
        if unpack:
            raise DataError(f"{self.tar.title} is compressed, so it cannot be read by position; {unpack} it")
        raise self._damaged(offset)

    def _extra(self, offset: int, size: int) -> bytes:
        if size > MAX_HEADER:
            raise self._damaged(offset)
        return self.read(offset, size)

    def _records(self, data: bytes, offset: int) -> dict[str, str]:
        """pax records: 'LENGTH KEY=VALUE' and a newline, where LENGTH includes all of it."""
        records, start = {}, 0
        while start < len(data):
            length = data[start : start + 8].partition(b" ")[0]
            end = start + int(length) if length.isdigit() else 0
            key, equals, value = data[start + len(length) + 1 : end - 1].partition(b"=")
            if (
                not equals
                or data[end - 1 : end] != b"\n"
                or (key == b"size" and not (value.isdigit() and len(value) < 20))
            ):
                raise self._damaged(offset)
            records[_text(key)] = _text(value)
            start = end
        return records

    def _check_name(self, name: str) -> None:
        if name.startswith("/") or ".." in name.split("/"):
            raise DataError(
                f"{self.tar.title}: the member {name!r} leads out of the tar; make the tar with relative names and "
                "without '..'"
            )

    def _truncated(self) -> DataError:
        return DataError(f"{self.tar.title} is truncated after {self._last}; restore it, or leave it out")

    def _damaged(self, offset: int) -> DataError:
        return DataError(f"{self.tar.title}: no tar header at byte {offset}; the file is damaged, restore it")


def _name(header: bytes) -> str:
    name = _text(header[:100])
    prefix = _text(header[345:500]) if header[257:263] == b"ustar\0" else ""  # GNU tars store times there
    return f"{prefix}/{name}" if prefix else name


def _text(field: bytes) -> str:
    return os.fsdecode(field.partition(b"\0")[0])


def _number(field: bytes) -> int:
    """Octal digits, or GNU's binary form for large numbers."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.strip(b" \0")
    if not digits.isdigit():
        raise ValueError(field)
    return int(digits, 8)

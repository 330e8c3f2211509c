"""Formats that only DATA.PIXELS native reads: how to recognize them, and a message for runs that do not read them."""

import contextlib
import io

from PIL import ExifTags, TiffImagePlugin

from utils.commands import page

NUMPY, DICOM_PLACE = b"\x93NUMPY", slice(128, 132)  # the first bytes of .npy files, and where DICOM files have DICM
TIFFS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")  # the first bytes; the last two are of BigTIFF
TIFF_CHANNELS, TIFF_BITS = ExifTags.Base.SamplesPerPixel, ExifTags.Base.BitsPerSample


def is_dicom(data: bytes) -> bool:
    return data[DICOM_PLACE] == b"DICM"


def describe_unread(data: bytes) -> str:
    """Return what a file is that only DATA.PIXELS native reads, or ""."""
    remedy = f"; DATA.PIXELS=native reads it ({page('docs/pixels.md')})"
    if data.startswith(NUMPY) or is_dicom(data):
        return ("a NumPy array" if data.startswith(NUMPY) else "a DICOM file") + remedy
    with contextlib.suppress(Exception):  # the file is damaged
        if data.startswith(TIFFS):
            file = io.BytesIO(data)
            tags = TiffImagePlugin.ImageFileDirectory_v2(file.read(8 if data.startswith(TIFFS[:2]) else 16))
            file.seek(tags.next)
            tags.load(file)
            return f"it has {tags[TIFF_CHANNELS]} channels of {max(tags[TIFF_BITS])} bits" + remedy
    return ""

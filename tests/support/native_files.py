"""Writers of small image files with an array's values: .npy, TIFF, 16-bit PNG, DICOM, and all that Pillow writes."""

import io
from typing import Any

import imagecodecs
import numpy as np
import tifffile
from PIL import Image
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, RLELossless, SecondaryCaptureImageStorage, generate_uid


def deep(*shape: int, most: int = 2**16) -> np.ndarray:
    """Return random uint16 values below `most`. The first is 0, and the second the highest value."""
    values = np.random.default_rng(len(shape)).integers(most, size=shape).astype(np.uint16)
    values.flat[:2] = 0, most - 1
    return values


def npy(values: Any) -> bytes:
    content = io.BytesIO()
    np.save(content, values)
    return content.getvalue()


def tiff(values: np.ndarray, **options: Any) -> bytes:
    """Return a TIFF. Its pages are grey unless the options of tifffile say something else."""
    content = io.BytesIO()
    tifffile.imwrite(content, values, **({"photometric": "minisblack"} | options))
    return content.getvalue()


def tiff_of_pages(*pages: np.ndarray | dict, **options: Any) -> bytes:
    """Return a TIFF whose pages are written one by one, like a scanner's. A dict also has options for its page."""
    content, usual = io.BytesIO(), {"photometric": "minisblack", "contiguous": False, "metadata": None}
    with tifffile.TiffWriter(content) as file:
        for page in pages:
            file.write(**(usual | options | (page if isinstance(page, dict) else {"data": page})))
    return content.getvalue()


def png16(values: np.ndarray) -> bytes:
    """Return a PNG of 16 bits with 1 to 4 channels. Pillow writes only grey ones."""
    return imagecodecs.png_encode(np.ascontiguousarray(values))


def by_pillow(values: np.ndarray, form: str, mode: str | None = None, **options: Any) -> bytes:
    """Return a file of any format of Pillow, after conversion to another mode if `mode` is given."""
    content, image = io.BytesIO(), Image.fromarray(values)
    (image.convert(mode) if mode else image).save(content, form, **options)
    return content.getvalue()


def dicom(pixels: np.ndarray | None, syntax: str = ExplicitVRLittleEndian, **elements: Any) -> bytes:
    """Return a DICOM file of integers [H, W] or [H, W, 3], or without pixels. `elements` replace or add elements."""
    file = Dataset()
    file.file_meta = FileMetaDataset()
    file.file_meta.TransferSyntaxUID = syntax
    file.SOPClassUID, file.SOPInstanceUID = SecondaryCaptureImageStorage, generate_uid()
    if pixels is not None:
        bits, samples = 8 * pixels.itemsize, pixels.shape[2] if pixels.ndim == 3 else 1
        usual = {
            "Rows": pixels.shape[0],
            "Columns": pixels.shape[1],
            "SamplesPerPixel": samples,
            "PhotometricInterpretation": "RGB" if samples == 3 else "MONOCHROME2",
            "BitsAllocated": bits,
            "BitsStored": bits,
            "HighBit": elements.get("BitsStored", bits) - 1,
            "PixelRepresentation": int(pixels.dtype.kind == "i"),
            "PixelData": pixels.tobytes(),
        }
        elements = usual | ({"PlanarConfiguration": 0} if samples == 3 else {}) | elements
    for name, value in elements.items():
        setattr(file, name, value)
    if syntax == RLELossless:
        file.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
        file.compress(syntax)
    content = io.BytesIO()
    file.save_as(content, enforce_file_format=True)
    return content.getvalue()

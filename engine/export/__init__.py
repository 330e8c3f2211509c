"""Exported graphs that take photos, have 8 bits, or run in a browser; and predictions with an exported graph."""

from configs.tables import import_named
from datasets.pixels import Pixels

# {class of pixels: file and class of a model that takes images before they are resized}
SUBJECTS = {"Pixels": "photo.PhotoSubject", "NativePixels": "native_photo.NativePhotoSubject"}


def subject_of(pixels: Pixels) -> type:
    """Return the class of a model to export with its preprocessing."""
    return import_named("engine.export", SUBJECTS[type(pixels).__name__])

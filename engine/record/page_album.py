"""Pictures of images: what the model gets wrong, and what it is trained with."""

from engine.record.html import Markup, element, scrolling, section
from engine.record.page import embedded
from engine.record.saved_run import SavedRun

SHEETS = {
    "mistakes.png": (
        "Mistakes it is surest of",
        "Validation images with label, prediction and its probability. Some may be labelled wrongly.",
    ),
    "train_batch.png": (
        "What it is trained with",
        "Training images as the model gets them, cropped, augmented and mixed.",
    ),
}


def album(run: SavedRun) -> list[Markup]:
    found = []
    for name, (title, told) in SHEETS.items():
        path = run.file(name)
        sheet = path and embedded(path, alt=f"{title}: {told}", class_="sheet")
        if sheet:
            found.append(section(title, element("p", told, class_="soft"), scrolling(sheet, title)))
    return found

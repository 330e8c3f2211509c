"""ImageNet's files as Kaggle's archive unpacks, with images of one shade."""

from pathlib import Path

from tests.support.image_sets import draw

SYNSETS = ("n01440764", "n01443537", "n02108551")
VAL_SYNSETS = ["n02108551", "n01440764", "n01443537", "n01440764"]  # of each validation image
IMAGES_PER_CLASS = 4


def val_name(number: int) -> str:
    return f"ILSVRC2012_val_{number + 1:08d}.JPEG"


def train_images() -> dict[str, dict[str, int]]:
    """The shades of the images of each class by their names: from 0 on."""
    return {
        synset: {f"{synset}_{each}.JPEG": place * IMAGES_PER_CLASS + each for each in range(IMAGES_PER_CLASS)}
        for place, synset in enumerate(SYNSETS)
    }


def write_solution(file: Path, synsets: list[str] = VAL_SYNSETS) -> None:
    """Not in the order of the images, and one of them with two boxes."""
    boxes = [f"{synset} 1 2 3 4 " * (1 + (number == 1)) for number, synset in enumerate(synsets)]
    lines = [f"{Path(val_name(number)).stem},{text}" for number, text in enumerate(boxes)]
    file.write_text("\n".join(["ImageId,PredictionString", *reversed(lines)]) + "\n")


def make_kaggle(root: Path) -> Path:
    """ILSVRC/ and the tables beside it; shades of the validation images count from 100."""
    images = root / "ILSVRC" / "Data" / "CLS-LOC"
    for synset, names in train_images().items():
        for name, shade in names.items():
            draw(images / "train" / synset / name, shade)
    for number in range(len(VAL_SYNSETS)):
        draw(images / "val" / val_name(number), 100 + number)
    write_solution(root / "LOC_val_solution.csv")
    return root

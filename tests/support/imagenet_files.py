"""ImageNet's files in the forms in which it is passed on, with images of one shade: Kaggle's folders, the official tars."""

import gzip
import io
from pathlib import Path

import numpy as np
import scipy.io

from tests.support.image_sets import draw, png, tar_bytes, write_tar

# The development kit numbers classes in another order than that of their names.
SYNSETS = {"n01440764": 3, "n01443537": 1, "n02108551": 2}
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


def class_tars() -> dict[str, bytes]:
    return {
        f"{synset}.tar": tar_bytes({name: png(shade) for name, shade in names.items()})
        for synset, names in train_images().items()
    }


def make_official(root: Path) -> Path:
    """Both tars and the development kit."""
    write_tar(root / "ILSVRC2012_img_train.tar", class_tars())
    images = {val_name(number): png(100 + number) for number in range(len(VAL_SYNSETS))}
    write_tar(root / "ILSVRC2012_img_val.tar", dict(reversed(images.items())))
    write_devkit(root / "ILSVRC2012_devkit_t12.tar.gz")
    return root


def write_devkit(file: Path, meta: bytes | None = None, truth: bytes | None = None) -> None:
    ids = [SYNSETS[synset] for synset in VAL_SYNSETS]
    truth = "".join(f"{number}\n" for number in ids).encode() if truth is None else truth
    files = {"meta.mat": meta or meta_mat(), "ILSVRC2012_validation_ground_truth.txt": truth}
    kit = tar_bytes({f"ILSVRC2012_devkit_t12/data/{name}": content for name, content in files.items()})
    file.write_bytes(gzip.compress(kit))


def meta_mat() -> bytes:
    """The classes by number, and one above them in the hierarchy, which is no class of an image."""
    rows = [(number, synset, 0) for synset, number in SYNSETS.items()] + [(4, "n00001740", 3)]
    kinds = [("ILSVRC2012_ID", object), ("WNID", object), ("words", object), ("num_children", object)]
    synsets = np.array([(float(number), name, f"the {name}", children) for number, name, children in rows], kinds)
    content = io.BytesIO()
    scipy.io.savemat(content, {"synsets": synsets.reshape(-1, 1)})
    return content.getvalue()

"""The wheel of halfstep, and a folder from which its user starts it."""

import shutil
from pathlib import Path

import numpy as np
from hatchling.builders.wheel import WheelBuilder
from PIL import Image

from tests.support.forks import ROOT

USERS_MODULE = 'raise ImportError("halfstep must not import the modules of its user")\n'
SMALL = "-cfg vit_digits -dataset imagefolder -data_path photos -epochs 2 -batch_size 4".split()
OPTIONS = "MODEL.DEPTH=1 DATA.NUM_WORKERS=0 TRAIN.WARMUP_EPOCHS=0 SAVE_STEPS=2 REPORT_FREQ=1 TRACK=[]".split()


def copy_tree(folder: Path) -> Path:
    """Copy the files of the checkout, and add a run and an environment, as users' clones have."""
    ignored = shutil.ignore_patterns(".git", ".venv", ".*_cache", "__pycache__", "output", "data")
    shutil.copytree(
        ROOT, folder, ignore=lambda parent, names: ignored(parent, names) if Path(parent) == ROOT else set()
    )
    for name in ("output/train-1/last.pth", ".venv/lib/module.py", "weights/mine.pth", "engine/__pycache__/x.pyc"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"not part of the wheel")
    return folder


def build_wheel(tree: Path, folder: Path) -> Path:
    """Build the wheel of a tree in this process, without pip."""
    (path,) = WheelBuilder(str(tree)).build(directory=str(folder), versions=["standard"])
    return Path(path)


def make_users_folder(parent: Path) -> Path:
    """Make a folder with two classes of photos, and with modules whose names are also names of halfstep's modules."""
    for label, shade in (("dark", 0), ("light", 128)):
        (parent / "photos" / label).mkdir(parents=True)
        for number in range(20):
            pixels = np.random.default_rng(number).integers(shade, shade + 128, size=(16, 16), dtype=np.uint8)
            Image.fromarray(pixels).save(parent / "photos" / label / f"{number}.png")
    for name in ("utils.py", "datasets/__init__.py", "configs/__init__.py"):
        (parent / name).parent.mkdir(exist_ok=True)
        (parent / name).write_text(USERS_MODULE)
    return parent


def printed_commands(stdout: str) -> dict[str, str]:
    """Return the commands that a finished run suggests: predict, export and train longer."""
    lines = [line.strip().split("  ", 1) for line in stdout.splitlines() if line.startswith("  ")]
    names = ("predict", "export", "train longer")
    return {parts[0]: parts[1].strip() for parts in lines if parts[0] in names and len(parts) == 2}

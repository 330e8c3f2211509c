"""The data and finished runs of the table of outputs (output_table.py), made so that most mistakes change an output.

The data are drawn by code. The runs are trained once and stored, because weights that were trained on another processor
differ slightly:

    python -m tests.support.output_runs
"""

import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from tests.support.forks import ROOT, end_server
from tests.support.runs import run

STORED = ROOT / "tests/data/output_runs"
# {class: (number of photos, colour)}. The order of the code points is not that of any natural language.
CLASSES = {
    "zebra": (6, (200, 60, 40)),
    "Apple": (15, (60, 190, 50)),
    "b, c": (9, (40, 70, 210)),
    "äpfel": (11, (190, 180, 60)),
    "dog|cat": (7, (60, 180, 190)),
    "猫": (8, (180, 60, 190)),
}
SIZES = [(20, 14), (14, 22), (26, 16), (16, 16), (34, 12)]  # width, height
BASE = """
DATA: {DATASET: imagefolder, DATA_PATH: photos, VAL_FRACTION: 0.4, NUM_WORKERS: 0, IMAGE_SIZE: 16, CROP_SCALE: [0.6, 1],
  BATCH_SIZE: 8, HFLIP: 0}
MODEL: {TYPE: vit, PATCH_SIZE: 4, EMBED_DIM: 16, DEPTH: 2, NUM_HEADS: 2}
TRAIN: {NUM_EPOCHS: 4, WARMUP_EPOCHS: 1, BASE_LR: 1e-2, MODEL_EMA: true, MODEL_EMA_DECAY: 0.7, MODEL_EMA_WARMUP: false}
SAVE: runs
TRACK: []
REPORT_FREQ: 2
SEED: 1
"""
TIMM = "MODEL.TYPE=timm MODEL.PATCH_SIZE=16 MODEL.EMBED_DIM=768 MODEL.DEPTH=12 MODEL.NUM_HEADS=12"
# {run: settings}
RUNS = {
    "vit": "TRAIN.NUM_EPOCHS=15",
    "vit2": "TRAIN.NUM_EPOCHS=6 SEED=2 TRAIN.BASE_LR=3e-3",
    "convnet": f"{TIMM} MODEL.NAME=test_resnet MODEL.KWARGS.channels=[4,4,8,8] TRAIN.BASE_LR=3e-2 TRAIN.NUM_EPOCHS=8",
    "lora": "MODEL.PRETRAINED=runs/vit/best.pth MODEL.LORA.RANK=2 TRAIN.NUM_EPOCHS=2",
    "labels": "DATA.DATASET=csv DATA.DATA_PATH=labels.csv DATA.LABEL_SEPARATOR=; TRAIN.NUM_EPOCHS=10",
}
SWEEP = "-folds 3 -over TRAIN.BASE_LR=1e-2,3e-3 -opts TRAIN.NUM_EPOCHS=5"
WITHOUT_WEIGHTS, COMPLETE = ("vit2", "sweep"), "vit"  # stored without weights, and with all files
NEVER_READ = "*.html accuracy.png loss.png *.txt .* *.csv.gz checkpoint-*.pth previous.pth".split()
ONLY_IN_COMPLETE = "last.pth confusion.png mistakes.png train_batch.png steps.csv".split()


def pixels_of(random: np.random.RandomState, colour: tuple[int, int, int], size: tuple[int, int]) -> np.ndarray:
    """Return a photo of this colour that is brighter at the left and darker at the bottom, with blocks of noise."""
    width, height = size
    blocks = random.randint(-80, 80, size=(-(-height // 4), -(-width // 4), 3)).repeat(4, 0).repeat(4, 1)
    light = np.linspace(40, -40, width)[None, :] + np.linspace(15, -35, height)[:, None]
    tint = random.randint(-60, 60, size=3)
    return (np.array(colour) + tint + light[:, :, None] + blocks[:height, :width]).clip(0, 255).astype(np.uint8)


def save(photo: Image.Image, path: Path, **options: object) -> None:
    """Write the photo uncompressed, so that the size of its file is the same with every version of zlib."""
    photo.save(path, compress_level=0, **options)


def write_data(root: Path) -> None:
    """Write the labelled photos, lists of several labels, and new photos of every kind of file."""
    random, rows, number = np.random.RandomState(7), [], 0
    for place, (name, (count, colour)) in enumerate(CLASSES.items()):
        (root / "photos" / name).mkdir(parents=True)
        for index in range(count):
            number += 1
            shown = [*CLASSES.values()][(place + 1) % 6][1] if index == 5 else colour  # a wrong label in each class
            pixels = pixels_of(random, shown, SIZES[(place + number) % 5])
            save(Image.fromarray(pixels), root / "photos" / name / f"{number}.png")
            marks = [name] * (number % 4 != 0) + ["wide"] * (pixels.shape[1] > 20) + ["Tall"] * (pixels.shape[0] > 20)
            rows.append((f"photos/{name}/{number}.png", ";".join(marks)))
    (root / "photos/zebra/broken.png").write_bytes(b"\x89PNG\r\n\x1a\nthe rest is lost")
    shutil.copy(root / "photos/Apple/9.png", root / "photos/Apple/copy.png")
    shutil.copy(root / "photos/b, c/23.png", root / "photos/zebra/other.png")
    lines = ["image_path,target", *(f'"{path}","{marks}"' for path, marks in rows)]
    (root / "labels.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    write_new_photos(root / "new", random)


def write_new_photos(folder: Path, random: np.random.RandomState) -> None:
    """Write photos without labels: other modes, depths, shapes and rotations, copies, and files that are not photos."""
    (folder / "in").mkdir(parents=True)
    colours = [colour for _, colour in CLASSES.values()]
    for number, colour in enumerate([*colours, *colours[:4]], start=1):
        save(Image.fromarray(pixels_of(random, colour, SIZES[number % 5])), folder / f"{number}.png")
    pixels = pixels_of(random, colours[1], (22, 15))
    photo = Image.fromarray(pixels)
    save(photo.convert("L"), folder / "grey.png")
    alpha = np.linspace(0, 255, 22).astype(np.uint8)[None, :].repeat(15, 0)
    save(Image.fromarray(np.dstack([pixels, alpha])), folder / "transparent.png")
    save(Image.fromarray(pixels[:, :, 1].astype(np.uint16) * 257), folder / "sixteen bits.png")
    palette = Image.fromarray(pixels[:, :, 0] // 64)
    palette.putpalette([0, 0, 0, 60, 190, 50, 200, 60, 40, 40, 70, 210])
    save(palette, folder / "palette.png", transparency=0)
    exif = Image.Exif()
    exif[0x0112] = 6
    save(photo, folder / "in" / "lying.png", exif=exif)
    save(Image.fromarray(pixels_of(random, colours[3], (6, 40))), folder / "in" / "2.png")
    save(Image.fromarray(random.randint(0, 256, size=(18, 18, 3)).astype(np.uint8)), folder / "in" / "noise.png")
    shutil.copy(folder / "3.png", folder / "in" / "3.png")
    (folder / "in" / "broken.png").write_bytes(b"no picture")
    (folder / "in" / "notes.txt").write_text("not a photo\n")


def train(root: Path) -> None:
    """Train all runs in this folder, and store them without the files that no command reads."""
    write_data(root)
    (root / "base.yaml").write_text(BASE)
    for name, settings in RUNS.items():
        run("main_single_gpu.py", "-cfg", "base.yaml", "-name", name, "-opts", *settings.split(), cwd=root).done()
    run("scripts/sweep.py", "-cfg", "base.yaml", *SWEEP.split(), "-output", "runs/sweep", cwd=root).done()
    shutil.rmtree(STORED, ignore_errors=True)
    shutil.copytree(root / "runs", STORED, ignore=shutil.ignore_patterns(*NEVER_READ))
    for path in [path for path in STORED.rglob("*") if path.is_file()]:
        run_name = path.relative_to(STORED).parts[0]
        is_left_out = path.name in ONLY_IN_COMPLETE and run_name != COMPLETE
        if is_left_out or (path.suffix == ".pth" and run_name in WITHOUT_WEIGHTS):
            path.unlink()
        elif path.suffix in (".json", ".yaml", ".csv"):  # so that no file names a folder of this machine
            path.write_bytes(path.read_bytes().replace(f"{root}/".encode(), b"").replace(str(root).encode(), b"."))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        train(Path(sys.argv[1] if sys.argv[1:] else folder))
    end_server()

"""Makes the pictures of docs/images from figures, a run and real photos, and prints the output that README.md shows.

    python scripts/maintenance/pictures.py benchmarks
    python scripts/maintenance/pictures.py report -real FOLDER
    python scripts/maintenance/pictures.py augmentation -photos FOLDER
    python scripts/maintenance/pictures.py attention -photos FOLDER

`benchmarks` draws figures of BENCHMARKS.md, which it reads from the tables there.
`report` types the commands of README.md, needs Chromium, and takes minutes; -real is the folder of
tests/support/real_sets.py.
-photos has the photos in PHOTOS, as .png or .jpg. scikit-image (in skimage/data) and scikit-learn (in
sklearn/datasets/images) ship them. Look at each picture before you commit it.
"""

import argparse
import itertools
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs/images"
CHART = IMAGES / "benchmarks.svg"
PHOTOS = ("astronaut", "chelsea", "china", "coffee", "flower", "rocket")  # chelsea is a cat
MODEL = "tf_efficientnet_lite0"  # its weights come with halfstep
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WINDOW = (1100, 1075)  # pixels of report.png: down to the confusion matrix
# The settings of docs/augmentation.md; one draw for each pair, and half of the pairs stay unmixed, so that all is seen.
AUGMENTATION = """TRAIN.AUTO_AUGMENT=rand-m9-mstd0.5-inc1 TRAIN.MIXUP_ALPHA=0.8 TRAIN.CUTMIX_ALPHA=1
    TRAIN.RANDOM_ERASE_PROB=0.25 TRAIN.SMOOTHING=0.1 TRAIN.MIXUP_MODE=pair TRAIN.MIXUP_PROB=0.5""".split()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", choices=("benchmarks", "report", "augmentation", "attention"))
    parser.add_argument(
        "-photos", type=Path, default=Path("photos"), metavar="FOLDER", help="photos of these packages [photos]"
    )
    parser.add_argument("-real", type=Path, default=Path("real"), metavar="FOLDER", help="real sets [real]")
    arguments = parser.parse_args()
    if arguments.picture == "benchmarks":
        CHART.write_text(draw_benchmarks((ROOT / "BENCHMARKS.md").read_text(encoding="utf-8")), encoding="utf-8")
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)  # the current folder of all programs, so that no picture shows a path of this machine
        (folder / "configs").symlink_to(ROOT / "configs")
        if arguments.picture == "report":
            make_report(folder, arguments.real)
        elif arguments.picture == "augmentation":
            make_augmentation(folder, find_photos(arguments.photos))
        else:
            make_attention(folder, find_photos(arguments.photos)["chelsea"])


def table_with(text: str, *columns: str) -> list[dict[str, str]]:
    """Return the rows of the first table of a page that has these columns, each as {column: cell}."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.split("\n")]
    start = next(number for number, cells in enumerate(lines) if {*columns} <= {*cells})
    rows = itertools.takewhile(lambda cells: len(cells) == len(lines[start]), lines[start + 2 :])
    return [dict(zip(lines[start], cells, strict=True)) for cells in rows]


def draw_benchmarks(text: str) -> str:
    """Return the SVG picture of two comparisons whose figures are in tables of this text of BENCHMARKS.md."""
    sets = table_with(text, "set", "linear", "halfstep", "fastai", "timm")
    accuracy = {name: sum(float(row[name]) for row in sets) / len(sets) for name in ("halfstep", "timm", "fastai")}
    (run,) = [row["x"] for row in table_with(text, "run", "x", "top-1, %") if row["run"] == "halfstep"]
    column = "ViT-Base, images/s"
    steps = {row[""]: float(row[column].replace(",", "")) for row in table_with(text, "", column)}
    speed = {
        "timm": 1.0,
        "halfstep, two CPU cores": float(run.split(" ")[0]),  # the brackets have minimum and maximum
        "halfstep, one H200": steps["halfstep, compiled"] / steps["timm, compiled"],
    }
    subtitle = f"% of other pictures recognised, mean of {len(sets)} sets"
    left = panel(0, ("Few pictures, the same model", subtitle), accuracy, ".1f")
    right = panel(430, ("Training speed", "images/s, times timm's: ViT-Tiny (CPU), ViT-Base (H200)"), speed, ".2f")
    return f"""<svg xmlns="http://www.w3.org/2000/svg" width="860" height="190" viewBox="0 0 860 190"
 font-family="-apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="14" fill="#1f2328">
<rect x="0.5" y="0.5" width="859" height="189" rx="8" fill="#ffffff" stroke="#d0d7de"/>
{left}
{right}
</svg>
"""


def panel(left: int, titles: tuple[str, str], bars: dict[str, float], form: str) -> str:
    """Return a group of horizontal bars as SVG, with a title and a line below it. `form`: the format of the figures."""
    title, subtitle = titles
    lines = [
        f'<text x="{left + 20}" y="32" font-size="17" font-weight="bold">{title}</text>',
        f'<text x="{left + 20}" y="54" fill="#59636e" font-size="13">{subtitle}</text>',
    ]
    for number, (name, value) in enumerate(bars.items()):
        top, width = 72 + 36 * number, 170 * value / max(bars.values())
        colour = "#0969da" if name.startswith("halfstep") else "#8c959f"
        lines += [
            f'<text x="{left + 185}" y="{top + 18}" text-anchor="end">{name}</text>',
            f'<rect x="{left + 193}" y="{top}" width="{width:.1f}" height="26" fill="{colour}"/>',
            f'<text x="{left + 201 + width:.1f}" y="{top + 18}" font-weight="bold">{value:{form}}</text>',
        ]
    return "\n".join(lines)


def find_photos(folder: Path) -> dict[str, Path]:
    """Return the file of each photo, or end the program if one is missing."""
    files = {file.stem: file for file in sorted(folder.glob("*"))}
    if missing := [name for name in PHOTOS if name not in files]:
        sys.exit(f"-photos: {folder} has no {', '.join(missing)}; copy these photos from scikit-image and scikit-learn")
    return {name: files[name] for name in PHOTOS}


def make_report(folder: Path, real: Path) -> None:
    """Fine-tune on the stamps, photograph the top of report.html, and print the lines that README.md shows."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(f"report: none of {', '.join(BROWSERS)} is installed; install one of them")
    for part, name in (("train", "photos"), ("val", "new_photos")):
        shutil.copytree(real / "stamps" / part, folder / name)
    words = ["-pretrained", MODEL, "-data_path", "photos", "-image_size", "128", "-epochs", "10"]
    output = run_in_terminal(folder, "train", *words)
    (page,) = folder.glob("output/*/report.html")
    output += run_in_terminal(folder, "predict", "latest", "new_photos")
    output += run_in_terminal(folder, "evaluate", "latest", "-data_path", "new_photos")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"]
    flags += [f"--user-data-dir={folder / 'browser'}", f"--window-size={WINDOW[0]},{WINDOW[1]}"]
    subprocess.run(
        [browser, *flags, f"--screenshot={folder / 'report.png'}", page.as_uri()], check=True, capture_output=True
    )
    picture = Image.open(folder / "report.png", formats=("PNG",)).convert("RGB").quantize(dither=Image.Dither.NONE)
    picture.save(IMAGES / "report.png", optimize=True)
    shown = r" *(model|writing to|before|epoch|\d+/10|done|next|look at|predict|export|new_photos/|(EMA )?top-1)\b"
    print("\n".join(line for line in output if re.match(shown, line)))


def run_in_terminal(folder: Path, *words: str) -> list[str]:
    """Return the lines that a command of halfstep prints on a terminal, without the progress bars."""
    terminal, output = pty.openpty()
    command = [sys.executable, str(ROOT / "halfstep/__main__.py"), *words]
    environment = os.environ | {"COLUMNS": "200", "NO_COLOR": "1"}
    process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output, env=environment)
    os.close(output)
    printed = b""
    try:
        while part := os.read(terminal, 65536):
            printed += part
    except OSError:  # how Linux reports that the other side has closed the terminal
        pass
    if process.wait() != 0:
        sys.exit(printed.decode())
    text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", printed.decode())
    return [line.rstrip().split("\r")[-1] for line in text.split("\n")]


def make_augmentation(folder: Path, photos: dict[str, Path]) -> None:
    """Show the images of the first update of a short run, with six copies of each photo as its class."""
    for name, file in photos.items():
        for path in [f"train/{name}/{number}" for number in range(6)] + [f"val/{name}/0"]:
            copy = (folder / "photos" / path).with_suffix(file.suffix)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
    flags = ["-cfg", "configs/vit_tiny_patch16_224.yaml", "-data_path", "photos", "-epochs", "1", "-batch_size", "24"]
    options = [*AUGMENTATION, "MODEL.DEPTH=1", "DATA.NUM_WORKERS=0"]
    command = [sys.executable, str(ROOT / "main_single_gpu.py"), *flags, "-device", "cpu", "-opts", *options]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    (picture,) = folder.glob("output/*/train_batch.png")
    Image.open(picture, formats=("PNG",)).convert("RGB").save(IMAGES / "augmentation.jpg", quality=80)


def make_attention(folder: Path, photo: Path) -> None:
    """Show where EfficientNet-Lite0 looks on the photo of a cat."""
    shutil.copyfile(photo, folder / f"cat{photo.suffix}")
    words = [MODEL, f"cat{photo.suffix}", "-attention", "maps"]
    subprocess.run([sys.executable, str(ROOT / "scripts/predict.py"), *words], cwd=folder, check=True)
    (picture,) = (folder / "maps").iterdir()
    Image.open(picture, formats=("PNG",)).convert("RGB").save(IMAGES / "attention.jpg", quality=85)


if __name__ == "__main__":
    main()

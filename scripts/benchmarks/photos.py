"""Makes class folders of JPEGs that take about as long to read as ImageNet's: 500 x 375 pixels, 100 kB.

    python scripts/benchmarks/photos.py -output photos -train 1216 -val 304

Writes photos/train and photos/val, with 10 classes. The images are always the same; existing files are kept.
"""

import io
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))  # so that the script runs from any folder

from utils.program import exit_code  # isort: skip
import numpy as np
from PIL import Image

from scripts.command_line import Parser, at_least
from utils.errors import ConfigError

WIDTH, HEIGHT, KILOBYTES = 500, 375, 100
NUM_CLASSES = 10


def main(argv: list[str]) -> int:
    parser = Parser(__doc__)
    parser.add_output("FOLDER", "folder to write to")
    parser.add_argument("-train", type=at_least(1), default=1216, metavar="N", help="training images [1216]")
    parser.add_argument("-val", type=at_least(1), default=304, metavar="N", help="validation images [304]")
    drawn_help = "number of different images, a multiple of 10; the others are links to them [all]"
    parser.add_argument("-drawn", type=at_least(NUM_CLASSES), metavar="N", help=drawn_help)
    arguments = parser.parse_args(argv)
    try:
        make_photos(arguments.output, arguments.train, arguments.val, arguments.drawn)
    except OSError as error:
        raise ConfigError(f"-output: cannot write {arguments.output} ({error}); choose another folder") from error
    print(f"{arguments.output}: {arguments.train} training and {arguments.val} validation images")
    return 0


def make_photos(folder: Path, num_train: int, num_val: int, num_drawn: int | None = None) -> None:
    """Write train/ and val/ with class folders, keeping existing files. Classes differ in colour.

    Drawing is slow, so only `num_drawn` images of each split are drawn, and the others are links to them.
    """
    num_drawn = num_drawn and max(num_drawn // NUM_CLASSES, 1) * NUM_CLASSES  # so that links stay within a class
    for part, count in (("train", num_train), ("val", num_val)):
        for number in range(count):
            target = number % NUM_CLASSES
            path = folder / part / f"class{target}" / f"{number:05d}.jpg"
            if path.exists():
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            if num_drawn and number >= num_drawn:
                path.hardlink_to(path.with_name(f"{number % num_drawn:05d}.jpg"))
            else:
                path.write_bytes(encode(draw(np.random.default_rng([part == "val", number]), target)))


def draw(rng: np.random.Generator, target: int) -> Image.Image:
    """Draw noise at all scales, stronger at larger scales as in photographs, and edges at random angles."""
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH]
    pixels = np.zeros((HEIGHT, WIDTH, 3), dtype=np.float32)
    for octave in range(1, 9):
        size = (4 * 2**octave // 2, 3 * 2**octave // 2)
        grey = rng.normal(size=(size[1], size[0])).astype(np.float32)
        layer = np.asarray(Image.fromarray(grey).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC))
        pixels += layer[:, :, None] * (1 + 0.3 * rng.normal(size=3)) / 1.4**octave
    for _ in range(6):
        angle, offset = rng.uniform(0, 2 * math.pi), rng.uniform(-200, 200)
        side = (x - WIDTH / 2) * math.cos(angle) + (y - HEIGHT / 2) * math.sin(angle) > offset
        pixels += side[:, :, None] * rng.normal(size=3) * 0.4
    colour = np.random.default_rng(target).uniform(60, 190, size=3)
    grain = rng.normal(size=(HEIGHT, WIDTH, 1)) * 7  # sensor noise
    pixels = (pixels - pixels.mean()) / pixels.std() * 45 + colour + grain
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def encode(image: Image.Image) -> bytes:
    """Encode the image as a JPEG, at the quality that gives the file size closest to KILOBYTES."""
    files = []
    for quality in range(72, 99, 2):
        buffer = io.BytesIO()
        image.save(buffer, format="JPEG", quality=quality)
        files.append(buffer.getvalue())
        if len(files[-1]) > KILOBYTES * 1000:
            break
    return min(files, key=lambda data: abs(len(data) - KILOBYTES * 1000))


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))

"""Makes a folder of JPEGs that cost about as much to read as ImageNet's: 500 x 375 pixels, 100 kB, class folders.

    python scripts/benchmarks/photos.py -out photos -train 1216 -val 304

In photos/train and photos/val, in 10 classes. The same numbers give the same pictures; what is there already stays.
"""

import io
import math
import sys
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parent.parent.parent)
)  # our folders, wherever the script is called from

import numpy as np
from PIL import Image

from scripts.command_line import Parser, at_least
from utils.errors import ConfigError
from utils.program import exit_code

WIDTH, HEIGHT, KILOBYTES = 500, 375, 100
NUM_CLASSES = 10


def main(argv: list[str]) -> int:
    parser = Parser(__doc__)
    parser.add_argument("-out", required=True, type=Path, metavar="FOLDER", help="where they go")
    parser.add_argument("-train", type=at_least(1), default=1216, metavar="N", help="training images [1216]")
    parser.add_argument("-val", type=at_least(1), default=304, metavar="N", help="validation images [304]")
    arguments = parser.parse_args(argv)
    try:
        make_photos(arguments.out, arguments.train, arguments.val)
    except OSError as error:
        raise ConfigError(
            f"-out: cannot write to {arguments.out} ({error}); choose another folder, or make room"
        ) from error
    print(f"{arguments.out}: {arguments.train} training and {arguments.val} validation images")
    return 0


def make_photos(folder: Path, num_train: int, num_val: int) -> None:
    """train/ and val/ with class folders; what is there already stays. A class shows in the colours of its images."""
    for part, count in (("train", num_train), ("val", num_val)):
        for number in range(count):
            target = number % NUM_CLASSES
            path = folder / part / f"class{target}" / f"{number:05d}.jpg"
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(encode(draw(np.random.default_rng([part == "val", number]), target)))


def draw(rng: np.random.Generator, target: int) -> Image.Image:
    """Noise of all sizes, the larger the stronger, as in photographs, over edges at random angles."""
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
    grain = rng.normal(size=(HEIGHT, WIDTH, 1)) * 7  # a sensor's
    pixels = (pixels - pixels.mean()) / pixels.std() * 45 + colour + grain
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def encode(image: Image.Image) -> bytes:
    """At the quality, among a few, whose file comes nearest to the size wanted."""
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

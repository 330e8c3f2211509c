"""Makes images of several channels from class folders, to measure how well new channels learn beside trained ones.

    python scripts/benchmarks/channels.py stamps -output five -classes animals symbols
    python scripts/benchmarks/channels.py solar -output two -add edges

Writes train/ and val/ below the output with an .npy file [side, side, channels] for each image of train/ and val/ in the
folder, in grey. With `-add others`, four images of any class come first, drawn at random from the same part, so that only
the fifth channel shows the class. With `-add edges`, the image comes first, and the second channel is derived from it: the
strength of its edges. The files are always the same.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))  # so that the script runs from any folder

from utils.program import exit_code  # isort: skip
import numpy as np
from PIL import Image, ImageFilter

from scripts.command_line import Parser, at_least
from utils.errors import ConfigError

NUM_OTHERS = 4
TRANSPARENT = (128, 128, 128, 255)  # the color behind transparent pixels


def main(argv: list[str]) -> int:
    parser = Parser(__doc__)
    parser.add_argument("folder", type=Path, help="a folder with train/CLASS/ and val/CLASS/")
    parser.add_output("FOLDER", "folder to write to")
    parser.add_argument("-classes", nargs="+", metavar="CLASS", help="use only these classes [all]")
    parser.add_argument("-add", choices=("others", "edges"), default="others", help="the other channels [others]")
    parser.add_argument("-side", type=at_least(8), default=96, metavar="N", help="width and height in pixels [96]")
    arguments = parser.parse_args(argv)
    rng = np.random.default_rng(0)
    for part in ("train", "val"):
        files = sorted((arguments.folder / part).glob("*/*"))
        files = [each for each in files if not arguments.classes or each.parent.name in arguments.classes]
        if len(files) <= NUM_OTHERS:
            raise ConfigError(
                f"folder: {arguments.folder / part} has {len(files)} images of these classes; name others"
            )
        pictures = [grey(file, arguments.side) for file in files]
        for number, file in enumerate(files):
            channels = [pictures[number], pictures[number].filter(ImageFilter.FIND_EDGES)]
            if arguments.add == "others":
                places = np.delete(np.arange(len(files)), number)
                channels = [pictures[each] for each in rng.choice(places, NUM_OTHERS, replace=False)]
                channels.append(pictures[number])
            target = arguments.output / part / file.parent.name / f"{file.stem}.npy"
            target.parent.mkdir(parents=True, exist_ok=True)
            np.save(target, np.stack([np.asarray(each) for each in channels], axis=-1))
    return 0


def grey(file: Path, side: int) -> Image.Image:
    with Image.open(file, formats=("PNG", "JPEG")) as image:
        if image.mode in ("P", "LA", "RGBA"):
            behind = Image.new("RGBA", image.size, TRANSPARENT)
            image = Image.alpha_composite(behind, image.convert("RGBA"))
        return image.convert("L").resize((side, side), Image.Resampling.BICUBIC)


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))

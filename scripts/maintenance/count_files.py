"""Counts the files of datasets/ that somebody reads who follows an image from the settings to its first batch.

    python scripts/maintenance/count_files.py                    # in this checkout
    python scripts/maintenance/count_files.py -tree ../before    # in another one
    python scripts/maintenance/count_files.py numbers -where     # with the files, in the order of their first calls

For each kind of data, the script opens a few images as a run does and reads the first training batch in one thread. It
counts the files whose functions are called, and how often a call or a return leads from one of these files to another.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[2]
COUNT = 4  # images; some of them are held out


def draw(number: int):
    import numpy as np

    return np.random.default_rng(number).integers(256, size=(20, 24, 3)).astype(np.uint8)


def jpeg(number: int) -> bytes:
    import io

    from PIL import Image

    content = io.BytesIO()
    Image.fromarray(draw(number)).save(content, "JPEG")
    return content.getvalue()


def write_photos(root: Path) -> list[str]:
    for number in range(COUNT):
        path = root / ("ant", "bee")[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(number))
    return ["DATA.DATASET=imagefolder"]


def write_numbers(root: Path) -> list[str]:
    lines = ["path,weight"]
    for number in range(COUNT):
        (root / f"{number}.jpg").write_bytes(jpeg(number))
        lines.append(f"{number}.jpg,{number / 3}")
    (root / "train.csv").write_text("\n".join(lines) + "\n")
    return ["DATA.DATASET=csv", "DATA.COLUMNS=[path,weight]", "TRAIN.OBJECTIVE=numbers"]


def write_tars(root: Path) -> list[str]:
    import io
    import tarfile

    with tarfile.open(root / "train-0.tar", "w") as tar:
        for number in range(COUNT):
            for name, content in ((f"{number}.jpg", jpeg(number)), (f"{number}.cls", b"%d" % (number % 2))):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return ["DATA.DATASET=shards"]


def write_deep(root: Path) -> list[str]:
    import numpy as np

    for number in range(COUNT):
        path = root / ("ant", "bee")[number % 2] / f"{number}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, draw(number).astype(np.uint16) * 200)
    return ["DATA.DATASET=imagefolder", "DATA.PIXELS=native"]


KINDS = {
    "photos": ("a photo in a folder", write_photos),
    "numbers": ("a row of numbers in a CSV file", write_numbers),
    "tars": ("an image in a tar", write_tars),
    "16 bits": ("a 16-bit image", write_deep),
}


class Counter:
    """A profile function that counts the files of datasets/ whose functions are called, and the changes of file."""

    def __init__(self, root: Path):
        self.root = f"{root / 'datasets'}/"
        self.files: dict[str, int] = {}  # {file: calls}, in the order of the first calls
        self.changes, self.last = 0, ""

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event not in ("call", "return"):
            return
        if event == "return":
            frame = frame.f_back
            if frame is None:
                return
        file = frame.f_code.co_filename
        if not file.startswith(self.root) or frame.f_code.co_name == "<module>":
            return
        if event == "call":
            self.files[file] = self.files.get(file, 0) + 1
        if file != self.last:
            self.changes, self.last = self.changes + 1, file


def count(write: Callable[[Path], list[str]], root: Path) -> Counter:
    """Open the images that `write` writes, and read the first training batch, under a Counter."""
    import torch

    from datasets import build_train_data, open_data
    from engine.settings import load_settings
    from utils.distributed import Process

    with tempfile.TemporaryDirectory() as folder:
        options = [f"DATA.DATA_PATH={folder}", *write(Path(folder)), "DATA.IMAGE_SIZE=16"]
        options += [
            "DATA.BATCH_SIZE=1",
            "DATA.WORKERS=processes",
            "MODEL.PATCH_SIZE=4",
            "DEVICE=cpu",
            "DATA.NUM_WORKERS=0",
        ]
        config, process = (
            load_settings(["-cfg", "vit_base_patch16_224", "-opts", *options]).config,
            Process(torch.device("cpu")),
        )

        def to_first_batch() -> None:
            opened = open_data(config, process=process, say=lambda line: None)
            data = build_train_data(opened.config, opened.train, process)
            windows = data.windows(0, 1)
            next(next(windows).batches)
            windows.close()

        to_first_batch()  # imports what is imported at the first use
        counter = Counter(root)
        sys.setprofile(counter)
        try:
            to_first_batch()
        finally:
            sys.setprofile(None)
    return counter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"kinds of data: {', '.join(KINDS)} (default: all)")
    parser.add_argument("-tree", type=Path, default=ROOT, help="checkout whose code is followed (default: this one)")
    parser.add_argument("-where", action="store_true", help="also print the files, with the number of calls")
    arguments = parser.parse_args()
    if unknown := [kind for kind in arguments.kinds if kind not in KINDS]:
        parser.error(f"unknown kind {', '.join(unknown)}; choose from {', '.join(KINDS)}")
    tree = arguments.tree.resolve()
    if tree != ROOT:  # this file, as a module of the other checkout
        words = [*arguments.kinds, *(["-where"] if arguments.where else [])]
        sys.exit(subprocess.run([sys.executable, "-c", OTHER, str(tree), __file__, *words], cwd=tree).returncode)
    print_counts(arguments.kinds or list(KINDS), arguments.where, ROOT)


OTHER = """
import runpy, sys
from pathlib import Path
tree, file, *words = sys.argv[1:]
sys.path[0] = tree
module = runpy.run_path(file, run_name="count_files")
kinds = [word for word in words if word != "-where"]
module["print_counts"](kinds or list(module["KINDS"]), "-where" in words, Path(tree))
"""


def print_counts(kinds: list[str], with_files: bool, root: Path) -> None:
    for kind in kinds:
        title, write = KINDS[kind]
        counter = count(write, root)
        print(f"{title}: {len(counter.files)} files of datasets/, {counter.changes} changes of file", flush=True)
        for file, calls in counter.files.items() if with_files else ():
            print(f"  {calls:5} {Path(file).relative_to(root)}")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()

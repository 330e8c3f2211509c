"""Measures what it costs that parquet files are read by row groups; prints a Markdown table.

    python scripts/benchmarks/row_groups.py -photos photos -repeat 4

Writes the photos, which photos.py makes, to parquet files with row groups of 100 images as Hugging Face does, and fetches
the images of an epoch as one of several processes does: the bytes of each, without decoding it. For comparison the same
images from their files, and how long decoding takes.
"""

import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))  # so that the script runs from any folder

from configs.load import load
from datasets import ImageSet, load_image_sets
from scripts.benchmarks.parts.common import Table, machine
from scripts.command_line import Parser, at_least
from utils.program import exit_code

ROWS_OF_FILE, ROWS_OF_GROUP = 1000, 100
PIECE = 32  # images that one process takes of the order at a time


def main(argv: list[str]) -> int:
    parser = Parser(__doc__)
    parser.add_argument("-photos", type=Path, required=True, help="a folder with train/ and val/, as photos.py makes")
    parser.add_argument("-repeat", type=at_least(1), default=4, help="how often each photo is in the files [4]")
    parser.add_argument("-processes", type=at_least(1), nargs="+", default=[1, 2, 8], help="of the run [1 2 8]")
    arguments = parser.parse_args(argv)
    photos = images_of("imagefolder", arguments.photos)
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder), photos, arguments.repeat)
        before = private_bytes()
        rows = [row_of("files", photos, 1, 1, before)]
        for world_size in arguments.processes:
            images = images_of("parquet", Path(folder))
            rows.append(row_of("parquet", images, world_size, 2, before))  # epochs: the first one gets its memory
    columns = [
        "images in",
        "processes",
        "CPU us to fetch an image",
        "bytes read for each byte of an image",
        "private MB since the start",
    ]
    start = time.thread_time()
    for index in range(100):
        photos.read(index)
    note = f"Decoding an image: {1e4 * (time.thread_time() - start):.0f} us."
    print(machine() + "\n\n" + Table("", columns, rows, [note]).markdown())
    return 0


def images_of(dataset: str, path: Path) -> ImageSet:
    return load_image_sets(load(["-dataset", dataset, "-data_path", str(path)], needs_file=False).config)[0]


def write_files(folder: Path, photos: ImageSet, repeat: int) -> None:
    """Copies of a photo differ by a number after its end, or a file would hold them once."""
    import pyarrow
    import pyarrow.parquet

    total = len(photos) * repeat
    for first in range(0, total, ROWS_OF_FILE):
        numbers = range(first, min(first + ROWS_OF_FILE, total))
        rows = {
            "image": [
                {"bytes": photos.file(number % len(photos))[1] + number.to_bytes(4, "big"), "path": f"{number}.jpg"}
                for number in numbers
            ],
            "label": [int(photos.targets[number % len(photos)]) for number in numbers],
        }
        name = f"train-{first // ROWS_OF_FILE:05d}.parquet"
        pyarrow.parquet.write_table(pyarrow.table(rows), folder / name, row_group_size=ROWS_OF_GROUP)
    pyarrow.parquet.write_table(pyarrow.table(rows), folder / "val.parquet", row_group_size=ROWS_OF_GROUP)


def row_of(name: str, images: ImageSet, world_size: int, num_epochs: int, before: int) -> list[str]:
    """A row of the table: what the first of so many processes needs for its share of the last epoch.

    `before`: the private memory at the start.
    """
    for epoch in range(num_epochs):
        order = images.epoch_order(0, epoch)
        count = num_bytes = 0
        start, read_before = time.thread_time(), figure("/proc/self/io", "rchar")
        for first in range(0, len(images), PIECE * world_size):
            for index in order[first : first + PIECE].tolist():
                count, num_bytes = count + 1, num_bytes + len(images.file(index)[1])
        seconds, num_read = time.thread_time() - start, figure("/proc/self/io", "rchar") - read_before
    private = f"{(private_bytes() - before) / 1e6:+.0f}"
    return [name, str(world_size), f"{1e6 * seconds / count:.0f}", f"{num_read / num_bytes:.1f}", private]


def private_bytes() -> int:
    return 1024 * figure("/proc/self/smaps_rollup", "Private_Dirty")


def figure(file: str, name: str) -> int:
    return next(int(line.split()[1]) for line in Path(file).read_text().splitlines() if line.startswith(f"{name}:"))


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))

"""Writes a data set as tar shards, which -dataset shards and WebDataset's tools read: one file after the other.

    python scripts/make_shards.py -dataset imagenet2012 -data_path /dataset/imagenet -out /fast/imagenet-shards
    python scripts/make_shards.py -dataset imagefolder -data_path photos -out photo-shards -megabytes 256 -shuffle_seed 1
    python main_single_gpu.py -cfg configs/vit_base_patch16_224.yaml -dataset shards -data_path /fast/imagenet-shards

A sample is the image's file as it is and KEY.cls, its class number; classes.txt has the names. Images that are no files
are written as PNG. Training images are shuffled once, validation images keep their order. Killed and called again, it
goes on behind the last shard that is whole.
"""

import argparse
import dataclasses
import hashlib
import io
import itertools
import json
import sys
import tarfile
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # our folders, wherever the script is called from

from configs import flags
from configs.schema import Config
from configs.values import SETTINGS, build, convert
from scripts.command_line import Parser, at_least
from utils.errors import ConfigError, DataError, did_you_mean
from utils.files import replacing, write_text
from utils.program import exit_code

NUM_READERS = 8
FILES_AHEAD = 64
NOTE = "shards.json"  # says what the folder is made of, so that nothing else is added to it


def main(argv: list[str]) -> int:
    parser = Parser(__doc__)
    parser.add_argument("-dataset", required=True, metavar="NAME", help="any data set of docs/data.md with images")
    parser.add_argument("-data_path", metavar="PATH", help="where it is")
    parser.add_argument("-out", required=True, type=Path, metavar="FOLDER", help="where the shards go")
    parser.add_argument("-samples_per_shard", type=at_least(1), metavar="N", help="images of a shard [1000]")
    parser.add_argument(
        "-megabytes", type=at_least(1), metavar="N", help="instead: about so many million bytes a shard"
    )
    parser.add_argument(
        "-shuffle_seed", type=at_least(0), default=0, metavar="N", help="order of the training images [0]"
    )
    parser.add_argument("-opts", nargs="+", default=[], metavar="KEY=VALUE", help="settings, as DATA.VAL_FRACTION=0.2")
    arguments = parser.parse_args(argv)
    if arguments.samples_per_shard is not None and arguments.megabytes is not None:
        raise ConfigError("-samples_per_shard and -megabytes: give one of them")
    if arguments.megabytes:
        limit = Limit(num_bytes=arguments.megabytes * 1_000_000)
    else:
        limit = Limit(num_samples=arguments.samples_per_shard or 1000)
    make_shards(arguments, limit)
    return 0


@dataclasses.dataclass(frozen=True)
class Limit:
    """Where a shard ends: at either of the two."""

    num_samples: int = sys.maxsize
    num_bytes: int = sys.maxsize


def make_shards(arguments: argparse.Namespace, limit: Limit) -> None:
    import numpy as np

    from datasets import load_image_sets
    from datasets.shuffle import shuffled
    from datasets.sources.shards.source import CLASSES_FILE

    config = read_settings(arguments)
    if config.DATA.DATASET == "synthetic":
        raise ConfigError("-dataset: synthetic has no images that could be written")
    train, val = load_image_sets(config)
    parts = {"train": (train, shuffled(len(train), arguments.shuffle_seed)), "val": (val, np.arange(len(val)))}
    note = {
        "dataset": arguments.dataset,
        "data_path": arguments.data_path,
        "shuffle_seed": arguments.shuffle_seed,
        "limit": dataclasses.asdict(limit),
        "classes": len(val.classes),
        **{part: hashlib.sha256(image_set.targets.tobytes()).hexdigest() for part, (image_set, _) in parts.items()},
    }
    try:
        claim(arguments.out, json.dumps(note, indent=1) + "\n")
        with replacing(arguments.out / CLASSES_FILE) as file:
            names = "".join(name.replace("\n", " ") + "\n" for name in val.classes)
            file.write(names.encode(errors="surrogateescape"))
        for part, (image_set, order) in parts.items():
            num_shards, num_kept = write_part(arguments.out, part, image_set, order, limit)
            kept = f", {num_kept} of them from an earlier call" if num_kept else ""
            print(f"{arguments.out}: {part} images: {len(order)}, shards: {num_shards}{kept}")
    except OSError as error:
        raise ConfigError(
            f"-out: cannot write to {arguments.out} ({error}); choose another folder, or make room"
        ) from error


def read_settings(arguments: argparse.Namespace) -> Config:
    """The defaults, but for what the command line says of the data: there is no -cfg here."""
    words = ["-dataset", arguments.dataset]
    words += ["-data_path", arguments.data_path] if arguments.data_path else []
    words += ["-opts", *arguments.opts] if arguments.opts else []
    values = {key: setting.default for key, setting in SETTINGS.items()}
    known = [key for key in SETTINGS if key.startswith("DATA.")]
    for layer in flags.parse(words).layers:
        for key, text in layer.texts.items():
            if key not in known:
                raise ConfigError(f"{layer.origin}: {key} is no setting of the data{did_you_mean(key, known)}")
            values[key] = convert(SETTINGS[key], text, layer.origin)
    return build(values)


def claim(out: Path, note: str) -> None:
    """Make the folder, or see that it is from the same call before."""
    out.mkdir(parents=True, exist_ok=True)
    file = out / NOTE
    if file.is_file():
        if file.read_text() != note:
            raise ConfigError(f"-out: {out} holds shards of other data or settings ({file}); choose another folder")
    elif any(each.name != f".{NOTE}.tmp" for each in out.iterdir()):
        raise ConfigError(f"-out: {out} is not empty, and what is in it is not from this script; choose another folder")
    else:
        write_text(file, note)


def write_part(out: Path, part: str, image_set, order, limit: Limit) -> tuple[int, int]:
    """All shards of one part but those that are there. Returns how many there are then, and how many were."""
    from tqdm import tqdm

    from datasets.sources.shards.index import load_index, save_index, scan

    done = num_shards = num_kept = 0
    with ThreadPoolExecutor(NUM_READERS, "files") as pool, tqdm(total=len(order), desc=part, disable=None) as bar:
        samples = None
        while done < len(order):
            path = out / f"{part}-{num_shards:06d}.tar"
            shard = (load_index(path) or scan(path)) if path.exists() else None
            if shard is None or shard.cut:
                samples = samples or read_ahead(pool, image_set, order[done:].tolist())
                with replacing(path) as file:
                    write_shard(file, done, samples, limit)
                shard = scan(path)
            else:
                samples = None  # what follows is to be read from behind it
                num_kept += 1
            save_index(shard)
            done += len(shard.samples)
            num_shards += 1
            bar.update(len(shard.samples))
    return num_shards, num_kept


def read_ahead(pool: ThreadPoolExecutor, image_set, indices: list[int]) -> Iterator[tuple[str, bytes, int]]:
    """Ending, bytes and class number of each image: many small files are read much faster several at a time."""
    from datasets.sources.folder import IMAGE_ENDINGS
    from datasets.types import ImageReadError

    started = ((index, pool.submit(image_set.file, index)) for index in indices)
    waiting = deque(itertools.islice(started, FILES_AHEAD))
    while waiting:
        index, future = waiting.popleft()
        try:
            ending, data = future.result()
        except ImageReadError as error:
            raise DataError(f"{image_set.name(index)} cannot be read ({error}); mend or remove it") from error
        # Readers look at the content; the ending only has to be one that they know.
        yield ending.lower() if ending.lower() in IMAGE_ENDINGS else ".jpg", data, int(image_set.targets[index])
        waiting.extend(itertools.islice(started, 1))


def write_shard(file: IO[bytes], first: int, samples: Iterator[tuple[str, bytes, int]], limit: Limit) -> None:
    """Samples until the shard is full. The same samples give the same bytes on every day and machine."""
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for number, (ending, data, target) in enumerate(itertools.islice(samples, limit.num_samples), first):
            for name, content in ((f"{number:08d}{ending}", data), (f"{number:08d}.cls", str(target).encode())):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
            if file.tell() >= limit.num_bytes:
                return


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))

"""Writes a data set as tar shards, which -dataset shards and WebDataset's tools read sequentially.

    halfstep make-shards -dataset imagenet2012 -data_path /dataset/imagenet -output /fast/imagenet-shards
    halfstep make-shards -dataset imagefolder -data_path photos -output shards -samples_per_shard 500 -shuffle_seed 1
    halfstep train -cfg configs/vit_base_patch16_224.yaml -dataset shards -data_path /fast/imagenet-shards

A sample consists of the unchanged image file and KEY.cls with its class number; classes.txt has the class names. Images
that are not files are written as PNG. Training images are shuffled once; validation images keep their order. If the
script was killed, run the same command again to continue after the last complete shard.
"""

import argparse
import contextlib
import hashlib
import io
import itertools
import json
import sys
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from any folder

from utils.commands import page

from utils.program import exit_code  # isort: skip
import numpy as np
from tqdm import tqdm

from configs.load import load
from datasets import ImageSet, open_data
from datasets.class_numbers import LINE_END
from datasets.index import ENDING
from datasets.passes import read_each
from datasets.pixels.decode import KNOWN_ENDINGS
from datasets.pixels.kinds import readers
from datasets.pixels.rules import ImageReadError
from datasets.sources.shards import CLASSES_FILE, ShardTar, save_shards, scan
from datasets.sources.tar import Tar
from engine.tasks import find_task
from scripts.command_line import Parser, at_least
from utils.errors import ConfigError, DataError
from utils.files import content_of, replacing, write_text

NUM_READERS = 8
ENDINGS = (*KNOWN_ENDINGS, *readers())
DATASET_HELP = f"any data set in {page('docs/data.md')} whose images have one class each, except synthetic"
MANIFEST = "shards.json"  # describes the source of the shards, so that shards of other data are not added


def main(argv: list[str]) -> int:
    parser = Parser(__doc__, "make-shards")
    parser.add_argument("-dataset", required=True, metavar="NAME", help=DATASET_HELP)
    parser.add_argument("-data_path", metavar="PATH", help="folder of the data set, or its CSV or parquet file")
    parser.add_output("FOLDER", "folder of the shards")
    number_help = "images per shard [1000]"
    parser.add_argument("-samples_per_shard", type=at_least(1), default=1000, metavar="N", help=number_help)
    parser.add_argument("-shuffle_seed", type=at_least(0), default=0, metavar="N", help="seed of the shuffle [0]")
    opts_help = "settings of the data set, such as DATA.VAL_FRACTION=0.2"
    parser.add_argument("-opts", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help=opts_help)
    make_shards(parser.parse_args(argv))
    return 0


def make_shards(arguments: argparse.Namespace) -> None:
    """Write the training and validation shards, except shards that an earlier call completed."""
    words = ["-dataset", arguments.dataset]
    words += ["-data_path", arguments.data_path] if arguments.data_path else []
    words += ["-opts", *arguments.opts] if arguments.opts else []
    config = load(words, needs_file=False).config
    if config.DATA.DATASET == "synthetic":
        raise ConfigError("-dataset: synthetic has no images to write; name another data set")
    if find_task(config).why_no_shards:
        raise ConfigError(f"-opts: {find_task(config).why_no_shards}")
    train, val, *_ = open_data(config)
    if val.trains_on_all:
        raise ConfigError(
            "-opts: DATA.FOLDS and DATA.VAL_FRACTION=0 hold out no images for the validation shards; remove them from "
            "-opts (to train on all images, use -folds with the original data instead of shards)"
        )
    for line in val.notes:
        print(line)
    parts = {
        "train": (train, train.storage.order_to_write(train.rows, len(train), arguments.shuffle_seed)),
        "val": (val, np.arange(len(val))),
    }
    manifest = {
        "dataset": arguments.dataset,
        "data_path": arguments.data_path,
        "shuffle_seed": arguments.shuffle_seed,
        "samples_per_shard": arguments.samples_per_shard,
        "classes": len(val.classes),
        **{
            part: hashlib.sha256(image_set.targets.astype(np.int64).tobytes()).hexdigest()
            for part, (image_set, _) in parts.items()
        },
    }
    try:
        prepare_output_folder(arguments.output, json.dumps(manifest, indent=1) + "\n")
        with replacing(arguments.output / CLASSES_FILE) as file:
            names = "".join(LINE_END.sub(" ", name) + "\n" for name in val.classes)
            file.write(names.encode(errors="surrogateescape"))
        for part, (image_set, order) in parts.items():
            num_shards, num_kept = write_part(arguments.output, part, image_set, order, arguments.samples_per_shard)
            kept = f", {num_kept} of them from an earlier call" if num_kept else ""
            print(f"{arguments.output}: {part} images: {len(order)}, shards: {num_shards}{kept}")
    except OSError as error:
        raise ConfigError(
            f"-output: cannot write to {arguments.output} ({error}); choose another folder, or free some space"
        ) from error


def prepare_output_folder(folder: Path, manifest: str) -> None:
    """Create the folder, or check that an earlier call with the same arguments created it."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / MANIFEST
    if file.is_file():
        if content_of(file) != manifest.encode():
            raise ConfigError(f"-output: {folder} has shards of other data or settings ({file}); choose another folder")
    elif any(each.name != f".{MANIFEST}.tmp" for each in folder.iterdir()):
        raise ConfigError(f"-output: {folder} is not empty and was not made by this script; choose another folder")
    else:
        write_text(file, manifest)


def write_part(folder: Path, part: str, image_set: ImageSet, order: np.ndarray, size: int) -> tuple[int, int]:
    """Write the missing shards of `part` (train or val) and its index.

    Return the number of shards, and how many of them an earlier call had completed.
    """
    done, num_kept, shards = 0, 0, []
    with tqdm(total=len(order), desc=part, disable=None) as bar:
        samples = None
        while done < len(order):
            path = folder / f"{part}-{len(shards):06d}.tar"
            shard = None  # the complete shard of an earlier call, if there is one
            with contextlib.suppress(DataError):
                shard = scan(Tar(path), image_endings=ENDINGS) if path.exists() else None
            if shard is None:
                samples = samples or read_files(image_set, order[done:].tolist())
                with replacing(path) as file:
                    write_shard(file, done, itertools.islice(samples, size))
                shard = scan(Tar(path), image_endings=ENDINGS)
            else:
                samples = None  # the next shard needs a new iterator, which starts after this shard
                num_kept += 1
            stat = path.stat()
            shards.append((ShardTar(path.name, stat.st_size, stat.st_mtime_ns), shard))
            done += len(shard.labels)
            bar.update(len(shard.labels))
    save_shards(folder / f"{part}{ENDING}", shards)
    return len(shards), num_kept


def read_files(image_set: ImageSet, indices: Sequence[int]) -> Iterator[tuple[str, bytes, int]]:
    """Yield the suffix, bytes and class number of each image.

    The files are read in parallel, which is much faster for small files.
    """
    for index, result in read_each(indices, image_set.file, title="", num_threads=NUM_READERS):
        if isinstance(result, ImageReadError):
            raise DataError(f"cannot read {image_set.name(index)} ({result}); repair or remove it") from result
        ending, data = result
        # Readers detect the format from the content; any known suffix will do.
        yield ending.lower() if ending.lower() in ENDINGS else ".jpg", data, int(image_set.targets[index])


def write_shard(file: IO[bytes], first: int, samples: Iterator[tuple[str, bytes, int]]) -> None:
    """Write the samples of a shard, numbered from `first`. The same samples always give the same bytes."""
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for number, (ending, data, target) in enumerate(samples, first):
            for name, content in ((f"{number:08d}{ending}", data), (f"{number:08d}.cls", str(target).encode())):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))

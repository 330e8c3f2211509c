"""Writes features of images to a file, classifies photos with a few examples of each class, or finds similar ones.

    halfstep embed output/train-20260102-03-04-05 photos -output features.npz
    halfstep embed vit_base_patch16_224 photos -output features.parquet
    halfstep embed output/train-20260102-03-04-05 photos -examples examples -csv classes.csv -sheet classes.png
    halfstep embed output/train-20260102-03-04-05 photos -near photo.jpg -sheet similar.png

-output FILE has the path, size and features of each photo (for .parquet: pip install pyarrow). -examples names a folder
with a folder for each class; one image per class is enough, and nothing is trained. -near prints the most similar
photos. Unreadable images are reported on stderr and left out, and the exit code is 2.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from any folder

from utils.program import exit_code, exit_now  # isort: skip
from engine.predict.output_paths import Outputs
from scripts.command_line import Parser, at_least, check_writable, refuse_among_photos
from scripts.predict import (
    MODEL_HELP,
    add_model_flags,
    files_to_write,
    make_folder,
    refuse_other_outputs,
    report,
    settings_flags,
)
from utils.errors import ConfigError
from utils.text import counted, one_line

if TYPE_CHECKING:
    import numpy as np

    from engine.features.embedder import Embedder, Photos, Table
    from engine.features.nearest import Examples

NUM_SIMILAR = 20  # photos that -near prints without -top
MOST_SIMILAR = 99  # maximum number of photos on the sheet of -near
# {flag: the flags of which it needs one}
NEEDS = {
    **dict.fromkeys(("csv", "json", "into", "unsure"), ["examples"]),
    **dict.fromkeys(("top", "sheet"), ["examples", "near"]),
}


def main(argv: list[str]) -> int:
    arguments = parse(argv)
    from engine.features.embedder import Embedder, find_photos  # local: importing torch takes seconds
    from engine.features.feature_files import check_output
    from engine.features.nearest import example_classes
    from engine.predict.classifier import load_classifier

    for name in example_classes(arguments.examples) if arguments.examples else []:
        find_photos("-examples", arguments.examples / name, lambda line: None)
    if arguments.near and not arguments.near.is_file():
        raise ConfigError(f"-near: there is no image {arguments.near}; name an image file")
    photos = find_photos("photos", arguments.photos, report)
    if arguments.output:
        check_writable("-output", arguments.output)
        check_output(arguments.output)
    check_pictures(arguments, len(photos))
    trained = load_classifier(arguments.model, settings_flags(arguments), arguments.raw, needs_classes=False)
    return embed(arguments, photos, Embedder(trained, arguments.device, report))


def parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(__doc__, "embed")
    parser.add_argument("model", help=MODEL_HELP)
    parser.add_argument("photos", type=Path, help="a folder of images; its subfolders are read too")
    add = parser.add_argument_group("what to do").add_argument
    add("-output", "-o", "-out", type=Path, metavar="FILE", help="write the features to this .npz or .parquet file")
    add("-examples", type=Path, metavar="FOLDER", help="classify the photos with the examples in FOLDER/CLASS/")
    add("-near", type=Path, metavar="IMAGE", help="find the photos that are most similar to this image")
    add = parser.add_argument_group("output of -examples and -near").add_argument
    add("-top", type=at_least(1), metavar="N", help="classes to print for each photo [1], or similar photos [20]")
    add("-sheet", type=Path, metavar="FILE", help="draw thumbnails, .png or .jpg [near.png with -near]")
    add("-csv", type=Path, metavar="FILE", help="write a table with one row per photo")
    add("-json", type=Path, metavar="FILE", help="write the table, the model and its preprocessing as JSON")
    add("-into", type=Path, metavar="FOLDER", help="copy each photo into the folder of its class in FOLDER")
    add("-unsure", type=float, metavar="P", help="mark photos whose class has a probability below P")
    add_model_flags(parser, argparse.SUPPRESS)  # -ngpus has no effect here
    arguments = parser.parse_args(argv)
    check_flags(arguments)
    if arguments.near and not arguments.sheet:
        arguments.sheet = Path("near.png")
    return arguments


def check_flags(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for flags that contradict each other or have no effect."""
    if not (arguments.output or arguments.examples or arguments.near):
        raise ConfigError(
            "-output is missing; write the features with -output FILE, classify the photos with -examples FOLDER, or "
            "find similar photos with -near IMAGE"
        )
    if (arguments.ngpus or 1) > 1:
        raise ConfigError("-ngpus: halfstep embed uses one process; start one for each part of the photos")
    if arguments.examples and arguments.near:
        raise ConfigError("-examples, -near: they cannot be used together; leave one of them out")
    for flag, needed in NEEDS.items():
        if getattr(arguments, flag) is not None and not any(getattr(arguments, each) for each in needed):
            raise ConfigError(f"-{flag} has no effect without -{' or -'.join(needed)}; leave it out")
    if arguments.unsure is not None and not 0 <= arguments.unsure <= 1:
        raise ConfigError(f"-unsure: {arguments.unsure} is not a probability; give a number from 0 to 1")
    if arguments.near and (arguments.top or 1) > MOST_SIMILAR:
        raise ConfigError(f"-top: {arguments.top} photos do not fit on the sheet of -near; give at most {MOST_SIMILAR}")


def check_pictures(arguments: argparse.Namespace, num_photos: int) -> None:
    """Raise ConfigError if a table or picture cannot be written, or if the next call would read it as a photo."""
    refuse_among_photos(arguments.photos, {"-sheet": arguments.sheet, "-into": arguments.into})
    outputs = Outputs(arguments.csv, arguments.json, arguments.sheet, arguments.into)
    files = files_to_write(outputs, 1 if arguments.near else num_photos, arguments.model, [arguments.cfg])
    if arguments.into:
        make_folder("-into", arguments.into)
    refuse_other_outputs(files)


# --- the command, with checked arguments ---


def embed(arguments: argparse.Namespace, photos: "Photos", embedder: "Embedder") -> int:
    """Run the command with checked arguments. Return the exit code, which is 2 if some photos cannot be read."""
    from engine.features.feature_files import write_features
    from engine.features.nearest import embed_one, read_examples

    trained, width = embedder.trained, embedder.width
    photos = photos.for_model(embedder.pixels, report)
    kind = f" ({trained.weights})" if trained.weights else ""
    epoch = f" after epoch {trained.epoch}" if trained.epoch else ""
    place = embedder.process.device.type
    report(f"{trained.source}{kind}: {trained.config.MODEL.NAME}{epoch}, {width} features, on {place}")
    examples = read_examples(arguments.examples, embedder) if arguments.examples else None  # before hours of computing
    if examples:
        of_classes = f"{counted(len(examples.owners), 'example')} of {counted(len(examples.classes), 'class')}"
        report(f"{arguments.examples}: {of_classes}")
    query = embed_one(arguments.near, embedder) if arguments.near else None
    table = embedder(photos.images(embedder.pixels))
    if arguments.output:
        write_features(arguments.output, photos, embedder.facts(), table)
        report(f"{arguments.output}: {counted(len(table.indices), 'row')} of {width} features")
    if examples:
        classify(arguments, photos, embedder, examples, table)
    if query is not None:
        find_similar(arguments, photos, embedder, query, table)
    if num_unreadable := len(photos) - len(table.indices):
        report(f"{num_unreadable} of {counted(len(photos), 'image')} could not be read")
    return 2 if num_unreadable else 0


def classify(
    arguments: argparse.Namespace, photos: "Photos", embedder: "Embedder", examples: "Examples", table: "Table"
) -> None:
    """Print the most similar classes of each photo, and write the tables and pictures."""
    import numpy as np

    from engine.features.embedder import thumbnail
    from engine.features.nearest import NEAREST, TEMPERATURE
    from engine.predict.output import UNSURE, Mark, Output
    from engine.predict.predictor import Prediction

    images, mark = photos.images(embedder.pixels), None if arguments.unsure is None else Mark(UNSURE, arguments.unsure)
    outputs = Outputs(arguments.csv, arguments.json, arguments.sheet, arguments.into)
    output = Output(photos, outputs, examples.classes, True, True, mark)
    guesses = examples.guesses(table.features, arguments.top or 1)
    for index, of_photo in zip(table.indices.tolist(), guesses, strict=True):
        picture = thumbnail(images, index) if arguments.sheet else None
        output.add(Prediction(index, photos[index], of_photo, picture))
    facts, per_class = embedder.trained.facts(), np.bincount(examples.owners).tolist()
    facts["model"] |= {"classes": examples.classes, "temperature": None}
    of_examples = {"folder": str(arguments.examples), "per_class": per_class}
    output.close(facts | {"examples": of_examples | {"nearest": NEAREST, "temperature": TEMPERATURE}})


def find_similar(
    arguments: argparse.Namespace, photos: "Photos", embedder: "Embedder", query: "np.ndarray", table: "Table"
) -> None:
    """Print and draw the photos that are most similar to the query, without the query itself."""
    import numpy as np

    from datasets.sources.images import unlabelled_files
    from engine.features.embedder import normalized, thumbnail
    from engine.predict.output import NUM_COLUMNS, THUMBNAIL, write_picture
    from engine.predict.pictures import Tile, contact_sheet

    images, similarities = photos.images(embedder.pixels), normalized(table.features) @ query
    rows = np.argsort(-similarities, kind="stable")[: (arguments.top or NUM_SIMILAR) + 1].tolist()
    similar = [(int(table.indices[row]), float(similarities[row])) for row in rows]
    similar = [each for each in similar if not os.path.samefile(photos[each[0]], arguments.near)]
    of_query = unlabelled_files([str(arguments.near)], embedder.pixels)
    tiles = [Tile(thumbnail(of_query, 0), ["query", str(arguments.near)])._replace(frame="black")]
    for index, similarity in similar[: arguments.top or NUM_SIMILAR]:
        print(f"{one_line(photos[index])}\t{similarity:.4f}")
        tiles.append(Tile(thumbnail(images, index), [f"{similarity:.4f}", photos[index]]))
    write_picture(contact_sheet(tiles, NUM_COLUMNS, THUMBNAIL), arguments.sheet)


if __name__ == "__main__":
    exit_now(exit_code(main, sys.argv[1:]))

"""Finds wrong labels, before a training or with finished runs, and chooses the photos without labels to label next.

    halfstep labels vit_small_patch16_224 -data_path photos
    halfstep labels vit_small_patch16_224 -data_path photos -apply labels/labels.csv
    halfstep sweep -pretrained vit_small_patch16_224 -data_path photos -folds 5 -output sweeps/folds
    halfstep labels sweeps/folds
    halfstep labels sweeps/folds -apply sweeps/folds/labels/labels.csv
    halfstep labels vit_small_patch16_224 -next 100 unlabelled -into to_label
    halfstep labels output/train-20260102-03-04-05 -next 100 unlabelled -into to_label

Weights judge all labels of a data set in about the time of an evaluation, without training: the label of each image is
predicted from the features and labels of all other images. In a sweep with -folds, every image also has a prediction by a
model that was not trained on it. With a single run, only the held-out images have one, and if the run kept the features
from before its training, these judge all. labels.csv lists images whose label the model doubts, equal or nearly equal images
with different labels, and copies of training images among the validation images; labels.png shows them. Write yes into
the column `confirmed`, and change the suggestion if another class is right. -apply writes train.csv and val.csv, which
list all images with the corrected labels, and prints the command that trains from them. It changes no file of the data.

-next chooses photos that differ from each other: with a run, photos that are similar to many of which its model is not sure;
with pretrained weights, typical photos. next.csv lists them, next.png shows them, and -into copies them. Photos with a
label and further copies of a photo are left out, and left_out.csv names their twins. Unreadable photos are reported, and the
exit code is 2.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from any folder

from utils.program import exit_code  # isort: skip
from scripts.command_line import RUN_HELP, Parser, at_least, local_path
from scripts.predict import add_model_flags
from utils.errors import ConfigError

OF_NEXT = ("into", "strangers")  # flags that need -next


def main(argv: list[str]) -> int:
    arguments = parse(argv)
    from scripts.labelling import apply, choose, find, source_of  # local: importing torch takes seconds

    if arguments.next:
        return choose(arguments)
    source = replace(source_of(arguments), data_path=arguments.data_path)
    if arguments.apply:
        apply(source, arguments.apply, arguments.output)
    else:
        find(source, arguments.output, not arguments.no_copies)
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(__doc__, "labels")
    add = parser.add_argument
    add("source", metavar="run", help=f"{RUN_HELP}; or the folder of a sweep with -folds; or any weights")
    add(
        "-output",
        type=Path,
        metavar="FOLDER",
        help="folder for labels.csv and labels.png [labels in the run's folder]; with -apply, for the lists [corrected "
        "in the folder of FILE]; with -next, for next.csv and next.png [next in the run's folder, or here]",
    )
    copies_help = "do not look for copies (the search reads every image); with -next, leave out no photo"
    add("-no_copies", action="store_true", help=copies_help)
    add("-apply", type=Path, metavar="FILE", help="write lists with the confirmed labels of this labels.csv")
    add("-data_path", type=Path, metavar="PATH", help="the data; with a run, only if they were moved after the run")
    add(
        "-dataset",
        metavar="NAME",
        help="judge -data_path by these weights, even if they are a run's: the kind of data, for example csv [imagefolder]",
    )
    add = parser.add_argument_group("photos without labels").add_argument
    add("-next", nargs=2, metavar=("N", "PHOTOS"), help="choose N photos of this folder whose labels help most")
    add("-into", type=Path, metavar="FOLDER", help="also copy the chosen photos to this folder")
    add("-strangers", action="store_true", help="choose photos that seem to show none of the classes like all others")
    add_model_flags(parser, argparse.SUPPRESS)  # -ngpus has no effect here
    arguments = parser.parse_args(argv)
    if (arguments.ngpus or 1) > 1:
        raise ConfigError("-ngpus: halfstep labels uses one process; leave it out")
    if arguments.next:
        check_next(arguments)
        return arguments
    if arguments.no_copies and arguments.apply:
        raise ConfigError("-no_copies has no effect with -apply; leave it out")
    for name in OF_NEXT:
        if getattr(arguments, name) != parser.get_default(name):
            raise ConfigError(f"-{name} has no effect without -next; leave it out")
    return arguments


def check_next(arguments: argparse.Namespace) -> None:
    """Convert the two values of -next. Raise ConfigError for flags that do nothing with it."""
    for name in ("apply", "dataset"):
        if getattr(arguments, name):
            raise ConfigError(f"-{name} has no effect with -next; leave it out")
    number, arguments.photos = arguments.next[0], local_path(arguments.next[1])
    try:
        arguments.next = at_least(1)(number)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"-next: {error}") from None


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))

"""Finds wrong labels, before a training or with finished runs, and chooses the photos without labels to label next.

    halfstep labels vit_small_patch16_224 -data_path photos
    halfstep labels vit_small_patch16_224 -data_path photos -apply labels/labels.csv
    halfstep sweep -pretrained vit_small_patch16_224 -data_path photos -folds 5 -output sweeps/folds
    halfstep labels sweeps/folds
    halfstep labels sweeps/folds -apply sweeps/folds/labels/labels.csv
    halfstep labels vit_small_patch16_224 -next 100 unlabelled -into to_label
    halfstep labels output/train-20260102-03-04-05 -next 100 unlabelled -into to_label

Weights judge all labels of a data set in about the time of an evaluation, without training: the label of each image is
predicted from the features and labels of all other images. In a sweep with -folds, every image also has a prediction by
a model that was not trained on it. With a single run, only the held-out images have one, and if the run kept the
features from before its training, these judge all. labels.csv lists images whose label the model doubts, equal or
nearly equal images with different labels, and copies of training images among the validation images; labels.png shows
them. Write yes into the column `confirmed`, and change the suggestion if another class is right. -apply writes
train.csv and val.csv, which list all images with the corrected labels, and prints the command that trains from them. It
changes no file of the data.

-next chooses photos that differ from each other: with a run, photos that are similar to many of which its model is not
sure; with pretrained weights, typical photos. next.csv lists them, next.png shows them, and -into copies them. Photos
with a label and further copies of a photo are left out, and left_out.csv names their twins. Unreadable photos are
reported, and the exit code is 2.
"""

import argparse
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from any folder

from utils.program import exit_code  # isort: skip
from configs.load import dataset_of_file
from configs.schema import Config
from scripts.command_line import RUN_HELP, Parser, at_least, local_path, refuse_among_photos
from scripts.predict import add_model_flags, make_folder, settings_flags
from utils.commands import command
from utils.errors import ConfigError
from utils.runs import folder_of
from utils.text import counted, one_line

if TYPE_CHECKING:  # importing torch takes seconds
    from engine.features.embedder import Embedder, Photos
    from engine.labelling.data import DataSet, Source
    from engine.labelling.labels import JudgedLabels
    from engine.labelling.numbers import JudgedNumbers

OF_NEXT = ("into", "strangers")  # flags that need -next
# Flags that a finished run has no use for
OF_WEIGHTS = "dataset raw cfg image_size opts amp batch_size device".split()
NUM_LISTED = 20  # number of corrections that are printed


def main(argv: list[str]) -> int:
    arguments = parse(argv)
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
        help="judge -data_path by these weights, even if they are a run's: the kind of data, for example csv "
        "[imagefolder]",
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


# --- the commands ---


def source_of(arguments: argparse.Namespace) -> "Source":
    """Return the finished runs of the best point of a sweep, a run, or weights with the settings of their data."""
    from engine.labelling.data import Source
    from engine.record.saved_run import SavedRun
    from scripts.sweep import DONE, FILE, ranked_points, read_result, read_sweep

    folder = folder_of(arguments.source)
    is_sweep, is_run = (folder / FILE).exists(), (folder / "config.yaml").exists()
    if arguments.data_path and (arguments.dataset or not (is_sweep or is_run)):
        return load_weights(arguments)
    for name in OF_WEIGHTS:
        if getattr(arguments, name) not in (None, False, [], "auto"):
            raise ConfigError(f"-{name} has no effect without -next, or weights and -data_path; leave it out")
    if not is_sweep:
        return Source(folder, [SavedRun.open(folder)])
    sweep = read_sweep(folder)
    if not sweep.folds:
        raise ConfigError(
            f"{folder}: this sweep was started without -folds, so its runs do not judge every image; give one of its "
            "runs, or a sweep with -folds"
        )
    results = [read_result(folder / trial.name) for trial in sweep.trials]
    point = next((number for number, _ in ranked_points(sweep, results)), 0)
    trials = [trial for trial in sweep.trials if trial.point == point]
    done = [trial for trial in trials if results[trial.index].state == DONE]
    if not done:
        raise ConfigError(
            f"{folder}: no trial of this sweep is done; continue it: {command('sweep', '-output', folder)}"
        )
    runs = [SavedRun.open(folder / trial.name) for trial in done]
    return Source(folder, runs, len(trials) - len(done), sweep.folds)


def load_weights(arguments: argparse.Namespace) -> "Source":
    """Load the weights whose features judge the labels of -data_path."""
    from engine.labelling.data import Source
    from engine.predict.classifier import load_classifier

    name = arguments.dataset or dataset_of_file(str(arguments.data_path)) or "imagefolder"
    dataset = ["-dataset", name, "-data_path", str(arguments.data_path)]
    flags = [*settings_flags(arguments), *dataset]
    weights = load_classifier(arguments.source, flags, arguments.raw, needs_classes=False)
    weights = replace(weights, config=replace(weights.config, EVAL=False))  # both parts
    if arguments.output:
        refuse_among_photos(arguments.data_path, {"-output": arguments.output})
    words = ["-cfg", arguments.cfg] if arguments.cfg else []
    words += ["-image_size", arguments.image_size] if arguments.image_size else []
    words += ["-opts", *arguments.opts] if arguments.opts else []
    return Source(Path(), [], weights=weights, flags=tuple(words), device=arguments.device)


def judge(source: "Source") -> "JudgedLabels | JudgedNumbers":
    """Return what the models say of the targets."""
    if source.config.task.has_classes:
        from engine.labelling.labels import JudgedLabels

        return JudgedLabels.of(source, print)
    from engine.labelling.numbers import JudgedNumbers

    return JudgedNumbers.of(source, print)


def find(source: "Source", output: Path | None, finds_copies: bool) -> None:
    """Write labels.csv and labels.png with doubtful targets and copies, and print a summary."""
    from engine.labelling.data import read_copies
    from engine.labelling.review import TABLE, refuse_confirmed, write_review

    folder = output or source.folder / "labels"
    refuse_confirmed(folder / TABLE)
    judged = judge(source)
    # To compute features, weights have read all images and reported the unreadable ones.
    say = (lambda line: None) if source.weights else print
    copies = read_copies(judged.data, judged.folds, say) if finds_copies else None
    rows = judged.rows(copies or [])
    sheets = write_review(folder, rows, judged.data)
    for line in (*judged.summary(copies), *judged.advice(source, len(rows), folder / TABLE, sheets)):
        print(line)


def apply(source: "Source", table: Path, output: Path | None) -> None:
    """Write lists of the images with the confirmed labels, and print the command that trains from them."""
    from engine.labelling.data import refuse_other_data
    from engine.labelling.lists import command_to_train, correct, write_lists
    from engine.labelling.review import check_unchanged, read_confirmed
    from engine.tasks import find_task

    if find_task(source.config).why_not_applied:
        raise ConfigError(f"-apply: {find_task(source.config).why_not_applied}")
    data = source.data()
    if not data.is_correctable:
        raise ConfigError(
            f"-apply: DATA.DATASET is {data.config.DATA.DATASET}; -apply can only list the images of class folders and "
            "CSV files (imagefolder, csv); correct the labels in the data from which this data set was made"
        )
    if source.runs:
        refuse_other_data(source.runs[0], data)
    confirmed, record = read_confirmed(table, data.classes)
    changes = [row for row in confirmed if row.suggestion != row.label]
    if not changes:
        raise ConfigError(
            f"-apply: no row of {table} is confirmed with another class than its label; write yes into the column "
            "confirmed where the suggestion is right"
        )
    check_unchanged(changes, data.root, record)
    folder = output or table.parent / "corrected"
    lists = write_lists(folder, data, correct(data, changes))
    if source.folds:
        lists = replace(lists, SAVE=Config().SAVE)  # the runs of a sweep are in its folder
    for row in changes[:NUM_LISTED]:
        print(one_line(f"{row.name}: {row.label} -> {row.suggestion}"))
    if len(changes) > NUM_LISTED:
        print(f"... and {len(changes) - NUM_LISTED:,} more")
    origin = source.runs[0].folder if source.runs else data.place
    print(
        f"{folder}: {describe_lists(data)} of {origin}, with "
        f"{counted(len(changes), 'corrected label')}; the data are unchanged"
    )
    if source.runs:
        print("train from the lists, then compare both runs with halfstep compare:")
        words = ["-cfg", str(origin / "config.yaml")]
    else:
        print("train from the lists:")
        words = ["-pretrained", source.name, *source.flags]
    print(f"  {command_to_train(words, data.config, lists)}")


def describe_lists(data: "DataSet") -> str:
    """Return which lists `-apply` has written, and what they list."""
    from engine.labelling.lists import LISTS

    if len(data.val):
        return f"{' and '.join(LISTS)} list the training and validation images"
    return f"{LISTS[0]} lists all images"


def choose(arguments: argparse.Namespace) -> int:
    """Choose photos to label. Return the exit code."""
    from engine.features.embedder import Embedder, find_photos
    from engine.labelling.data import DataSet, config_of
    from engine.predict.classifier import load_classifier
    from engine.record.saved_run import SavedRun

    photos, folder = find_photos("-next", arguments.photos, print), folder_of(arguments.source)
    is_run = (folder / "config.yaml").exists()
    arguments.output = arguments.output or (folder if is_run else Path()) / "next"
    refuse_among_photos(arguments.photos, {"-output": arguments.output, "-into": arguments.into})
    trained = load_classifier(arguments.source, settings_flags(arguments), arguments.raw, needs_classes=False)
    data = None
    if is_run:
        run = SavedRun.open(folder)
        config = config_of(run, arguments.data_path)
        if config.task.has_classes and config.DATA.DATASET != "synthetic":
            data = DataSet.load(config, run)
    if data is None and arguments.data_path:
        raise ConfigError(f"-data_path has no effect, because {arguments.source} is no run with labels; leave it out")
    if data is not None and data.is_listing:
        refuse_among_photos(data.root, {"-into": arguments.into})
    if arguments.into:
        make_folder("-into", arguments.into)
    embedder = Embedder(trained, arguments.device, print, with_logits=data is not None)
    return choose_next(arguments, photos, embedder, data)


def choose_next(arguments: argparse.Namespace, photos: "Photos", embedder: "Embedder", data: "DataSet | None") -> int:
    """Choose photos and write them. Return the exit code, which is 2 if some photos cannot be read.

    `arguments` has the flags `next`, `output`, `into`, `no_copies` and `strangers`. `data`: the images on which the
    classifier was trained and evaluated, or None if the weights are not those of a run.
    """
    import numpy as np

    from engine.features.embedder import Table
    from engine.labelling.next import LEFT_OUT, TABLE, check_output, choose_photos, find_new, write_left_out, write_next
    from engine.predict.output import copy_into

    check_output(arguments.output)
    photos = photos.for_model(embedder.pixels, print)
    images = photos.images(embedder.pixels)
    table = embedder(images)
    num_unreadable = len(photos) - len(table.indices)
    is_new, twins = np.ones(len(table.indices), bool), []
    if not arguments.no_copies:
        is_new, twins = find_new(images, table.indices, photos, data)
    write_left_out(arguments.output, twins)
    counts = Counter(reason for *_, reason in twins).items()
    left_out = f", left out: {', '.join(f'{count:,} {reason}' for reason, count in counts)}" if twins else ""
    print(f"{photos.folder}: {counted(len(photos), 'photo')}{left_out}; see {arguments.output / LEFT_OUT}")
    if not is_new.any():
        raise ConfigError(
            f"-next: no photo in {photos.folder} can be chosen, because none is new and readable; add photos, or leave "
            f"out none with -no_copies (see {arguments.output / LEFT_OUT})"
        )
    table = Table(*(column[is_new] for column in table))
    if len(table.indices) < arguments.next:
        print(
            f"only {counted(len(table.indices), 'photo')} can be chosen, fewer than {arguments.next:,}, so all are "
            "chosen"
        )
    if data is not None and np.isnan(table.known).all():
        print(
            f"strangers are not recognized, because {embedder.trained.source} has no statistics of the validation "
            "images"
        )
    numbers, cells = choose_photos(table, arguments.next, arguments.strangers, photos, embedder.trained.classes)
    sheets = write_next(arguments.output, cells, numbers, images)
    print(f"{arguments.output / TABLE}: {counted(len(cells), 'photo')} to label; look at {sheets[0]}")
    if arguments.into:
        for path, *_ in cells:
            copy_into(arguments.into, Path(path))
        print(f"{arguments.into}: has copies of these photos; move each copy into the folder of its class")
    if num_unreadable:
        print(f"{num_unreadable} of {counted(len(photos), 'image')} could not be read")
    return 2 if num_unreadable else 0


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))

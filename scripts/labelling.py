"""The commands of halfstep labels: find doubtful labels, list confirmed ones, choose photos."""

from argparse import Namespace
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np

from configs.load import dataset_of_file
from configs.schema import Config
from configs.tables import import_named
from datasets.sources.files import refuse_copies
from engine.features.embedder import Embedder, Photos, Table, find_photos
from engine.labelling.data import DataSet, Source, config_of, read_copies, refuse_other_data
from engine.labelling.lists import LISTS, command_to_train, correct, write_lists
from engine.labelling.next import (
    LEFT_OUT,
    TABLE,
    check_output,
    choose_photos,
    find_new,
    write_left_out,
    write_next,
)
from engine.labelling.review import TABLE as LABELS
from engine.labelling.review import check_unchanged, read_confirmed, refuse_confirmed, write_review
from engine.predict.classifier import load_classifier
from engine.predict.output import copy_into
from engine.record.saved_run import SavedRun
from engine.tasks import find_task
from scripts.command_line import refuse_among_photos
from scripts.predict import make_folder, settings_flags
from scripts.sweeping import DONE, FILE, ranked_points, read_result, read_sweep
from utils.commands import command
from utils.errors import ConfigError
from utils.runs import folder_of
from utils.text import counted, one_line

# Flags that a finished run has no use for
OF_WEIGHTS = "dataset raw cfg image_size opts amp batch_size device".split()
NUM_LISTED = 20  # number of corrections that are printed


def source_of(arguments: Namespace) -> Source:
    """Return the finished runs of the best point of a sweep, a single run, or weights with the settings of their data."""
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


def load_weights(arguments: Namespace) -> Source:
    """Load the weights whose features judge the labels of -data_path."""
    name = arguments.dataset or dataset_of_file(str(arguments.data_path)) or "imagefolder"
    dataset = ["-dataset", name, "-data_path", str(arguments.data_path)]
    flags = [*settings_flags(arguments), *dataset]
    weights = load_classifier(arguments.source, flags, arguments.raw, needs_classes=False)
    weights = replace(weights, config=weights.config.changed("START", EVAL=False))  # both parts
    if arguments.output:
        refuse_among_photos(arguments.data_path, {"-output": arguments.output})
    given = ["-cfg", arguments.cfg] if arguments.cfg else []
    given += ["-image_size", arguments.image_size] if arguments.image_size else []
    given += ["-opts", *arguments.opts] if arguments.opts else []
    return Source(Path(), [], weights=weights, flags=tuple(given), device=arguments.device)


def find(source: Source, output: Path | None, finds_copies: bool) -> None:
    """Write labels.csv and labels.png with doubtful targets and copies, and print a summary."""
    folder = output or source.folder / "labels"
    refuse_confirmed(folder / LABELS)
    judged = import_named("engine.labelling", find_task(source.config).labelling).of(source, print)
    # To compute features, weights have read all images and reported the unreadable ones.
    say = (lambda line: None) if source.weights else print
    copies = read_copies(judged.data, judged.folds, say) if finds_copies else None
    rows = judged.rows(copies or [])
    sheets = write_review(folder, rows, judged.data)
    for line in (*judged.summary(copies), *judged.advice(source, len(rows), folder / LABELS, sheets)):
        print(line)


def apply(source: Source, table: Path, output: Path | None) -> None:
    """Write lists of the images with the confirmed labels, and print the command that trains from them."""
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


def describe_lists(data: DataSet) -> str:
    """Return which lists `-apply` has written, and what they list."""
    if len(data.val):
        return f"{' and '.join(LISTS)} list the training and validation images"
    return f"{LISTS[0]} lists all images"


def choose(arguments: Namespace) -> int:
    """Choose photos to label. Return the exit code."""
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


def choose_next(given: Namespace, photos: Photos, embedder: Embedder, data: DataSet | None) -> int:
    """Choose photos and write them. Return the exit code, which is 2 if some photos cannot be read.

    `given` has the flags `next`, `output`, `into`, `no_copies` and `strangers`. `data`: the images on which the classifier
    was trained and evaluated, or None if the weights are not those of a run.
    """
    check_output(given.output)
    photos = photos.for_model(embedder.pixels, print)
    if given.into:
        refuse_copies(embedder.pixels)
    images = photos.images(embedder.pixels)
    table = embedder(images)
    num_unreadable = len(photos) - len(table.indices)
    is_new, twins = np.ones(len(table.indices), bool), []
    if not given.no_copies:
        is_new, twins = find_new(images, table.indices, photos, data)
    write_left_out(given.output, twins)
    counts = Counter(reason for *_, reason in twins).items()
    left_out = f", left out: {', '.join(f'{count:,} {reason}' for reason, count in counts)}" if twins else ""
    print(f"{photos.folder}: {counted(len(photos), 'photo')}{left_out}; see {given.output / LEFT_OUT}")
    if not is_new.any():
        raise ConfigError(
            f"-next: no photo in {photos.folder} can be chosen, because none is new and readable; add photos, or leave out none "
            f"with -no_copies (see {given.output / LEFT_OUT})"
        )
    table = Table(*(column[is_new] for column in table))
    if len(table.indices) < given.next:
        print(
            f"only {counted(len(table.indices), 'photo')} can be chosen, fewer than {given.next:,}, so all are chosen"
        )
    if data is not None and np.isnan(table.known).all():
        print(
            f"strangers are not recognized, because {embedder.trained.source} has no statistics of the validation images"
        )
    numbers, cells = choose_photos(table, given.next, given.strangers, photos, embedder.trained.classes)
    sheets = write_next(given.output, cells, numbers, images)
    print(f"{given.output / TABLE}: {counted(len(cells), 'photo')} to label; look at {sheets[0]}")
    if given.into:
        for path, *_ in cells:
            copy_into(given.into, Path(path))
        print(f"{given.into}: has copies of these photos; move each copy into the folder of its class")
    if num_unreadable:
        print(f"{num_unreadable} of {counted(len(photos), 'image')} could not be read")
    return 2 if num_unreadable else 0

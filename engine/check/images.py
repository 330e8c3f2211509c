"""Checks that read a data set before a run: classes, sizes, unreadable images, duplicates."""

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from configs.checks import IN_THEIR_ORDER
from configs.schema import Config
from datasets.bad_images import num_allowed
from datasets.copies import Copies, are_equal, find_copies
from datasets.identity import ImageContents
from datasets.image_set import ImageSet
from datasets.passes import read_each
from datasets.pixels.decode import KEEP_VALUES, SHALLOW
from datasets.pixels.rules import ImageReadError
from datasets.split import DRAWN
from engine.check.shapes import check_shape
from engine.evaluation.scores import FEW, interval_of
from engine.quick_checks import OK, WARN, WRONG, Finding
from utils.commands import page
from utils.text import WARNING, counted, first_of, plural

LINE_EACH = ",\n"
SIGNS = {True: "=", False: "~"}  # between the names of two images: equal pixels, near copies
UNEVEN = 10  # the ratio of largest to smallest class above which classes are reported as uneven


class ScanResult:
    """The size, or the error, of each image in a set or in a sample spread evenly over the set."""

    def __init__(self, image_set: ImageSet, most: int | None = None):
        self.image_set, total = image_set, len(image_set)
        self.count = min(total, most or total)
        self.sides = np.zeros((self.count, 2), dtype=np.int32)  # height, width
        self.reasons: dict[int, str] = {}  # errors of unreadable images
        self.survey = image_set.pixels.survey(self.count)

    @property
    def readable(self) -> np.ndarray:
        """Return whether each image could be read, as bool [N]."""
        return self.sides[:, 0] > 0

    @property
    def read_ones(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices of the images that could be read, and their sides."""
        numbers = np.flatnonzero(self.readable)
        return numbers * len(self.image_set) // self.count, self.sides[numbers]

    @property
    def is_sample(self) -> bool:
        return self.count < len(self.image_set)

    def index(self, number: int) -> int:
        """Convert an image's number in the sample to its index in the image set."""
        return number * len(self.image_set) // self.count

    def name(self, number: int) -> str:
        return self.image_set.name(self.index(number))

    def describe_count(self) -> str:
        return f"{self.count:,} of {len(self.image_set):,}" if self.is_sample else f"{self.count:,}"

    def read(self, contents: ImageContents, start: int, title: str) -> Counter[str]:
        """Read the images in threads, with a progress bar on a terminal.

        Return how many files of each unusual kind there are.

        Also add the images to `contents`, which numbers the first image of the sample `start`.
        """
        kinds: Counter[str] = Counter()

        def read(number: int) -> tuple[Sequence[str], ImageReadError | None]:
            index = self.index(number)
            kinds_of_image = self.image_set.kinds(index)
            try:
                pixels = self.image_set.read(index)
            except ImageReadError as error:
                return kinds_of_image, error
            self.sides[number] = pixels.shape[:2]
            contents.add(start + number, pixels)
            self.survey.add(number, pixels)
            return kinds_of_image, None

        for number, (kinds_of_image, error) in read_each(range(self.count), read, title):
            kinds.update(kinds_of_image)
            if error:
                self.reasons[number] = str(error)
        return kinds


def contents_of(scans: Sequence[ScanResult]) -> ImageContents:
    """Return empty contents for the images of all scans, numbered from the first image of the first scan."""

    def find(number: int) -> tuple[ImageSet, int]:
        is_first = number < scans[0].count
        scan = scans[0 if is_first else -1]
        return scan.image_set, scan.index(number - (0 if is_first else scans[0].count))

    return ImageContents(sum(scan.count for scan in scans), find)


def check_images(config: Config, train: ImageSet | None, val: ImageSet) -> Iterator[Finding]:
    """Yield all findings about a data set whose lists and folders are valid. `train` is None in evaluation."""
    counts = counted(len(val), "validation image")
    counts = counts if train is None else f"{len(train):,} training and {counts}"
    trains_on_all = val.trains_on_all
    if trains_on_all:
        counts = f"all {counted(len(val), 'image')} for training"
    if val.makes_batches:  # images generated on the device, with random classes
        yield Finding("data", counts)
        return
    yield Finding("data", counts) if trains_on_all else check_counts(config, counts, train, val)
    check_targets = check_classes if config.task.has_classes else check_numbers
    yield check_targets(config, train, val)
    parts = [("training", train), ("validation", val)]
    if train is None or trains_on_all:
        parts = parts[:1] if trains_on_all else parts[1:]
    scans = [ScanResult(image_set, config.CHECK_IMAGES) for _, image_set in parts]
    contents, start, kinds = contents_of(scans), 0, Counter()
    for (part, _), scan in zip(parts, scans, strict=True):
        kinds.update(scan.read(contents, start, f"reading {part} images"))
        start += scan.count
        yield check_readable(part, scan, config.DATA.MAX_BAD_FRACTION)
        yield check_sizes(part, scan, config)
        if lines := scan.survey.describe(scan.name):
            remedy = "leave such channels out, and remove or repair such images" if len(lines) > 1 else ""
            yield Finding(f"{part} pixels", "\n".join(lines), WARN if remedy else OK, remedy)
    if finding := check_shape(scans[0].sides[scans[0].readable], config):
        yield finding
    if kinds:
        text = ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common())
        is_lost = kinds[SHALLOW] > kinds["16-bit"]
        yield Finding("kinds of files", text, WARN if is_lost else OK, KEEP_VALUES if is_lost else "")
    if finding := check_duplicates(config, scans, contents):
        yield finding
    if config.task.has_classes and not config.task.has_several_classes:
        from engine.check.clues import check_clues

        yield check_clues(scans[0].image_set, *scans[0].read_ones)


def check_counts(config: Config, counts: str, train: ImageSet | None, val: ImageSet) -> Finding:
    """Report the numbers of images. Warn if there are few validation images."""
    if len(val) >= FEW:
        return Finding("data", counts)
    text = f"{counts}; with so few validation images, scores are uncertain"
    if config.task.noun == "class":
        interval = interval_of(50, len(val))
        text = f"{counts}; with so few validation images, an accuracy of 50% has a 95% interval of {interval}"
    remedy = "add validation images"
    if train is not None and val.split.get("rule") in DRAWN:
        total = counted(len(train) + len(val), "image")
        remedy = f"-folds 5 measures on all {total} and trains on all of them, in about 5 times the time"
    return Finding("data", text, WARN, remedy)


def check_classes(config: Config, train: ImageSet | None, val: ImageSet) -> Finding:
    """Report classes without images, and how uneven the other classes are.

    Labels out of range need no check here, because reading the lists refuses them.
    """
    part, image_set = ("validation", val) if train is None else ("training", train)
    names = image_set.classes
    counts, num_val = (each.count_classes() for each in (image_set, val))
    present = counts[counts > 0]
    fewest = f"{present.min():,} to " if present.min() < present.max() else ""
    notes = [f"{len(names):,}, each with {fewest}{counted(present.max(), f'{part} image')}"]
    if present.max() > UNEVEN * present.min():
        note = f"uneven: {names[counts.argmax()]} has the most images"
        if train and counts.all():
            may_repeat = not config.task.has_several_classes and config.DATA.DATASET not in IN_THEIR_ORDER
            sampler = "DATA.SAMPLER=balanced or " if may_repeat else ""
            note += f"; {sampler}TRAIN.CLASS_WEIGHTS=auto (-opts) helps small classes"
        notes.append(note)
    if (config.MODEL.NUM_CLASSES or 0) > len(names):
        notes.append(f"MODEL.NUM_CLASSES is {config.MODEL.NUM_CLASSES:,}")
    unseen = [names[number] for number in np.flatnonzero((num_val == 0) & (counts > 0))]
    if unseen:
        notes.append(f"without validation images: {first_of(unseen)}")
    empty = [names[number] for number in np.flatnonzero(counts == 0)]
    if not empty:
        return Finding("classes", "; ".join(notes))
    notes.append(f"without {part} images: {first_of(empty)}")
    return Finding("classes", "; ".join(notes), WARN, "add images of these classes, or number the classes without gaps")


def check_numbers(config: Config, train: ImageSet | None, val: ImageSet) -> Finding:
    """Report the range of each number, and numbers that are missing or only count the rows."""
    parts = {"training": train, "validation": val}
    lines = [
        (part, line)
        for part, images in parts.items()
        if images is not None
        for line in images.meaning.describe(config, images)
    ]
    is_doubtful = any(line.startswith(WARNING) for _, line in lines)
    text = "\n".join(f"{part}: {line.removeprefix(WARNING)}" for part, line in lines)
    return Finding(plural(config.task.noun), text, WARN if is_doubtful else OK)


def check_readable(part: str, scan: ScanResult, max_fraction: float) -> Finding:
    """Report unreadable images by name. Above `max_fraction` (DATA.MAX_BAD_FRACTION) the verdict is WRONG."""
    title, bad = f"{part} images", sorted(scan.reasons)
    of_sample = " read" if scan.is_sample else ""
    if not bad:
        return Finding(title, f"{scan.describe_count()}{of_sample}, all readable")
    named = [f"{scan.name(number)} ({scan.reasons[number]})" for number in bad]
    share = f"{len(bad):,} of {scan.count:,}{of_sample} ({len(bad) / scan.count:.2%}) cannot be read"
    text = f"{share}; DATA.MAX_BAD_FRACTION is {max_fraction:g}:\n{first_of(named, LINE_EACH)}"
    verdict = WRONG if len(bad) > num_allowed(max_fraction, scan.count) else WARN
    return Finding(title, text, verdict, "repair or remove them")


def check_sizes(part: str, scan: ScanResult, config: Config) -> Finding:
    """Report the smallest, median and largest image, and how many images are enlarged."""
    title, sides, image_size = f"{part} sizes", scan.sides[scan.readable], config.DATA.IMAGE_SIZE
    if not len(sides):
        return Finding(title, "no image could be read")
    by_area = np.argsort(sides.prod(axis=1, dtype=np.int64), kind="stable")
    three = sides[by_area[[0, len(sides) // 2, -1]]].tolist()
    smallest, median, largest = (f"{width} x {height}" for height, width in three)
    smaller = float((sides < config.DATA.shape).any(axis=1).mean())
    note = f"; {smaller:.1%} are enlarged to DATA.IMAGE_SIZE {image_size}" if smaller else ""
    of = f" of {scan.describe_count()} images" if scan.is_sample else ""
    return Finding(title, f"smallest {smallest}, median {median}, largest {largest}{of}{note}")


Pairs = dict[bool, list[str]]  # the names of two images, by whether their pixels are equal


def check_duplicates(config: Config, scans: Sequence[ScanResult], contents: ImageContents) -> Finding | None:
    """Report copies by the rules of datasets/copies.py. Only equal pixels are counted as the same image.

    In evaluation, there is one scan, and the result is None unless images are in two classes.
    """
    train, val = scans[0] if len(scans) > 1 else None, scans[-1]
    num_train = train.count if train else 0
    is_sample = any(scan.is_sample for scan in scans)
    of = f"{val.count:,} validation and {num_train:,} training images read"
    copies, noun = find_copies(contents, val.image_set), config.task.noun
    twins, clashes = name_duplicates(contents, copies)
    texts, nouns = [], plural(noun)
    keep_one = f"keep only one {noun} for each of them"
    if paths := twins[True]:
        share = f"{len(paths):,} of {of if is_sample else counted(val.count, 'validation image')}"
        how = "is also a training image" if len(paths) == 1 else "are also training images"
        texts.append(
            f"{share} {how}:\n{first_of(paths, LINE_EACH)}\n"
            f"-> remove them from one of the two sets ({page('docs/data.md')}): they make the scores look too good"
        )
    if paths := clashes[True]:
        are = "is" if len(paths) == 1 else "are"
        texts.append(
            f"{counted(len(paths), 'image')} {are} in two {nouns}:\n{first_of(paths, LINE_EACH)}\n-> {keep_one}"
        )
    texts += describe_near(twins[False], "training and validation images", "remove them from one of the two sets")
    texts += describe_near(clashes[False], f"images in two {nouns}", keep_one)
    repeats = sum(each.num_repeated for each in copies)
    repeated = [f"training images with the pixels of another training image: {repeats:,}"] if repeats else []
    if texts:
        remedy = "halfstep labels lists all in labels.csv and shows them in labels.png"
        if config.task.has_several_classes:  # halfstep labels judges one label per image
            remedy = ""
        return Finding("duplicates", "\n".join([*texts, *repeated]), WARN, remedy)
    if train is None:
        return None
    none = f"none among {of}; others may be duplicates"
    if not is_sample:
        none = "no validation image is also a training image"
    return Finding("duplicates", "\n".join([none, *repeated]))


def name_duplicates(contents: ImageContents, copies: Sequence[Copies]) -> tuple[Pairs, Pairs]:
    """Return the validation images with a copy in training, and the copies in two classes."""
    twins: Pairs = {True: [], False: []}
    clashes: Pairs = {True: [], False: []}
    for group, contradictions, in_training, _ in copies:
        for pair in in_training:
            equal = are_equal(group, pair)
            twins[equal].append(f"{contents.name(pair[0])} {SIGNS[equal]} {contents.name(pair[1])}")
        for pair in dict.fromkeys((min(pair), max(pair)) for pair in contradictions):
            equal = are_equal(group, pair)
            one, other = (f"{contents.name(number)} ({contents.target(number)})" for number in pair)
            clashes[equal].append(f"{one} {SIGNS[equal]} {other}")
    return twins, clashes


def describe_near(pairs: Sequence[str], what: str, remedy: str) -> list[str]:
    """Describe pairs of near copies: a person must decide whether they show the same, and then follow the remedy."""
    if not pairs:
        return []
    count = counted(len(pairs), "pair")
    return [
        f"{count} of {what} that look the same (~), with other pixels:\n{first_of(pairs, LINE_EACH)}\n"
        f"-> look at them; if they show the same, {remedy}"
    ]

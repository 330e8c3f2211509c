"""One run from settings to a result, in the order in which things happen."""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from configs.load import LoadedConfig
from configs.schema import AUTO
from datasets import (
    BadImages,
    CacheProgress,
    ImageSet,
    Normalize,
    build_eval_data,
    build_train_data,
    cache_image_sets,
    load_image_sets,
    parse_policy,
)
from engine.check.quick_checks import quick_checks
from engine.checkpoint.resume import (
    batch_size_of,
    find_checkpoint,
    global_batch_to_keep,
    read_saved,
    restore,
    run_folder_of,
)
from engine.epochs import Epochs
from engine.evaluation import evaluate
from engine.memory.auto_batch_size import settle
from engine.parallel.sharding import check_strategy, is_sharded
from engine.precision.policy import Precision
from engine.session import Session
from engine.train.trainer import Trainer
from models import build_model, describe
from models.weights import load_exactly, load_pretrained
from utils.distributed import Process
from utils.errors import ConfigError, DataError
from utils.findings import OK
from utils.seed import make_deterministic
from utils.signals import StopSignal


def run(loaded: LoadedConfig, process: Process) -> int:
    """Train or evaluate as the settings say. Returns the exit code: 0, 1 (last save failed), 3 or 128 + signal."""
    session = Session(loaded.with_default_batch_size() if loaded.config.EVAL else loaded, process)
    if process.world_size > 1:
        session.log.say(process.describe())
    if loaded.config.DETERMINISTIC:
        make_deterministic()
    try:
        Precision(loaded.config, process.device)  # refuses what this device cannot do, before any data is read
        parse_policy(loaded.config.TRAIN)  # likewise
        if not loaded.config.EVAL:
            check_strategy(loaded.config)  # likewise
        code = run_evaluation(session) if loaded.config.EVAL else run_training(session)
    except BaseException as error:
        error_told = process.name_lost_ranks(error)
        session.end(error_told)
        raise error_told from None if error_told is error else error
    session.end(None)
    return code


def run_training(session: Session) -> int:
    process, log = session.process, session.log
    stop = StopSignal()
    checkpoint = process.first(lambda: find_checkpoint(session))
    session.open_folder("train", existing=run_folder_of(checkpoint))
    train_set, eval_set = load_data(session, lambda: stop.number)
    num_classes = session.config.MODEL.NUM_CLASSES or len(eval_set.classes)
    saved = read_saved(checkpoint, lazily=True)
    if session.config.DATA.BATCH_SIZE == AUTO:
        settle(session, len(train_set), num_classes, batch_size_of(saved), stop)
    config = session.config
    model = make_model(session, len(eval_set.classes))
    if checkpoint and "progress" not in saved:  # before the model is shared out
        for line in load_pretrained(model, str(checkpoint), setting="-resume"):
            log.say(line)
    kept = global_batch_to_keep(config, saved)
    train_data = build_train_data(config, train_set, process.rank, process.world_size, process.device, kept)
    eval_data = build_eval_data(config, eval_set, process.rank, process.world_size, process.device)
    trainer = Trainer(config, model, train_data, process, log, stop)
    if is_sharded(config, process):
        log.say(
            f"strategy: fsdp2; each of {process.world_size} processes holds a part of weights, gradients and optimizer"
        )
    log.say(
        f"data: {train_data.num_samples} training and {eval_data.num_samples} validation images, "
        f"{len(eval_set.classes)} classes; an epoch is {train_data.steps_per_epoch} updates of "
        f"{train_data.global_batch} images ({train_data.describe_split()})"
    )
    log.say(trainer.precision.describe())
    advice = trainer.precision.advise_on_sizes(config, num_classes)
    if advice:
        log.say(advice)
    for finding in quick_checks(config, model, train_data, process, session.path):
        if finding.verdict != OK:
            log.say(f"check: {finding.what}: {finding.found}; {finding.remedy}")
    if checkpoint:
        restore(session, trainer, checkpoint, saved)
    log.say(f"writing to {session.path}")
    return Epochs(session, trainer, eval_data).run()


def load_data(session: Session, signal: Callable[[], int] = lambda: 0) -> tuple[ImageSet | None, ImageSet]:
    """The image sets, from a cache where the settings ask for one; `signal`: the one that tells us to stop, or 0."""
    config, process, log = session.config, session.process, session.log
    progress = CacheProgress(log.say, log.warn, signal, may_build=process.local_rank == 0)
    train_set, eval_set = process.after_first(
        lambda: cache_image_sets(config, load_image_sets(config, log.say), progress)
    )
    for line in eval_set.notes:
        log.say(line)
    return train_set, eval_set


def make_model(session: Session, num_data_classes: int) -> torch.nn.Module:
    """The model with the weights that it starts from, on this process's device."""
    config, process, log = session.config, session.process, session.log
    torch.manual_seed(config.SEED)
    model = build_model(config, config.MODEL.NUM_CLASSES or num_data_classes)
    source = config.MODEL.PRETRAINED or (config.MODEL.RESUME if config.EVAL else None)
    if source:
        for line in process.after_first(lambda: load_pretrained(model, source, needs_head=config.EVAL)):
            log.say(line)
    log.say(f"model: {config.MODEL.NAME}, {describe(model)}")
    # What is shared out goes to the device part by part.
    return model if is_sharded(config, process) and not config.EVAL else model.to(process.device)


def run_evaluation(session: Session) -> int:
    """Score given weights on the validation images; a checkpoint's raw weights and running mean both."""
    config, process, log = session.config, session.process, session.log
    checkpoint = process.first(lambda: find_weights(session))
    session.open_folder("eval")
    _, eval_set = load_data(session)
    data = build_eval_data(config, eval_set, process.rank, process.world_size, process.device)
    precision = Precision(config, process.device)
    log.say(f"data: {data.num_samples} validation images, {len(eval_set.classes)} classes")
    log.say(precision.describe())
    normalize = Normalize(config.DATA, torch.float32).to(process.device)
    bad_images = BadImages(eval_set, config.DATA.MAX_BAD_FRACTION, log.warn)
    session.begin()
    found = {}
    for name, model in weights_to_score(session, checkpoint, eval_set.classes):
        for line in precision.prepare(model):
            log.say(line)
        start = time.perf_counter()
        scores = evaluate(model, data, normalize, precision, process, bad_images)
        log.say(
            f"----- {name}Validation Loss: {scores.loss:.4f}, {name}Validation Acc@1: {scores.top1 / 100:.4f}, "
            f"{name}Validation Acc@5: {scores.top5 / 100:.4f}, time: {time.perf_counter() - start:.2f}"
        )
        excluded = f"; {scores.num_excluded} unreadable ones left out" if scores.num_excluded else ""
        log.say(f"{name}top-1 {scores.top1:.3f}%, top-5 {scores.top5:.3f}% of {scores.num_images} images{excluded}")
        found[name.strip().lower() or "raw"] = asdict(scores)
    session.status("done", **found)
    return 0


def find_weights(session: Session) -> Path | None:
    """The checkpoint to evaluate; None where MODEL.PRETRAINED says what to evaluate."""
    checkpoint = find_checkpoint(session)
    if not (session.config.MODEL.PRETRAINED or checkpoint):
        raise ConfigError("-eval: no weights to evaluate; name a file with -pretrained or -resume")
    return checkpoint


def weights_to_score(
    session: Session, checkpoint: Path | None, classes: list[str]
) -> Iterator[tuple[str, torch.nn.Module]]:
    """The model with each set of weights there is to score, and what to call it in front of its figures."""
    config = session.config
    state = read_saved(checkpoint)
    if "progress" not in state:  # weights of another system
        yield "", make_model(session, len(classes))
        return
    names = state.get("class_names", classes)
    if classes != names[: len(classes)]:  # a list file's classes end at the largest label in it
        raise DataError(
            f"DATA.DATA_PATH: its classes are not those of {checkpoint}: {first_difference(classes, names)}"
        )
    model = build_model(config, config.MODEL.NUM_CLASSES or len(names))
    for key, name in (("state_dict", ""), ("state_dict_ema", "EMA ")):
        if state.get(key):
            load_exactly(model, state[key], checkpoint)
            yield name, model.to(session.process.device)


def first_difference(mine: list[str], theirs: list[str]) -> str:
    """Where two lists of class names part."""
    theirs = theirs + ["nothing"] * len(mine)
    number, pair = next((n, pair) for n, pair in enumerate(zip(mine, theirs, strict=False)) if pair[0] != pair[1])
    return f"class {number} is {pair[0]} here and {pair[1]} there"

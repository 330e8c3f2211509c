"""Saves the update of a run that overflowed, replays it in the run or for halfstep doctor, and writes doctor.yaml."""

import contextlib
import copy
import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from configs.auto import without_auto
from configs.schema import Config
from configs.values import flatten, unflatten
from datasets import (
    Batch,
    CacheProgress,
    Normalize,
    Piece,
    Preparation,
    PriorFacts,
    SavedData,
    build_preparation,
    build_train_data,
    open_data,
)
from engine.checkpoint.resume import is_run
from engine.doctor.diagnosis import Case, Diagnosis, diagnose
from engine.open_model import SavedModel
from engine.precision import Precision, set_matmul
from engine.settings import load_settings
from engine.train.loss import Loss, build_loss
from engine.train.trainer import Trainer
from models.transforms import choose_transforms
from models.weights.files import find_and_read
from models.weights.state import merged
from models.weights.torch_files import read_torch
from utils.commands import command
from utils.distributed import Process, choose_device
from utils.errors import ConfigError, cause_of
from utils.files import Kind, refuse_other_kind, replacing, write_text
from utils.log import Log
from utils.runs import refuse_old_run, weights_in, without_latest
from utils.seed import unchanged_random_state
from utils.text import counted

OVERFLOW_FILE = "overflow-batch.pth"
DOCTOR_FILE = "doctor.yaml"  # the settings that prevent the overflow
PRESCRIPTION = Kind("a file of halfstep doctor", (b"BASE: config.yaml\nPRECISION:", b"PRECISION:"))


@dataclass
class Batches:
    """The batches of one update in one process, from a run, a file or the data set."""

    step: int
    rank: int
    batches: list[tuple[Batch, float]]  # each with its weight in the update's loss
    state: dict = field(default_factory=dict)  # further content of the file, such as the run's weights and settings


def save_overflow(folder: Path, update: Batches) -> str:
    """Write the update of this process; process 0 adds its `state`. Return a sentence on how to use the file."""
    batches, shares = zip(*update.batches, strict=True)
    content = {
        "step": update.step,
        "rank": update.rank,
        "shares": list(shares),
        "images": torch.cat([batch.images.cpu() for batch in batches]),
        "targets": torch.cat([batch.targets.cpu() for batch in batches]),
        "sizes": [len(batch.targets) for batch in batches],
        # The pieces determine mixing and erasing. They are saved as plain values, because torch reads with
        # weights_only.
        "pieces": [
            {**batch.piece._asdict(), "indices": batch.piece.indices.tolist(), "repeats": batch.piece.repeats.tolist()}
            for batch in batches
        ],
    }
    name = OVERFLOW_FILE if update.rank == 0 else f"overflow-batch-{update.rank}.pth"
    with replacing(folder / name) as file:
        torch.save(content | (update.state if update.rank == 0 else {}), file)
    return f"to see where it breaks: {command('doctor', folder)}"


def read_overflow(path: Path) -> Batches:
    """Read a file that save_overflow wrote."""
    if not path.is_file():
        raise ConfigError(
            f"-batch: there is no file {path}; a run writes {OVERFLOW_FILE} into its folder when it stops"
        )
    state = read_torch(path)
    if not isinstance(state, dict) or not {"images", "targets", "sizes", "pieces", "shares"} <= state.keys():
        raise ConfigError(f"-batch: {path} contains no batch; give a run's {OVERFLOW_FILE}")
    batches = []
    for *tensors, plain, share in zip(
        state["images"].split(state["sizes"]),
        state["targets"].split(state["sizes"]),
        state["pieces"],
        state["shares"],
        strict=True,
    ):
        arrays = {name: np.array(plain[name]) for name in ("indices", "repeats")}
        batches.append((Batch(*tensors, len(tensors[0]), [], Piece(**plain | arrays)), share))
    return Batches(state["step"], state["rank"], batches, state)


def make_case(
    config: Config, model: torch.nn.Module, prepare: Preparation, update: Batches, scale: float, loss: Loss
) -> Case:
    """Return an update of a run with these settings, to replay on `model`, which has no transforms yet.

    `prepare`, `loss`: the run's preparation and loss, on the device of the replay.
    """
    # Both replays use one model. A white list would bring half precision into the float32 replay, and naive mode has
    # no lists. float8 layers scale their inputs, so they cannot overflow.
    config = config.changed("PRECISION", MODE="autocast", CUSTOM_WHITE_LIST=())
    precision = Precision(config, prepare.device)
    transforms = choose_transforms(config, prepare.device, precision.half)
    transforms.apply(model)
    return Case(
        model.to(prepare.device),
        precision,
        transforms,
        loss,
        prepare,
        update.batches,
        scale,
        (config.SEED, update.step, update.rank),
    )


def prescribe(diagnosis: Diagnosis, config: Config, folder: Path) -> str:
    """Write the settings that prevent the overflow, if any, to doctor.yaml. Return its text, or an empty string."""
    settings = [f"    {name}: {value}" for name, value in diagnosis.prescription(config.PRECISION).items()]
    if not settings:
        return ""
    base = ["BASE: config.yaml"] if (folder / "config.yaml").exists() else []
    text = "\n".join([*base, "PRECISION:", *settings]) + "\n"
    write_text(folder / DOCTOR_FILE, text)
    return text


# --- in a run ---


def save_last_update(config: Config, folder: Path, log: Log, update: Batches, trainer: Trainer) -> str:
    """Save the last update in every process. Return advice, or an empty text if it cannot be saved. Collective."""
    parallel = trainer.parallel
    update.state = {
        **update.state,
        **parallel.gather_state({"state_dict": parallel.local_state(trainer.model)}),
        "config": flatten(config),
        "seed": config.SEED,
        "amp_scaler": trainer.precision.state_dict(),
    }
    try:
        return save_overflow(folder, update)
    except (OSError, RuntimeError) as error:
        log.warn(f"cannot save the last batch in {folder} ({cause_of(error)})")
        return ""


def examine(config: Config, folder: Path, log: Log, update: Batches, trainer: Trainer) -> str:
    """Return the finding and the remedy for an update, or an empty string if the doctor fails."""
    try:
        with unchanged_random_state(trainer.process.device):
            model, scale = copy.deepcopy(trainer.model), trainer.precision.scaler.get_scale()
            trainer.transforms.revert(model)
            diagnosis = diagnose(make_case(config, model, trainer.prepare, update, scale, trainer.loss))
        is_written = bool(prescribe(diagnosis, config, folder))
    except Exception as error:  # for example, out of memory or a full disk; no error here ends the run
        log.warn(
            f"the doctor cannot examine step {update.step} ({type(error).__name__}: {error}); training continues "
            "without it"
        )
        return ""
    log.say(
        f"doctor: updates are skipped, the last one at step {update.step}. Replay of that step: {diagnosis.finding()}"
    )
    path, remedies = shlex.quote(str(folder / DOCTOR_FILE)), []
    if is_written:
        settings = ", ".join(f"{name}: {value}" for name, value in diagnosis.prescription(config.PRECISION).items())
        outcome = "is finite" if diagnosis.is_fixed else "still breaks"
        log.say(f"doctor: {settings}; with these settings the replayed update {outcome}; to use them: -cfg {path}")
        remedies += [f"-cfg {path}"] if diagnosis.is_fixed else []
    finding = f"the update breaks at {diagnosis.finding()}" if diagnosis.first_non_finite else diagnosis.finding()
    if diagnosis.breaks_in_float32:
        return finding
    remedies += ["-amp_dtype bfloat16"] if diagnosis.half is torch.float16 else []
    return f"{finding}; try {' or '.join(remedies or ['a lower TRAIN.BASE_LR'])}"


# --- halfstep doctor ---


def replay_run(source: str, batch: Path | None, cfg: str | None, half: str | None) -> None:
    """Replay an update of a run and print the findings. The arguments come from halfstep doctor."""
    folder, state, batches = find_run(source, batch)
    refuse_other_kind("run", folder / DOCTOR_FILE, PRESCRIPTION, "rename it")
    config = unflatten(state["config"])
    if cfg:
        config = without_auto(load_settings(["-cfg", cfg])).config
    config, scale = precision_of(config, state, half)
    device = choose_device("auto", local_rank=0)
    set_matmul(config.PRECISION.MATMUL)
    prepare = build_preparation(config, Normalize(config.DATA).to(device))
    loss = build_loss(config, state.get("class_weights"), device)
    for update in batches or [next_batch(config, state, folder)]:
        weights = merged(state["state_dict"], state["config"])
        model = SavedModel(Path("the run's weights"), state, "state_dict", weights).build(config)
        diagnosis = diagnose(make_case(config, model, prepare, update, scale, loss))
        if diagnosis.first_non_finite:
            break
    num_images = sum(len(batch.targets) for batch, _ in update.batches)
    print(f"step {update.step}, process {update.rank}: {counted(num_images, 'image')}; loss scale {scale:g}")
    print("\n".join(diagnosis.lines()))
    # Without a saved overflow, only the next update was replayed. If it is finite, no setting needs to change.
    text = prescribe(diagnosis, config, folder) if diagnosis.first_non_finite or batches else ""
    if text:
        target = folder / DOCTOR_FILE
        print(f"\n{text}\nwritten to {target}; to train with it: {command('train', '-cfg', target)}")


def find_run(source: str, batch: Path | None) -> tuple[Path, dict, list]:
    """Find the run's folder, the checkpoint to replay with, and the saved batches (one per process), if any."""
    from engine.record.saved_run import read_status  # local: a run that trains needs no other run's status

    path = Path(without_latest(source)).expanduser()
    folder = path if path.is_dir() else path.parent
    refuse_old_run(folder, read_status(folder).get("about", {}).get("halfstep"))
    files = [batch] if batch else sorted(folder.glob("overflow-batch*.pth"))
    batches = [read_overflow(file) for file in files]
    # The weights at the overflow are newer than the last checkpoint.
    if path.is_dir() and batches and "state_dict" in batches[0].state:
        return folder, batches[0].state, batches
    if path.is_dir() and weights_in(path) is None:
        raise ConfigError(
            f"{folder} has neither {OVERFLOW_FILE} nor best.pth or last.pth; give the folder of a run, or a checkpoint"
        )
    _, state = find_and_read(path, {"state_dict", "config", "class_names"})
    return folder, state, batches


def precision_of(config: Config, state: dict, asked: str | None) -> tuple[Config, float]:
    """Return the settings with the half type to examine, and the loss scale for this type."""
    saved = state.get("amp_scaler", {})
    half = str(saved.get("dtype", "None")).removeprefix("torch.")
    half = asked or (half if half != "None" else None)
    if half is None:
        raise ConfigError(
            "this run computed in float32 (AMP is false); give the half type to examine with -amp_dtype float16 or "
            "-amp_dtype bfloat16"
        )
    first = config.PRECISION.INIT_LOSS_SCALING if half == "float16" else 1.0
    scale = saved.get("scale", first) if saved.get("dtype") == f"torch.{half}" else first
    if config.PRECISION.MODE != "autocast" or config.PRECISION.CUSTOM_WHITE_LIST:
        print("replayed with PRECISION.MODE autocast and without CUSTOM_WHITE_LIST")
    if config.TRAIN.DISTILLATION_TYPE != "none":
        print("replayed without the teacher: the loss uses only the labels")
    return replace(config.changed("PRECISION", DTYPE=half), AMP=True), float(scale)


def next_batch(config: Config, state: dict, folder: Path) -> Batches:
    """Return the batches of the run's next update. They depend only on seed, step and the run's split."""
    kept = SavedData(state["class_names"], state.get("split", {}), file=folder / "last.pth")
    prior = PriorFacts(
        saved=kept, began=state["config"] if is_run(state) else {}, origins=dict.fromkeys(flatten(config), "the run")
    )
    opened = open_data(config, "both", prior, cache=CacheProgress(print, print, may_build=False))
    config = opened.config
    per_process = config.DATA.BATCH_SIZE * config.TRAIN.ACCUM_ITER
    world_size = max(state["config"].get("GLOBAL_BATCH", per_process) // per_process, 1)
    read_here = config.changed("DATA", NUM_WORKERS=0)
    data = build_train_data(read_here, opened.train, Process(torch.device("cpu"), world_size=world_size))
    step = state.get("step", 0)
    with contextlib.closing(data.windows(step, step + 1)) as windows:
        window = next(windows)
        shares = [(batch, batch.num_samples * world_size / window.num_samples) for batch in window.batches]
    return Batches(step, 0, shares)

"""Replays an update of a run for scripts/doctor.py, prints where it breaks, and writes settings that fix it."""

import contextlib
import shlex
from dataclasses import replace
from pathlib import Path

import torch

from configs.schema import Config
from configs.values import unflatten
from datasets import (
    SavedData,
    build_normalize,
    build_preparation,
    build_train_data,
    load_image_sets,
)
from engine.build import read_through_cache
from engine.precision.policy import set_matmul
from engine.settings import load_settings
from engine.train.loss import build_loss
from extras.doctor.diagnosis import diagnose
from extras.doctor.overflow import (
    DOCTOR_FILE,
    OVERFLOW_FILE,
    PRESCRIPTION,
    Batches,
    make_case,
    prescribe,
    read_overflow,
)
from models import build_model
from models.weights.files import read_checkpoint
from models.weights.load import load_exactly
from models.weights.state import merged
from utils.distributed import Process, choose_device
from utils.errors import ConfigError
from utils.files import refuse_other_kind
from utils.runs import weights_in, without_latest
from utils.text import counted


def examine(source: str, batch: Path | None, cfg: str | None, half: str | None) -> None:
    """Replay an update of a run and print the findings. The arguments come from scripts/doctor.py."""
    folder, state, batches = find_run(source, batch)
    refuse_other_kind("run", folder / DOCTOR_FILE, PRESCRIPTION, "rename it")
    config = unflatten(state["config"])
    if cfg:
        config = load_settings(["-cfg", cfg]).with_default_batch_size().config
    if config.TRAIN.OBJECTIVE != "classes":
        raise ConfigError(
            f"{folder}: the run learns features (TRAIN.OBJECTIVE), and its updates cannot be replayed without the teacher; "
            "read the doctor's lines in the run's log.txt"
        )
    config, scale = precision_of(config, state, half)
    device = choose_device("auto", local_rank=0)
    set_matmul(config.PRECISION.MATMUL)
    prepare = build_preparation(config, build_normalize(config.DATA).to(device))
    loss = build_loss(config, state.get("class_weights"), device)
    for each in batches or [next_batch(config, state)]:
        found = diagnose(make_case(config, make_model(config, state), prepare, each, scale, loss))
        if found.first:
            break
    num_images = sum(len(batch.targets) for batch, _ in each.batches)
    print(f"step {each.step}, process {each.rank}: {counted(num_images, 'image')}; loss scale {scale:g}")
    print("\n".join(found.lines()))
    # Without a saved overflow, only the next update was replayed. If it is finite, no setting needs to change.
    text = prescribe(found, config, folder) if found.first or batches else ""
    if text:
        target = folder / DOCTOR_FILE
        command = f"python main_single_gpu.py -cfg {shlex.quote(str(target))}"
        print(f"\n{text}\nwritten to {target}; to train with it: {command}")


def find_run(source: str, batch: Path | None) -> tuple[Path, dict, list]:
    """Find the run's folder, the checkpoint to replay with, and the saved batches (one per process), if any."""
    path = Path(without_latest(source)).expanduser()
    folder = path if path.is_dir() else path.parent
    files = [batch] if batch else sorted(folder.glob("overflow-batch*.pth"))
    batches = [read_overflow(file) for file in files]
    if path.is_dir():
        # The weights at the overflow are newer than the last checkpoint.
        if batches and "state_dict" in batches[0].state:
            return folder, batches[0].state, batches
        path = weights_in(folder)
        if path is None:
            raise ConfigError(
                f"{folder} has neither {OVERFLOW_FILE} nor best.pth or last.pth; give the folder of a run, or a "
                "checkpoint"
            )
    _, state = read_checkpoint(path, {"state_dict", "config", "class_names"})
    return folder, state, batches


def precision_of(config: Config, state: dict, wanted: str | None) -> tuple[Config, float]:
    """Return the settings with the half type to examine, and the loss scale for this type."""
    saved = state.get("amp_scaler", {})
    half = str(saved.get("dtype", "None")).removeprefix("torch.")
    half = wanted or (half if half != "None" else None)
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
    return replace(config, AMP=True, PRECISION=replace(config.PRECISION, DTYPE=half)), float(scale)


def next_batch(config: Config, state: dict) -> Batches:
    """Return the batches of the run's next update. They depend only on seed and step."""
    kept = SavedData(state["class_names"], state.get("split", {}))
    image_sets = load_image_sets(config, saved=kept)
    train_set, _ = read_through_cache(config, image_sets, say=print, warn=print, may_build=False)
    per_process = config.DATA.BATCH_SIZE * config.TRAIN.ACCUM_ITER
    world_size = max(state["config"].get("GLOBAL_BATCH", per_process) // per_process, 1)
    read_here = replace(config, DATA=replace(config.DATA, NUM_WORKERS=0))
    data = build_train_data(read_here, train_set, Process(torch.device("cpu"), world_size=world_size))
    step = state.get("step", 0)
    with contextlib.closing(data.windows(step, step + 1)) as windows:
        window = next(windows)
        shares = [(each, each.num_samples * world_size / window.num_samples) for each in window.batches]
    return Batches(step, 0, shares)


def make_model(config: Config, state: dict) -> torch.nn.Module:
    """Build the model with the run's weights."""
    model = build_model(config, config.MODEL.NUM_CLASSES or len(state["class_names"]))
    load_exactly(model, merged(state["state_dict"], state["config"]), Path("the run's weights"))
    return model

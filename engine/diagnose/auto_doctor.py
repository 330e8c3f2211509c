"""Starts the doctor on an update: from a script, or by itself when a run skips updates; writes doctor.yaml."""

import copy
import shlex
from dataclasses import replace
from pathlib import Path

import torch

from configs.schema import Config
from datasets import Preparation
from engine.diagnose.doctor import Case, Diagnosis, diagnose
from engine.diagnose.failing_batch import Batches, LastUpdate
from engine.precision.policy import Precision
from engine.train.counters import Report
from engine.train.loss import Loss
from engine.train.trainer import Callback, Trainer
from models.transforms import choose_transforms
from utils.files import write_text
from utils.log import Log
from utils.seed import unchanged_random_state

DOCTOR_FILE = "doctor.yaml"


def make_case(
    config: Config, model: torch.nn.Module, prepare: Preparation, update: Batches, scale: float, loss: Loss
) -> Case:
    """An update of a run with these settings, to be replayed on `model`, which has no transforms yet.

    `prepare`, `loss`: those of the run, on the device of the replay.
    """
    # Both replays use one model: a white list would bring half precision into the exact one, and naive mode has no
    # lists. float8 layers scale their inputs, so they cannot overflow.
    settings = replace(config.PRECISION, MODE="autocast", CUSTOM_WHITE_LIST=())
    config = replace(config, PRECISION=settings)
    precision = Precision(config, prepare.device)
    transforms = choose_transforms(config, prepare.device, precision.half)
    transforms.apply(model)
    return Case(
        model.to(prepare.device),
        precision,
        transforms,
        loss,
        [(*prepare(batch), share) for batch, share in update.batches],
        scale,
        (config.SEED, update.step, update.rank),
    )


def prescribe(found: Diagnosis, config: Config, folder: Path) -> str:
    """Write doctor.yaml into the run folder if there are settings that help. Returns its text."""
    settings = [f"    {name}: {value}" for name, value in found.prescription(config.PRECISION).items()]
    if not settings:
        return ""
    base = ["BASE: config.yaml"] if (folder / "config.yaml").exists() else []
    text = "\n".join([*base, "PRECISION:", *settings]) + "\n"
    write_text(folder / DOCTOR_FILE, text)
    return text


class AutoDoctor(Callback):
    """Examines the last update once, on a copy, after PRECISION.DOCTOR_SKIPS consecutive skipped updates."""

    def __init__(self, config: Config, folder: Path, log: Log, last_update: LastUpdate):
        self._config, self._folder, self._log, self._last_update = config, folder, log, last_update
        self._advice: str | None = None  # None: not examined yet

    def get_advice(self) -> str:
        """Finding and remedy; empty without one."""
        return self._advice or ""

    def on_report(self, trainer: Trainer, report: Report) -> None:
        settings = self._config.PRECISION
        if not settings.DOCTOR_SKIPS or self._advice is not None:
            return
        if report.skips_in_a_row >= min(settings.DOCTOR_SKIPS, settings.MAX_CONSECUTIVE_SKIPS):
            self._advice = self._examine(trainer)

    def on_rollback(self, trainer: Trainer) -> None:
        self._advice = None

    def _examine(self, trainer: Trainer) -> str:
        """Returns finding and remedy; empty if the doctor fails."""
        log, config, device = self._log, self._config, trainer.process.device
        update = self._last_update.batches(trainer.process.rank)
        try:
            with unchanged_random_state(device):
                model, scale = copy.deepcopy(trainer.model), trainer.precision.scaler.get_scale()
                trainer.transforms.revert(model)
                found = diagnose(make_case(config, model, trainer.prepare, update, scale, trainer.loss))
            is_written = bool(prescribe(found, config, self._folder))
        except Exception as error:  # out of memory, a full disk, an untraceable operation: no reason to end a run
            log.warn(
                f"the doctor cannot look at step {update.step} ({type(error).__name__}: {error}); training continues "
                "without it"
            )
            return ""
        log.say(
            f"doctor: updates are skipped, the last one at step {update.step}. In a replay of it: {found.finding()}"
        )
        path = shlex.quote(str(self._folder / DOCTOR_FILE))
        if is_written:
            settings = ", ".join(f"{name}: {value}" for name, value in found.prescription(config.PRECISION).items())
            outcome = "a replay with them is finite" if found.is_mended else "a replay with them still breaks"
            log.say(f"doctor: {settings}; {outcome}; written for -cfg to {path}")
        return advice(found, path if is_written and found.is_mended else None)


def advice(found: Diagnosis, path: str | None) -> str:
    """One sentence: what breaks, and what to try. `path`: the file of settings that help."""
    finding = f"first non-finite: {found.finding()}" if found.first else found.finding()
    if found.breaks_in_float32:
        return finding
    remedies = [f"-cfg {path}"] if path else []
    remedies += ["-amp_dtype bfloat16"] if found.half is torch.float16 else []
    return f"{finding}; try {' or '.join(remedies or ['a lower TRAIN.BASE_LR'])}"

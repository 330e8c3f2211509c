"""The training step, what changes while the model learns, and the callbacks that watch it."""

import contextlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from configs.schema import Config
from datasets import Batch, Mixed, Preparation, TrainData, Window
from engine.evaluation.scores import Best, Scores
from engine.parallel import Parallel
from engine.precision.loss_scale import Clipping
from engine.precision.master_weights import ComputingModel
from engine.precision.policy import Precision
from engine.train.counters import Counters, EpochResult, Report
from engine.train.ema import Ema
from engine.train.loss import Loss, hits
from engine.train.optimizers import AnyOptimizer, load_state, set_rates
from engine.train.schedule import Schedule
from models.transforms import ModelTransforms
from models.weights.state import PREFERRED
from utils.distributed import Process
from utils.seed import seed_update

# The phases of an update, in order; "data" to "other" repeat for each micro-batch. "copy" is what is left of the way to the
# device (where it has streams, loading/workers.py has copied ahead), normalising and mixing; "communication" is the part of
# the backward that only waits for the all-reduce.
PHASES = ("data", "copy", "forward", "backward", "communication", "optimizer", "other")

MicroBatches = Iterator[tuple[Batch, bool]]  # each with whether it is the last one of this process in the window


class Callback:
    """Watches the training: it changes no weights, but may end the run. The base class ignores every event.

    The trainer calls its callbacks in list order. Each process has its own list, and most callbacks are in that of process 0
    only (callback_list.py): they call no collective. Read values of tensors only in `on_report`: reading them in every
    update would synchronise host and device.
    """

    def on_start_scored(self, trainer: "Trainer", scores: Scores, seconds: float) -> None:
        """Before the first update, where the weights know all classes: they were evaluated, which took so long."""

    def on_epoch_start(self, trainer: "Trainer") -> None:
        """Epoch `trainer.epoch` begins, or continues after a resume."""

    def on_window(self, trainer: "Trainer") -> None:
        """An update begins, or is repeated with smaller micro-batches."""

    def on_phase(self, trainer: "Trainer", name: str) -> None:
        """A phase of the update begins and lasts until the next one."""

    def on_loss(self, trainer: "Trainer", loss: Tensor, is_last: bool) -> None:
        """The backward of a micro-batch follows; `is_last`: it synchronises the gradients."""

    def on_micro_batch(self, trainer: "Trainer", batch: Batch, share: float) -> None:
        """Forward and backward of a micro-batch are done; `share`: its weight in the loss of the update."""

    def on_update(self, trainer: "Trainer") -> None:
        """An update is done or skipped; `trainer.step` already includes it."""

    def on_report(self, trainer: "Trainer", report: Report) -> None:
        """The counters were read: after the first update of an epoch, every REPORT_FREQ updates, and after the last."""

    def on_epoch_end(self, trainer: "Trainer", result: EpochResult) -> None:
        """The epoch is trained, and evaluated if due; `trainer.epoch` does not include it yet."""

    def on_rollback(self, trainer: "Trainer") -> None:
        """The trainer returned to an earlier state."""

    def should_stop(self, trainer: "Trainer", updates_left: int) -> bool:
        """Called before each update: whether the run must save and end. `updates_left`: in this epoch."""
        return False

    def choose(self, trainer: "Trainer") -> int:
        """Called before each update: of how many updates the run is to be; 0: of as many as before."""
        return 0

    def on_choice(self, trainer: "Trainer") -> None:
        """The run has another number of updates from this step on; no update has used it yet."""

    def close(self) -> None:
        """The run ends, for whatever reason."""


class Guard:
    """Every batch of the loader is a micro-batch, and nothing is repeated.

    A subclass may yield further attempts: the trainer restarts the window for each.
    """

    def attempts(self, window: Window) -> Iterator[AbstractContextManager[MicroBatches]]:
        yield contextlib.nullcontext(cut(window, window.batches))


def cut(window: Window, batches: Iterable[Batch], max_images: int | None = None) -> MicroBatches:
    """Micro-batches of at most `max_images` images; None: as the loader delivers them."""
    for number, batch in enumerate(batches, start=1):
        parts = [batch] if max_images is None else batch.parts(max_images)
        for part in parts:
            yield part, number == window.num_batches and part is parts[-1]


@dataclass
class Trainer:
    """Model, optimizer, precision, EMA and counters of one process; `update` is one training step.

    build.py creates it; what to edit to add a loss, an optimizer, a callback and so on: CONTRIBUTING.md, "Adding". Callbacks
    observe an update. The guard may run it again with smaller micro-batches, and then `on_window` is called twice.
    """

    config: Config
    process: Process
    data: TrainData
    model: nn.Module  # the weights that are trained and saved
    computing: ComputingModel  # the model that computes: the same one, or a copy in half precision
    replica: nn.Module  # the computing model, wrapped to average gradients (ddp; fsdp2 shards in Parallel.place)
    transforms: ModelTransforms  # how the model computes; reverted where it must be seen plainly
    precision: Precision
    parallel: Parallel
    optimizer: AnyOptimizer  # found by its name: optimizers.py, find_class
    parameters: list[nn.Parameter]  # those that this process's optimizer updates
    clipping: Clipping
    schedule: Schedule  # of the step alone, and of what a budget chose; scales TRAIN.BASE_LR by the global batch if that is set
    loss: Loss  # a function of logits and targets; build_loss has the table
    prepare: Preparation
    ema: Ema | None
    counters: Counters
    guard: Guard = field(default_factory=Guard)
    callbacks: list[Callback] = field(default_factory=list)
    epoch: int = 0  # finished epochs, including their evaluation
    step: int = 0  # updates so far: done, skipped or left out
    best: Best = Best()
    not_better: int = 0  # evaluations in a row since the best one
    preferred: str | None = None  # key in a checkpoint of the better weights in the newest evaluation
    left_out: list[range] = field(default_factory=list)  # updates that a rollback leaves out

    def update(self, window: Window) -> None:
        """One update from the images of a window; this process computes its share of them in micro-batches."""
        set_rates(self.optimizer.param_groups, self.schedule(self.step))
        # A second one only if the first ran out of memory (with several processes: memory/recovery.py).
        for attempt in self.guard.attempts(window):
            with attempt as micro_batches:
                seed_update(self.config.SEED, self.step, self.process.rank)
                self.notify("on_window")
                sums = self.counters.new_sums()
                self.notify("on_phase", "data")
                for batch, is_last in micro_batches:
                    sums += self.forward_and_backward(batch, is_last, window.num_samples)
        self.notify("on_phase", "optimizer")
        self.computing.gradients_to_master()
        self.parallel.gradients_to_optimizer()
        scaler = self.precision.scaler
        grad_norm = scaler.unscale_and_clip(self.optimizer, self.parameters, self.parallel, self.clipping)
        skipped = scaler.found_inf(self.optimizer)  # 1.0 or 0.0, on the device
        scaler.step(self.optimizer)  # does nothing if skipped
        scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.computing.refresh()
        if self.ema:
            self.ema.update(self.step, skipped)
        self.notify("on_phase", "other")
        self.counters.add(sums, grad_norm, skipped)
        self.step += 1
        self.notify("on_update")

    def forward_and_backward(self, batch: Batch, is_last: bool, num_samples: int) -> Tensor:
        """Add the gradients of one micro-batch. Returns the sums of its losses, correct images and images.

        `num_samples`: images of the update, over all processes and micro-batches.
        """
        self.notify("on_phase", "copy")
        images, targets = self.to_device(batch)
        with self.parallel.sync_gradients(self.replica, now=is_last):
            self.notify("on_phase", "forward")
            with self.precision.autocast():
                logits = self.replica(images)
            loss = self.loss(logits, targets)
            # Weights each micro-batch by its images; times world_size, because DDP and FSDP average over the processes.
            share = batch.num_samples * self.process.world_size / num_samples
            self.notify("on_phase", "backward")
            self.notify("on_loss", loss, is_last)
            self.precision.scaler.scale(loss * share).backward()
        self.notify("on_phase", "other")
        self.notify("on_micro_batch", batch, share)
        with torch.no_grad():
            correct = hits(logits, targets).to(loss.dtype).mean()
            sums = batch.num_samples * torch.stack((loss, correct, torch.ones_like(loss)))
        self.notify("on_phase", "data")
        return sums

    def to_device(self, batch: Batch) -> tuple[Tensor, Tensor | Mixed]:
        """Images [B, C, H, W] and targets [B] on the device, ready for model and loss."""
        return self.prepare(batch, self.precision.input_dtype(self.computing.model))

    def notify(self, event: str, *facts) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self, *facts)

    def leave_out(self) -> None:
        """Count an update without computing it."""
        self.counters.add_left_out()
        self.step += 1

    def report(self) -> Report:
        """Read the counters of all processes. `update` never makes the host wait for the device; this does."""
        last = max(self.step - 1, 0)
        scale = self.precision.scaler.get_scale()
        figures = self.counters.read(self.process)
        rates = {"lr": self.schedule(last), "num_updates": self.schedule.num_updates}
        return Report(step=last, epoch=self.epoch, loss_scale=scale, **rates, **figures)

    def end_epoch(self) -> None:
        self.epoch += 1
        self.counters.totals.zero_()

    def replicate(self, accumulates: bool) -> None:
        """Wrap the model again: a static DDP graph cannot change."""
        self.replica = None  # freed first: both would hook the same gradients
        self.replica = self.parallel.wrap(self.computing.model, accumulates)

    def state_dict(self) -> dict:
        """This process's part of everything needed to continue, under timm's key names. A collective."""
        return {
            "epoch": self.epoch - 1,
            "step": self.step,
            "state_dict": self.parallel.local_state(self.model),
            **({"state_dict_ema": self.parallel.local_state(self.ema.model)} if self.ema else {}),
            **({PREFERRED: self.preferred} if self.preferred else {}),
            "optimizer": self.optimizer.state_dict(),
            "amp_scaler": self.precision.state_dict(),
            "progress": {
                **self.counters.state_dict(self.process),
                "best": list(self.best),
                "not_better": self.not_better,
                "left_out": [[each.start, each.stop] for each in self.left_out],
                **({"choices": self.schedule.choices} if self.schedule.choices else {}),
            },
        }

    def load_state_dict(self, state: dict) -> None:
        """Continue from the state of a whole run, in the form of `state_dict`."""
        state = self.parallel.local_part(state)
        self.parallel.load(self.model, state["state_dict"])
        if self.ema:
            self.parallel.load(self.ema.model, state.get("state_dict_ema") or state["state_dict"])
        load_state(self.optimizer, state["optimizer"], self.config.TRAIN.OPTIMIZER.NAME)
        self.computing.refresh()
        self.precision.load_state_dict(state["amp_scaler"])
        self.epoch, self.step = state["epoch"] + 1, state["step"]
        progress = state["progress"]
        self.best, self.preferred = Best(*progress["best"]), state.get(PREFERRED)
        self.not_better = progress["not_better"]
        self.left_out = [range(*each) for each in progress["left_out"]]
        self.schedule.resume(progress.get("choices", []))
        self.counters.load_state_dict(progress, self.process)
        if not self.data.order.has_updates_of(state.get("config", {})):
            # Steps are counted by epochs of this length, and no update is left that was to be left out.
            self.step, self.left_out = self.epoch * self.data.steps_per_epoch, []
            self.counters.totals.zero_()

    def roll_back(self, state: dict, streak: range) -> None:
        """Load a state from before a streak of skipped updates, and leave these updates out from now on.

        Called after SkipLimit (stop_conditions.py) has ended a streak. The update before it is left out too: it may have
        produced the bad weights, as every later update overflowed.
        """
        left_out = [*self.left_out, range(max(streak.start - 1, state["step"]), streak.stop)]
        self.load_state_dict(state)
        self.left_out = left_out
        self.notify("on_rollback")

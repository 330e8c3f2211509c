"""The training step, and the state that changes during training."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from configs.schema import Config
from datasets import Batch, Mixed, Preparation, TrainData, Window
from engine.evaluation.best import Best
from engine.evaluation.evaluate import Inference
from engine.parallel import Parallel
from engine.precision import Precision
from engine.train.clipping import Clipping
from engine.train.clock import Clock
from engine.train.computing import ComputingModel
from engine.train.counters import Counters, Report
from engine.train.loss import Loss
from engine.train.optimizers import load_state, set_rates
from engine.train.schedule import Schedule
from models.transforms import ModelTransforms
from models.weights.record import PREFERRED
from utils.distributed import Process
from utils.seed import seed_update

if TYPE_CHECKING:
    from engine.train.ema import Ema

BEFORE = "before"  # the key in a checkpoint for the scores of the weights before the first update


class Stateful(Protocol):
    """A component whose state is saved in each checkpoint. A resumed run creates the component from this state."""

    def state(self) -> Any: ...


@dataclass(kw_only=True)
class Trainer:
    """Model, optimizer, precision, EMA and counters of one process; `update` is one training step.

    build.py creates it. CONTRIBUTING.md, "Adding", says which files to edit for a new loss, optimizer or callback.
    Callbacks observe the updates.
    """

    config: Config
    task: Any  # what the model learns: a Task (engine/tasks/task.py)
    process: Process
    data: TrainData
    model: nn.Module  # the weights that are trained and saved
    computing: ComputingModel  # the model that computes: `model` itself, or a copy in half precision
    replica: nn.Module  # the computing model; ddp wraps it to average gradients (Parallel.wrap)
    transforms: ModelTransforms  # changes to how the model computes; reverted where the original modules are needed
    precision: Precision
    parallel: Parallel
    optimizer: torch.optim.Optimizer  # from TORCH_OPTIMIZERS (configs/tables.py) or from timm
    parameters: list[nn.Parameter]  # the parameters that this process's optimizer updates
    clipping: Clipping
    schedule: Schedule  # the learning rate of each step; TRAIN.LINEAR_SCALED_LR scales it with the global batch
    loss: Loss  # a function of logits and targets, from the table LOSSES (configs/tables.py)
    prepare: Preparation
    ema: "Ema | None"
    counters: Counters
    clock: Clock
    callbacks: list[Any] = field(default_factory=list)  # each a Callback (callback.py), which knows the trainer
    epoch: int = 0  # finished epochs, including their evaluation
    step: int = 0  # updates so far: done, skipped or left out
    best: Best = Best()
    # Scores of the weights before the first update, by name. {}: they will be evaluated; None: they will not.
    before: dict[str, float] | None = None
    not_better: int = 0  # evaluations since the best one
    preferred: str | None = None  # checkpoint key of the weights that scored better in the newest evaluation
    parts: dict[str, Stateful] = field(default_factory=dict)  # {checkpoint key: component}
    left_out: list[range] = field(default_factory=list)  # updates that are left out after a rollback

    def update(self, window: Window) -> None:
        """Make one update from the images of a window. This process computes its share of them in micro-batches.

        If a gradient is not finite in any process, all processes skip the update: weights, optimizer state and EMA stay
        unchanged, and in float16 the loss scale is lowered. SkipLimit (stop_conditions.py) acts on many skips in a row.
        """
        clock, process, scaler = self.clock, self.process, self.precision.scaler
        # Each parameter group gets the rate of this step times its `lr_scale` (TRAIN.LAYER_DECAY).
        set_rates(self.optimizer.param_groups, self.schedule(self.step))
        seed_update(self.config.SEED, self.step, process.rank, process.device)  # dropout differs between processes
        sums = self.accumulate(window)
        with clock("optimizer"):
            self.computing.gradients_to_master()
            self.parallel.gradients_to_optimizer()
            grad_norm = scaler.unscale_and_clip(self.optimizer, self.parameters, self.parallel, self.clipping)
            skipped = scaler.found_inf()  # 1.0 or 0.0, on the device
            scaler.step(self.optimizer)  # does nothing if the update is skipped
            scaler.update()
            self.optimizer.zero_grad(set_to_none=True)
            self.computing.refresh()
            if self.ema:
                self.ema.update(self.step, skipped)
        self.counters.add(sums, grad_norm, skipped)
        self.step += 1
        self.notify("on_update")

    def accumulate(self, window: Window) -> Tensor:
        """Add up the gradients of a window. Return the sums of its losses, correct predictions and images."""
        clock, sums = self.clock, self.counters.new_sums()
        for number, batch in enumerate(clock.waiting_for(window.batches), start=1):
            with clock("copy"):
                images, targets = self.prepare_batch(batch)
            is_last = number == window.num_batches
            with self.parallel.sync_gradients(self.replica, now=is_last):
                with clock("forward"):
                    with self.precision.autocast():
                        logits = self.replica(images)
                    loss = self.loss(logits, targets)
                # Weight each micro-batch by its size, so the gradient is the mean over all images of the update, with
                # any number of micro-batches and processes. world_size undoes the averaging of DDP and FSDP.
                weight = batch.num_samples * self.process.world_size / window.num_samples
                with clock("backward"):
                    if is_last and self.process.world_size > 1:
                        clock.mark_communication(loss)
                    self.precision.scaler.scale(loss * weight).backward()
            self.notify("on_micro_batch", batch, weight)
            with torch.no_grad():
                correct = self.task.are_right(logits, targets).to(loss.dtype).mean()
                sums += batch.num_samples * torch.stack((loss, correct, torch.ones_like(loss)))
        return sums

    def prepare_batch(self, batch: Batch) -> tuple[Tensor, Tensor | Mixed]:
        """Return images [B, C, H, W] and targets [B] on the device, normalized, erased and mixed for model and loss."""
        return self.prepare(batch, self.precision.input_dtype(self.computing.model))

    @property
    def inference(self) -> Inference:
        return Inference(self.prepare.normalize, self.precision, self.process)

    def notify(self, event: str, *facts) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self, *facts)

    def leave_out(self) -> None:
        """Count an update that is left out after a rollback, without computing it."""
        self.counters.add_left_out()
        self.step += 1

    def report(self) -> Report:
        """Return a Report over all processes. Unlike `update`, this makes the host wait for the device."""
        last = max(self.step - 1, 0)
        scale = self.precision.scaler.get_scale()
        figures = self.counters.read(self.process)
        seconds = self.clock.lap()
        times = {"seconds": sum(seconds.values()), "shares": self.clock.shares(seconds)}
        rates = {"lr": self.schedule(last), "num_updates": self.schedule.num_updates}
        return Report(step=last, epoch=self.epoch, loss_scale=scale, **rates, **times, **figures)

    def end_epoch(self) -> None:
        self.epoch += 1
        self.counters.start_epoch()

    def replicate(self, accumulates: bool) -> None:
        """Wrap the model again, because DDP with a static graph cannot start to accumulate gradients."""
        self.replica = None  # freed first, because two wrappers would hook the same gradients
        self.replica = self.parallel.wrap(self.computing.model, accumulates)

    def state_dict(self) -> dict:
        """Return this process's part of the state that a resume needs, under timm's key names. Collective."""
        return {
            "epoch": self.epoch - 1,
            "step": self.step,
            "state_dict": self.parallel.local_state(self.model),
            **({"state_dict_ema": self.parallel.local_state(self.ema.model)} if self.ema else {}),
            **({PREFERRED: self.preferred} if self.preferred else {}),
            **({} if self.before is None else {BEFORE: self.before}),
            "optimizer": self.optimizer.state_dict(),
            "amp_scaler": self.precision.state_dict(),
            "progress": {
                **self.counters.state_dict(self.process),
                "best": self.best.state(),
                "not_better": self.not_better,
                "left_out": [[each.start, each.stop] for each in self.left_out],
                **({"choices": self.schedule.choices} if self.schedule.choices else {}),
            },
            **{key: part.state() for key, part in self.parts.items()},
        }

    def load_state_dict(self, state: dict) -> None:
        """Load the complete state of a run, in the form of `state_dict`."""
        state = self.parallel.local_part(state)
        self.parallel.load(self.model, state["state_dict"])
        if self.ema:
            self.parallel.load(self.ema.model, state.get("state_dict_ema") or state["state_dict"])
        load_state(self.optimizer, state["optimizer"], self.config.TRAIN.OPTIMIZER.NAME)
        self.computing.refresh()
        self.precision.load_state_dict(state["amp_scaler"])
        self.epoch, self.step = state["epoch"] + 1, state["step"]
        progress = state["progress"]
        self.best, self.preferred = Best.from_state(progress["best"]), state.get(PREFERRED)
        self.before = self.before or state.get(BEFORE)
        self.not_better = progress["not_better"]
        self.left_out = [range(*each) for each in progress["left_out"]]
        self.schedule.resume(progress.get("choices", []))
        self.counters.load_state_dict(progress, self.process)
        if not self.data.order.has_updates_of(state.get("config", {})):
            # The updates are different now: count steps in epochs of the new length, and leave no updates out.
            self.step, self.left_out = self.epoch * self.data.steps_per_epoch, []
            self.counters.start_epoch()

    def roll_back(self, state: dict, streak: range) -> None:
        """Load a state from before a streak of skipped updates, and leave these updates out from now on.

        The preceding update may have caused the streak. If `state` does not include that update, leave it out too.
        """
        left_out = [*self.left_out, range(max(streak.start - 1, state["step"]), streak.stop)]
        self.load_state_dict(state)
        self.left_out = left_out
        self.notify("on_rollback")

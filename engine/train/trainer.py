"""The training loop: the model and everything that changes while it learns."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from configs.schema import Config
from datasets import BadImages, Batch, Mixed, Normalize, Preparation, TrainData, Window, heavier
from engine.diagnose.failing_batch import Shown
from engine.diagnose.fp32_compare import compare
from engine.evaluation import sum_type
from engine.memory.recovery import MicroBatches, Rereadable, shortage, try_out
from engine.parallel.sharding import choose_sharding, is_sharded
from engine.precision.policy import Precision
from engine.report.timing import Phases, shares
from engine.train.ema import Ema
from engine.train.loss import ClassificationLoss
from engine.train.optim import Schedule, build_optimizer
from engine.train.stop_conditions import TIME_IS_UP, NonFinite, Stopped
from models.transforms.activation_checkpointing import recompute_blocks
from models.transforms.cpu_kernels import compile_model
from utils.distributed import Process
from utils.log import Log
from utils.seed import seed_update
from utils.signals import StopSignal


@dataclass
class Report:
    """What the log shows of the updates since the epoch began."""

    loss: float  # of the last update
    mean_loss: float
    accuracy: float  # share of 1
    skipped: int
    grad_norm: float  # of the last update
    mean_grad_norm: float


class Trainer:
    """Model, optimizer, precision, running mean and counters of one process; `update` is one step of all of them."""

    def __init__(
        self, config: Config, model: torch.nn.Module, data: TrainData, process: Process, log: Log, stop: StopSignal
    ):
        device = process.device
        self.config, self.data, self.process, self.log, self.stop = config, data, process, log, stop
        self.model = model
        self.precision = Precision(config, device)
        self.sharding = choose_sharding(config, process, self.precision.half)
        for line in self.precision.prepare(model):
            log.say(line)
        if config.TRAIN.GRAD_CHECKPOINTING:
            recompute_blocks(config, model)
        self.ema = Ema(model, config.TRAIN.MODEL_EMA_DECAY) if config.TRAIN.MODEL_EMA else None
        self.sharding.lay_out(model, *([self.ema.model] if self.ema else []))
        if self.ema:
            self.ema.follow(model, self.sharding)
        self.computing = self.precision.computing(model).train()
        self.precision.link(model, self.computing, self.sharding)
        if config.COMPILE:
            compile_model(self.computing, config)
        self.replica = self.sharding.wrap(self.computing, accumulates=data.order.num_micro_batches(0) > 1)
        self.micro_batches = MicroBatches(config, data.order, process, log)
        # The first update takes the memory for the optimizer's state, so that only the second has all there is. Shards of
        # weights are gathered from all processes, so that none of them can try anything without the others.
        self.rehearsals = 0 if process.world_size == 1 or config.COMPILE or is_sharded(config, process) else 2
        own = self.sharding.parameters(model)
        self.parameters = [parameter for parameter in own.values() if parameter.requires_grad]
        self.optimizer = build_optimizer(config.TRAIN, model, own)
        self.sharding.follow(self.optimizer)
        self.schedule = Schedule(config.TRAIN, data.steps_per_epoch, data.global_batch)
        self.loss = ClassificationLoss(config.TRAIN)
        self.normalize = Normalize(config.DATA, self.parameters[0].dtype).to(device)
        self.prepare = Preparation(config, self.normalize)
        self.bad_images = BadImages(data.image_set, config.DATA.MAX_BAD_FRACTION, log.warn)
        self.epoch = 0  # finished epochs, their evaluation included
        self.step = 0  # attempted updates
        self.left_out: list[range] = []  # updates that are not made, one range for each time the run went back
        self.best = (-1.0, 0)  # highest accuracy, and the epoch it was in
        # Of the epoch so far: loss, correct, samples, skipped, gradient norm, updates. On the device: reading waits.
        self.totals = torch.zeros(6, dtype=sum_type(device), device=device)
        self.last = torch.zeros(3, dtype=sum_type(device), device=device)  # loss, samples, norm of the last update
        self.skips_in_a_row = torch.zeros((), device=device)
        self.phases = Phases.on(device)
        self.phase_seconds: Counter[str] = Counter()  # of each phase, in the epoch so far and this start
        self.on_update: Callable[[], None] = lambda: None  # called after each update
        self.on_report: Callable[[dict], None] = lambda row: None  # gets the figures of an update, each REPORT_FREQ
        self.on_shadow: Callable[[dict], None] = lambda row: None  # gets the figures of each comparison
        # Whether the run must save and end now; asked before each update, with the number of them left in the epoch.
        self.is_time_up: Callable[[int], bool] = lambda num_left: False
        # Called once, when many updates in a row were skipped; returns what breaks and what to try.
        self.on_skips: Callable[[], str] = lambda: ""
        self.advice: str | None = None  # what it returned
        self.shown = Shown()

    @property
    def lr(self) -> float:
        return self.schedule(self.step)

    def update(self, window: Window) -> None:
        """One update from all images of a window: this process's share of them, micro-batch by micro-batch."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr
        seen = self._accumulate_within_memory(window, Rereadable(self._wait_for(window.batches)))
        self.phases.begin("optimizer")
        grad_norm, skipped = self.precision.update(self.optimizer, self.parameters, self.config.TRAIN.GRAD_CLIP)
        if self.ema:
            self.ema.update(skipped)
        self.phases.begin("other")
        self._count(seen, grad_norm, skipped)
        self.step += 1

    def _accumulate(self, window: Window, batches: Iterable[Batch]) -> torch.Tensor:
        """Gradients of the whole window. Returns the sums of losses, correct images and images of this process."""
        seed_update(self.config.SEED, self.step, self.process.rank)
        seen = torch.zeros_like(self.totals[:3])
        self.shown.start(window.step)
        for batch, is_last in self.micro_batches.cut(window, batches):
            self.phases.begin("copy")
            images, targets = self._place(batch)
            with self.sharding.sync_gradients(self.replica, now=is_last):
                self.phases.begin("forward")
                with self.precision.autocast():
                    logits = self.replica(images)
                loss = self.loss(logits, targets)
                # The mean over the window, whatever the micro-batches' sizes; DDP divides by the processes.
                share = batch.num_samples * self.process.world_size / window.num_samples
                self.phases.begin_backward(loss, syncs=is_last and self.process.world_size > 1)
                self.precision.backward(loss * share)
                self.shown.add(batch, share)
            self.phases.begin("other")
            with torch.no_grad():
                correct = logits.argmax(1).eq(heavier(targets)).to(loss.dtype).mean()
                seen += batch.num_samples * torch.stack((loss, correct, torch.ones_like(loss)))
        return seen

    def _accumulate_within_memory(self, window: Window, batches: Rereadable) -> torch.Tensor:
        """The same, begun again with smaller micro-batches for as long as memory runs out."""
        if self.rehearsals:
            self._rehearse(window, batches)
        while True:
            try:
                return self._accumulate(window, batches)
            except RuntimeError as error:
                reason = shortage(error)
                if batches.is_reading or not reason:
                    raise
            if self.process.world_size > 1:
                raise self.micro_batches.cannot_repeat(window.step, reason)
            # Not inside `except`: the error would keep what it met of the forward.
            self.replica.zero_grad(set_to_none=True)
            self.micro_batches.halve(window.step, reason)

    def _rehearse(self, window: Window, batches: Rereadable) -> None:
        """Find out together whether memory suffices, while no process waits for the gradients of another."""
        largest = max(batches, key=lambda batch: len(batch.targets))
        self.phases.begin("other")
        while True:
            parts = self.micro_batches.parts(largest)
            # Where gradients accumulate, the first lie there while the second are computed.
            passes = 2 if len(parts) * window.num_batches > 1 else 1
            reason = try_out(self.computing, partial(self._loss_of, parts[0]), passes)
            if self.process.all_true(reason is None):
                break
            self.replica = None  # its graph may be static, which is over; and its memory is needed
            self.micro_batches.halve(window.step, reason)
            self.replica = self.sharding.wrap(self.computing, accumulates=True)
        self.rehearsals -= 1

    def _loss_of(self, batch: Batch) -> torch.Tensor:
        """Without the others: of the model itself, not of its replica."""
        images, targets = self._place(batch)
        with self.precision.autocast():
            logits = self.computing(images)
        return self.loss(logits, targets)

    def _place(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | Mixed]:
        """Images [B, C, H, W] and targets [B] on the device, as model and loss take them."""
        images, targets = self.prepare(batch)
        return self.precision.cast(images), targets

    @torch.no_grad()
    def _count(self, seen: torch.Tensor, grad_norm: torch.Tensor, skipped: torch.Tensor) -> None:
        """Add one update to the counters without the host looking at them; of a skipped one only that it was."""
        skipped = skipped.reshape(()).to(seen)
        grad_norm = grad_norm.to(seen)
        counted = torch.stack((*seen, torch.zeros_like(skipped), grad_norm, torch.ones_like(skipped)))
        nothing = torch.zeros_like(counted)
        nothing[3] = 1
        self.totals += torch.where(skipped > 0, nothing, counted)
        self.last = torch.stack((seen[0], seen[2], grad_norm))
        self.skips_in_a_row = (self.skips_in_a_row + 1) * skipped.to(self.skips_in_a_row)

    def train_epoch(self, windows: Iterator[Window], save: Callable[[], None]) -> Report:
        """Go on to the end of the epoch; `save` is called every SAVE_STEPS updates within it."""
        per_epoch, save_steps = self.data.steps_per_epoch, self.config.SAVE_STEPS
        done = self.step - self.epoch * per_epoch
        title = f"epoch {self.epoch + 1}/{self.config.TRAIN.NUM_EPOCHS}"
        self.log.start_bar(per_epoch, done, title, self.data.global_batch)
        self.phases.restart()
        try:
            for index in range(done, per_epoch):
                stop = self.process.delayed_max(self.stop.number or self.is_time_up(per_epoch - index) * TIME_IS_UP)
                if stop:
                    raise Stopped(stop)
                if any(self.step in each for each in self.left_out):
                    self._leave_out()
                else:
                    self._make(next(windows), index)
                self.log.move_bar()
                if save_steps and self.step % save_steps == 0 and index < per_epoch - 1:
                    save()
        finally:
            self.log.end_bar()
        return self.report()

    def _make(self, window: Window, index: int) -> None:
        """One update, and what is to be known of it."""
        lr = self.lr
        self.update(window)
        self.on_update()
        if self.config.PRECISION.SHADOW_STEPS and self.step % self.config.PRECISION.SHADOW_STEPS == 0:
            self._compare_with_float32()
        if index % self.config.REPORT_FREQ == 0 or index == self.data.steps_per_epoch - 1:
            self._tell(index, lr)

    def _leave_out(self) -> None:
        """Count an update as skipped that is not made. It ends a row of skipped ones: it says nothing of the weights."""
        self.totals[3] += 1
        self.skips_in_a_row.zero_()
        self.step += 1

    def end_epoch(self) -> None:
        """The epoch is trained and evaluated."""
        self.epoch += 1
        self.totals.zero_()
        self.phase_seconds.clear()

    def _compare_with_float32(self) -> None:
        """Process 0 runs its last micro-batch both ways, at the weights of now, and says so when they part."""
        settings = self.config.PRECISION
        if self.process.is_first and self.precision.half is not None:
            place = (self.config.SEED, self.step - 1, self.process.rank)
            batch = self.shown.last_batch
            difference = compare(self.model, self.precision, self.loss, self.prepare, batch, place)
            line = f"shadow at step {self.step - 1}: {difference.describe()}"
            if difference.alarms(settings.SHADOW_COSINE, settings.SHADOW_LOSS):
                self.log.warn(f"{line}; scripts/doctor.py looks for the cause")
            else:
                self.log.note(line)
            self.on_shadow(difference.row(self.step - 1))

    def report(self) -> Report:
        """Read the counters of all processes: the one place where the host waits for the device."""
        world_size = self.process.world_size
        loss, correct, samples, skipped, grad_norms, updates = self.process.sum(self.totals.clone()).tolist()
        last_loss, last_samples, last_norm = self.process.sum(self.last.clone()).tolist()
        return Report(
            loss=last_loss / max(last_samples, 1),
            mean_loss=loss / samples if samples else float("nan"),
            accuracy=correct / samples if samples else float("nan"),
            skipped=round(skipped / world_size),
            grad_norm=last_norm / world_size,
            mean_grad_norm=grad_norms / max(updates, 1),
        )

    def _tell(self, index: int, lr: float) -> None:
        """One line of the log, in PaddleViT's form."""
        report = self.report()
        seconds = self.phases.lap()
        self.phase_seconds.update(seconds)
        scale = self.precision.scaler.get_scale()
        line = (
            f"Epoch[{self.epoch + 1:03d}/{self.config.TRAIN.NUM_EPOCHS:03d}], "
            f"Step[{index:04d}/{self.data.steps_per_epoch:04d}], Lr: {lr:.6f}, "
            f"Loss: {report.loss:.4f} ({report.mean_loss:.4f}), Avg Acc: {report.accuracy:.4f}"
        )
        if self.log.shows_bar:
            self.log.note(line)
            self.log.show_on_bar(loss=f"{report.mean_loss:.3f}", acc=f"{report.accuracy:.3f}", scale=f"{scale:g}")
        else:
            self.log.say(line)
        self.on_report(
            {
                "step": self.step - 1,
                "epoch": self.epoch,
                "lr": lr,
                "loss": report.loss,
                "mean_loss": report.mean_loss,
                "grad_norm": report.grad_norm,
                "loss_scale": scale,
                "skipped": report.skipped,
                "seconds": sum(seconds.values()),
                **{f"{name}_pct": share for name, share in shares(seconds, self.process.device).items()},
            }
        )
        self._look_at_skips()

    def _look_at_skips(self) -> None:
        """The doctor after some skips in a row, and a stop after many."""
        settings, skips = self.config.PRECISION, int(self.skips_in_a_row)
        is_last = skips >= settings.MAX_CONSECUTIVE_SKIPS
        if self.advice is None and settings.DOCTOR_SKIPS and (is_last or skips >= settings.DOCTOR_SKIPS):
            self.advice = self.on_skips()
        if is_last:
            advice = self.advice or "lower TRAIN.BASE_LR, set TRAIN.GRAD_CLIP, or in float16 try -amp_dtype bfloat16"
            raise NonFinite(
                f"{skips} updates in a row had a non-finite gradient, up to step {self.step}; the weights are those "
                f"before them; {advice}",
                range(self.step - skips, self.step),
            )

    def _wait_for(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The same batches, with the time spent waiting for them marked and unreadable images told."""
        batches = iter(batches)
        while True:
            self.phases.begin("data")
            batch = next(batches, None)
            if batch is None:
                return
            self.bad_images.note(batch.bad)
            yield batch

    def state_dict(self) -> dict:
        """What this process holds of everything that the next update depends on, under timm's names. All call it together."""
        return {
            "epoch": self.epoch - 1,
            "step": self.step,
            "state_dict": self.sharding.state_of(self.model),
            **({"state_dict_ema": self.sharding.state_of(self.ema.model)} if self.ema else {}),
            "optimizer": self.optimizer.state_dict(),
            "amp_scaler": self.precision.state_dict(),
            "progress": {
                "totals": self.process.sum(self.totals.clone()),
                "skips_in_a_row": self.skips_in_a_row,
                "best": list(self.best),
                "left_out": [[each.start, each.stop] for each in self.left_out],
            },
        }

    def load_state_dict(self, state: dict) -> None:
        """Go on with the state of a whole run, where `state_dict` was called."""
        state = self.sharding.own(state)
        self.sharding.load(self.model, state["state_dict"])
        if self.ema:
            self.sharding.load(self.ema.model, state.get("state_dict_ema") or state["state_dict"])
        self.precision.refresh()
        self.optimizer.load_state_dict(state["optimizer"])
        self.precision.load_state_dict(state["amp_scaler"])
        self.epoch, self.step = state["epoch"] + 1, state["step"]
        progress = state["progress"]
        self.best = tuple(progress["best"])
        self.skips_in_a_row = progress["skips_in_a_row"].to(self.skips_in_a_row)
        self.left_out = [range(*each) for each in progress.get("left_out", [])]
        self.totals.zero_()
        if self.process.is_first:  # the saved sums are those of all processes
            self.totals = progress["totals"].to(self.totals)

    def go_back(self, state: dict, streak: range) -> None:
        """To a state from before a streak of skipped updates, which are left out when it comes to them again.

        So is the one before the streak: it led to weights that nothing was finite with, and would lead there again.
        """
        left_out = [*self.left_out, range(max(streak.start - 1, state["step"]), streak.stop)]
        self.load_state_dict(state)
        self.left_out = left_out
        self.phase_seconds.clear()
        self.advice = None

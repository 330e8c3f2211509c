"""Sums up loss and accuracy on the device, so that the host waits for the device only when a report is due."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from engine.evaluation.scores import Scores
from engine.evaluation.tally import sum_dtype
from utils.distributed import Process


@dataclass(frozen=True)
class Report:
    """Figures of the last update and of the epoch so far."""

    step: int
    epoch: int
    lr: float
    loss: float
    mean_loss: float
    accuracy: float  # fraction in [0, 1]
    skipped: int
    skips_in_a_row: int
    grad_norm: float
    mean_grad_norm: float
    loss_scale: float
    num_updates: int = 0  # total number of updates of the run; a budget may change it
    seconds: float = 0.0  # since the last report
    shares: dict[str, float | None] = field(default_factory=dict)  # {phase: percent of `seconds`, if known}
    infinite: int = 0  # images of the epoch so far whose loss was infinite; `mean_loss` leaves them out


@dataclass(frozen=True)
class EpochResult:
    """The results of one epoch."""

    report: Report
    scores: dict[str, Scores]  # key "": raw weights, "_ema": EMA weights; empty if not evaluated
    num_images: int  # images used for training, not counting images before a resume
    training_seconds: float
    evaluation_seconds: float
    images: Any = None  # results of each image (ClassResults), if this epoch is the best so far
    times: dict[str, float | None] = field(default_factory=dict)  # percentage of the training time in each phase


class Counters:
    """Sums of the epoch so far and of the last update, and the number of consecutive skipped updates.

    The loss can be infinite although all gradients are finite, for example if the logit of the label is -inf. Then the
    update is made. Its images are counted apart, because an infinite loss would hide all others in the sum.
    """

    def __init__(self, device: torch.device, has_classes: bool = True):
        self._has_classes = has_classes  # whether the model predicts classes; if not, the accuracy is NaN
        # The sums of: loss, correct predictions, images, skipped updates, gradient norm, updates that were not skipped,
        # images with an infinite loss.
        self.totals = torch.zeros(7, dtype=sum_dtype(device), device=device)
        self.last = torch.zeros(3, dtype=sum_dtype(device), device=device)  # loss, images, gradient norm
        self.skips_in_a_row = torch.zeros((), device=device)

    def new_sums(self) -> Tensor:
        """Return zeros for the sums of one update: loss, correct predictions, images."""
        return torch.zeros_like(self.totals[:3])

    @torch.no_grad()
    def add(self, sums: Tensor, grad_norm: Tensor, skipped: Tensor) -> None:
        """Add the sums of one update. If it was skipped, only count the skip."""
        skipped = skipped.reshape(()).to(sums)
        grad_norm = grad_norm.to(sums)
        is_infinite = ~sums[0].isfinite()
        loss, infinite = sums[0].masked_fill(is_infinite, 0), sums[2] * is_infinite
        counted = torch.stack(
            (loss, *sums[1:], torch.zeros_like(skipped), grad_norm, torch.ones_like(skipped), infinite)
        )
        nothing = torch.zeros_like(counted)
        nothing[3].fill_(1)  # an assignment would make the host wait for a GPU
        self.totals += torch.where(skipped > 0, nothing, counted)
        self.last = torch.stack((sums[0], sums[2], grad_norm))
        self.skips_in_a_row = (self.skips_in_a_row + 1) * skipped.to(self.skips_in_a_row)

    def add_left_out(self) -> None:
        """Count an update that was left out after a rollback: it counts as skipped, but ends a streak of skips."""
        self.totals[3] += 1
        self.skips_in_a_row.zero_()

    def read(self, process: Process) -> dict[str, float]:
        """Return the fields of a Report, over all processes. This synchronises host and device once."""
        totals, last = (process.sum(each.clone()) for each in (self.totals, self.last))
        values = torch.cat((totals, last, self.skips_in_a_row.to(totals)[None])).tolist()
        loss, correct, samples, skipped, grad_norms, updates, infinite = values[:7]
        last_loss, last_samples, last_norm, skips_in_a_row = values[7:]
        return {
            "loss": last_loss / max(last_samples, 1),
            "mean_loss": loss / (samples - infinite) if samples > infinite else float("nan"),
            "accuracy": correct / samples if samples and self._has_classes else float("nan"),
            "skipped": round(skipped / process.world_size),
            "skips_in_a_row": int(skips_in_a_row),
            "grad_norm": last_norm / process.world_size,
            "mean_grad_norm": grad_norms / max(updates, 1),
            "infinite": int(infinite),
        }

    def start_epoch(self) -> None:
        """Reset the sums for a new epoch."""
        self.totals.zero_()

    def state_dict(self, process: Process) -> dict[str, Tensor]:
        totals = process.sum(self.totals.clone())
        return {"totals": totals[:6].clone(), "skips_in_a_row": self.skips_in_a_row, "infinite": totals[6:].clone()}

    def load_state_dict(self, state: dict[str, Tensor], process: Process) -> None:
        totals, skips_in_a_row = torch.cat((state["totals"], state["infinite"])), state["skips_in_a_row"]
        for name, saved, own in (("totals", totals, self.totals), ("skips", skips_in_a_row, self.skips_in_a_row)):
            if saved.shape != own.shape or not saved.isfinite().all():
                raise ValueError(f"its {name} are invalid: {saved.tolist()}")
        self.skips_in_a_row = skips_in_a_row.to(self.skips_in_a_row, copy=True)
        self.totals.zero_()
        if process.is_first:  # the saved sums cover all processes
            self.totals = totals.to(self.totals)

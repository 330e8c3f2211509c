"""Repeats a batch in float32 from time to time, to measure how far half precision deviates."""

import copy
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import starmap

import torch
from torch import Tensor, nn

from configs.schema import Precision as Settings
from datasets import Batch
from engine.diagnose.overflow import LastUpdate
from engine.train.trainer import Callback, Trainer
from utils.log import Log
from utils.seed import seed_update, unchanged_random_state

LEAST_COSINE = 0.9  # of a module's gradient and float32's; a smaller one is a warning
MOST_LOSS = 0.05  # the relative error of the loss that is no warning


class Float32Compare(Callback):
    """Every PRECISION.SHADOW_STEPS updates, computes the last micro-batch in both precisions; warns if they deviate."""

    def __init__(self, settings: Settings, last_update: LastUpdate, log: Log, record: Callable[[dict], None]):
        self._steps, self._last_update, self._log, self._record = settings.SHADOW_STEPS, last_update, log, record

    def on_update(self, trainer: Trainer) -> None:
        step = trainer.step - 1
        if trainer.step % self._steps:
            return
        difference = compare(trainer, self._last_update.last_batch)
        line = f"shadow at step {step}: {difference.describe()}"
        if difference.is_large:
            self._log.warn(f"{line}; scripts/doctor.py looks for the cause")
        else:
            self._log.note(line)
        self._record(difference.row(step))


@dataclass(frozen=True)
class Difference:
    """How one batch in half precision differs from float32, with the same weights and dropout."""

    loss: float  # in half precision
    exact_loss: float
    cosines: dict[str, float]  # of the gradients of each module's own parameters; NaN if not finite
    underflow: dict[str, float]  # fraction in [0, 1] of these gradients that are zero only in half precision

    @property
    def worst(self) -> tuple[str, float]:
        """The module with the smallest cosine similarity."""
        return min(self.cosines.items(), key=lambda item: item[1] if item[1] == item[1] else -2.0)

    @property
    def loss_share(self) -> float:
        """The relative error of the loss."""
        return abs(self.loss - self.exact_loss) / max(abs(self.exact_loss), 1e-12)

    @property
    def is_large(self) -> bool:
        # Written so that NaN warns too.
        return not (self.worst[1] >= LEAST_COSINE and self.loss_share <= MOST_LOSS)

    def describe(self) -> str:
        name, cosine = self.worst
        vanishing, share = max(self.underflow.items(), key=lambda item: item[1])
        underflow = f"most underflow: {vanishing}, {share:.2%} of its gradients" if share else "no underflow"
        return (
            f"loss {self.loss:.5f}, in float32 {self.exact_loss:.5f}; least alike gradient: {name}, cosine {cosine:.4f}; "
            f"{underflow}"
        )

    def row(self, step: int) -> dict[str, float]:
        """The row for shadow.csv and TensorBoard."""
        return {
            "step": step,
            "loss_share": self.loss_share,
            "least_cosine": self.worst[1],
            **{f"cosine/{name}": cosine for name, cosine in self.cosines.items()},
            **{f"underflow/{name}": share for name, share in self.underflow.items()},
        }


def compare(trainer: Trainer, batch: Batch) -> Difference:
    """Compute a batch of the last update in both precisions, on copies.

    The run's weights, gradients, statistics and random state stay as they are.
    """
    model, precision, loss = trainer.model, trainer.precision, trainer.loss
    seed = trainer.config.SEED, trainer.step - 1, trainer.process.rank  # which dropout depends on
    images, targets = trainer.prepare(batch)
    half = copy.deepcopy(precision.computing(model)).train()
    exact = copy.deepcopy(model).train()
    trainer.transforms.lowering_precision().revert(exact)
    scale = precision.scaler.get_scale()
    with unchanged_random_state(precision.device):
        seed_update(*seed)
        with precision.autocast():
            logits = half(images.to(precision.input_dtype(half)))
        half_loss, half_gradients = _gradients(half, loss(logits, targets), scale)
        seed_update(*seed)
        exact_loss, exact_gradients = _gradients(exact, loss(exact(images), targets), scale)
    pairs = [(half_gradients[name], exact_gradients[name]) for name in exact_gradients]
    losses = [half_loss.double(), exact_loss.double()]
    # One copy to the host, because each would wait for the device.
    values = torch.stack([*losses, *starmap(_cosine, pairs), *starmap(_underflow, pairs)]).tolist()
    cosines, underflow = values[2 : 2 + len(pairs)], values[2 + len(pairs) :]
    return Difference(
        *values[:2],
        dict(zip(exact_gradients, cosines, strict=True)),
        dict(zip(exact_gradients, underflow, strict=True)),
    )


def _gradients(model: nn.Module, loss: Tensor, scale: float) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and the gradient of each module's own parameters as one vector."""
    named = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    gradients = torch.autograd.grad(loss * scale, [each for _, each in named], allow_unused=True)
    rows = defaultdict(list)
    for (name, _), gradient in zip(named, gradients, strict=True):
        if gradient is not None:
            rows[name.rpartition(".")[0] or name].append(gradient.double().reshape(-1))
    return loss.detach(), {name: torch.cat(parts) for name, parts in rows.items()}


def _cosine(one: Tensor, other: Tensor) -> Tensor:
    norms = one.norm() * other.norm()
    return torch.where(norms > 0, one @ other / norms, (one == other).all().to(norms))


def _underflow(half: Tensor, exact: Tensor) -> Tensor:
    expected = exact != 0
    return ((expected & (half == 0)).sum() / expected.sum().clamp(min=1)).double()

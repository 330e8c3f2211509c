"""The passes before the first update: find micro-batches that fit into memory, and let DDP arrange its buckets.

They use invented images, and leave weights, gradients, buffers and the random state unchanged.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from datasets import Batch, build_train_data, invent_images
from datasets.order import Piece
from engine.memory import flags_for, out_of_memory, raises_when_full, release, shortage, smaller_batch
from engine.train.optimizers import optimizer_bytes
from engine.train.trainer import Trainer
from utils.log import Log
from utils.seed import unchanged_random_state
from utils.text import counted, warning


def fit_micro_batches(trainer: Trainer, log: Log) -> None:
    """Make micro-batches smaller until the largest fits into memory in every process. Collective.

    Do nothing with fsdp2, because no process can try alone, or with COMPILE, because each size would be compiled.
    Do nothing on a CPU either: it raises no error that could be caught.
    """
    is_fixed = trainer.parallel.is_sharded or trainer.config.COMPILE
    if is_fixed or not raises_when_full(trainer.process.device):
        return
    reason = try_largest(trainer)
    while not trainer.process.all_true(reason is None):
        use_smaller_micro_batch(trainer, log, reason)
        reason = try_largest(trainer)


def use_smaller_micro_batch(trainer: Trainer, log: Log, reason: str | None) -> None:
    """Use the next smaller micro-batch. Collective. `reason`: the out-of-memory message, if this process has one."""
    if reason:
        log.note(f"step {trainer.step}: {reason}")
    order = trainer.data.order
    old, size = order.largest_piece(0), smaller_batch(order)
    if not size:
        raise out_of_memory(trainer, None, reason or "in another process")
    line = (
        f"out of memory with micro-batches of {counted(old, 'image')}; continuing with {size}. Each update still has "
        f"the same images. To start a run like this: {' '.join(flags_for(order, size))}"
    )
    log.say(warning(line))
    order = replace(order, batch_size=size, fixed_global_batch=order.global_batch)
    trainer.data = build_train_data(trainer.config, trainer.data.image_set, trainer.process, order)
    trainer.replicate(accumulates=True)
    release(trainer.process.device)


def try_largest(trainer: Trainer) -> str | None:
    """Run forward and backward of the largest micro-batch. Return the out-of-memory message, or None if it fits.

    Meanwhile, everything is in memory that will be there during an update: also gradients, the optimizer's state and
    the next batch.
    """
    order, device = trainer.data.order, trainer.process.device
    trained = [parameter for parameter in trainer.computing.model.parameters() if parameter.requires_grad]
    # The state of a new optimizer is not allocated before its first update.
    state_bytes = 0 if trainer.optimizer.state else optimizer_bytes(trainer.config.TRAIN, trainer.model)
    try:
        batch = largest_batch(trainer, order.largest_piece(0))
        # Reserve memory for the optimizer's state, and for the next batch, which is copied to the device ahead of time.
        reserved = [torch.empty(state_bytes, dtype=torch.uint8, device=device), torch.empty_like(batch.images)]
        # Repeat with the gradients of the first micro-batch in memory, as they are during the second one.
        for _ in range(min(order.num_micro_batches(0), 2)):
            reserved += gradients_of(trainer, batch, trained)
    except RuntimeError as error:
        reason = shortage(error)
        if not reason:
            raise
        return reason
    return None


def gradients_of(trainer: Trainer, batch: Batch, parameters: list[nn.Parameter]) -> tuple[Tensor | None, ...]:
    """Return the gradients of the loss for these parameters of the computing model, and leave the model unchanged."""
    model = trainer.computing.model
    with unchanged_buffers(model), unchanged_random_state(trainer.process.device):
        images, targets = trainer.prepare_batch(batch)
        with trainer.precision.autocast():
            logits = model(images)
        # Not backward(), because that would trigger DDP's gradient hooks.
        return torch.autograd.grad(trainer.loss(logits, targets), parameters, allow_unused=True)


def arrange_ddp_buckets(trainer: Trainer) -> None:
    """Let DDP arrange its buckets before the next update if there are more than two processes. Collective.

    DDP arranges the gradients in its buckets once, after its first pass, or with a static graph after its second. With
    more than two processes, the place of a gradient in a bucket changes the last bit of its average. So without the two
    passes here, the first updates of a resumed run would differ from the same updates of an uninterrupted run.
    """
    process, replica = trainer.process, trainer.replica
    if process.world_size <= 2 or trainer.parallel.is_sharded:
        return
    piece = trainer.data.order.pieces(trainer.step, process.rank)[0]
    with unchanged_buffers(trainer.computing.model), unchanged_random_state(process.device):
        batch = invent_batch(trainer, piece)
        for _ in range(2):
            images, targets = trainer.prepare_batch(batch)
            with trainer.parallel.sync_gradients(replica, now=True):
                with trainer.precision.autocast():
                    logits = replica(images)
                trainer.loss(logits, targets).backward()
            replica.zero_grad(set_to_none=True)


def invent_batch(trainer: Trainer, piece: Piece) -> Batch:
    """Return random images and targets with the shapes of this piece, on the device."""
    count, process, classes = len(piece.indices), trainer.process, trainer.data.image_set.classes
    num_outputs = trainer.config.MODEL.NUM_CLASSES or len(classes) or 1
    config = trainer.config.changed("DATA", SYNTHETIC_SIZE=count).changed("MODEL", NUM_CLASSES=num_outputs)
    make_batches = invent_images(config).batches(config, count, process.rank, process.device)
    return next(make_batches([piece]))


def largest_batch(trainer: Trainer, count: int) -> Batch:
    """Return `count` random images of the largest size that the run trains on, on the device."""
    shapes = trainer.config.train_shapes
    epoch = max(shapes, key=shapes.get)  # the epoch of a batch selects the size of its images
    piece = Piece(epoch, np.zeros(count, int), count, trainer.step, 0, np.zeros(count, int))
    return invent_batch(trainer, piece)


@contextlib.contextmanager
def unchanged_buffers(model: nn.Module) -> Iterator[None]:
    """Restore all buffers, such as BatchNorm's statistics, when the `with` block ends."""
    saved = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(saved[name])

"""Probes of DDP in one process: its gradients are those of the model without it."""

import dataclasses

import torch

from scripts.benchmarks.session.plan import Context
from scripts.benchmarks.session.probes.checks import Probes, require
from scripts.benchmarks.session.probes.trainers import first_batches, relative_error, small_trainer

SMALL_SCALE = "PRECISION.INIT_LOSS_SCALING=256"  # at which no gradient overflows
# name: options, micro-batches of the update, largest relative error
CASES = {
    "static graph": ((), 1, 1e-5),
    "no_sync, two micro-batches": ((), 2, 1e-5),
    "compiled": (("COMPILE=true",), 1, 1e-3),
    "compiled, no_sync": (("COMPILE=true",), 2, 1e-3),
    "checkpointing": (("TRAIN.GRAD_CHECKPOINTING=true",), 1, 1e-5),
    "compiled, checkpointing": (("COMPILE=true", "TRAIN.GRAD_CHECKPOINTING=true"), 1, 1e-3),
    "bfloat16 reduce": (("PRECISION.REDUCE=half", "PRECISION.DTYPE=bfloat16"), 1, 0.01),
    "float16 reduce": (("PRECISION.REDUCE=half", "PRECISION.DTYPE=float16", SMALL_SCALE), 1, 0.01),
}


def run_probes(context: Context) -> None:
    backend = context.pick("nccl", "gloo")
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    probes = Probes(context)
    for name, case in CASES.items():
        probes.check(f"DDP by NCCL: {name}", lambda: wrapped_gradients(context, *case), True)  # noqa: B023
    torch.distributed.destroy_process_group()
    probes.end()


def wrapped_gradients(context: Context, options: tuple[str, ...], num_batches: int, largest: float) -> str:
    plain = gradients(context, [each for each in options if not each.startswith("COMPILE")], num_batches, False)
    error = relative_error(gradients(context, options, num_batches, True), plain)
    return require(error < largest, f"relative error {error:.2g}")


def gradients(context: Context, options, num_batches: int, wrapped: bool) -> list[torch.Tensor]:
    """Of the micro-batches of one update, not divided by the loss scale, the second time: a static graph is known then."""
    from engine.parallel.replicated import Replicated

    half = any(each.startswith("PRECISION") for each in options)
    trainer = small_trainer(context, f"AMP={half}", f"TRAIN.ACCUM_ITER={num_batches}", *options)
    if wrapped:
        # Two processes by name: a single one is not wrapped. The group has one, whose average is its own gradient.
        process = dataclasses.replace(trainer.process, world_size=2)
        reduce = trainer.precision.half if "PRECISION.REDUCE=half" in options else None
        trainer.parallel = Replicated(process, reduce)
        trainer.replicate(accumulates=num_batches > 1)
    batches = first_batches(trainer)
    for _ in range(2):
        trainer.optimizer.zero_grad(set_to_none=True)
        for number, batch in enumerate(batches, start=1):
            trainer.forward_and_backward(batch, number == num_batches, trainer.data.global_batch)
    return [each.grad.clone() for each in trainer.model.parameters()]

"""Times of what an update does around its matrix products: patch embedding both ways, inputs, policy, optimizer, EMA."""

import statistics
import time

import torch
from timm.layers import PatchEmbed

from models.transforms.kernels import GpuKernels
from scripts.benchmarks.session.plan import Context
from scripts.benchmarks.session.probes.checks import Probes
from scripts.benchmarks.session.probes.trainers import first_batches, small_trainer

LARGE = ("DATA.BATCH_SIZE=8", "MODEL.EMBED_DIM=1024", "MODEL.DEPTH=24", "MODEL.NUM_HEADS=16")


def run_probes(context: Context) -> None:
    probes = Probes(context)
    num_images, width, side, large = context.pick((256, 384, 224, LARGE), (2, 16, 32, ()))
    images = torch.randn(num_images, 3, side, side, device=context.device, dtype=torch.bfloat16)
    embed = PatchEmbed(side, 16, 3, width).to(images)
    probes.check("ms, patch embedding by convolution", lambda: time_gradient(context, embed, images), True)
    GpuKernels(images.device).apply(embed)
    probes.check("ms, patch embedding by product", lambda: time_gradient(context, embed, images), True)
    probes.check("ms, copied batch to the model's input", lambda: time_preparation(context, num_images, side), True)
    policy = "rand-m9-mstd0.5-inc1"
    for place in ("device", "host"):
        probes.check(f"images/s, {policy} on the {place}", lambda: time_policy(context, policy, place), True)  # noqa: B023
    for ema in (False, True):
        name = "ms, unscale, clip and optimizer of ViT-L" + (", with EMA" if ema else "")
        probes.check(name, lambda: time_optimizer(context, f"TRAIN.MODEL_EMA={ema}", *large), True)  # noqa: B023
    probes.end()


def time_gradient(context: Context, embed: torch.nn.Module, images: torch.Tensor) -> str:
    """Forward and the gradient of the weights."""
    direction, weights = torch.randn_like(embed(images)), list(embed.parameters())
    return milliseconds(context, lambda: torch.autograd.grad(embed(images), weights, direction))


def time_preparation(context: Context, num_images: int, side: int) -> str:
    """Normalising, erasing and mixing of images that lie on the device."""
    mixing = ("TRAIN.MIXUP_ALPHA=0.8", "TRAIN.RANDOM_ERASE_PROB=0.25", "AMP=true", "PRECISION.DTYPE=bfloat16")
    trainer = small_trainer(context, *mixing, f"DATA.BATCH_SIZE={num_images}", f"DATA.IMAGE_SIZE={side}")
    (batch,) = first_batches(trainer)
    return milliseconds(context, lambda: trainer.to_device(batch))


def time_policy(context: Context, policy: str, place: str) -> str:
    """Of a batch that lies on the device, or of one thread of the host."""
    from scripts.benchmarks.session.probes.augmentation import Case

    num_images, side = context.pick((256, 224), (4, 24))
    case = Case(policy, num_images, side)
    images = case.images.to(context.device)
    run = case.on_host if place == "host" else lambda: case.on_device(images)
    return f"{1000 * num_images / float(milliseconds(context, run).split()[0]):.0f}"


def time_optimizer(context: Context, *options: str) -> str:
    """By the report's share of the phase, as steps.csv has it."""
    from engine.record.timing import Timing

    trainer = small_trainer(context, "AMP=true", "TRAIN.GRAD_CLIP=1.0", *options)
    timing = Timing.on(trainer.process.device)
    trainer.callbacks = [timing]
    num_updates = context.pick(10, 2)
    for window in trainer.data.windows(0, num_updates + 3):
        if window.step == 3:
            timing.restart()
        trainer.update(window)
    report = trainer.report()
    timing.on_report(trainer, report)
    return f"{1000 * report.seconds * report.shares['optimizer'] / 100 / num_updates:.3f}"


def milliseconds(context: Context, run) -> str:
    """Median of several, by the device's clock."""
    seconds = []
    for number in range(context.pick(25, 3)):
        begin = time.perf_counter()
        if context.device == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            passed = start.elapsed_time(end)
        else:
            run()
            passed = 1000 * (time.perf_counter() - begin)
        if number >= context.pick(5, 1):
            seconds.append(passed)
    return f"{statistics.median(seconds):.3f} ({min(seconds):.3f} to {max(seconds):.3f})"

"""Probes of torch.compile and of the update: the same numbers as without it, as few graphs, and no wait for the device."""

import torch

from configs.load import load
from scripts.benchmarks.parts.common import ROOT
from scripts.benchmarks.session.plan import Context
from scripts.benchmarks.session.probes.checks import Probes, Unavailable, require
from scripts.benchmarks.session.probes.trainers import relative_error, small_trainer, train
from utils.errors import ConfigError

BFLOAT16 = ("AMP=true", "PRECISION.DTYPE=bfloat16")
# What an update can do besides computing: all of it must go on without the host.
BUSY = ("TRAIN.MIXUP_ALPHA=0.8", "TRAIN.CUTMIX_ALPHA=1.0", "TRAIN.RANDOM_ERASE_PROB=0.5", "TRAIN.MODEL_EMA=true")
BUSY += ("TRAIN.AUTO_AUGMENT=rand-m9-mstd0.5-inc1", "DATA.AUGMENT_ON=device")
BUSY += ("TRAIN.GRAD_CLIP=1.0", "DATA.WORKERS=threads", "DATA.NUM_WORKERS=2")


def run_probes(context: Context) -> None:
    probes = Probes(context)
    for dtype in ("float16", "bfloat16"):
        probes.check(f"5 updates never wait, {dtype}", lambda: no_wait(context, f"PRECISION.DTYPE={dtype}"), True)  # noqa: B023
    for residual in ("float32", "half"):
        name = f"compiled against eager, residual {residual}"
        probes.check(name, lambda: compiled(context, f"PRECISION.RESIDUAL={residual}"))  # noqa: B023
    probes.check("5 updates never wait, compiled", lambda: no_wait(context, *BFLOAT16, "COMPILE=true"), True)
    probes.check("graphs of blocks of several drop path rates", lambda: count_graphs(context))
    probes.check("reduce-overhead, one micro-batch", lambda: cuda_graphs(context), True)
    probes.check("reduce-overhead, two micro-batches", refused_graphs)
    probes.end()


def compiled(context: Context, *options: str) -> str:
    """Loss and weights after three updates."""
    loss, weights = train(small_trainer(context, *BFLOAT16, *options), 3)
    other_loss, other_weights = train(small_trainer(context, *BFLOAT16, *options, "COMPILE=true"), 3)
    return compare(loss, other_loss, relative_error(other_weights, weights))


def compare(loss: float, other_loss: float, error: float) -> str:
    # Adam's first steps are the signs of the gradients: the smallest of them round to either.
    figure = f"loss {loss:.5f} and {other_loss:.5f}, relative difference of the weights {error:.2g}"
    return require(abs(other_loss / loss - 1) < 0.01 and error < 0.02, figure)


def no_wait(context: Context, *options: str) -> str:
    """torch raises at whatever makes the host wait for the device. On real images, which threads read."""
    data = ("DATA.DATASET=digits", "DATA.IMAGE_SIZE=32", "DATA.IMAGE_CHANNELS=1", "DATA.IMAGENET_MEAN=0.5")
    data += ("DATA.IMAGENET_STD=0.5", "MODEL.PATCH_SIZE=8")
    trainer = small_trainer(context, "AMP=true", *BUSY, *data, *options)
    windows = trainer.data.windows(0, 8)
    for _ in range(3):
        trainer.update(next(windows))
    if context.device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            trainer.update(next(windows))
    finally:
        if context.device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    windows.close()
    return f"5 updates, loss {trainer.report().mean_loss:.4f}"


def count_graphs(context: Context) -> str:
    """12 blocks, the first of which drops no path: two graphs."""
    from models.compilation import parts_to_compile

    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    options = ("COMPILE=true", "COMPILE_SCOPE=blocks", "MODEL.DEPTH=12", "MODEL.DROPPATH=0.1")
    trainer = small_trainer(context, *BFLOAT16, *options)
    torch.compiler.reset()
    for part in parts_to_compile(trainer.computing.model, trainer.config):
        part.compile(backend=backend, dynamic=False)
    train(trainer, 2)
    return require(len(graphs) <= 3, f"{len(graphs)} graphs of 12 blocks")


def cuda_graphs(context: Context) -> str:
    if context.dry:
        raise Unavailable("CUDA graphs")
    loss, weights = train(small_trainer(context, *BFLOAT16), 5)
    mode = ("COMPILE=true", "COMPILE_MODE=reduce-overhead")
    other_loss, other_weights = train(small_trainer(context, *BFLOAT16, *mode), 5)
    return compare(loss, other_loss, relative_error(other_weights, weights))


def refused_graphs() -> str:
    words = ("COMPILE=true", "COMPILE_MODE=reduce-overhead", "TRAIN.ACCUM_ITER=2")
    try:
        load(["-cfg", str(ROOT / "configs/vit_tiny_patch16_224.yaml"), "-opts", *words])
    except ConfigError as error:
        return f"refused: {str(error).split(',')[0]}"
    raise AssertionError("not refused, although CUDA graphs overwrite the gradients of the first")

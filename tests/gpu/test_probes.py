"""Compilers, kernels and NCCL on this GPU compute the same as plain code, and updates never wait for the device."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from datasets import Window
from engine.parallel import Parallel
from models.transforms.kernels import ClassTokenBlock, ClassTokenVisionTransformer
from tests.gpu.trainers import BATCH, first_batches, relative_error, small_trainer, train

BFLOAT16 = ("AMP=true", "PRECISION.DTYPE=bfloat16")
# Everything that an update can do besides the model. None of it may make the host wait for the device.
BUSY = """TRAIN.MIXUP_ALPHA=0.8 TRAIN.CUTMIX_ALPHA=1.0 TRAIN.RANDOM_ERASE_PROB=0.5 TRAIN.MODEL_EMA=true
TRAIN.GRAD_CLIP=1.0 TRAIN.AUTO_AUGMENT=rand-m9-mstd0.5-inc1 DATA.WORKERS=threads DATA.NUM_WORKERS=2 DATA.DATASET=digits
DATA.IMAGE_SIZE=32 DATA.IMAGE_CHANNELS=1 DATA.IMAGENET_MEAN=0.5 DATA.IMAGENET_STD=0.5 MODEL.PATCH_SIZE=8""".split()


@pytest.mark.parametrize("options", ["PRECISION.DTYPE=float16", "PRECISION.DTYPE=bfloat16 COMPILE=true"])
def test_updates_on_real_images_never_wait_for_the_device(device, no_wait, options):
    trainer = small_trainer(device, "AMP=true", *BUSY, *options.split())
    windows = trainer.data.windows(0, 8)
    for step, window in enumerate(windows):
        no_wait(step >= 3)
        trainer.update(window)
    no_wait(False)
    assert math.isfinite(trainer.report().mean_loss)


@pytest.mark.parametrize(
    "options", [["COMPILE=true"], ["COMPILE=true", "PRECISION.RESIDUAL=half"], ["COMPILE=reduce-overhead"]]
)
def test_compiled_updates_give_nearly_the_same_weights_as_eager_updates(device, options):
    if "COMPILE=reduce-overhead" in options and device == "cpu":
        pytest.skip("needs CUDA graphs")
    eager = [each for each in options if not each.startswith("COMPILE")]
    loss, weights = train(small_trainer(device, *BFLOAT16, *eager), 5)
    other_loss, other_weights = train(small_trainer(device, *BFLOAT16, *options), 5)
    # Adam's first steps are the signs of the gradients, and the smallest gradients may round to either sign.
    assert abs(other_loss / loss - 1) < 0.01 and relative_error(other_weights, weights) < 0.02


WAYS = [f"TRAIN.OPTIMIZER.NAME={name}" for name in ("lamb", "lion", "laprop", "adafactor")]
DISTILLED = "TRAIN.DISTILLATION_TYPE=hard TRAIN.TEACHER_MODEL=test_vit3"
WAYS += ["TRAIN.SIZE_SCHEDULE=[0:16,1:32]", DISTILLED]
WAYS += ["MODEL.LORA.RANK=4"]


@pytest.mark.parametrize("options", WAYS)
def test_each_training_mode_matches_cpu_after_resume(device, options):
    """Train two epochs of two updates each, and resume before the second."""
    if "LORA" in options:
        pytest.importorskip("peft")
    words = [*BATCH["cpu"], "DATA.SYNTHETIC_SIZE=16", "TRAIN.WARMUP_EPOCHS=0", "TRAIN.BASE_LR=1e-4", *options.split()]
    begun, resumed, on_cpu = (small_trainer(each, *words) for each in (device, device, "cpu"))
    train(begun, 2)
    resumed.load_state_dict(begun.state_dict())
    train(on_cpu, 2)
    (loss, weights), (wanted_loss, wanted) = train(resumed, 2), train(on_cpu, 2)
    assert abs(loss / wanted_loss - 1) < 0.01 and relative_error([each.cpu() for each in weights], wanted) < 0.02


@pytest.mark.parametrize(("dtype", "largest"), [(torch.float32, 1e-4), (torch.bfloat16, 0.03)])
def test_short_last_block_matches_full_block_on_gpu(device, dtype, largest):
    trainer = small_trainer(device)
    model, (batch,) = trainer.model, first_batches(trainer)
    assert type(model) is ClassTokenVisionTransformer
    images, targets = trainer.prepare_batch(batch)

    def compute() -> list[Tensor]:
        model.zero_grad(set_to_none=True)
        with torch.autocast(images.device.type, dtype, enabled=dtype != torch.float32):
            logits = model(images)
        functional.cross_entropy(logits.float(), targets).backward()
        return [logits.detach().float(), *(each.grad for each in model.parameters())]

    short = compute()
    ClassTokenBlock().revert(model)
    assert relative_error(short, compute()) < largest


# Options, micro-batches per update, largest relative error. At a loss scale of 256, no gradient overflows.
DDP = {
    "static graph": ("", 1, 1e-5),
    "no_sync": ("", 2, 1e-5),
    "compiled": ("COMPILE=true", 1, 1e-3),
    "compiled, no_sync": ("COMPILE=true", 2, 1e-3),
    "checkpointing": ("TRAIN.GRAD_CHECKPOINTING=true", 1, 1e-5),
    "compiled, checkpointing": ("COMPILE=true TRAIN.GRAD_CHECKPOINTING=true", 1, 1e-3),
    "bfloat16 reduce": ("PRECISION.REDUCE=half PRECISION.DTYPE=bfloat16", 1, 0.01),
    "float16 reduce": ("PRECISION.REDUCE=half PRECISION.DTYPE=float16 PRECISION.INIT_LOSS_SCALING=256", 1, 0.01),
}


@pytest.fixture(scope="module")
def one_process():
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("case", DDP)
def test_gradients_reduced_by_nccl_match_gradients_of_one_process(device, case):
    options, num_batches, largest = DDP[case]
    eager = [each for each in options.split() if not each.startswith("COMPILE")]
    plain = gradients(device, eager, num_batches, wrapped=False)
    assert relative_error(gradients(device, options.split(), num_batches, wrapped=True), plain) < largest


def gradients(device: str, options: list[str], num_batches: int, wrapped: bool) -> list[Tensor]:
    """Return an update's gradients, still multiplied by the loss scale, of its second run, because of static graphs."""
    half = any(each.startswith("PRECISION") for each in options)
    trainer = small_trainer(device, f"AMP={half}", f"TRAIN.ACCUM_ITER={num_batches}", *options)
    if wrapped:
        # World size 2, because a single process is not wrapped. The group has one process, so the average is its
        # gradient.
        process = dataclasses.replace(trainer.process, world_size=2)
        trainer.parallel = Parallel(process, trainer.precision.half if "PRECISION.REDUCE=half" in options else None)
        trainer.replicate(accumulates=num_batches > 1)
    batches = first_batches(trainer)
    for _ in range(2):
        trainer.optimizer.zero_grad(set_to_none=True)
        trainer.accumulate(Window(0, trainer.data.global_batch, num_batches, iter(batches)))
    return [each.grad.clone() for each in trainer.model.parameters()]

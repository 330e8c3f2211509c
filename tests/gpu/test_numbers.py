"""Special computations on GPUs give the same numbers as the usual ones."""

import copy

import pytest
import torch
from timm.layers import PatchEmbed

from datasets import Normalize, Preparation
from datasets.transforms.erase_and_mix import BatchedErasing
from engine.train.ema import foreach_lerp, fused_lerp
from engine.train.fused_loss_scale import FusedLossScaler
from engine.train.loss_scale import LossScaler
from models.transforms.gpu_kernels import GpuKernels
from tests.gpu.trainers import first_batches, relative_error, small_trainer
from tests.support.batches import ERASES, MIXES, batch, settings


@pytest.mark.parametrize("optimizer, largest_error", [("AdamW", 1e-3), ("SGD", 1e-5)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_fused_unscaling_and_clipping_match_separate_passes(device, dtype, optimizer, largest_error):
    found = []
    for scaler in (FusedLossScaler, LossScaler):
        options = (f"PRECISION.DTYPE={dtype}", f"TRAIN.OPTIMIZER.NAME={optimizer}", "TRAIN.GRAD_CLIP=0.1")
        # A loss scale at which only the poisoned update overflows.
        trainer = small_trainer(device, "AMP=true", "PRECISION.INIT_LOSS_SCALING=256", *options, "TRAIN.MODEL_EMA=true")
        trainer.precision.scaler = scaler(device, trainer.config.PRECISION, needed=dtype == "float16")
        for window in trainer.data.windows(0, 6):
            hook = trainer.model.norm.register_forward_hook(lambda *args: args[2] * float("inf"))
            if window.step != 3:
                hook.remove()
            trainer.update(window)
            hook.remove()
        assert trainer.report().skipped == 1
        found.append([*trainer.model.parameters(), *trainer.ema.model.parameters()])
    assert relative_error(*found) < largest_error


@pytest.mark.parametrize("dtype, largest_error", [(torch.float32, 1e-5), (torch.bfloat16, 0.01)])
def test_patch_embedding_as_matrix_product_matches_convolution(device, dtype, largest_error):
    torch.manual_seed(0)
    exact, images = PatchEmbed(32, 16, 3, 24).double(), torch.randn(4, 3, 32, 32)
    ours = copy.deepcopy(exact).to(device, dtype)
    GpuKernels().apply(ours)
    assert type(ours.proj) is not type(exact.proj)
    found = []
    for embed, inputs in ((ours, images.to(device, dtype)), (exact, images.double())):
        tokens = embed(inputs)
        direction = torch.linspace(-1, 1, tokens.numel()).view(tokens.shape).to(tokens)
        found.append([each.cpu() for each in (tokens, *torch.autograd.grad(tokens, embed.parameters(), direction))])
    assert relative_error(*found) < largest_error


@pytest.mark.parametrize("skipped", [0.0, 1.0])
def test_single_kernel_ema_update_matches_three_kernels(device, skipped):
    values = [torch.randn(3, 5, device=device), torch.randn(1025, device=device)]
    found = []
    for kind in (fused_lerp, foreach_lerp):
        torch.manual_seed(0)
        means = [torch.randn_like(each) for each in values]
        kind(means, values)(0.1, torch.tensor(skipped, device=device))
        found.append(means)
    torch.testing.assert_close(*found)


def test_class_token_query_runs_no_fused_kernel(device):
    """Of three blocks, the last has a single query. On an H200, cuDNN's gradients for it were not finite."""
    if device == "cpu":
        pytest.skip("small models compute attention without fused kernels there")
    trainer = small_trainer(device, "AMP=true", "PRECISION.DTYPE=bfloat16")
    (batch,) = first_batches(trainer)
    images, _ = trainer.prepare_batch(batch)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with trainer.precision.autocast(), torch.profiler.profile(activities=activities) as profiled:
        trainer.model(images)
    assert len([event for event in profiled.events() if event.name.startswith("aten::_scaled_dot_product_")]) == 2


@pytest.mark.parametrize("is_compiled", [False, True])
def test_batch_preparation_matches_between_device_and_host(device, is_compiled):
    if is_compiled and device == "cpu":
        pytest.skip("compilation takes minutes")
    config = settings(**ERASES, **MIXES)
    here = Preparation(config, Normalize(config.DATA))
    there = Preparation(config, Normalize(config.DATA).to(device), is_compiled)
    there.erase = BatchedErasing(config, device)
    for count in (9, 8):
        wanted, got, half = here(batch(count))[0], there(batch(count))[0].cpu(), there(batch(count), torch.bfloat16)[0]
        torch.testing.assert_close(got, wanted)
        torch.testing.assert_close(half.cpu().float(), wanted, rtol=2**-8, atol=1e-5)

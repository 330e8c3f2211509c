"""Models of DATA.TOKENS in the other parts of a run: the doctor, deterministic kernels, teachers, memory and messages."""

import pytest
import torch

from datasets import build_normalize
from extras.native_aspect.synthetic import blank_batch
from models import build_model
from models.transforms import choose_transforms
from tests.extras.native_aspect.photos import settings
from tests.support.extras import needing_extra
from tests.support.refusals import assert_names, refused
from tests.support.runs import run, run_folder, typed
from utils.errors import ConfigError
from utils.torch_internals import TorchDispatchMode

pytestmark = pytest.mark.slow

# The doctor


@needing_extra("doctor")
def test_doctor_replays_saved_batch_of_a_stopped_run(folder, tmp_path):
    words = [
        "-cfg",
        str(folder / "native.yaml"),
        "-output",
        str(tmp_path / "o"),
        "-amp",
        "-amp_dtype",
        "float16",
        "-opts",
    ]
    options = "TRAIN.BASE_LR=1000 DATA.TRAIN_TOKENS=[12] PRECISION.MAX_CONSECUTIVE_SKIPS=2 TRAIN.RANDOM_ERASE_PROB=0.5"
    stopped = run("main_single_gpu.py", *words, *options.split())
    assert stopped.returncode == 3 and "python scripts/doctor.py" in stopped.stdout, stopped.printed
    saved = run_folder(tmp_path / "o")
    said = typed("scripts/doctor.py", saved).done().stdout
    assert_names(said, "process 0: 8 images", "first: embeds.proj")
    state = torch.load(saved / "overflow-batch.pth", weights_only=True)
    torch.save(state | {"images": torch.zeros((8, 3, 8, 8), dtype=torch.uint8)}, saved / "overflow-batch.pth")
    ended = typed("scripts/doctor.py", saved)
    ended.refused("-batch", "DATA.TOKENS", page="extras/native_aspect/mistakes_of_models", case="doctor.py")


# Deterministic kernels

GPU = torch.device("cuda")


class LikeCuda(TorchDispatchMode):
    """Refuses the gradients for which CUDA has no deterministic kernel."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not ("backward" in str(func) and ("upsample" in str(func) or "grid_sampler" in str(func))), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("positions", ["learned", "factorized"])
def test_deterministic_gradients_of_position_embeddings_equal_default_ones(folder, positions, is_compiled):
    config = settings(folder, "DETERMINISTIC=true", f"MODEL.KWARGS.pos_embed={positions}")
    plain, chosen = build_model(config, 5), build_model(config, 5)
    chosen.load_state_dict(plain.state_dict())
    choose_transforms(config, GPU, None, training=True).apply(chosen)
    if is_compiled:
        chosen.compile(backend="eager", dynamic=False)
    for length in (24, 40, 24):
        images = build_normalize(config.DATA)(blank_batch(config, 2, length))
        total = chosen(images).square().sum()
        with LikeCuda():
            total.backward()
        plain(images).square().sum().backward()
    found = {name: each.grad for name, each in chosen.named_parameters() if "pos_embed" in name}
    assert len(found) == (1 if positions == "learned" else 2)
    for name, grad in found.items():
        assert grad.abs().max() > 1e-3
        torch.testing.assert_close(grad, plain.get_parameter(name).grad, rtol=1e-4, atol=1e-5)


def test_grid_sample_with_deterministic_kernels_is_refused_on_gpus(folder):
    config = settings(folder, "DETERMINISTIC=true", "MODEL.KWARGS.pos_embed_use_grid_sample=true")
    model = build_model(config, 5)
    with refused(ConfigError, "MODEL.KWARGS", "pos_embed_use_grid_sample", "DETERMINISTIC"):
        choose_transforms(config, GPU, None, training=True).apply(model)

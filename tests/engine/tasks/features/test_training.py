"""The training step of TRAIN.OBJECTIVE features: losses, weights with micro-batches, and saved state."""

import copy

import pytest
import timm
import torch
from torch import nn
from torch.nn import functional

from engine.tasks.feature_training import make_student, mean_cosine
from models import build_model
from models.features import Widths, widths_of
from tests.engine.tasks.features.support import digits_config
from tests.support.configs import small_config
from tests.support.trainers import make_trainer, update

pytestmark = pytest.mark.slow

LR, DECAY, CLIP = 1e-3, 0.05, 1.0
CASES = [("both", "cosine"), ("both", "smooth_l1"), ("pooled", "cosine"), ("patches", "smooth_l1")]


def vit(width: int, depth: int) -> nn.Module:
    args = {"img_size": 8, "patch_size": 4, "in_chans": 1, "num_classes": 0}
    return timm.create_model("vit_tiny_patch16_224", embed_dim=width, depth=depth, num_heads=2, **args).double()


def plain_losses(state: dict, teacher_file: str, pixels: list[torch.Tensor], features: str, kind: str) -> list[float]:
    """Train in plain PyTorch on batches of uint8 pixels, and return the loss of each update."""
    student, teacher = vit(16, 2), vit(24, 1).eval()
    weights = torch.load(teacher_file, weights_only=True)["state_dict"]
    teacher.load_state_dict({name: each for name, each in weights.items() if not name.startswith("head.")})
    student.load_state_dict({name: each for name, each in state.items() if not name.startswith("feature_maps.")})
    maps = {name: nn.Linear(16, 24).double() for name in ("pooled", "patches") if features in ("both", name)}
    for name, each in maps.items():
        each.load_state_dict({part: state[f"feature_maps.{name}.{part}"] for part in ("weight", "bias")})
    named = [*student.named_parameters(), *(pair for each in maps.values() for pair in each.named_parameters())]
    # As in timm, vectors and embeddings are not decayed.
    plain = [each for name, each in named if each.ndim < 2 or name in ("cls_token", "pos_embed")]
    decayed = [each for _, each in named if not any(each is other for other in plain)]
    groups = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
    optimizer, losses = torch.optim.AdamW(groups, lr=LR, weight_decay=DECAY), []

    def parts_of(model: nn.Module, images: torch.Tensor) -> dict[str, torch.Tensor]:
        tokens = model.forward_features(images)
        return {"pooled": tokens[:, 0], "patches": tokens[:, 1:]}

    for each in pixels:
        images = (each.double() / 255 - 0.5) / 0.5
        with torch.no_grad():
            targets = parts_of(teacher, images)
        found, loss = parts_of(student, images), 0
        for name, linear in maps.items():
            if kind == "cosine":
                cosines = functional.cosine_similarity(linear(found[name]), targets[name], dim=-1)
                loss = loss + (1 - cosines).reshape(len(images), -1).mean(1).mean()
            else:
                loss = loss + functional.smooth_l1_loss(linear(found[name]), targets[name])
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_([each for _, each in named], CLIP)
        optimizer.step()
    return losses


@pytest.mark.parametrize(("features", "kind"), CASES)
def test_losses_equal_a_plain_pytorch_loop_update_by_update(tmp_path, features, kind):
    options = f"TRAIN.FEATURES={features} TRAIN.FEATURE_LOSS={kind} TRAIN.LR_SCHEDULER.NAME=constant TRAIN.BASE_LR={LR}"
    config = digits_config(tmp_path, *options.split(), f"TRAIN.WEIGHT_DECAY={DECAY}", f"TRAIN.GRAD_CLIP={CLIP}")
    trainer, losses = make_trainer(config, double=True, classes=[]), []
    state = copy.deepcopy(trainer.model.state_dict())
    pixels = [next(iter(window.batches)).images.clone() for window in trainer.data.windows(0, 6)]
    for _ in pixels:
        losses.append(update(trainer, 1).report().loss)
    expected = plain_losses(state, config.TRAIN.TEACHER_MODEL, pixels, features, kind)
    assert losses == pytest.approx(expected, abs=1e-6, rel=0) and expected[-1] < expected[0]


def test_half_precision_applies_to_the_teacher_and_reduces_the_loss(tmp_path):
    half = "AMP=true PRECISION.DTYPE=float16 PRECISION.INIT_LOSS_SCALING=128 TRAIN.BASE_LR=1e-2"
    trainer = make_trainer(digits_config(tmp_path, *half.split()), classes=[])
    exact = make_trainer(digits_config(tmp_path, "TRAIN.BASE_LR=1e-2"), classes=[])
    assert {each.dtype for each in trainer.prepare.teacher.model.parameters()} == {torch.float16}
    first = [update(each, 1).report().loss for each in (trainer, exact)]
    last = [update(each, 30).report().loss for each in (trainer, exact)]
    assert first[0] == pytest.approx(first[1], rel=0.02) and last[0] == pytest.approx(last[1], rel=0.1)
    assert last[0] < 0.7 * first[0]


def test_ema_model_computes_with_its_own_weights(tmp_path):
    trainer = update(make_trainer(digits_config(tmp_path, "TRAIN.MODEL_EMA=true"), classes=[]), 3)
    images, average = torch.randn(2, 1, 8, 8), trainer.ema.model
    before = [each.clone() for each in average(images)]
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.zero_()
    assert all(torch.equal(*each) for each in zip(before, average(images), strict=True))
    assert not torch.equal(before[0], trainer.model.eval()(images)[0])


@pytest.mark.parametrize("seed", [0, 7])
def test_maps_depend_only_on_the_seed_and_leave_random_state_unchanged(tmp_path, seed):
    config, found = small_config(tmp_path), []
    for state in (1, 2):
        torch.manual_seed(state)
        model = build_model(config, 3)
        before = torch.get_rng_state()
        make_student(model, ("pooled",), Widths(16, 16, 2), Widths(24, 24, 2), config.DATA, seed)
        assert torch.equal(before, torch.get_rng_state())
        found.append(model.feature_maps["pooled"].weight)
    torch.manual_seed(seed)
    assert torch.equal(*found) and torch.equal(found[0], nn.Linear(16, 24).weight)


def test_weights_without_influence_on_features_are_frozen(tmp_path):
    config = small_config(tmp_path, "MODEL.KWARGS.global_pool=avg", "MODEL.KWARGS.class_token=false")
    model, both = build_model(config, 3), build_model(config, 3)
    own = widths_of(model, 1, 8)
    (line,) = make_student(model, ("patches",), own, own, config.DATA, 0)
    frozen = [name for name, each in model.named_parameters() if not each.requires_grad]
    assert frozen == ["fc_norm.weight", "fc_norm.bias"] and all(name in line for name in frozen)
    assert make_student(both, ("pooled", "patches"), own, own, config.DATA, 0) == []
    assert all(each.grad is None for each in model.parameters())


@pytest.mark.parametrize("shape", [(0, 8), (0, 4, 8)])
def test_process_without_images_computes_no_cosine(shape):
    assert mean_cosine(torch.zeros(shape), torch.zeros(shape)).shape == (0,)

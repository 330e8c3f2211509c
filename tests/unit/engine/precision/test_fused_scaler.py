"""The GPU loss scaler, tested on the CPU: unscaling and clipping in the optimizer's kernel match torch's functions."""

from types import SimpleNamespace

import pytest
import torch

from configs.schema import Config
from engine.parallel import Parallel
from engine.train.clipping import Clipping
from engine.train.fused_loss_scale import FusedLossScaler
from engine.train.loss_scale import LossScaler
from engine.train.optimizers import build_optimizer
from tests.support.configs import CPU, replaced, small_config
from utils.distributed import Process

# Three finite updates in a row double the scale; two overflows in a row halve it.
SCALING = {"INIT_LOSS_SCALING": 1024.0, "INCR_EVERY_N_STEPS": 3, "DECR_EVERY_N_NAN_OR_INF": 2}
FACTORS = [1, 1, 1, 1, "inf", "nan", "inf", "inf", 1, 1, 1e-3, 1, 1e3, "-inf", 1]  # factors of the loss, one per update


class Learner:
    """A linear model with its optimizer and scaler."""

    def __init__(self, config: Config, scaler: type[LossScaler], dtype: torch.dtype, fused: bool = True):
        torch.manual_seed(0)
        self.model = torch.nn.Linear(7, 5).to(dtype)
        self.optimizer = build_optimizer(config.TRAIN, self.model)
        if not fused:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=False)
        self.scaler = scaler("cpu", config.PRECISION, needed=True)
        self.clipping, self.dtype = Clipping(config.TRAIN, self.model.parameters()), dtype

    def update(self, factor: float, parallel=None) -> tuple[float, bool, float]:
        """Return the gradient norm, whether the update was skipped, and the new loss scale."""
        images = torch.linspace(-1, 1, 21, dtype=self.dtype).view(3, 7)
        loss = (self.model(images) - images.sum()).square().mean()
        self.scaler.scale(loss * factor).backward()
        parameters = list(self.model.parameters())
        norm = self.scaler.unscale_and_clip(
            self.optimizer, parameters, parallel or Parallel(Process(CPU)), self.clipping
        )
        skipped = self.scaler.found_inf()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return norm.item(), bool(skipped), self.scaler.get_scale()

    def state(self) -> list[torch.Tensor]:
        return [*self.model.parameters(), *(each for state in self.optimizer.state.values() for each in state.values())]


def config_of(tmp_path, name="AdamW", clip=None) -> Config:
    config = small_config(tmp_path, "AMP=true", f"TRAIN.OPTIMIZER.NAME={name}", "TRAIN.BASE_LR=0.01")
    return replaced(config, PRECISION=SCALING, TRAIN={"GRAD_CLIP": clip})


@pytest.mark.slow
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_fused_loss_scaler_trains_like_torch_in_fp64(tmp_path, name, clip):
    config = config_of(tmp_path, name, clip)
    ours, exact = Learner(config, FusedLossScaler, torch.float32), Learner(config, LossScaler, torch.float64)
    scales = []
    for factor in map(float, FACTORS):
        before = [each.clone() for each in ours.state()]
        (norm, *facts), (exact_norm, *exact_facts) = ours.update(factor), exact.update(factor)
        assert facts == exact_facts and exact_facts[0] is not (abs(factor) < float("inf"))
        if exact_facts[0]:
            after = ours.state()[: len(before)]  # the first update creates the optimizer's state
            assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        else:
            assert norm == pytest.approx(exact_norm, rel=1e-5)
        for mine, theirs in zip(ours.state(), exact.state(), strict=True):
            torch.testing.assert_close(mine.double(), theirs.double(), rtol=1e-4, atol=1e-5)
        scales.append(facts[1])
    assert sorted(set(scales)) == [512, 1024, 2048]  # it increased and decreased


def test_non_finite_gradient_in_another_process_skips_the_local_update(tmp_path):
    learner = Learner(config_of(tmp_path), FusedLossScaler, torch.float32)
    before = [each.clone() for each in learner.model.parameters()]
    assert learner.update(1.0, SimpleNamespace(norm=lambda norm: norm * float("inf")))[1]
    assert all(torch.equal(one, other) for one, other in zip(before, learner.model.parameters(), strict=True))


def test_fused_scaler_skips_finite_gradients_with_overflowing_norm(tmp_path):
    for scaler, skips in ((FusedLossScaler, True), (LossScaler, False)):
        assert Learner(config_of(tmp_path), scaler, torch.float32).update(1e20)[1] is skips


def test_fused_scaler_matches_torch_scaler_for_unfused_optimizer(tmp_path):
    config = config_of(tmp_path, clip=0.5)
    learners = [Learner(config, scaler, torch.float32, fused=False) for scaler in (FusedLossScaler, LossScaler)]
    for _ in range(3):
        assert learners[0].update(1.0) == learners[1].update(1.0)
    assert all(map(torch.equal, learners[0].state(), learners[1].state()))

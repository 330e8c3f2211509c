"""Shadow parity tells a bad cast from the ordinary rounding of half precision, and leaves the run alone."""

import csv

import pytest
import torch

from engine.diagnose.fp32_compare import Float32Compare
from engine.diagnose.overflow import LastUpdate
from tests.support.configs import SMALL, replaced, small_config
from tests.support.refusals import assert_names
from tests.support.run_hash import run_hash
from tests.support.runs import run, run_folder
from tests.support.trainers import Lines, make_trainer, update


def compared(tmp_path, plant=None, **precision) -> tuple[Lines, list[dict]]:
    """What the comparisons of 12 updates said and found."""
    config = small_config(tmp_path, "AMP=true", "TRAIN.WARMUP_EPOCHS=0", "MODEL.DROPOUT=0.1", "MODEL.DROPPATH=0.1")
    config = replaced(config, PRECISION={"SHADOW_STEPS": 4, **precision})
    log, found, last_update = Lines(), [], LastUpdate()
    trainer = make_trainer(
        config, callbacks=[last_update, Float32Compare(config.PRECISION, last_update, log, found.append)]
    )
    if plant:
        plant(trainer.model)
    update(trainer, 12)
    assert [row["step"] for row in found] == [3, 7, 11]
    return log, found


@pytest.mark.parametrize("mode", ["autocast", "naive"])
def test_a_clean_run_does_not_alarm(tmp_path, mode):
    log, found = compared(tmp_path, MODE=mode)
    assert not log.warned
    assert all(0.9 < row["least_cosine"] < 1 and 0 < row["loss_share"] < 0.05 for row in found)
    assert all("cosine/blocks.1.mlp.fc2" in row for row in found)
    if mode == "autocast":
        assert all(line.endswith("no underflow") for line in log.noted) and len(log.noted) == 3
        assert {share for row in found for name, share in row.items() if name.startswith("underflow/")} == {0.0}


def test_a_planted_bad_cast_alarms_and_names_a_module(tmp_path):
    def plant(model):
        """Three bits of an activation are all that half precision leaves of it here."""

        def cast_badly(module, inputs, output):
            return output if output.dtype is torch.float32 else (output.float() * 4).round().to(output.dtype) / 4

        model.blocks[1].mlp.fc1.register_forward_hook(cast_badly)

    log, found = compared(tmp_path, plant)
    assert_names(log.warned[0], "cosine", "scripts/doctor.py")
    assert min(row["least_cosine"] for row in found) < 0.9


def test_a_layer_whose_gradients_underflow_is_named(tmp_path):
    def plant(model):
        """What fc1 takes is zero in float16, and with it the gradient of its weights."""
        model.blocks[1].norm2.requires_grad_(False).weight.fill_(1e-9)

    log, found = compared(tmp_path, plant, DTYPE="float16", INIT_LOSS_SCALING=1024.0)
    assert_names(log.noted[0], "underflow", "blocks.1.mlp.fc1")
    shares = [{name: share for name, share in row.items() if name.startswith("underflow/")} for row in found]
    assert shares[0]["underflow/blocks.1.mlp.fc1"] > 0.9
    assert all(share < 0.1 for name, share in shares[0].items() if name != "underflow/blocks.1.mlp.fc1")


def test_comparing_changes_nothing_of_a_run_and_in_float32_there_is_nothing_to_compare(tmp_path):
    (tmp_path / "small.yaml").write_text(SMALL)
    folders, compares = {}, "PRECISION.SHADOW_STEPS=7"
    for name, *words in (("without", "AMP=true"), ("with", "AMP=true", compares), ("float32", compares)):
        flags = ["-cfg", str(tmp_path / "small.yaml"), "-epochs", "1", "-output", str(tmp_path / name)]
        result = run("main_single_gpu.py", *flags, "-opts", "MODEL.DROPOUT=0.1", *words)
        assert result.returncode == 0, result.stderr
        folders[name] = run_folder(tmp_path / name)
    assert run_hash(folders["with"]) == run_hash(folders["without"])
    with open(folders["with"] / "shadow.csv") as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["6", "13", "20", "27", "34", "41"]
    assert not (folders["float32"] / "shadow.csv").exists()


def test_a_comparison_sees_the_mixed_images_and_targets_of_the_update(tmp_path):
    options = ("AMP=true", "TRAIN.MIXUP_ALPHA=0.8", "TRAIN.RANDOM_ERASE_PROB=0.5", "PRECISION.SHADOW_STEPS=1")
    config, last_update = small_config(tmp_path, *options), LastUpdate()
    compare = Float32Compare(config.PRECISION, last_update, Lines(), lambda row: None)
    trainer = make_trainer(config, callbacks=[last_update, compare])
    images, targets, loss = [], [], trainer.loss
    trainer.model.register_forward_pre_hook(lambda module, inputs: images.append(inputs[0]))
    trainer.loss = lambda logits, target: targets.append(target) or loss(logits, target)
    update(trainer)
    assert len(images) == len(targets) == 3
    assert all(torch.equal(images[0], each) for each in images)
    assert all(torch.equal(targets[0].share, each.share) for each in targets)

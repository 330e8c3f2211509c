"""Shadow parity tells a bad cast from the ordinary rounding of half precision, and leaves the run alone."""

import csv

import pytest
import torch

from tests.support.configs import SMALL, replaced, small_config
from tests.support.refusals import assert_names
from tests.support.run_hash import run_hash
from tests.support.runs import run, run_folder
from tests.support.trainers import make_trainer


def differences(tmp_path, mode="autocast", plant=None, note=None, **settings):
    """What 12 updates' comparisons found."""
    config = small_config(tmp_path, "AMP=true", "TRAIN.WARMUP_EPOCHS=0", "MODEL.DROPOUT=0.1", "MODEL.DROPPATH=0.1")
    trainer = make_trainer(replaced(config, PRECISION={"MODE": mode, "SHADOW_STEPS": 4, **settings}))
    said, found = [], []
    trainer.log.warn, trainer.on_shadow = said.append, found.append
    trainer.log.note = ([] if note is None else note).append
    if plant:
        plant(trainer)
    windows = trainer.data.windows(0, 12)
    for window in windows:
        trainer.update(window)
        if trainer.step % 4 == 0:
            trainer._compare_with_float32()
    assert [row["step"] for row in found] == [3, 7, 11]
    return said, found


@pytest.mark.parametrize("mode", ["autocast", "naive"])
def test_a_clean_run_does_not_alarm(tmp_path, mode):
    said, found = differences(tmp_path, mode)
    assert not said
    assert all(0.9 < row["least_cosine"] < 1 and 0 < row["loss_share"] < 0.05 for row in found)
    assert all("cosine/blocks.1.mlp.fc2" in row for row in found)


def test_a_planted_bad_cast_alarms_and_names_a_module(tmp_path):
    def plant(trainer):
        """Three bits of an activation are all that half precision leaves of it here."""

        def cast_badly(module, inputs, output):
            return output if output.dtype is torch.float32 else (output.float() * 4).round().to(output.dtype) / 4

        trainer.model.blocks[1].mlp.fc1.register_forward_hook(cast_badly)

    said, found = differences(tmp_path, plant=plant)
    assert said and "cosine" in said[0] and "scripts/doctor.py" in said[0]
    assert min(row["least_cosine"] for row in found) < 0.9


def test_a_layer_whose_gradients_underflow_is_named(tmp_path):
    def plant(trainer):
        """What fc1 takes is zero in float16, and with it the gradient of its weights."""
        trainer.model.blocks[1].norm2.requires_grad_(False).weight.fill_(1e-9)

    said = []
    settings = {"DTYPE": "float16", "INIT_LOSS_SCALING": 1024.0}
    _, found = differences(tmp_path, plant=plant, note=said, **settings)
    assert_names(said[0], "underflow", "blocks.1.mlp.fc1")
    shares = [{name: share for name, share in row.items() if name.startswith("underflow/")} for row in found]
    assert shares[0]["underflow/blocks.1.mlp.fc1"] > 0.9
    assert all(share < 0.1 for name, share in shares[0].items() if name != "underflow/blocks.1.mlp.fc1")


def test_where_nothing_underflows_the_shares_are_zero(tmp_path):
    said = []
    _, found = differences(tmp_path, note=said)
    assert all(line.endswith("no underflow") for line in said) and len(said) == 3
    assert {share for row in found for name, share in row.items() if name.startswith("underflow/")} == {0.0}


def test_in_float32_there_is_nothing_to_compare(tmp_path):
    trainer = make_trainer(replaced(small_config(tmp_path), PRECISION={"SHADOW_STEPS": 1}))
    trainer.on_shadow = lambda row: pytest.fail("compared")
    windows = trainer.data.windows(0, 1)
    trainer.update(next(windows))
    trainer._compare_with_float32()


def test_comparing_changes_nothing_of_the_run(tmp_path):
    (tmp_path / "small.yaml").write_text(SMALL)
    hashes = []
    for name, options in (("without", []), ("with", ["PRECISION.SHADOW_STEPS=7"])):
        flags = ["-cfg", str(tmp_path / "small.yaml"), "-amp", "-epochs", "1", "-output", str(tmp_path / name)]
        result = run("main_single_gpu.py", *flags, "-opts", "MODEL.DROPOUT=0.1", *options)
        assert result.returncode == 0, result.stderr
        hashes.append(run_hash(run_folder(tmp_path / name)))
    assert hashes[0] == hashes[1]
    with open(run_folder(tmp_path / "with") / "shadow.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["6", "13", "20", "27", "34", "41"]


def test_a_comparison_sees_the_mixed_images_and_targets_of_the_update(tmp_path):
    trainer = make_trainer(small_config(tmp_path, "AMP=true", "TRAIN.MIXUP_ALPHA=0.8", "TRAIN.RANDOM_ERASE_PROB=0.5"))
    trainer.log.warn = trainer.log.note = lambda line: None
    images, targets, loss = [], [], trainer.loss
    trainer.model.register_forward_pre_hook(lambda module, inputs: images.append(inputs[0]))
    trainer.loss = lambda logits, target: targets.append(target) or loss(logits, target)
    windows = trainer.data.windows(0, 1)
    trainer.update(next(windows))
    trainer._compare_with_float32()
    assert len(images) == len(targets) == 3
    assert all(torch.equal(images[0], each) for each in images)
    assert all(torch.equal(targets[0].share, each.share) for each in targets)

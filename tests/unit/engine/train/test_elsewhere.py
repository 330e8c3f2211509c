"""Training on a device other than the host computes the same numbers, and the host waits only at expected places."""

from unittest import mock

import pytest
import torch

import engine.run
from configs.load import load
from configs.tables import TASKS
from datasets import BadImages, build_eval_data
from engine import stages
from engine.checkpoint.async_saver import AsyncSaver
from engine.checkpoint.find import read_checkpoint
from engine.evaluation.evaluate import Inference, evaluate
from engine.train.fused_loss_scale import FusedLossScaler
from engine.train.stop_conditions import SkipLimit
from models.transforms.gpu_kernels import PatchConv2d
from tests.support.configs import small_config
from tests.support.opened import open_sets
from tests.support.pretend_device import DEVICE, on_pretend_device, waits
from tests.support.run_hash import state_hash
from tests.support.several_labels import write_digits
from tests.support.trainers import big_logits, make_trainer, update
from utils.distributed import Process

# {event of a run: the operations in which the host waits for the device}
WAITS = {
    "update": {},
    "report": {"item": 1, "tolist": 1},  # the loss scale; all counters
    "evaluation": {"tolist": 1},  # the sums over all batches
    "evaluation of several labels": {"tolist": 1, "blocking copy": 2},  # and the scores and labels of all images
    "best epoch": {"blocking copy": 1},  # per-image results
    "ranking": {"blocking copy": 2},  # the scores and labels of all images
    "save": {"item": 3, "synchronize": 1},  # the loss scale and its two counters; copies of all tensors
}
HALF = "AMP=true"
ALL = "TRAIN.MIXUP_ALPHA=0.8 TRAIN.CUTMIX_ALPHA=1 TRAIN.RANDOM_ERASE_PROB=0.5 TRAIN.MODEL_EMA=true TRAIN.ACCUM_ITER=2"
MODES = {
    "float32": "",
    **{f"loss {name}": f"{HALF} TRAIN.LOSS={name}" for name in TASKS["classes"].losses},
    "float16": f"{HALF} PRECISION.DTYPE=float16",
    "float16 that overflows": f"{HALF} PRECISION.DTYPE=float16 PRECISION.INIT_LOSS_SCALING={2.0**32}",
    "LoRA": f"{HALF} MODEL.LORA.RANK=4",
    "no clipping": "TRAIN.GRAD_CLIP=null",
    "weighted classes": "TRAIN.CLASS_WEIGHTS=auto DATA.SAMPLER=balanced",
    "binary losses": f"{HALF} TRAIN.LOSS=bce TRAIN.CLASS_WEIGHTS=auto TRAIN.BCE_TARGET_THRESH=0.2 "
    "TRAIN.MIXUP_ALPHA=0.8",
    "SGD": "TRAIN.OPTIMIZER.NAME=SGD",
    "activation checkpointing": "TRAIN.GRAD_CHECKPOINTING=true",
    "op lists": f"{HALF} PRECISION.CUSTOM_BLACK_LIST=[softmax] PRECISION.CUSTOM_WHITE_LIST=[layer_norm]",
    "half residual": f"{HALF} PRECISION.RESIDUAL=half",
    "distillation": f"{HALF} TRAIN.DISTILLATION_TYPE=soft TRAIN.TEACHER_MODEL=test_resnet DATA.IMAGENET_MEAN=[0.3]",
    "many at once": f"{HALF} {ALL} PRECISION.DTYPE=float16",
    "many at once, naive": f"{HALF} {ALL} PRECISION.MODE=naive",
    "many at once, naive float16": f"{HALF} {ALL} PRECISION.MODE=naive PRECISION.DTYPE=float16",
}


SLOW_IMPORTS = pytest.mark.slow  # of peft


def trainer_there(config, callbacks=()):
    return make_trainer(config, callbacks=callbacks, device=torch.device(DEVICE))


def written(trainer, folder) -> dict:
    """Return the trainer's checkpoint."""
    folder.mkdir()
    saver = AsyncSaver(folder, keep=1, device=trainer.process.device, warn=str)
    saver.save(trainer.state_dict(), [])
    saver.wait()
    return read_checkpoint(folder / "last.pth")


@pytest.mark.slow
@on_pretend_device
def test_pretend_device_counts_host_waits_and_refuses_host_tensors():
    ones, here = torch.ones(3, device=DEVICE), torch.zeros(3, pin_memory=True)
    with waits() as seen:
        there = here.to(DEVICE, non_blocking=True)
        there.copy_(here, non_blocking=True)
        here.copy_((ones + there)[torch.arange(3, device=DEVICE)], non_blocking=True)
    assert seen == {} and here.tolist() == [0, 0, 0]
    with waits() as seen:
        torch.accelerator.current_stream(DEVICE).synchronize()
    assert seen == {"synchronize": 1} and here.tolist() == [1, 1, 1]
    with waits() as seen:
        values = ones.tolist(), ones.cpu().tolist(), ones.sum().item(), len(ones.nonzero()), len(ones[ones > 0])
        here.to(DEVICE)
        torch.zeros(3).to(DEVICE, non_blocking=True)
        torch.zeros(3).copy_(ones, non_blocking=True)
    assert values == ([1, 1, 1], [1, 1, 1], 3, 3, 3)
    assert seen == {"tolist": 1, "blocking copy": 4, "item": 1, "nonzero": 1, "index": 1}
    with pytest.raises(RuntimeError, match="a host tensor"):
        ones + here


@pytest.mark.long
@pytest.mark.parametrize("mode", [pytest.param(each, marks=SLOW_IMPORTS if each == "LoRA" else ()) for each in MODES])
@on_pretend_device
def test_device_update_needs_no_sync_and_matches_the_host(tmp_path, mode):
    config = small_config(tmp_path, *MODES[mode].split(), "TRAIN.WARMUP_EPOCHS=0")
    trainer = trainer_there(config, [SkipLimit(50)])
    with waits() as seen:
        update(trainer, 2)
    assert seen == WAITS["update"]
    with waits() as seen:
        there = trainer.report()
    assert seen == WAITS["report"]
    here = update(make_trainer(config), 2).report()
    assert (there.loss_scale, there.skipped) == (here.loss_scale, here.skipped)
    assert (there.skipped > 0) is (mode == "float16 that overflows")
    assert there.mean_loss == pytest.approx(here.mean_loss, rel=2e-3, nan_ok=True)
    # In half precision, an image's two best logits may differ by less (0.0002) than host and device do (0.0015).
    assert there.accuracy == pytest.approx(here.accuracy, abs=config.AMP / 64, nan_ok=True)
    assert there.grad_norm == pytest.approx(here.grad_norm, rel=5e-3, nan_ok=True)


@pytest.mark.long
@on_pretend_device
def test_device_kernels_match_host_after_a_skipped_update(tmp_path):
    options = ("TRAIN.OPTIMIZER.NAME=SGD", "TRAIN.GRAD_CLIP=0.1", "TRAIN.BASE_LR=0.5", "TRAIN.MODEL_EMA=true")
    config, found = small_config(tmp_path, *options, "TRAIN.WARMUP_EPOCHS=0"), []
    for trainer in (make_trainer(config), trainer_there(config)):
        update(trainer, 2)  # the EMA starts at the current weights
        poison = trainer.model.norm.register_forward_hook(lambda module, inputs, output: output * float("nan"))
        update(trainer)
        poison.remove()
        assert update(trainer).report().skipped == 1
        states = (trainer.model.state_dict(), trainer.ema.model.state_dict())
        found.append(
            {(number, name): each.cpu() for number, state in enumerate(states) for name, each in state.items()}
        )
    assert type(trainer.precision.scaler) is FusedLossScaler and type(trainer.model.patch_embed.proj) is PatchConv2d
    here, there = found
    assert (here[0, "head.weight"] - here[1, "head.weight"]).abs().max() > 1e-4
    for name, weight in here.items():
        torch.testing.assert_close(
            there[name], weight, rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.long
@pytest.mark.parametrize("mode", ["autocast", "naive"])
@on_pretend_device
def test_evaluations_and_saves_sync_exactly_as_often_as_listed(tmp_path, mode):
    config = small_config(tmp_path, HALF, f"PRECISION.MODE={mode}", "TRAIN.MODEL_EMA=true")
    trainer, process = trainer_there(config, []), Process(torch.device(DEVICE))
    with waits() as seen:
        update(trainer, 3)
    assert seen == WAITS["update"]
    eval_set = open_sets(config)[1]
    data, bad = build_eval_data(config, eval_set, process), BadImages(eval_set, 0.0, str)
    for model in (trainer.model, trainer.ema.model):
        with waits() as seen:
            evaluate(
                [model],
                data,
                Inference(trainer.prepare.normalize, trainer.precision, process),
                bad,
                trainer.task.tally,
            )
        assert seen == WAITS["evaluation"]
    saver = AsyncSaver(tmp_path, keep=1, device=process.device, warn=str)
    for _ in range(2):  # the second save reuses the first one's memory
        with waits() as seen:
            saver.save(trainer.state_dict(), [])
            saver.wait()
        assert seen == WAITS["save"]


@pytest.mark.long
@on_pretend_device
def test_multi_label_updates_and_evaluations_avoid_syncs(tmp_path):
    file, _ = write_digits(tmp_path, 80)
    options = ("DATA.DATASET=csv", f"DATA.DATA_PATH={file}", "DATA.LABEL_SEPARATOR=|", "DATA.VAL_FRACTION=0.5")
    config = small_config(tmp_path, *options, "MODEL.NUM_CLASSES=10", "TRAIN.MIXUP_ALPHA=0.8", "DATA.BATCH_SIZE_EVAL=5")
    trainer, process = trainer_there(config), Process(torch.device(DEVICE))
    eval_set = open_sets(config)[1]
    data, bad = build_eval_data(config, eval_set, process), BadImages(eval_set, 0.0, str)
    assert len(eval_set) > 20
    with waits() as seen:
        update(trainer, 1)
    assert seen == WAITS["update"]
    with waits() as seen:
        ((scores, _),) = evaluate(
            [trainer.model],
            data,
            Inference(trainer.prepare.normalize, trainer.precision, process),
            bad,
            trainer.task.tally,
        )
    assert seen == WAITS["evaluation of several labels"] and 0 < scores.map <= 100


@pytest.mark.long
@pytest.mark.parametrize("mode", ["autocast", "naive"])
@on_pretend_device
def test_device_training_resumes_bitwise_from_its_checkpoint(tmp_path, mode):
    options = (HALF, "PRECISION.DTYPE=float16", f"PRECISION.MODE={mode}", "TRAIN.MODEL_EMA=true", "MODEL.DROPOUT=0.1")
    config = small_config(tmp_path, *options)
    trainer, resumed = update(trainer_there(config), 2), trainer_there(config)
    resumed.load_state_dict(written(trainer, tmp_path / "early"))
    straight, resumed = (written(update(each, 2), tmp_path / name) for each, name in ((trainer, "a"), (resumed, "b")))
    assert straight["step"] == 4 and state_hash(straight) == state_hash(resumed)
    for name, weight in trainer.model.state_dict().items():
        assert torch.equal(straight["state_dict"][name], weight.cpu()), name


@pytest.mark.long
@pytest.mark.parametrize("mode", ["autocast", "naive"])
@on_pretend_device
def test_attention_logits_beyond_float16_do_not_overflow(tmp_path, mode):
    """In all other blocks the logits stay in float32 inside a fused kernel."""
    options = (HALF, "PRECISION.DTYPE=float16", f"PRECISION.MODE={mode}", "PRECISION.INIT_LOSS_SCALING=64")
    for block in (0, 1):
        trainer = trainer_there(small_config(tmp_path, *options))
        big_logits(trainer.computing.model, block)
        assert update(trainer).report().skipped == 0


@pytest.mark.long
@on_pretend_device
def test_whole_run_syncs_only_for_reports_evaluations_and_saves(tmp_path):
    options = f"-epochs 1 -opts {HALF} PRECISION.DTYPE=float16 TRAIN.MODEL_EMA=true REPORT_FREQ=5 SAVE_STEPS=4".split()
    small_config(tmp_path)
    words = ["-cfg", str(tmp_path / "small.yaml"), "-output", str(tmp_path / "runs"), "-batch_size", "32"]
    train = stages.train

    def counted(run: stages.Run) -> stages.Outcome:
        with waits() as seen:
            ended = train(run)
        found.append(seen)
        return ended

    found = []
    with mock.patch.object(stages, "train", counted):
        assert engine.run.run(load([*words, *options]), Process(torch.device(DEVICE))) == 0
    # 11 updates: reports after updates 1, 6 and 11; evaluations of raw and EMA weights; saves after
    # updates 4 and 8 and after the epoch. Its raw weights are the best, and at the end the average is kept, so both
    # have results of images. Then the run ranks the images for the figures of each class.
    events = {"report": 3, "evaluation": 2, "best epoch": 2, "save": 3, "ranking": 1}
    total = {}
    for event, number in events.items():
        for kind, count in WAITS[event].items():
            total[kind] = total.get(kind, 0) + number * count
    total["item"] += 1  # at its end, the run reads whether any update counted
    assert found == [total], (found, total)

"""Distillation: timm's and DeiT's losses, the teacher's inputs and outputs, and updates independent of the split."""

from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional

from configs.schema import Arguments, Config, Shape
from configs.values import flatten
from datasets import Normalize
from engine.train.distillation import (
    DistillationLoss,
    DistillationTargets,
    Teacher,
    find_teacher,
    load_teacher,
)
from models import build_model
from models.transforms.gpu_kernels import PatchConv2d
from tests.support.configs import CPU, replaced, small_config
from tests.support.pretend_device import DEVICE, on_pretend_device
from tests.support.refusals import assert_names, refused
from tests.support.runs import epochs_of, run_folder, typed
from tests.support.trainers import make_trainer, update
from utils.errors import ConfigError

pytestmark = pytest.mark.slow

B, C, ALPHA, TAU = 6, 5, 0.3, 2.5
TEACHER = ("TRAIN.TEACHER_MODEL=test_resnet", "DATA.IMAGENET_MEAN=[0.3]", "TRAIN.WARMUP_EPOCHS=0")


class Says(nn.Module):
    """A student or teacher of timm's tasks that returns fixed tensors for any images."""

    pretrained_cfg = {"mean": (0.5,) * 3, "std": (0.5,) * 3}
    num_classes, in_chans = C, 3

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def set_distilled_training(self, enable=True):
        pass

    def forward(self, images):
        return self.answer


@pytest.fixture
def answers() -> tuple[torch.Tensor, ...]:
    """Return logits of the student's two heads and of the teacher, and labels."""
    generator = torch.Generator().manual_seed(1)
    return *(3 * torch.randn(3, B, C, generator=generator, dtype=torch.float64)), torch.tensor([0, 3, 4, 1, 1, 2])


def ours(outputs, teacher, labels, kind) -> torch.Tensor:
    train = {"DISTILLATION_TYPE": kind, "DISTILLATION_ALPHA": ALPHA, "DISTILLATION_TAU": TAU}
    settings = replaced(Config(), TRAIN=train).TRAIN
    return DistillationLoss(functional.cross_entropy, settings)(outputs, DistillationTargets(labels, teacher))


@pytest.mark.parametrize(("kind", "heads"), [("soft", 1), ("soft", 2), ("hard", 2)])
def test_distillation_loss_matches_timm(answers, kind, heads):
    task = pytest.importorskip("timm.task")
    first, second, teacher, labels = answers
    outputs, kinds = (first, {}) if heads == 1 else ((first, second), {"distill_type": kind})
    make = task.LogitDistillationTask if heads == 1 else task.TokenDistillationTask
    kinds |= {"task_loss_weight": 1 - ALPHA, "temperature": TAU, "device": CPU, "verbose": False}
    theirs = make(Says(outputs), Says(teacher), nn.CrossEntropyLoss(), **kinds)
    torch.testing.assert_close(ours(outputs, teacher, labels, kind), theirs(torch.zeros(B, 3, 4, 4), labels)["loss"])


def test_teacher_gets_images_with_its_own_normalization_and_size():
    student = replaced(Config(), DATA={"IMAGENET_MEAN": (0.2, 0.3, 0.4), "IMAGENET_STD": (0.1, 0.2, 0.3)}).DATA
    own = replaced(Config(), DATA={"IMAGENET_MEAN": (0.5, 0.6, 0.7), "IMAGENET_STD": (0.4, 0.3, 0.2)}).DATA
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, C))
    pixels = torch.randint(0, 256, (B, 3, 8, 8), dtype=torch.uint8)
    seen = Teacher(model, student, own)(Normalize(student)(pixels))
    torch.testing.assert_close(seen, model(Normalize(own)(pixels)), rtol=1e-4, atol=1e-4)
    picked = Teacher(model, student, own, outputs=[3, 0])(Normalize(student)(pixels))
    torch.testing.assert_close(picked, seen[:, [3, 0]])
    even = torch.full((B, 3, 4, 4), 100, dtype=torch.uint8)
    resized = Teacher(model, own, own, shape=Shape(8, 8))(Normalize(own)(even))
    torch.testing.assert_close(resized, model(Normalize(own)(even.new_full((B, 3, 8, 8), 100))), rtol=1e-4, atol=1e-4)


def test_timm_teacher_uses_its_own_normalization(tmp_path):
    found = find_teacher(small_config(tmp_path, "DATA.IMAGE_CHANNELS=3", "TRAIN.TEACHER_MODEL=resnet18")).config.DATA
    assert (found.IMAGENET_MEAN, found.IMAGENET_STD) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def test_teacher_logits_follow_class_names_and_unknown_classes_are_refused(tmp_path):
    config = small_config(tmp_path, "DATA.IMAGENET_MEAN=[0.3]", "DATA.IMAGENET_STD=[0.4]")
    path, state = str(tmp_path / "best.pth"), build_model(config, 3).state_dict()
    torch.save({"state_dict": state, "config": flatten(config), "class_names": ["ant", "bee", "cat"]}, path)
    distilled = replaced(config, TRAIN={"DISTILLATION_TYPE": "soft", "TEACHER_MODEL": path})
    images = torch.randn(4, 1, 8, 8)
    logits = load_teacher(distilled, ["ant", "bee", "cat"], 3)[0](images)
    torch.testing.assert_close(load_teacher(distilled, ["cat", "ant"], 2)[0](images), logits[:, [2, 0]])
    with refused(ConfigError, "TRAIN.TEACHER_MODEL", path, "dog"):
        load_teacher(distilled, ["ant", "dog"], 2)
    with refused(ConfigError, "TRAIN.TEACHER_MODEL", path, 3, 9):
        load_teacher(distilled, ["ant"], 9)
    with refused(ConfigError, "DATA.IMAGE_CHANNELS", path):
        load_teacher(replaced(distilled, DATA={"IMAGE_CHANNELS": 3}), ["ant", "bee", "cat"], 3)


def test_incomplete_or_ambiguous_teacher_is_refused(tmp_path):
    config, path = small_config(tmp_path), tmp_path / "best.pth"
    whole = {"state_dict": {}, "config": flatten(config), "class_names": ["ant"]}

    def find(name: object, weights: str | None = None):
        return find_teacher(replaced(config, TRAIN={"TEACHER_MODEL": str(name), "TEACHER_PRETRAINED": weights}))

    for gone in ("config", "class_names"):
        torch.save({name: each for name, each in whole.items() if name != gone}, path)
        with refused(ConfigError, "TRAIN.TEACHER_MODEL", path, "TRAIN.TEACHER_PRETRAINED"):
            find(path)
    torch.save(whole, path)
    assert find(path).classes == ["ant"]
    with refused(ConfigError, "TRAIN.TEACHER_PRETRAINED", path):
        find(path, "other.pth")


def test_timm_teacher_weights_must_match_class_count(tmp_path):
    config = small_config(tmp_path, *TEACHER, "TRAIN.DISTILLATION_TYPE=soft")
    torch.manual_seed(3)
    named = replaced(config, MODEL={"TYPE": "timm", "NAME": "test_resnet"})
    model = build_model(replaced(named, MODEL={"PATCH_SIZE": 16, "EMBED_DIM": 768, "DEPTH": 12, "NUM_HEADS": 12}), 4)
    torch.save(model.state_dict(), tmp_path / "teacher.pth")
    config = replaced(config, TRAIN={"TEACHER_PRETRAINED": str(tmp_path / "teacher.pth")})
    images = torch.randn(4, 1, 32, 32)
    teacher, (line,) = load_teacher(config, list("abcd"), 4)
    assert_names(line, "TRAIN.TEACHER_PRETRAINED", "teacher.pth")
    torch.testing.assert_close(teacher(images), model.eval()(images * teacher.scale + teacher.shift))
    with refused(ConfigError, "TRAIN.TEACHER_PRETRAINED", "teacher.pth", 4, 5):
        load_teacher(config, list("abcde"), 5)
    config = replaced(config, TRAIN={"TEACHER_MODEL": "deit_tiny_distilled_patch16_224"}, DATA={"IMAGE_SIZE": 16})
    torch.save({"head_dist.weight": torch.zeros(4, 192)}, tmp_path / "teacher.pth")
    with refused(ConfigError, "TRAIN.TEACHER_PRETRAINED", "teacher.pth", 4, 5, "TRAIN.TEACHER_MODEL"):
        load_teacher(config, list("abcde"), 5)


@pytest.mark.usefixtures("signal_handlers")
def test_run_reports_its_teacher_and_teacher_image_size(tmp_path, small_yaml):
    config, names = small_config(tmp_path, "DATA.IMAGENET_MEAN=[0.3]"), [str(number) for number in range(10)]
    content = {"state_dict": build_model(config, 10).state_dict(), "config": flatten(config), "class_names": names}
    torch.save(content, tmp_path / "teacher.pth")
    flags = ["-cfg", small_yaml, "-epochs", "1", "-batch_size", "128", "-opts", "TRAIN.SIZE_SCHEDULE=[0:4,1:12]"]
    plain = typed("main_single_gpu.py", *flags, f"SAVE={tmp_path}/plain").done().stdout
    flags += ["TRAIN.DISTILLATION_TYPE=soft", f"TRAIN.TEACHER_MODEL={tmp_path}/teacher.pth"]
    said = typed("main_single_gpu.py", *flags, f"SAVE={tmp_path}/o").done().stdout
    (teacher,) = (line for line in said.splitlines() if line.startswith("teacher: "))
    assert f"TRAIN.TEACHER_MODEL: weights of {tmp_path / 'teacher.pth'}" in said
    count = sum(parameter.numel() for parameter in build_model(config, 10).parameters())
    assert_names(
        teacher, tmp_path / "teacher.pth", f"{count:,} parameters", "8 x 8", "normalized as its weights expect"
    )
    assert "training images: 4 x 4 from epoch 1 on, 12 x 12 from epoch 2 on; evaluation at 8" in said
    taught, alone = (epochs_of(run_folder(tmp_path / name))[0]["train_loss"] for name in ("o", "plain"))
    assert taught != alone and "teacher: " not in plain


def test_second_deit_head_learns_only_from_teacher(tmp_path):
    kwargs = Arguments({"embed_dim": 32, "depth": 1, "num_heads": 2, "patch_size": 4})
    model = {"TYPE": "timm", "NAME": "deit_tiny_distilled_patch16_224", "KWARGS": kwargs}
    fields = {"PATCH_SIZE": 16, "EMBED_DIM": 768, "DEPTH": 12, "NUM_HEADS": 12}
    config = small_config(tmp_path, *TEACHER, "TRAIN.DISTILLATION_TYPE=hard", "TRAIN.DISTILLATION_ALPHA=0.5")
    config = replaced(config, MODEL=model | fields)
    for alpha, first, second in ((1.0, False, True), (0.0, True, False)):
        trainer = make_trainer(replaced(config, TRAIN={"DISTILLATION_ALPHA": alpha, "WEIGHT_DECAY": 0.0}))
        before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
        update(trainer, 1)
        after = trainer.model.state_dict()
        moved = [not torch.equal(before[name], after[name]) for name in ("head.weight", "head_dist.weight")]
        assert moved == [first, second]
        images = torch.randn(2, 1, 8, 8)
        assert trainer.model.train()(images)[0].shape == (2, 10) and trainer.model.eval()(images).shape == (2, 10)


@pytest.mark.long
@on_pretend_device
def test_teacher_on_device_uses_student_kernels_and_float32_batch_norms(tmp_path):
    options = (
        f"AMP=true {' '.join(TEACHER)} TRAIN.DISTILLATION_TYPE=soft PRECISION.CUSTOM_BLACK_LIST=[blocks.0]".split()
    )
    vit = "TRAIN.TEACHER_MODEL=vit_tiny_patch16_224"
    teachers, compiled = [], []
    with mock.patch.object(nn.Module, "compile", lambda self, **how: compiled.append((self, how["mode"]))):
        for more in ((), (vit,), (vit, "COMPILE=reduce-overhead")):
            trainer = make_trainer(small_config(tmp_path, *options, *more), device=torch.device(DEVICE))
            teachers.append(trainer.prepare.teacher.model)
    convolutional, plain, last = teachers
    convolution, norm = (
        next(each for each in convolutional.modules() if isinstance(each, kind)) for kind in (nn.Conv2d, nn.BatchNorm2d)
    )
    dtypes = [each.dtype for each in (convolution.weight, norm.weight, norm.running_var)]
    assert dtypes == [torch.bfloat16, torch.float32, torch.float32]
    assert type(plain.patch_embed.proj) is PatchConv2d and [mode for each, mode in compiled if each is last] == [None]

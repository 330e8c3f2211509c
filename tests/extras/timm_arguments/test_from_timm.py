"""from_timm.py: its output for published recipes trains like timm's own objects, and it names every difference."""

import contextlib
import os
import re
import shlex
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import yaml
from timm.data.naflex_dataset import NaFlexMapDatasetWrapper

from configs.load import LoadedConfig, load
from configs.schema import Config
from configs.timm_arguments import TIMM_ARGUMENTS
from configs.values import flatten
from datasets.batch_order import Order
from datasets.transforms.augment import Augmentation
from engine.train.loss import build_loss
from engine.train.optimizers import build_optimizer, parameter_groups
from engine.train.schedule import Schedule
from extras.timm_arguments.command import read_arguments
from extras.timm_arguments.translation import Translation
from models import build_model
from scripts import from_timm
from tests.support.cases import cases_of, names_of
from tests.support.configs import meta_device, replaced, write
from tests.support.refusals import assert_names, refused
from tests.support.runs import ROOT, typed
from utils.errors import ConfigError

pytestmark = pytest.mark.slow

EFFICIENTNET = """--sched step --epochs 450 --decay-epochs 2.4 --decay-rate .97 --opt rmsproptf --opt-eps .001 -j 8 --warmup-lr 1e-6
--weight-decay 1e-5 --aa rand-m9-mstd0.5 --remode pixel --reprob 0.2 --amp"""
A1 = "--opt lamb --lr 5e-3 --weight-decay .01 --bce-loss --aa rand-m7-mstd0.5-inc1 --mixup .2 --cutmix 1 --warmup-lr 1e-6"
VIT = """--opt adamw --weight-decay .05 --aa rand-m9-mstd0.5-inc1 --reprob .25 --mixup .8 --cutmix 1 --warmup-lr 1e-6 --min-lr 1e-5
--drop-path .1 --lr 1e-3"""
# {model: arguments}: the first five from timm's documentation of train.py, the others from the papers of the models.
RECIPES = {
    "seresnet34": "4 --sched cosine --epochs 150 --warmup-epochs 5 --lr 0.4 --reprob 0.5 --remode pixel --batch-size 256 --amp -j 4",
    "efficientnet_b2": f"2 -b 128 {EFFICIENTNET} --drop 0.3 --drop-path 0.2 --model-ema --model-ema-decay 0.9999 --lr .016",
    "mixnet_xl": f"2 -b 128 {EFFICIENTNET} --decay-rate .969 --drop 0.3 --reprob .3 --lr .016 --dist-bn reduce",
    "resnet50": "2 -b 64 --sched cosine --epochs 200 --lr 0.05 --amp --reprob 0.6 --aa rand-m9-mstd0.5-inc1",
    "resnext50_32x4d": "8 --lr 0.6 --epochs 240 --weight-decay 1e-4 --reprob 0.4 --recount 3 --aa rand-m7-mstd0.5-inc1 -b 192",
    "resnet50d": f"8 -b 256 --epochs 600 {A1} --drop-path .05 --smoothing 0 --model-kwargs zero_init_last=False",
    "deit_small_patch16_224": f"8 -b 128 --epochs 300 {VIT} --aug-repeats 3",
    "convnext_tiny": f"8 -b 128 --epochs 300 --warmup-epochs 20 --grad-accum-steps 4 {VIT} --model-ema --layer-decay .8",
    "swin_tiny_patch4_window7_224": f"8 -b 128 --epochs 300 --warmup-epochs 20 --clip-grad 5 {VIT}",
    "vit_tiny_patch16_224": f"4 -b 256 --epochs 90 --warmup-prefix --cooldown-epochs 5 --sched-on-updates {VIT}",
}
NUM_IMAGES = 53_248  # 13 updates of 4,096, full batches of other sizes, and timm's rounding for repeated images


def written(*words: str) -> tuple[str, str]:
    """Return the script's stdout and stderr."""
    ended = typed("scripts/from_timm.py", "--", *words).done()
    return ended.stdout, ended.stderr


def described(model: torch.nn.Module, groups: list[dict]) -> dict[str, tuple[float, float]]:
    """Return {parameter: (weight decay, factor of the learning rate)}."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    factors = ((group, (group["weight_decay"], group.get("lr_scale", 1.0))) for group in groups)
    return {names[id(each)]: factor for group, factor in factors for each in group["params"]}


def timms_augmentation(args: SimpleNamespace, model: torch.nn.Module) -> dict:
    from timm.data import create_transform, resolve_data_config

    data, names = resolve_data_config(vars(args), model=model), ("scale", "ratio", "hflip", "vflip", "color_jitter")
    chosen = {name: getattr(args, name) for name in names} | {"interpolation": args.train_interpolation}
    chosen |= {"re_prob": args.reprob, "re_mode": args.remode, "re_count": args.recount, "auto_augment": args.aa}
    chosen |= {name: data[name] for name in ("input_size", "mean", "std")}
    steps = {type(step).__name__: step for step in create_transform(is_training=True, **chosen).transforms}
    kinds = ("RandomResizedCropAndInterpolation", "RandAugment", "ColorJitter", "RandomErasing")
    crop, policy, jitter, erasing = map(steps.get, kinds)
    return {
        "crop": (tuple(crop.scale), tuple(crop.ratio), crop.size, steps["RandomHorizontalFlip"].p),
        "policy": policy
        and [(op.name, op.prob, op.magnitude, op.magnitude_std) for op in policy.ops] * policy.num_layers,
        "jitter": jitter and dict.fromkeys(("brightness", "contrast", "color"), jitter.brightness),
        "erasing": erasing and (erasing.probability, erasing.per_pixel, erasing.max_count),
        "normalized": (tuple(data["mean"]), tuple(data["std"])),
    }


def our_augmentation(config) -> dict:
    data, train, drawn = config.DATA, config.TRAIN, Augmentation(config)
    policy = drawn.policy
    erasing = (train.RANDOM_ERASE_PROB, train.RANDOM_ERASE_MODE == "pixel", train.RANDOM_ERASE_COUNT)
    each = [(op.name, op.probability, op.magnitude, op.options.deviation) for op in policy.operations] if policy else []
    return {
        "crop": (data.CROP_SCALE, data.CROP_RATIO, (data.IMAGE_SIZE,) * 2, data.HFLIP),
        "policy": each * policy.count if policy else None,
        "jitter": drawn.jitter or None,
        "erasing": erasing if train.RANDOM_ERASE_PROB else None,
        "normalized": (data.IMAGENET_MEAN, data.IMAGENET_STD),
    }


@pytest.mark.parametrize("name", RECIPES)
def test_translated_published_recipe_matches_objects_built_by_timm(tmp_path, name):
    import timm
    from timm.optim import create_optimizer_v2, optimizer_kwargs
    from timm.scheduler import create_scheduler_v2, scheduler_kwargs

    words = ["./distributed_train.sh", *f"{RECIPES[name]} --data-dir /imagenet --model {name}".split()]
    (tmp_path / "my.yaml").write_text(written(*words)[0])
    config = load(["-cfg", str(tmp_path / "my.yaml")]).config
    given, launch = read_arguments(words)
    found, processes = Translation(given, launch).args.items(), launch.processes
    args = SimpleNamespace(**{key.replace("-", "_"): None if value == [] else value for key, value in found})
    data, train = config.DATA, config.TRAIN
    order = Order(NUM_IMAGES, data.BATCH_SIZE, processes, train.ACCUM_ITER, data.DROP_LAST, 0, lambda *each: None)
    batches = NUM_IMAGES // processes // args.batch_size
    per_epoch = -(-batches // args.grad_accum_steps)
    assert order.steps_per_epoch == per_epoch
    rates = {"drop_rate": args.drop, "drop_path_rate": args.drop_path}
    with meta_device():
        theirs = timm.create_model(name, num_classes=args.num_classes, **rates)
        ours = build_model(config, 1000)
    optimizer = create_optimizer_v2(theirs, **optimizer_kwargs(args))
    own = dict(ours.named_parameters())
    assert described(ours, parameter_groups(train, ours, own)) == described(theirs, optimizer.param_groups)
    built = build_optimizer(train, torch.nn.Linear(2, 2))
    settings = {key: (value, optimizer.defaults.get(key)) for key, value in built.param_groups[0].items()}
    for key in {"betas", "eps", "momentum", "nesterov", "alpha"} & optimizer.defaults.keys():
        assert tuple(map(str, settings[key]))[0] == str(settings[key][1]), key
    scheduler, epochs = create_scheduler_v2(optimizer, **scheduler_kwargs(args), updates_per_epoch=per_epoch)
    assert train.NUM_EPOCHS == epochs
    schedule = Schedule(train, per_epoch, order.global_batch)
    base = optimizer.param_groups[-1].get("lr_scale", 1.0)
    for step in range(epochs * per_epoch):
        if step % per_epoch == 0:
            scheduler.step(step // per_epoch)
        scheduler.step_update(step)
        assert abs(schedule(step) - optimizer.param_groups[-1]["lr"] / base) < 1e-9, step
    assert our_augmentation(config) == timms_augmentation(args, theirs)


@pytest.mark.parametrize("row", cases_of("timm_arguments-timms_arguments"))
def test_timm_argument_becomes_a_setting_or_is_reported(here, row):
    """A row has arguments | the resulting settings."""
    arguments, settings = row.split("|")
    rate = [] if "--lr-base" in arguments else ["--lr", ".1"]
    translation = Translation(*read_arguments([*shlex.split(arguments), *rate]))
    values = flatten(load(["-cfg", write(translation.file())]).config)
    for key, _, value in (word.partition("=") for word in settings.split()):
        assert str(values[key]).replace(" ", "") == value
    assert_names("\n".join(translation.remarks), *names_of("timm_arguments-timms_arguments", row))


@pytest.mark.parametrize("batch", [4, 8, 12])
def test_naflex_loader_has_the_updates_of_timms_or_a_remark(here, batch):
    words = ["--naflex-loader", "--naflex-train-seq-lens", "16", "-b", str(batch), "--lr", ".1"]
    translation = Translation(*read_arguments(words))
    data = load(["-cfg", write(translation.file())]).config.DATA
    (size,) = {int(word) for each in translation.remarks for word in re.findall("BATCH_SIZE=([0-9]+)", each)} or {batch}
    assert data.BATCH_SIZE == batch
    order = Order(34, size, 1, 1, data.DROP_LAST, 0, lambda *each: None)
    theirs = NaFlexMapDatasetWrapper(range(34), seq_lens=(16,), max_tokens_per_batch=16 * batch)
    assert order.steps_per_epoch == len(theirs)


NAMES = [
    "007",
    "1e3",
    "0x10",
    "1_000",
    "on",
    "true",
    "2026-01-02",
    "1:30",
    "-x",
    "a: b",
    "#x",
    "it's",
    '"q"',
    "é",
    "a b",
]
PATHS = [*NAMES, "null", "None", "~", " ", "auto", "Latest", "a/b c"]
FLAGS_OF_PATHS = {"data-dir": "DATA.DATA_PATH", "class-map": "DATA.CLASSES", "output": "SAVE"}


def started(words: list[str]) -> LoadedConfig:
    """Return the settings of the run that the printed command starts."""
    translation = Translation(*read_arguments(["--lr", ".1", *words]))
    typed = shlex.split(translation.remarks[-1].partition("main_single_gpu.py -cfg my.yaml")[2])
    return load(["-cfg", write(translation.file()), *typed])


@pytest.mark.parametrize("name", NAMES)
def test_numeric_looking_name_in_timm_arguments_stays_text(here, name):
    loaded = started([f"--experiment={name}", f"--gp={name}", "--model-kwargs", f"act_layer={name!r}"])
    assert loaded.config.START.NAME == name
    assert dict(loaded.config.MODEL.KWARGS) == {"global_pool": name, "act_layer": name}


@pytest.mark.parametrize("path", PATHS)
def test_odd_looking_path_in_timm_arguments_stays_unchanged(here, path):
    words = [f"--{flag}={path}" for flag in (*FLAGS_OF_PATHS, "initial-checkpoint", "resume")]
    loaded = started(words)
    values = flatten(loaded.config)
    found = [*(values[key] for key in FLAGS_OF_PATHS.values()), values["MODEL.PRETRAINED"], loaded.config.START.RESUME]
    assert [os.path.normpath(each) for each in found] == [os.path.normpath(path)] * 5
    (args := here / "args.yaml").write_text(yaml.safe_dump({"output": path, "lr": 0.1, "resume": path}))
    again = started([str(args)]).config
    assert os.path.normpath(again.SAVE) == os.path.normpath(again.START.RESUME) == os.path.normpath(path)


def test_every_timm_argument_is_translated_reported_or_refused():
    plain = Translation(*read_arguments(["--lr", ".1"]))
    silent = []
    for name, argument in TIMM_ARGUMENTS.items():
        value = {bool: [], int: ["7"], float: ["0.37"], str: ["x=1"]}[argument.kind]
        flag = [] if name == "data" else [f"--{name}"]
        try:
            found = Translation(*read_arguments(["--lr", ".1", *flag, *value]))
        except ConfigError as error:
            if f"--{name}" not in str(error):
                silent.append(name)
        else:
            is_named = any(f"--{name}" in each for each in found.remarks)
            if not is_named and (found.file(), found.remarks) == (plain.file(), plain.remarks):
                silent.append(name)
    assert silent == ["persistent-workers"], "the default of train.py"


def test_timm_command_line_overrides_args_yaml(here):
    (here / "args.yaml").write_text(
        "lr: 0.1\nepochs: 5\namp: true\nexperiment: '007'\nmodel_kwargs: {act_layer: '1'}\n"
    )
    config = started(["args.yaml", "--epochs", "7"]).config
    assert (config.TRAIN.NUM_EPOCHS, config.AMP, config.START.NAME) == (7, True, "007")
    assert dict(config.MODEL.KWARGS) == {"act_layer": "1"}


def test_args_yaml_gives_same_settings_as_its_command_line(tmp_path):
    words = (
        "--model resnet50 --opt sgd --momentum .8 --cutmix-minmax .2 .8 --gp max --model-kwargs act_layer=silu --amp"
    )
    typed, remarks = written(*f"{words} --initial-checkpoint x.pth --decay-milestones 3 5 --sched multistep".split())
    defaults = {name: each.default or None for name, each in TIMM_ARGUMENTS.items()}
    defaults |= {"model-kwargs": {}, "opt-kwargs": {}, "pretrained-cfg-overlay": {}}
    given = {name.replace("-", "_"): value for name, value in defaults.items()}
    given |= {"model": "resnet50", "opt": "sgd", "momentum": 0.8, "cutmix_minmax": [0.2, 0.8], "gp": "max", "amp": True}
    given |= {"model_kwargs": {"act_layer": "silu"}, "initial_checkpoint": "x.pth", "decay_milestones": [3, 5]}
    given |= {"sched": "multistep"}
    (tmp_path / "args.yaml").write_text(yaml.safe_dump(given))
    assert written(str(tmp_path / "args.yaml")) == (typed, remarks)
    (tmp_path / "my.yaml").write_text(typed)
    config = load(["-cfg", str(tmp_path / "my.yaml")]).config
    assert config.TRAIN.LR_SCHEDULER.MILESTONES == (2, 4) and config.MODEL.PRETRAINED == "x.pth"
    assert dict(config.MODEL.KWARGS) == {"act_layer": "silu", "global_pool": "max"}
    assert dict(config.TRAIN.OPTIMIZER.KWARGS) == {"nesterov": True} and config.TRAIN.OPTIMIZER.MOMENTUM == 0.8


@pytest.mark.parametrize("words", cases_of("timm_arguments-mistakes_of_timms_arguments"))
def test_unknown_timm_argument_or_value_is_refused(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    texts = {"args": "modle: x", "1": "amp: maybe", "2": "epochs: [3]", "3": "lr_noise: [0.4, 0.9]"}
    for name, text in (texts | {"4": "pretrained_cfg_overlay: {num_classes: 10}"}).items():
        (tmp_path / f"{name}.yaml").write_text(f"{text}\n")
    with refused(ConfigError, *names_of("timm_arguments-mistakes_of_timms_arguments", words)):
        from_timm.main(shlex.split(words))


def trained(loss: Callable, dtype: torch.dtype, loss_is_inside: bool) -> tuple[list[float], torch.Tensor]:
    """Return the losses of 12 updates in this type, and the final weights."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 32), torch.nn.GELU(), torch.nn.Linear(32, 10))
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    autocast = partial(torch.autocast, "cpu", dtype, enabled=dtype != torch.float32)
    for _ in range(12):
        images, targets = torch.randn(16, 3, 4, 4), torch.randint(10, (16,))
        with autocast():
            logits = model(images)
        with autocast() if loss_is_inside else contextlib.nullcontext():
            losses.append(value := loss(logits, targets))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    return [each.item() for each in losses], torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def test_losses_match_timm_in_float32_but_not_bfloat16():
    """As in docs/from-timm.md: train.py computes the loss inside autocast, and halfstep in float32."""
    from timm.loss import LabelSmoothingCrossEntropy

    ours, theirs = build_loss(replaced(Config(), TRAIN={"SMOOTHING": 0.1})), LabelSmoothingCrossEntropy(0.1)

    def apart(dtype: torch.dtype, loss_is_inside: bool) -> tuple[float, float]:
        """Return the largest relative difference of a loss, and the relative difference of the final weights."""
        wide = theirs if loss_is_inside else lambda logits, targets: theirs(logits.float(), targets)
        (losses, weights), (others, other) = trained(ours, dtype, False), trained(wide, dtype, loss_is_inside)
        loss = max(abs(one / another - 1) for one, another in zip(losses, others, strict=True))
        return loss, ((weights - other).norm() / weights.norm()).item()

    assert max(apart(torch.float32, True)) < 1e-6 and max(apart(torch.bfloat16, False)) < 1e-6
    assert 1e-5 < min(apart(torch.bfloat16, True)) and max(apart(torch.bfloat16, True)) < 0.02
    page = " ".join((ROOT / "docs/from-timm.md").read_text(encoding="utf-8").split())
    assert "are the same in float32, update by update" in page
    assert "bfloat16` they differ" in page and "inside autocast" in page

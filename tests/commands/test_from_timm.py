"""halfstep from-timm: its output for published recipes trains like timm's own objects, and it names each difference."""

import shlex
from types import SimpleNamespace

import pytest
import torch
import yaml

from configs.flags import FLAGS
from configs.load import load
from configs.translate.timm_arguments import TIMM_ARGUMENTS
from configs.typed_names import suggest_flag
from configs.values import flatten
from datasets.order import Order
from datasets.transforms.augment import Augmentation
from engine.train.optimizers import build_optimizer, parameter_groups
from engine.train.schedule import Schedule
from models import build_model
from scripts.from_timm import translate
from tests.support.cases import cases_of, content_of, names_of, value_of
from tests.support.configs import meta_device, write
from tests.support.forks import ROOT
from tests.support.refusals import assert_names
from tests.support.runs import typed
from utils.errors import ConfigError

pytestmark = pytest.mark.slow

EFFICIENTNET = """--sched step --epochs 450 --decay-epochs 2.4 --decay-rate .97 --opt rmsproptf --opt-eps .001 -j 8
--warmup-lr 1e-6 --weight-decay 1e-5 --aa rand-m9-mstd0.5 --remode pixel --reprob 0.2 --amp"""
A1 = """--opt lamb --lr 5e-3 --weight-decay .01 --bce-loss --aa rand-m7-mstd0.5-inc1 --mixup .2 --cutmix 1
--warmup-lr 1e-6"""
VIT = """--opt adamw --weight-decay .05 --aa rand-m9-mstd0.5-inc1 --reprob .25 --mixup .8 --cutmix 1 --warmup-lr 1e-6
--min-lr 1e-5 --drop-path .1 --lr 1e-3"""
# {model: arguments}: the first five from timm's documentation of train.py, the others from the papers of the models.
RECIPES = {
    "seresnet34": "4 --sched cosine --epochs 150 --warmup-epochs 5 --lr 0.4 --reprob 0.5 --remode pixel --batch-size "
    "256 --amp -j 4",
    "efficientnet_b2": f"2 -b 128 {EFFICIENTNET} --drop 0.3 --drop-path 0.2 --model-ema --model-ema-decay 0.9999 --lr "
    ".016",
    "mixnet_xl": f"2 -b 128 {EFFICIENTNET} --decay-rate .969 --drop 0.3 --reprob .3 --lr .016 --dist-bn reduce",
    "resnet50": "2 -b 64 --sched cosine --epochs 200 --lr 0.05 --amp --reprob 0.6 --aa rand-m9-mstd0.5-inc1",
    "resnext50_32x4d": "8 --lr 0.6 --epochs 240 --weight-decay 1e-4 --reprob 0.4 --recount 3 --aa rand-m7-mstd0.5-inc1 "
    "-b 192",
    "resnet50d": f"8 -b 256 --epochs 600 {A1} --drop-path .05 --smoothing 0 --model-kwargs zero_init_last=False",
    "deit_small_patch16_224": f"8 -b 128 --epochs 300 {VIT} --aug-repeats 3",
    "convnext_tiny": f"8 -b 128 --epochs 300 --warmup-epochs 20 --grad-accum-steps 4 {VIT} --model-ema --layer-decay "
    ".8",
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
    operations, _, count = drawn.draw_policy.args if drawn.draw_policy else ([], None, 0)
    erasing = (train.RANDOM_ERASE_PROB, train.RANDOM_ERASE_MODE == "pixel", train.RANDOM_ERASE_COUNT)
    each = [(op.name, op.probability, op.magnitude, op.options.deviation) for op in operations]
    return {
        "crop": (data.CROP_SCALE, data.CROP_RATIO, (data.IMAGE_SIZE,) * 2, data.HFLIP),
        "policy": each * count or None,
        "jitter": drawn.jitter or None,
        "erasing": erasing if train.RANDOM_ERASE_PROB else None,
        "normalized": (data.IMAGENET_MEAN, data.IMAGENET_STD),
    }


@pytest.mark.long
@pytest.mark.parametrize("name", RECIPES)
def test_translated_published_recipe_matches_objects_built_by_timm(tmp_path, name):
    import timm
    from timm.optim import create_optimizer_v2, optimizer_kwargs
    from timm.scheduler import create_scheduler_v2, scheduler_kwargs

    words = ["./distributed_train.sh", *f"{RECIPES[name]} --data-dir /imagenet --model {name}".split()]
    (tmp_path / "my.yaml").write_text(written(*words)[0])
    config = load(["-cfg", str(tmp_path / "my.yaml")]).config
    found, processes = translate(words).args.items(), int(words[1])
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


@pytest.mark.parametrize("arguments", cases_of("timm_arguments-translated"))
def test_timm_arguments_become_equivalent_settings(here, arguments):
    rate = [] if "--lr-base" in arguments else ["--lr", ".1"]
    translation = translate([*shlex.split(content_of(arguments)), *rate])
    values = flatten(load(["-cfg", write(translation.yaml)]).config)
    for key, _, value in (word.partition("=") for word in value_of("timm_arguments-translated", arguments).split()):
        assert str(values[key]).replace(" ", "") == value, key


@pytest.mark.parametrize("command", cases_of("timm_arguments-commands"))
def test_training_command_starts_as_many_processes_as_timm(command):
    assert translate([*shlex.split(command), "--lr", ".1"]).command == value_of("timm_arguments-commands", command)


def test_small_differences_from_timm_are_named():
    words = "./distributed_train.sh 2 --lr .1 --grad-accum-steps 2 --reprob .2 --mixup .8 --channels-last"
    remarks = translate(words.split()).remarks
    assert {each.partition(" ")[0].strip(":") for each in remarks} == {
        *("--dist-bn", "--grad-accum-steps", "--reprob", "--channels-last")
    }


@pytest.mark.parametrize("name", ["007", "1e3", "0x10", "on", "2026-01-02", "a: b", "#x", "it's", "é", "a b"])
def test_numeric_looking_text_in_timm_arguments_stays_text(here, name):
    flags = {"data-dir": "DATA.DATA_PATH", "class-map": "DATA.CLASSES", "output": "SAVE"}
    words = [*(f"--{flag}={name}" for flag in flags), "--gp", name, "--model-kwargs", f"act_layer={name!r}"]
    config = load(["-cfg", write(translate(["--lr", ".1", *words]).yaml)]).config
    assert [flatten(config)[key] for key in flags.values()] == [name] * 3
    assert dict(config.MODEL.KWARGS) == {"global_pool": name, "act_layer": name}


# Arguments with which many others have an effect.
CONTEXTS = (
    "--lr .1",
    "--lr .1 --amp --pretrained --mixup .1 --model-ema --bce-loss --torchcompile --reprob .1 --clip-grad 1 --sched "
    "step --opt adamw",
    "--sched multistep --opt adamw",
)


def test_every_timm_argument_changes_the_settings_or_is_named():
    silent = set(TIMM_ARGUMENTS)
    for words in map(str.split, CONTEXTS):
        plain = translate(words)
        for name in sorted(silent):
            kind = TIMM_ARGUMENTS[name].kind
            value = {bool: [], int: ["7"], float: ["0.37"], str: ["x=1"]}[kind]
            try:
                found = translate([*words, *([] if name == "data" else [f"--{name}"]), *value])
            except ConfigError as error:
                is_named = name in str(error) or TIMM_ARGUMENTS[name].setting.partition("=")[0] in str(error)
                silent -= {name} if is_named else set()
            else:
                silent -= {name} if found[:3] != plain[:3] else set()
    assert silent == {"persistent-workers"}, "the default of train.py"


def test_timm_command_line_overrides_args_yaml(here):
    text = "lr: 0.1\nepochs: 5\namp: true\noutput: '007'\nmodel_kwargs: {act_layer: '1'}\ndata: a\n"
    (here / "args.yaml").write_text(text)
    config = load(["-cfg", write(translate(["args.yaml", "--epochs", "7"]).yaml)]).config
    assert (config.TRAIN.NUM_EPOCHS, config.AMP, config.SAVE, config.DATA.DATA_PATH) == (7, True, "007", "a")
    assert dict(config.MODEL.KWARGS) == {"act_layer": "1"}
    typed = ["--config", "args.yaml", "b", "--model-kwargs", "act_layer=silu"]
    config = load(["-cfg", write(translate(typed).yaml)]).config
    assert config.DATA.DATA_PATH == "b" and dict(config.MODEL.KWARGS) == {"act_layer": "silu"}


@pytest.mark.parametrize(
    ("text", "interpolation"),
    [("''", None), ('""', None), ("", "random"), ("~", "random"), ("null", "random"), ("bilinear", "bilinear")],
)
def test_only_unquoted_empty_values_of_args_yaml_count_as_unset(here, text, interpolation):
    """An empty text, which train.py replaces by the interpolation of evaluations, differs from its default random."""
    (here / "args.yaml").write_text(f"lr: 0.1\ntrain_interpolation: {text}\n")
    config = load(["-cfg", write(translate(["args.yaml"]).yaml)]).config
    assert config.DATA.TRAIN_INTERPOLATION == interpolation


@pytest.mark.parametrize("word", ["none", "auto", ""])
def test_arguments_of_constructors_keep_words_that_mean_something_in_files(here, word):
    words = ["--lr", ".1", "--gp", word, "--model-kwargs", f"pos_embed={word!r}"]
    config = load(["-cfg", write(translate(words).yaml)]).config
    assert dict(config.MODEL.KWARGS) == {"global_pool": word, "pos_embed": word}


def test_args_yaml_gives_same_settings_as_its_command_line(tmp_path):
    words = (
        "--model resnet50 --opt sgd --momentum .8 --cutmix-minmax .2 .8 --gp max --model-kwargs act_layer=silu --amp"
    )
    typed, remarks = written(*f"{words} --initial-checkpoint x.pth --decay-milestones 3 5 --sched multistep".split())
    given = {name.replace("-", "_"): each.default or None for name, each in TIMM_ARGUMENTS.items()}
    given |= {"model_kwargs": {}, "opt_kwargs": {}, "pretrained_cfg_overlay": {}, "experiment": "", "resume": ""}
    given |= {"model": "resnet50", "opt": "sgd", "momentum": 0.8, "cutmix_minmax": [0.2, 0.8], "gp": "max", "amp": True}
    given |= {"model_kwargs": {"act_layer": "silu"}, "initial_checkpoint": "x.pth", "decay_milestones": [3, 5]}
    (tmp_path / "args.yaml").write_text(yaml.safe_dump(given | {"sched": "multistep"}))
    assert written(str(tmp_path / "args.yaml")) == (typed, remarks)
    (tmp_path / "my.yaml").write_text(typed)
    config = load(["-cfg", str(tmp_path / "my.yaml")]).config
    assert config.TRAIN.LR_SCHEDULER.MILESTONES == (2, 4) and config.MODEL.PRETRAINED == "x.pth"
    assert dict(config.MODEL.KWARGS) == {"act_layer": "silu", "global_pool": "max"}
    assert dict(config.TRAIN.OPTIMIZER.KWARGS) == {"nesterov": True} and config.TRAIN.OPTIMIZER.MOMENTUM == 0.8


@pytest.mark.parametrize("words", cases_of("timm_arguments-mistakes"))
def test_timm_argument_without_equivalent_is_refused_by_name(here, words):
    for name, text in {"args": "modle: x", "1": "amp: maybe", "2": "epochs: [3]", "3": "lr_noise: [0.4, 0.9]"}.items():
        (here / f"{name}.yaml").write_text(f"{text}\n")
    rate = [] if "--lr" in words or ".yaml" in words or "'python" in words else ["--lr", ".1"]
    ended = typed("scripts/from_timm.py", "--", *shlex.split(words), *rate)
    assert ended.returncode == 2 and not ended.stdout
    assert_names(ended.stderr, *names_of("timm_arguments-mistakes", words))


def test_timm_arguments_get_flag_suggestions_and_those_on_the_page_their_settings():
    page = (ROOT / "docs" / "from-timm.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    assert len(TIMM_ARGUMENTS) == 203, "202, and train-steps-per-epoch, another name of an argument"
    known = {flag: key for group in FLAGS.values() for flag, (key, _) in group.items()}
    for name, argument in TIMM_ARGUMENTS.items():
        flag = name if name == "data" else f"--{name}"
        ours = [row[1] for row in rows if f"`{flag}`" in row[0]]
        setting = argument.setting.partition("=bce")[0].split(".")
        leaf = setting[1] if "KWARGS" in setting else setting[-1]
        assert len(ours) < 2, flag
        assert all(leaf.split("_")[-1].split("=")[-1] in each for each in ours), flag
        assert suggest_flag(f"--{name}", known), flag

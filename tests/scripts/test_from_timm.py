"""from_timm.py: what it writes for published recipes trains as timm's own objects do, and it names what differs."""

from types import SimpleNamespace

import pytest
import torch
import yaml

from configs.load import load
from configs.values import flatten
from datasets.batch_order import Order
from datasets.transforms.augment import Augmentation
from engine.train.optimizers import build_optimizer, parameter_groups
from engine.train.schedule import Schedule
from models import build_model
from scripts import from_timm
from tests.support.configs import meta_device, write
from tests.support.printed import cases_of
from tests.support.refusals import refused
from tests.support.runs import typed
from utils.errors import ConfigError

EFFICIENTNET = """--sched step --epochs 450 --decay-epochs 2.4 --decay-rate .97 --opt rmsproptf --opt-eps .001 -j 8 --warmup-lr 1e-6
--weight-decay 1e-5 --aa rand-m9-mstd0.5 --remode pixel --reprob 0.2 --amp"""
A1 = "--opt lamb --lr 5e-3 --weight-decay .01 --bce-loss --aa rand-m7-mstd0.5-inc1 --mixup .2 --cutmix 1 --warmup-lr 1e-6"
VIT = """--opt adamw --weight-decay .05 --aa rand-m9-mstd0.5-inc1 --reprob .25 --mixup .8 --cutmix 1 --warmup-lr 1e-6 --min-lr 1e-5
--drop-path .1 --lr 1e-3"""
# {model: arguments}: the first nine from timm's documentation of train.py, the others as the papers of the models have them.
RECIPES = {
    "seresnet34": "4 --sched cosine --epochs 150 --warmup-epochs 5 --lr 0.4 --reprob 0.5 --remode pixel --batch-size 256 --amp -j 4",
    "efficientnet_b2": f"2 -b 128 {EFFICIENTNET} --drop 0.3 --drop-path 0.2 --model-ema --model-ema-decay 0.9999 --lr .016",
    "mixnet_xl": f"2 -b 128 {EFFICIENTNET} --decay-rate .969 --drop 0.3 --reprob .3 --lr .016 --dist-bn reduce",
    "seresnext26t_32x4d": "2 --lr 0.1 --warmup-epochs 5 --epochs 160 --weight-decay 1e-4 --sched cosine --reprob 0.4 -b 112",
    "efficientnet_b0": f"2 -b 384 {EFFICIENTNET} --drop 0.2 --drop-path 0.2 --model-ema --model-ema-decay 0.9999 --lr .048",
    "resnet50": "2 -b 64 --sched cosine --epochs 200 --lr 0.05 --amp --reprob 0.6 --aa rand-m9-mstd0.5-inc1 --resplit --jsd",
    "efficientnet_es": f"8 -b 128 {EFFICIENTNET} --drop 0.2 --drop-path 0.2 --lr .064",
    "mobilenetv3_large_100": f"2 -b 512 {EFFICIENTNET} --epochs 600 --decay-rate .973 --drop 0.2 --lr .064",
    "resnext50_32x4d": "8 --lr 0.6 --epochs 240 --weight-decay 1e-4 --reprob 0.4 --recount 3 --aa rand-m7-mstd0.5-inc1 -b 192",
    "resnet50d": f"8 -b 256 --epochs 600 {A1} --drop-path .05 --smoothing 0 --model-kwargs zero_init_last=False",
    "deit_small_patch16_224": f"8 -b 128 --epochs 300 {VIT} --aug-repeats 3",
    "convnext_tiny": f"8 -b 128 --epochs 300 --warmup-epochs 20 --grad-accum-steps 4 {VIT} --model-ema --layer-decay .8",
    "swin_tiny_patch4_window7_224": f"8 -b 128 --epochs 300 --warmup-epochs 20 --clip-grad 5 {VIT}",
    "vit_tiny_patch16_224": f"4 -b 256 --epochs 90 --warmup-prefix --cooldown-epochs 5 --sched-on-updates {VIT}",
}
NUM_IMAGES = 53_248  # 13 updates of 4,096, as many of each smaller batch, and of timm's rounds for repeated images


def written(*words: str) -> tuple[str, str]:
    """What the script prints, and what it says beside it."""
    ended = typed("scripts/from_timm.py", "--", *words).done()
    return ended.stdout, ended.stderr


def described(model: torch.nn.Module, groups: list[dict]) -> dict[str, tuple[float, float]]:
    """{parameter: weight decay and factor of the rate}"""
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
def test_a_published_recipe_has_timms_updates_rates_groups_and_augmentation(tmp_path, name):
    import timm
    from timm.optim import create_optimizer_v2, optimizer_kwargs
    from timm.scheduler import create_scheduler_v2, scheduler_kwargs

    words = ["./distributed_train.sh", *f"{RECIPES[name]} --data-dir /imagenet --model {name}".split()]
    (tmp_path / "my.yaml").write_text(written(*words)[0])
    config = load(["-cfg", str(tmp_path / "my.yaml")]).config
    given, processes = from_timm.read_arguments(words)
    found = from_timm.Translation(given, processes).args.items()
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


# Arguments | the settings that they become | arguments that are named beside the file | flags of the command that trains
TRANSLATED = """
| DATA.DATASET=imagefolder DEVICE=auto MODEL.NUM_CLASSES=1000 TRAIN.LOSS=cross_entropy TRAIN.LR_SCHEDULER.PER_EPOCH=True | |
-b 32 --mixup .2 | DATA.BATCH_SIZE=32 TRAIN.MIXUP_GROUP=32 | |
--cutmix 1 --mixup-mode elem --bce-loss --smoothing 0 | TRAIN.MIXUP_MODE=elem TRAIN.LOSS=bce | |
--bce-loss --bce-pos-weight 2 | TRAIN.LOSS=bce TRAIN.CLASS_WEIGHTS=None | --bce-pos-weight 2 |
--reprob .1 --cutmix-minmax .2 .8 | TRAIN.CUTMIX_MINMAX=[0.2,0.8] | --reprob 0.1 |
--model-ema --model-ema-warmup | TRAIN.MODEL_EMA_WARMUP=True | --model-ema-warmup |
a --data-dir b --dataset torch/cifar10 | DATA.DATASET=torchvision/cifar10 DATA.DATA_PATH=b | |
--dataset wds/x c | DATA.DATASET=shards DATA.DATA_PATH=c | |
--dataset hfds/x | DATA.DATASET=imagefolder | --dataset hfds/x |
--input-size 3 224 192 | DATA.IMAGE_SIZE=192 DATA.IMAGE_CHANNELS=3 | --input-size 3 224 192 |
--in-chans 1 --num-classes 7 | DATA.IMAGE_CHANNELS=1 DATA.IMAGE_SIZE=224 DATA.IMAGENET_MEAN=[0.449] MODEL.NUM_CLASSES=7 | |
--input-img-mode L --img-size 96 --mean .3 | DATA.IMAGE_CHANNELS=1 DATA.IMAGE_SIZE=96 DATA.IMAGENET_MEAN=[0.3] | |
--input-img-mode CMYK | DATA.IMAGE_CHANNELS=3 | --input-img-mode CMYK |
--pretrained | MODEL.PRETRAINED=resnet50 | |
--pretrained --pretrained-path x.pth | MODEL.PRETRAINED=x.pth | |
--pretrained --initial-checkpoint y.pth | MODEL.PRETRAINED=y.pth | |
--opt momentum | TRAIN.OPTIMIZER.NAME=SGD TRAIN.OPTIMIZER.KWARGS={'nesterov':False} | |
--opt adamw --momentum .7 | TRAIN.OPTIMIZER.NAME=AdamW TRAIN.OPTIMIZER.MOMENTUM=None | |
--opt nosuch | TRAIN.OPTIMIZER.NAME=nosuch | --opt nosuch |
--sched none | TRAIN.LR_SCHEDULER.NAME=constant TRAIN.WARMUP_EPOCHS=0.0 | |
--epochs 20 --cooldown-epochs 5 | TRAIN.NUM_EPOCHS=25 | |
--sched multistep --epochs 20 --cooldown-epochs 5 --sched-on-updates | TRAIN.NUM_EPOCHS=20 TRAIN.LR_SCHEDULER.PER_EPOCH=False | --sched-on-updates |
--sched wsd --epochs 75 --warmup-epochs 15 --cooldown-epochs 5 --decay-epochs .33 | TRAIN.NUM_EPOCHS=80 TRAIN.LR_SCHEDULER.DECAY_FRACTION=0.25 | |
--sched wsd --epochs 75 --warmup-epochs 15 --warmup-prefix --sched-on-updates --decay-epochs .33 | TRAIN.NUM_EPOCHS=90 TRAIN.LR_SCHEDULER.DECAY_FRACTION=0.275 | |
--lr-base .4 --lr-base-size 512 --opt adamw | TRAIN.BASE_LR=0.2 | --lr-base 0.4 |
--lr-base .4 --lr-base-size 512 --opt adamw --lr-base-scale linear | TRAIN.BASE_LR=0.1 | --lr-base 0.4 |
torchrun --nnodes 2 --nproc-per-node=2 train.py --lr-base .4 --lr-base-size 512 | TRAIN.BASE_LR=0.4 | --lr-base 0.4, --dist-bn reduce | -ngpus 4
./distributed_train.sh 4 --data-dir b | DATA.DATA_PATH=b | --dist-bn reduce | -ngpus 4
--resume x.pth --start-epoch 3 --experiment mine | | | -resume x.pth -last_epoch 3 -name mine
--kd-model-name resnet18 --kd-token-distill-type hard | TRAIN.TEACHER_MODEL=resnet18 TRAIN.DISTILLATION_TYPE=soft TRAIN.DISTILLATION_ALPHA=0.5 | --task-loss-weight |
--kd-model-name a --kd-distill-type token --kd-token-distill-type hard --task-loss-weight .3 | TRAIN.DISTILLATION_TYPE=hard TRAIN.DISTILLATION_ALPHA=0.7 | |
--kd-model-name a --kd-distill-type feature --task-loss-weight 1 --distill-loss-weight 3 | TRAIN.DISTILLATION_ALPHA=0.75 | --kd-distill-type feature, --task-loss-weight 1 |
--torchcompile --device cuda:1 --log-wandb | COMPILE=True DEVICE=auto TRACK=['tensorboard','wandb'] | |
--torchcompile aot_eager --torchcompile-mode reduce-overhead --device cpu | COMPILE=reduce-overhead DEVICE=cpu | --torchcompile aot_eager |
--sched tanh --lr-noise .4 .9 --no-aug --bce-loss --smoothing 0 | TRAIN.LOSS=cross_entropy TRAIN.LR_SCHEDULER.NAME=cosine | --sched tanh, --lr-noise 0.4 0.9, --no-aug, --bce-loss |
--grad-accum-steps 2 --train-crop-mode rkrc --model samvit_base_patch16 | DATA.DROP_LAST=False TRAIN.ACCUM_ITER=2 DATA.TRAIN_CROP=rrc MODEL.NAME=samvit_base_patch16 | --grad-accum-steps 2, --train-crop-mode rkrc |
--recovery-interval 50 --aug-repeats 3 | SAVE_STEPS=50 TRAIN.REPEATED_AUG=3 | |
"""


@pytest.mark.parametrize("row", TRANSLATED.strip().splitlines())
def test_an_argument_becomes_the_setting_that_means_it_and_is_named_where_none_does(here, row):
    arguments, settings, named, flags = row.split("|")
    rate = [] if "--lr-base" in arguments else ["--lr", ".1"]
    translation = from_timm.Translation(*from_timm.read_arguments([*arguments.split(), *rate]))
    values = flatten(load(["-cfg", write(translation.file())]).config)
    for key, _, value in (word.partition("=") for word in settings.split()):
        assert str(values[key]).replace(" ", "") == value
    *told, command = translation.remarks
    assert {each.partition(":")[0] for each in told} == set(filter(None, named.strip().split(", ")))
    assert command.partition("my.yaml")[2].strip() == flags.strip()
    assert ("main_multi_gpu.py" in command) == ("-ngpus" in flags)


def test_an_args_yaml_means_what_its_command_line_does(tmp_path):
    words = (
        "--model resnet50 --opt sgd --momentum .8 --cutmix-minmax .2 .8 --gp max --model-kwargs act_layer=silu --amp"
    )
    typed, _ = written(*f"{words} --initial-checkpoint x.pth --decay-milestones 3 5 --sched multistep".split())
    given = {"model": "resnet50", "opt": "sgd", "momentum": 0.8, "cutmix_minmax": [0.2, 0.8], "gp": "max", "amp": True}
    given |= {"model_kwargs": {"act_layer": "silu"}, "initial_checkpoint": "x.pth", "decay_milestones": [3, 5]}
    given |= {"sched": "multistep", "lr": None, "opt_kwargs": {}, "local_rank": 0, "wandb_tags": []}
    (tmp_path / "args.yaml").write_text(yaml.safe_dump(given))
    assert written(str(tmp_path / "args.yaml"))[0] == typed
    (tmp_path / "my.yaml").write_text(typed)
    config = load(["-cfg", str(tmp_path / "my.yaml")]).config
    assert config.TRAIN.LR_SCHEDULER.MILESTONES == (2, 4) and config.MODEL.PRETRAINED == "x.pth"
    assert dict(config.MODEL.KWARGS) == {"act_layer": "silu", "global_pool": "max"}
    assert dict(config.TRAIN.OPTIMIZER.KWARGS) == {"nesterov": True} and config.TRAIN.OPTIMIZER.MOMENTUM == 0.8


@pytest.mark.parametrize("words", cases_of("mistakes/of_timms_arguments"))
def test_an_unknown_argument_or_value_is_named_with_exit_code_2(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "args.yaml").write_text("modle: x\n")
    with refused(ConfigError, page="mistakes/of_timms_arguments", case=words):
        from_timm.main(words.split())

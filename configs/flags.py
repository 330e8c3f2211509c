"""The command line: PaddleViT's flags and ours. Each flag sets one setting and overrides the settings file."""

import argparse
import re
from typing import NamedTuple

from configs.removed import REMOVED_FLAGS
from configs.values import ALL_SETTINGS, BOOLS, to_text
from configs.yaml_files import Layer
from utils.commands import page
from utils.errors import ConfigError

# {group: {flag: (setting, metavar)}}
FLAGS = {
    "data": {
        "-dataset": ("DATA.DATASET", "NAME"),
        "-data_path": ("DATA.DATA_PATH", "PATH"),
        "-image_size": ("DATA.IMAGE_SIZE", "PIXELS"),
        "-batch_size": ("DATA.BATCH_SIZE", "N|auto"),
        "-batch_size_eval": ("DATA.BATCH_SIZE_EVAL", "N"),
        "-num_workers": ("DATA.NUM_WORKERS", "N"),
    },
    "model": {
        "-num_classes": ("MODEL.NUM_CLASSES", "N"),
        "-pretrained": ("MODEL.PRETRAINED", "WEIGHTS"),
        "-resume": ("MODEL.RESUME", "CHECKPOINT"),
    },
    "training": {
        "-epochs": ("TRAIN.NUM_EPOCHS", "N"),
        "-budget": ("TRAIN.BUDGET", "TIME"),
        "-accum_iter": ("TRAIN.ACCUM_ITER", "N"),
        "-folds": ("DATA.FOLDS", "K"),
        "-last_epoch": ("TRAIN.LAST_EPOCH", "N"),
        "-seed": ("SEED", "N"),
        "-eval": ("EVAL", "false"),
        "-check": ("CHECK", "false"),
        "-check_images": ("CHECK_IMAGES", "N"),
    },
    "precision and speed": {
        "-amp": ("AMP", "false|auto"),
        "-amp_dtype": ("PRECISION.DTYPE", "TYPE"),
        "-compile": ("COMPILE", "false"),
        "-profile": ("PROFILE", "N"),
        "-device": ("DEVICE", "NAME"),
        "-ngpus": ("NGPUS", "N"),
    },
    "several machines": {
        "-dist_url": ("DIST.URL", "tcp://HOST:PORT"),
        "-world_size": ("DIST.WORLD_SIZE", "N"),
        "-rank": ("DIST.RANK", "N"),
    },
    "output": {
        "-output": ("SAVE", "FOLDER"),
        "-name": ("NAME", "TEXT"),
        "-track": ("TRACK", "NAMES"),
    },
}
_SETTING_OF = {flag: key for group in FLAGS.values() for flag, (key, _) in group.items()}
SWITCHES = {key: flag for flag, key in _SETTING_OF.items() if ALL_SETTINGS[key].kind is bool}  # their value is optional
# {flag: description of its value}, for flags that scripts often fill from shell variables. An empty value would start a
# different run.
NEVER_EMPTY = {"-resume": "a run or auto", "-pretrained": "weights", "-budget": "a time such as 8h"}
_HELP = ("-h", "--help", "-help")
_VERSION = "-version"  # handled for all programs by utils/program.py
# torch.distributed.launch passes this flag, in either spelling. It is ignored, because LOCAL_RANK has the same value.
_LOCAL_RANK = ("--local-rank", "--local_rank")

EXAMPLES = """\
examples:
  halfstep train photos
  halfstep train -cfg vit_digits -amp
  halfstep train -ngpus 4 -cfg vit_base_patch16_224 -dataset imagenet2012 -data_path /dataset/imagenet -amp
  halfstep evaluate vit_base_patch16_224.pdparams -cfg vit_base_patch16_224
  halfstep evaluate output/train-20260102-03-04-05/best.pth -data_path photos
"""


class CommandLine(NamedTuple):
    """A command line, the file given with -cfg, and the layers of the other flags."""

    arguments: list[str]  # without the program's name
    cfg: str | None
    layers: list[Layer]  # later layers override earlier ones


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        """Raise ConfigError instead of exiting, so that the caller reports this error like all others."""
        raise ConfigError(f"{message}; -h lists the flags")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line.

    All values stay text; the loader converts them like the values of a file.
    """
    parser = _Parser(
        prog="halfstep train",
        usage="%(prog)s [PHOTOS] [-cfg FILE] [flag ...]",
        description="Train or evaluate an image classifier. Flags override the settings file. PHOTOS, a folder with a "
        "folder for each\nclass, means -data_path PHOTOS; without -cfg and -pretrained, it is learned from weights "
        "that come with halfstep.\n"
        "In brackets: the setting that a flag sets, and its default.",
        epilog=f"{EXAMPLES}\nThe pages that this help names are in {page('docs')}.",
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=26),
        allow_abbrev=False,
        add_help=False,
    )
    settings = parser.add_argument_group("settings")
    settings.add_argument(*_HELP, action="help", help="Show this help and exit.")
    settings.add_argument(_VERSION, action="store_true", help="Show versions, device and processor, and exit.")
    settings.add_argument(
        "-cfg",
        metavar="FILE",
        action="append",
        help="YAML file of settings, or the name of a file in configs/ (list prints them). Without it, -resume and "
        "-pretrained use the settings in the checkpoint; weights without settings are fine-tuned "
        "(configs/finetune*.yaml for classes, numbers, BatchNorm).",
    )
    settings.add_argument(
        "-opts",
        metavar="KEY=VALUE",
        nargs="+",
        action="extend",
        default=[],
        help="Settings by full name (docs/settings.md), such as TRAIN.BASE_LR=1e-3; they override everything else.",
    )
    for title, flags in FLAGS.items():
        group = parser.add_argument_group(title)
        for flag, (key, metavar) in flags.items():
            setting = ALL_SETTINGS[key]
            # -amp without a value switches it on; -amp false overrides a file with AMP: true.
            switch = {"nargs": "?", "const": "true"} if setting.kind is bool else {}
            default = "none" if setting.default in (None, "") else to_text(setting.default)
            text = f"{setting.help} [{key}={default}]".replace("%", "%%")
            group.add_argument(flag, dest=key, metavar=metavar, help=text, **switch)
    parser.add_argument(*_LOCAL_RANK, help=argparse.SUPPRESS)
    return parser


def parse(argv: list[str]) -> CommandLine:
    """Parse the command line, given without the program's name."""
    _check_names(argv)
    known, rest = build_parser().parse_known_args(argv)
    for flag, values in NEVER_EMPTY.items():
        text = getattr(known, _SETTING_OF[flag])
        if text is not None and not text.strip():
            raise ConfigError(
                f"{flag} is empty, perhaps because a shell variable is not set; name {values}, or leave {flag} out"
            )
    switched = {getattr(known, key) for key in SWITCHES} - {*BOOLS, None}
    if rest or switched or not all("=" in option for option in known.opts):
        from configs.bare_words import with_photos

        known = with_photos(known, rest, SWITCHES)
    values = ((flag, key, getattr(known, key)) for flag, key in _SETTING_OF.items())
    layers = [Layer(f"flag {flag}", {key: text}) for flag, key, text in values if text is not None]
    files = list(dict.fromkeys(known.cfg or [None]))
    if len(files) > 1:
        raise ConfigError(f"-cfg: {' and '.join(files)} are given; give one file, which may include another with BASE")
    return CommandLine(argv, files[0], [*layers, Layer("-opts", dict(map(_pair, known.opts)))])


def _check_names(argv: list[str]) -> None:
    """Refuse unknown flags before argparse sees them: argparse would read -hflip as -h, and in Python 3.11 -out as
    -output, even without allow_abbrev."""
    flags = {"-cfg": "-cfg", "-opts": "-opts"} | _SETTING_OF
    for argument in argv:
        name = argument.partition("=")[0]
        is_flag = name.startswith("-") and not re.match(r"-\.?[0-9]", name)
        if is_flag and name in REMOVED_FLAGS:
            raise ConfigError(f"{name} was removed; {REMOVED_FLAGS[name]}")
        if is_flag and name not in (*flags, *_HELP, *_LOCAL_RANK):
            from configs.typed_names import suggest_flag

            raise ConfigError(f"unknown flag {name}{suggest_flag(name, flags)}; -h lists the flags")


def _pair(option: str) -> tuple[str, str]:
    key, equals, text = option.partition("=")
    if not equals:
        raise ConfigError(
            f"-opts: {option!r} has no =; write KEY=VALUE, as in -opts TRAIN.BASE_LR=1e-3; quote a value with spaces"
        )
    return key.strip(), text

"""What the command line and settings files may say, and what a person reads when something in them is wrong."""

import dataclasses
import itertools
import re
import runpy
import shlex
from pathlib import Path

import pytest
import yaml

from configs.flags import FLAGS
from configs.load import Loaded, load, to_yaml
from configs.removed import REMOVED
from configs.schema import IGNORED, Config
from configs.values import SETTINGS, convert, flatten, to_text
from utils.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent.parent
SHIPPED = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    """Every test works in an empty folder, so that messages name files as a person would."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(text: str, name: str = "x.yaml") -> str:
    Path(name).parent.mkdir(exist_ok=True, parents=True)
    Path(name).write_text(text, encoding="utf-8")
    return name


def load_text(text: str, *argv: str) -> Loaded:
    return load(["-cfg", write(text), *argv])


def error_of(*argv: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(list(argv))
    return str(error.value)


def error_in(text: str, *argv: str) -> str:
    return error_of("-cfg", write(text), *argv)


def error_of_setting(key: str, text: str) -> str:
    with pytest.raises(ConfigError) as error:
        convert(SETTINGS[key], text, "x.yaml")
    return str(error.value)


# Shipped files


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_file_loads_and_its_saved_form_gives_the_same_config(path):
    loaded = load(["-cfg", str(path)])
    saved = to_yaml(loaded.config, loaded.origins)
    assert load_text(saved).config == loaded.config
    assert loaded.notes == []


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_file_opens_with_accuracy_time_and_a_command_that_names_it(path):
    opening = "".join(itertools.takewhile(lambda line: line.startswith("#"), path.open(encoding="utf-8")))
    assert "Expected accuracy: " in opening and "Time: " in opening
    command = re.search(r"python (main_.*)", opening.replace("\\\n#", " ")).group(1)
    entry, *argv = shlex.split(command)
    assert entry in ("main_single_gpu.py", "main_multi_gpu.py")
    assert argv[:2] == ["-cfg", f"./configs/{path.name}"]
    load(["-cfg", str(path), *argv[2:]])


def test_the_15_vit_files_have_paddlevits_names_and_values():
    widths = {"tiny": (192, 12, 3), "small": (384, 12, 6), "base": (768, 12, 12), "large": (1024, 24, 16)}
    names = {f"vit_{size}_patch{patch}_{image}" for size in widths for patch in (16, 32) for image in (224, 384)}
    names = names - {"vit_tiny_patch32_224", "vit_tiny_patch32_384"} | {"vit_huge_patch14_224"}
    widths["huge"] = (1280, 32, 16)
    assert {path.stem for path in SHIPPED if "_patch" in path.stem} == names
    for name in names:
        size, patch, image = re.fullmatch(r"vit_(\w+)_patch(\d+)_(\d+)", name).groups()
        expected = {
            "DATA.IMAGE_SIZE": int(image),
            "DATA.CROP_PCT": {"224": 0.875, "384": 1.0}[image],
            "MODEL.TYPE": "vit",
            "MODEL.NAME": name,
            "MODEL.PATCH_SIZE": int(patch),
            **dict(zip(("MODEL.EMBED_DIM", "MODEL.DEPTH", "MODEL.NUM_HEADS"), widths[size], strict=True)),
            "MODEL.MLP_RATIO": 4.0,
            "MODEL.QKV_BIAS": True,
            "MODEL.DROPOUT": 0.1,
            "MODEL.ATTENTION_DROPOUT": 0.1,
            "TRAIN.NUM_EPOCHS": 300,
            "TRAIN.WARMUP_EPOCHS": 32,
            "TRAIN.WEIGHT_DECAY": 0.3,
            "TRAIN.BASE_LR": 3e-3,
            "TRAIN.WARMUP_START_LR": 1e-6,
            "TRAIN.END_LR": 0.0,
            "TRAIN.GRAD_CLIP": 1.0,
            "TRAIN.ACCUM_ITER": 1,
            "TRAIN.OPTIMIZER.NAME": "AdamW",
            "TRAIN.OPTIMIZER.BETAS": [0.9, 0.999],
        }
        values = flatten(load(["-cfg", str(ROOT / "configs" / f"{name}.yaml")]).config)
        assert {key: values[key] for key in expected} == expected


# The three dialects of PaddleViT

FLAT = """
MODEL:
    TYPE: vit
    PATCH_SIZE: 32
    EMBED_DIM: 64
    MLP_RATIO: 3.0
    DEPTH: 5
    NUM_HEADS: 4
    QKV_BIAS: false
"""
LATE_2021 = """
MODEL:
    TYPE: ViT
    TRANS:
        PATCH_SIZE: 32
        EMBED_DIM: 64
        MLP_RATIO: 3.0
        DEPTH: 5
        NUM_HEADS: 4
        QKV_BIAS: false
"""
MID_2021 = """
MODEL:
    TYPE: ViT
    TRANS:
        HYBRID: False
        PATCH_SIZE: 32
        HIDDEN_SIZE: 64
        MLP_DIM: 192
        NUM_LAYERS: 5
        NUM_HEADS: 4
        QKV_BIAS: false
"""


@pytest.mark.parametrize("text", [FLAT, LATE_2021, MID_2021], ids=["flat", "late 2021", "mid 2021"])
def test_each_dialect_gives_the_same_model(text):
    loaded = load_text(text)
    fields = {"PATCH_SIZE": 32, "EMBED_DIM": 64, "MLP_RATIO": 3.0, "DEPTH": 5, "NUM_HEADS": 4, "QKV_BIAS": False}
    assert loaded.config == dataclasses.replace(Config(), MODEL=dataclasses.replace(Config().MODEL, **fields))
    assert loaded.origins["MODEL.DEPTH"] == "x.yaml"
    assert loaded.notes == []


def test_mlp_width_of_the_oldest_dialect_survives_being_turned_into_a_ratio():
    for width, hidden in ((60, 123), (448, 453), (768, 3072)):
        config = load_text(f"MODEL: {{TRANS: {{HIDDEN_SIZE: {width}, MLP_DIM: {hidden}, NUM_HEADS: 1}}}}").config
        assert int(width * config.MODEL.MLP_RATIO) == hidden


def test_oldest_dialects_mistakes_are_named_as_written():
    assert error_in("MODEL: {TRANS: {MLP_DIM: 192}}") == (
        "x.yaml: MODEL.TRANS.MLP_DIM says nothing without MODEL.TRANS.HIDDEN_SIZE; give both or MLP_RATIO"
    )
    assert error_in("MODEL: {TRANS: {MLP_DIM: wide, HIDDEN_SIZE: 64}}") == (
        "x.yaml: MODEL.TRANS.MLP_DIM is 'wide'; it must be a whole number from 1 to 100,000"
    )
    assert error_in("MODEL: {TRANS: {DEPHT: 5}}") == (
        "x.yaml: unknown key MODEL.TRANS.DEPHT; did you mean MODEL.TRANS.DEPTH?"
    )
    assert error_in("MODEL: {DEPTH: 4, TRANS: {NUM_LAYERS: 5}}") == (
        "x.yaml: MODEL.DEPTH and MODEL.TRANS.NUM_LAYERS are two names of one setting; keep one of them"
    )


def test_hybrid_is_refused_with_timms_name_for_it():
    message = error_in("MODEL: {TRANS: {HYBRID: True, PATCH_SIZE: 32}}")
    assert message.startswith("x.yaml: MODEL.TRANS.HYBRID is 'True'; for a convolutional stem")
    assert "set MODEL.TYPE: timm and MODEL.NAME to one of timm's hybrids, for example vit_base_r50_s16_224" in message


def test_another_kind_of_model_is_referred_to_timm_before_its_keys_are_called_unknown():
    text = "MODEL:\n    DEPTHS: [2, 2, 18, 2]\n    TYPE: swin\n    NAME: {}\n"
    assert error_in(text.format("swin_base_patch4_window7_224")) == (
        "x.yaml: MODEL.TYPE is 'swin'; it must be vit or timm. For other models set MODEL.TYPE: timm and MODEL.NAME: "
        "swin_base_patch4_window7_224, and remove MODEL's keys that describe layers"
    )
    assert "nearest are swin_base_patch4_window12_384" in error_in(text.format("swin_base_patch4_window12_384_21k_1k"))


def test_keys_without_effect_are_accepted_with_one_line_each():
    loaded = load_text("LOCAL_RANK: 0\nTRAIN: {LAYER_DECAY: 0.8, TEACHER_MODEL: None, BASE_LR: 1e-3}")
    assert loaded.notes == [
        "x.yaml: LOCAL_RANK is ignored: the launcher says which process this is",
        "x.yaml: TRAIN.LAYER_DECAY is ignored: not part of this version, so it has no effect",
        "x.yaml: TRAIN.TEACHER_MODEL is ignored: not part of this version, so it has no effect",
    ]
    assert loaded.config.TRAIN.BASE_LR == 1e-3


def test_no_key_is_both_a_setting_and_without_effect():
    assert not (set(IGNORED) | set(REMOVED)) & set(SETTINGS)


@pytest.mark.parametrize("key", REMOVED)
def test_a_removed_setting_loads_with_its_former_default_alone(key):
    removed = REMOVED[key]
    *sections, name = key.split(".")
    text = "".join(f"{section}: {{" for section in sections) + f"{name}: VALUE" + "}" * len(sections)
    loaded = load_text(text.replace("VALUE", removed.accepted))
    assert loaded.config == load_text("").config and key not in to_yaml(loaded.config, loaded.origins)
    error = error_of("-cfg", write(text.replace("VALUE", "other")))
    assert key in error and "'other'" in error and removed.remedy in error


def test_paddlevits_other_words_for_values_are_understood_and_named():
    loaded = load_text("NGPUS: -1\nTRAIN: {GRAD_CLIP: 0, LR_SCHEDULER: {NAME: warmupcosine, MILESTONES: '30, 60, 90'}}")
    assert loaded.config.NGPUS is None
    assert loaded.config.TRAIN.GRAD_CLIP is None
    assert loaded.config.TRAIN.LR_SCHEDULER.NAME == "cosine"
    assert loaded.config.TRAIN.LR_SCHEDULER.MILESTONES == (30, 60, 90)
    assert "x.yaml: NGPUS -1 is read as None: one process per visible device" in loaded.notes
    assert sum(" is read as " in note for note in loaded.notes) == 3


# Which value wins


def test_later_sources_win_and_each_value_says_where_it_came_from():
    write("TRAIN: {NUM_EPOCHS: 1, BASE_LR: 0.1, END_LR: 0.1, WEIGHT_DECAY: 0.1, ACCUM_ITER: 1}", "base.yaml")
    text = "BASE: base.yaml\nTRAIN: {NUM_EPOCHS: 2, BASE_LR: 0.2, END_LR: 0.2, ACCUM_ITER: 2}"
    loaded = load_text(text, "-epochs", "3", "-accum_iter", "3", "-opts", "TRAIN.NUM_EPOCHS=4", "TRAIN.BASE_LR=0.4")
    expected = {
        "TRAIN.SMOOTHING": (0.0, "default"),
        "TRAIN.WEIGHT_DECAY": (0.1, "base.yaml"),
        "TRAIN.END_LR": (0.2, "x.yaml"),
        "TRAIN.ACCUM_ITER": (3, "flag -accum_iter"),
        "TRAIN.BASE_LR": (0.4, "-opts"),
        "TRAIN.NUM_EPOCHS": (4, "-opts"),
    }
    values = flatten(loaded.config)
    assert {key: (values[key], loaded.origins[key]) for key in expected} == expected


def test_the_batch_size_flag_leaves_a_given_evaluation_batch_size_alone():
    config = load_text("DATA: {BATCH_SIZE: 8, BATCH_SIZE_EVAL: 16}", "-batch_size", "4").config
    assert (config.DATA.BATCH_SIZE, config.DATA.BATCH_SIZE_EVAL) == (4, 16)


@pytest.mark.parametrize(
    "text", ["", "BASE: ''", "BASE: ['']", "BASE:", "# nothing", "TRAIN:", "TRAIN: null", "DATA: {}"]
)
def test_a_file_that_sets_nothing_gives_the_defaults(text):
    assert load_text(text).config == Config()


def test_bases_are_read_depth_first_from_the_including_files_folder_and_own_keys_win():
    write("SEED: 1\nTAG: a\nSAVE: one\nSAVE_FREQ: 1\n", "shared/one.yaml")
    write("BASE: one.yaml\nSEED: 2\nTAG: b\nSAVE: two\n", "shared/two.yaml")
    write("SEED: 3\nTAG: c\n", "three.yaml")
    loaded = load_text("BASE: [shared/two.yaml, '', three.yaml]\nSEED: 4\n")
    config = loaded.config
    assert (config.SEED, config.TAG, config.SAVE, config.SAVE_FREQ) == (4, "c", "two", 1)
    assert loaded.origins["SAVE_FREQ"] == "shared/one.yaml"


def test_a_base_loop_names_the_loop():
    write("BASE: b.yaml", "a.yaml")
    write("BASE: [./a.yaml]", "b.yaml")
    loop = "a.yaml: BASE goes round in a circle: a.yaml -> b.yaml -> a.yaml; remove one of these BASE lines"
    assert error_of("-cfg", "a.yaml") == loop
    assert error_in("BASE: a.yaml") == loop  # x.yaml leads to the loop and is no part of it
    assert "BASE goes round in a circle: y.yaml -> y.yaml" in error_of("-cfg", write("BASE: y.yaml", "y.yaml"))


def test_a_file_may_be_the_base_of_two_others():
    write("SEED: 1", "root.yaml")
    write("BASE: root.yaml", "left.yaml")
    write("BASE: root.yaml", "right.yaml")
    assert load_text("BASE: [left.yaml, right.yaml]").config.SEED == 1


def test_a_missing_base_names_the_path_and_the_nearest_file():
    write("", "shared/recipe.yaml")
    assert error_in("BASE: shared/recipes.yaml") == (
        "x.yaml: BASE names shared/recipes.yaml, but there is no file shared/recipes.yaml (a BASE is looked up from the "
        "folder of the file that names it); did you mean shared/recipe.yaml?"
    )


def test_base_must_be_paths():
    assert error_in("BASE: [[a.yaml]]") == "x.yaml: BASE must be the path of a file, or a list of them"
    assert error_in("", "-opts", "BASE=y.yaml") == "-opts: BASE is read from files only; name another file with -cfg"


# Text becomes values: PyYAML's traps one by one


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("TRAIN.BASE_LR", "3e-3", 3e-3),
        ("TRAIN.BASE_LR", "1E-4", 1e-4),
        ("TRAIN.BASE_LR", "1", 1.0),
        ("TRAIN.BASE_LR", ".5", 0.5),
        ("TRAIN.OPTIMIZER.BETAS", "(0.9, 0.95)", (0.9, 0.95)),
        ("TRAIN.OPTIMIZER.BETAS", "[0.9, 0.95]", (0.9, 0.95)),
        ("TRAIN.OPTIMIZER.BETAS", "0.9, 0.95", (0.9, 0.95)),
        ("TRAIN.LR_SCHEDULER.MILESTONES", "(30,)", (30,)),
        ("TRAIN.LR_SCHEDULER.MILESTONES", "()", ()),
        ("TRAIN.LR_SCHEDULER.MILESTONES", "None", ()),
        ("TRAIN.GRAD_CLIP", "None", None),
        ("TRAIN.GRAD_CLIP", "null", None),
        ("TRAIN.GRAD_CLIP", "~", None),
        ("TRAIN.GRAD_CLIP", "", None),
        ("DATA.IMAGE_SIZE", "0100", 100),
        ("AMP", "on", True),
        ("AMP", "Yes", True),
        ("AMP", "FALSE", False),
        ("TAG", "no", "no"),
        ("TAG", "1e3", "1e3"),
        ("TAG", "null", ""),
        ("DATA.CACHE", "none", "none"),
        ("DATA.CACHE", "null", "none"),
        ("SAVE", "2024-01-01", "2024-01-01"),
        ("TRAIN.OPTIMIZER.NAME", "adamw", "AdamW"),
        ("PRECISION.DTYPE", "bf16", "bfloat16"),
        ("MODEL.FREEZE", "['*', '!fc.*']", ("*", "!fc.*")),
        ("MODEL.FREEZE", "blocks.[0-3].*", ("blocks.[0-3].*",)),
    ],
)
def test_text_is_converted_by_the_schemas_type_in_files_and_in_opts(key, text, value):
    *sections, name = key.split(".")
    lines = [f"{'  ' * depth}{section}:" for depth, section in enumerate(sections)]
    in_file = load_text("\n".join([*lines, f"{'  ' * len(sections)}{name}: {text}"])).config
    in_opts = load_text("", "-opts", f"{key}={text}").config
    for config in (in_file, in_opts):
        found = config
        for part in key.split("."):
            found = getattr(found, part)
        assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("key", "text", "rest"),
    [
        ("DATA.BATCH_SIZE", "abc", "a whole number from 1 to 1,000,000, or auto"),
        ("DATA.BATCH_SIZE", "0", "a whole number from 1 to 1,000,000, or auto"),
        ("DATA.BATCH_SIZE", "12:30", "a whole number from 1 to 1,000,000, or auto"),
        ("DATA.BATCH_SIZE", "1e3", "a whole number from 1 to 1,000,000, or auto"),
        ("DATA.BATCH_SIZE", "64.0", "a whole number from 1 to 1,000,000, or auto"),
        ("DATA.BATCH_SIZE", "true", "a whole number from 1 to 1,000,000, or auto"),
        ("DATA.BATCH_SIZE", "None", "a whole number from 1 to 1,000,000, or auto"),
        ("DATA.BATCH_SIZE", "1_000", "a whole number from 1 to 1,000,000, or auto"),
        ("DATA.BATCH_SIZE", "aut", "a whole number from 1 to 1,000,000, or auto; did you mean auto?"),
        ("DATA.BATCH_SIZE_EVAL", "auto", "a whole number from 1 to 1,000,000, or None"),
        ("TRAIN.ACCUM_ITER", "auto", "a whole number from 1 to 1,000,000"),
        ("DATA.BATCH_SIZE_EVAL", "-1", "a whole number from 1 to 1,000,000, or None"),
        ("TRAIN.BASE_LR", "nan", "a number from 0 to 1,000"),
        ("TRAIN.BASE_LR", ".inf", "a number from 0 to 1,000"),
        ("TRAIN.BASE_LR", "1e999", "a number from 0 to 1,000"),
        ("TRAIN.BASE_LR", "yes", "a number from 0 to 1,000"),
        ("TRAIN.BASE_LR", "3e-3x", "a number from 0 to 1,000"),
        ("DATA.CROP_PCT", "87.5", "a number from 0.01 to 1"),
        ("AMP", "1", "true or false"),
        ("AMP", "fp16", "true or false"),
        ("TRAIN.OPTIMIZER.BETAS", "(0.9, 1.5)", "a list of numbers from 0 to 0.999999"),
        ("TRAIN.OPTIMIZER.BETAS", "0.9 0.95", "a list of numbers from 0 to 0.999999"),
        ("TRAIN.LR_SCHEDULER.MILESTONES", "3, x", "a list of whole numbers from 1 to 1,000,000"),
        ("DATA.IMAGE_CHANNELS", "4", "1 or 3"),
        ("TRAIN.OPTIMIZER.NAME", "adamx", "AdamW, Adam or SGD; did you mean Adam or AdamW?"),
        ("PRECISION.DTYPE", "float15", "float16, bfloat16, auto or None; did you mean float16 or bfloat16?"),
    ],
)
def test_a_wrong_value_is_named_with_what_it_must_be(key, text, rest):
    assert error_of_setting(key, text) == f"x.yaml: {key} is {text!r}; it must be {rest}"


def test_a_list_where_one_value_belongs_is_an_error():
    assert error_in("DATA: {BATCH_SIZE: [32, 64]}") == (
        "x.yaml: DATA.BATCH_SIZE is [32, 64]; it must be a whole number from 1 to 1,000,000, or auto"
    )
    assert error_in("TAG: [a, b]") == "x.yaml: TAG is [a, b]; it must be text"
    assert error_in("TRAIN: {OPTIMIZER: {BETAS: [[0.9, 0.99]]}}") == (
        "x.yaml: TRAIN.OPTIMIZER.BETAS is [[0.9, 0.99]]; it must be a list of numbers from 0 to 0.999999"
    )


# Files that are not what they should be


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("TRAIN: {BASE_LRR: 1}", "unknown key TRAIN.BASE_LRR; did you mean TRAIN.BASE_LR?"),
        ("TRIAN:\n  BASE_LR: 1", "unknown key TRIAN.BASE_LR; did you mean TRAIN.BASE_LR?"),
        ("BASE_LR: 1", "unknown key BASE_LR; did you mean TRAIN.BASE_LR?"),
        ("train:\n  eps: 1", "unknown key train.eps; did you mean TRAIN.OPTIMIZER.EPS?"),
        ("TRAIN: {MIXUP_ALPHAS: 1}", "unknown key TRAIN.MIXUP_ALPHAS; did you mean TRAIN.MIXUP_ALPHA?"),
        ("QQQ: 1", "unknown key QQQ; docs/settings.md lists them"),
        (
            "TRAIN: 5",
            "TRAIN is '5', but it is a section: it has no value, only settings in it, such as TRAIN.NUM_EPOCHS",
        ),
        (
            "DATA: {BATCH_SIZE: {TRAIN: 5}}",
            "DATA.BATCH_SIZE is a section here, with DATA.BATCH_SIZE.TRAIN in it; it must be a whole number from 1 to 1,000,000, or auto",
        ),
        ("SEED: 1\nTAG: a\nSEED: 2", "SEED is there twice, in lines 1 and 3; make it one"),
        ("TRAIN:\n  END_LR: 1\nSEED: 1\nTRAIN:\n  BASE_LR: 1", "TRAIN is there twice, in lines 1 and 4; make it one"),
        (
            "TRAIN:\n  OPTIMIZER:\n    EPS: 1\n    EPS: 1",
            "TRAIN.OPTIMIZER.EPS is there twice, in lines 3 and 4; make it one",
        ),
        ("SEED: 1\nTAG: 'a", "line 2 is not valid YAML: found unexpected end of stream"),
        ("SEED: 1\n  TAG: a", "line 2 is not valid YAML: mapping values are not allowed here"),
        (
            "TRAIN:\n\tEND_LR: 1",
            "line 2 is not valid YAML: found character '\\t' that cannot start any token; indent with spaces, not tabs",
        ),
        ("SEED: 1\nTAG: \x07", "line 2 is not valid YAML: special characters are not allowed"),
        ("SEED: 1\n---\nSEED: 2", "line 2 is not valid YAML: but found another document"),
        ("hello", "not a file of settings; it must consist of lines like `TRAIN:` and `NUM_EPOCHS: 5`"),
        ("- SEED: 1", "not a file of settings; it must consist of lines like `TRAIN:` and `NUM_EPOCHS: 5`"),
        ("SEED: 1\n[a, b]: 1", "line 2: a list or section stands where the name of a setting belongs"),
        ("A: &a {}\nTRAIN:\n  <<: *a", "line 3: the merge key << is not read; name a file of settings under BASE"),
        (
            "MODEL:\n  FREEZE:\n    - a: 1",
            "line 3: MODEL.FREEZE is a list of sections; it must be a value or a list of values",
        ),
    ],
)
def test_a_broken_file_is_named_with_the_place_and_the_remedy(text, message):
    assert error_in(text) == f"x.yaml: {message}"


def test_a_file_of_another_kind_is_refused():
    Path("weights.pth").write_bytes(b"PK\x03\x04\xff\xfe")
    assert error_of("-cfg", "weights.pth") == (
        "weights.pth: not a text file in UTF-8 (byte 4); settings are YAML text, and weights are given with -pretrained "
        "or -resume"
    )
    Path("folder").mkdir()
    assert error_of("-cfg", "folder") == "folder: cannot be read as a settings file: it is a folder"


def test_a_byte_order_mark_windows_line_ends_and_python_tags_do_no_harm():
    Path("x.yaml").write_bytes("\ufeffSEED: 7\r\nTAG: !!python/object:os.system ä\r\n".encode())
    config = load(["-cfg", "x.yaml"]).config
    assert (config.SEED, config.TAG) == (7, "ä")


# Facts about several settings


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "MODEL: {EMBED_DIM: 100, NUM_HEADS: 3}",
            "MODEL.EMBED_DIM, 100 (x.yaml), must be a multiple of MODEL.NUM_HEADS, 3 (x.yaml); change one of them or set "
            "MODEL.ATTN_HEAD_SIZE",
        ),
        (
            "DATA: {IMAGE_SIZE: 8}",
            "MODEL.PATCH_SIZE, 16 (default), must not be larger than DATA.IMAGE_SIZE, 8 (x.yaml)",
        ),
        (
            "DATA: {CROP_SCALE: [1.0, 0.5]}",
            "DATA.CROP_SCALE, [1.0, 0.5] (x.yaml), must be two numbers, least and most, such as [0.08, 1.0]",
        ),
        (
            "DATA: {CROP_RATIO: 1}",
            "DATA.CROP_RATIO, [1.0] (x.yaml), must be two numbers, least and most, such as [0.08, 1.0]",
        ),
        (
            "TRAIN: {OPTIMIZER: {BETAS: [0.9]}}",
            "TRAIN.OPTIMIZER.BETAS, [0.9] (x.yaml), must be two numbers, such as [0.9, 0.999]",
        ),
        (
            "DATA: {IMAGENET_STD: 0.3}",
            "DATA.IMAGENET_STD, [0.3] (x.yaml), must have one number for each channel: DATA.IMAGE_CHANNELS, 3 (default)",
        ),
        (
            "DATA: {IMAGE_CHANNELS: 1, IMAGENET_MEAN: [0.1, 0.2, 0.3]}",
            "DATA.IMAGENET_MEAN, [0.1, 0.2, 0.3] (x.yaml), must have one number for each channel: DATA.IMAGE_CHANNELS, 1 "
            "(x.yaml)",
        ),
    ],
)
def test_settings_that_do_not_fit_together_are_named_with_their_sources(text, message):
    assert error_in(text) == message


def test_what_only_a_vit_needs_is_not_asked_of_timms_models():
    assert load_text("DATA: {IMAGE_SIZE: 8}\nMODEL: {TYPE: timm, EMBED_DIM: 100}").config.DATA.IMAGE_SIZE == 8


def test_a_head_size_frees_the_width_from_the_number_of_heads():
    assert load_text("MODEL: {EMBED_DIM: 100, NUM_HEADS: 3, ATTN_HEAD_SIZE: 32}").config.MODEL.NUM_HEADS == 3


def test_grey_images_take_one_entry_of_the_default_mean_and_deviation():
    config = load_text("DATA: {IMAGE_CHANNELS: 1, IMAGENET_STD: 0.3}").config
    assert (config.DATA.IMAGENET_MEAN, config.DATA.IMAGENET_STD) == ((0.5,), (0.3,))


# Flags

EXAMPLE_VALUES = {
    "DATA.IMAGE_SIZE": "32",
    "PRECISION.DTYPE": "float16",
    "EVAL": "true",
    "CHECK": "true",
    "AMP": "true",
    "PRECISION.EXPLAIN": "true",
    "COMPILE": "true",
}


@pytest.mark.parametrize(("flag", "key"), [(flag, key) for group in FLAGS.values() for flag, (key, _) in group.items()])
def test_every_flag_sets_its_setting_with_a_blank_or_an_equals_sign(flag, key):
    text = EXAMPLE_VALUES.get(key, "7")
    for argv in ([flag, text], [f"{flag}={text}"]):
        loaded = load_text("", *argv)
        changed = {name for name, origin in loaded.origins.items() if origin != "default"}
        assert changed == {key} and loaded.origins[key] == f"flag {flag}"
        assert str(flatten(loaded.config)[key]).lower() == text


def test_the_flags_are_paddlevits_and_ours():
    paddlevits = """-dataset -data_path -output -batch_size -batch_size_eval -image_size -accum_iter -num_classes -ngpus
                    -pretrained -resume -last_epoch -eval -amp"""
    ours = """-amp_dtype -check -explain_precision -epochs -seed -num_workers -compile -profile -tag
              -dist_url -world_size -rank"""
    assert {flag for group in FLAGS.values() for flag in group} == set(f"{paddlevits} {ours}".split())


def test_a_command_out_of_paddlevits_history_is_understood():
    write("", "configs/vit.yaml")
    command = """-cfg='./configs/vit.yaml' -dataset='imagenet2012' -batch_size=32 -data_path='/dataset/imagenet' -ngpus=8
                 -eval -pretrained='./vit_base_patch16_224' -amp --local-rank=0"""
    config = load(shlex.split(command)).config
    assert (config.EVAL, config.AMP, config.DATA.BATCH_SIZE, config.NGPUS) == (True, True, 32, 8)
    assert (config.DATA.DATA_PATH, config.MODEL.PRETRAINED) == ("/dataset/imagenet", "./vit_base_patch16_224")
    assert config.MODEL.NUM_CLASSES is None


@pytest.mark.parametrize(
    "spelling", [["--local-rank=3"], ["--local_rank=3"], ["--local-rank", "3"], ["--local_rank", "3"]]
)
def test_a_launchers_local_rank_is_accepted_and_changes_nothing(spelling):
    assert load_text("", *spelling).config == Config()


def test_flags_override_when_they_were_given_not_when_they_are_truthy():
    text = "AMP: true\nTAG: a\nMODEL: {PRETRAINED: x.pth}\nTRAIN: {LAST_EPOCH: 5}\nDATA: {NUM_WORKERS: 4}"
    argv = ["-last_epoch", "0", "-num_workers=0", "-pretrained", "", "-tag=", "-amp", "false"]
    config = load_text(text, *argv).config
    assert (config.TRAIN.LAST_EPOCH, config.DATA.NUM_WORKERS) == (0, 0)
    assert (config.MODEL.PRETRAINED, config.TAG, config.AMP) == (None, "", False)


def test_a_switch_alone_switches_on_whatever_follows():
    config = load_text("", "-eval", "-compile", "-amp", "-batch_size", "8").config
    assert (config.EVAL, config.COMPILE, config.AMP, config.DATA.BATCH_SIZE) == (True, True, True, 8)


def test_opts_may_come_several_times_and_anywhere():
    argv = ["-opts", "TRAIN.BASE_LR=0.1", "TAG=a=b", "-amp", "-opts", "MODEL.FREEZE=[*, !fc.*]", "SEED=5"]
    config = load_text("", *argv).config
    assert (config.TRAIN.BASE_LR, config.TAG, config.SEED, config.AMP) == (0.1, "a=b", 5, True)
    assert config.MODEL.FREEZE == ("*", "!fc.*")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (f"-seed {2**63}", f"flag -seed: SEED is '{2**63}'; it must be below 2**63"),
        (
            "-batch_size 0",
            "flag -batch_size: DATA.BATCH_SIZE is '0'; it must be a whole number from 1 to 1,000,000, or auto",
        ),
        (
            "-batch_size=abc",
            "flag -batch_size: DATA.BATCH_SIZE is 'abc'; it must be a whole number from 1 to 1,000,000, or auto",
        ),
        ("-last_epoch -1", "flag -last_epoch: TRAIN.LAST_EPOCH is '-1'; it must be a whole number from 0 to 1,000,000"),
        ("-amp maybe", "flag -amp: AMP is 'maybe'; it must be true or false"),
        ("-batch_size", "argument -batch_size: expected one argument; -h lists the flags"),
        ("-bach_size 8", "unknown flag -bach_size; did you mean -batch_size?; -h lists the flags"),
        ("--batch-size=8", "unknown flag --batch-size; did you mean -batch_size?; -h lists the flags"),
        ("-out=here", "unknown flag -out; did you mean -output?; -h lists the flags"),
        ("-workers 2", "unknown flag -workers; did you mean -num_workers?; -h lists the flags"),
        ("-hflip 0", "unknown flag -hflip; -h lists the flags"),
        ("-c=x.yaml", "unknown flag -c; did you mean -cfg?; -h lists the flags"),
        ("-seed 1 y.yaml", "'y.yaml' on the command line belongs to no flag; settings files are given as -cfg y.yaml"),
        ("-opts SEED 1", "-opts: 'SEED' has no =; write KEY=VALUE, as in -opts TRAIN.BASE_LR=1e-3; quote"),
        ("-opts SEED=x", "-opts: SEED is 'x'; it must be a whole number of at least 0"),
        ("-opts TRAIN.LR=1", "-opts: unknown key TRAIN.LR; did you mean TRAIN."),
        ("-opts TRAIN=1", "-opts: TRAIN is '1', but it is a section"),
        ("-opts MODEL.TRANS.DEPTH=0", "-opts: MODEL.DEPTH is '0'; it must be a whole number from 1 to 1,000"),
    ],
)
def test_a_mistake_on_the_command_line_is_named_with_the_remedy(argv, message):
    assert error_in("", *shlex.split(argv)).startswith(message)


def test_without_cfg_the_shipped_files_are_offered():
    for argv in ([], ["-cfg", ""], ["-amp"]):
        message = error_of(*argv)
        assert message.startswith("-cfg is missing; it names the file of settings")
        assert f"  {ROOT / 'configs' / 'vit_digits.yaml'}\n" in message + "\n"


def test_a_cfg_that_is_not_there_brings_the_nearest_names(monkeypatch):
    write("", "mine/flowers.yaml")
    assert error_of("-cfg", "mine/flower.yaml") == "-cfg: no file mine/flower.yaml; did you mean mine/flowers.yaml?"
    assert error_of("-cfg", "qqqqqqqq") == "-cfg: no file qqqqqqqq"
    monkeypatch.chdir(ROOT)
    assert error_of("-cfg", "vit_digit.yaml") == "-cfg: no file vit_digit.yaml; did you mean configs/vit_digits.yaml?"


def test_a_cfg_of_the_repository_is_not_guessed_from_another_folder():
    assert error_of("-cfg", "./configs/vit_digits.yaml") == (
        f"-cfg: no file ./configs/vit_digits.yaml in the working directory {Path.cwd()}; if you mean halfstep's, give its "
        f"whole path, {ROOT / 'configs' / 'vit_digits.yaml'}"
    )


@pytest.mark.parametrize("flag", ["-h", "--help", "-help"])
def test_help_shows_each_flag_with_its_setting_and_default_and_three_commands(flag, capsys):
    with pytest.raises(SystemExit) as ending:
        load([flag])
    assert ending.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for group in FLAGS.values():
        for name, (key, _) in group.items():
            default = SETTINGS[key].default
            assert f" {name} " in text
            assert f"[{key}={'none' if default in (None, '') else to_text(default)}]" in text
    assert "local" not in text
    assert text.partition("examples:")[2].count("python main_") == 3


# The result


def test_the_config_cannot_be_written_to():
    config = load_text("").config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.SEED = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.TRAIN.OPTIMIZER.EPS = 1.0


AWKWARD = "null, 'it''s' \"#1\": [a] {b} & *c !d %e @f\\n 日本 \U0001f600 \t\x85é"


@pytest.mark.parametrize("text", [AWKWARD, "true", "123", "-", "a: b", " spaces ", "line\nbreak", "x" * 200])
def test_any_text_survives_being_saved(text):
    loaded = load_text("", f"-tag={text}", f"-data_path={text}")
    assert flatten(loaded.config)["TAG"] == text
    assert load_text(to_yaml(loaded.config, loaded.origins)).config == loaded.config


def test_every_saved_value_has_its_origin_and_the_type_that_other_readers_take_it_for():
    loaded = load_text(
        "TRAIN: {BASE_LR: 1e-6}\nMODEL: {FREEZE: ['*', '!fc.*']}", "-seed", "3", "-tag", "true", "-opts", "AMP=true"
    )
    saved = to_yaml(loaded.config, loaded.origins)
    origin = dict(re.findall(r"^ *(BASE_LR|FREEZE|SEED|AMP|DEPTH): .*  # (.*)$", saved, re.MULTILINE))
    assert origin == {
        "BASE_LR": "x.yaml",
        "FREEZE": "x.yaml",
        "SEED": "flag -seed",
        "AMP": "-opts",
        "DEPTH": "default",
    }
    assert len(re.findall("  # ", saved)) == len(SETTINGS)
    plain = yaml.safe_load(saved)
    for key, value in flatten(loaded.config).items():
        found = plain
        for part in key.split("."):
            found = found[part]
        assert found == value


def test_the_settings_page_is_what_its_script_makes():
    page = runpy.run_path(str(ROOT / "scripts" / "make_settings_page.py"))["page"]()
    assert (ROOT / "docs" / "settings.md").read_text(encoding="utf-8") == page
    assert all(f"| `{key.rpartition('.')[2]}` |" in page for key in SETTINGS)

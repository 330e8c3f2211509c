"""The precedence of values, settings that must be set together, and the resulting config."""

import pytest

from configs.auto import without_auto
from configs.flags import parse
from configs.load import load, resolve, to_yaml
from configs.values import SETTINGS, flatten
from configs.yaml_files import Layer, read_layers
from models import build_model
from tests.support.cases import cases_of, names_of
from tests.support.configs import ema, load_text, write, yaml_of
from tests.support.refusals import assert_names, refused
from utils.errors import ConfigError

pytestmark = pytest.mark.usefixtures("here")


def test_setting_takes_value_and_origin_of_its_last_source():
    write("TRAIN: {NUM_EPOCHS: 1, BASE_LR: 0.1, END_LR: 0.1, WEIGHT_DECAY: 0.1, ACCUM_ITER: 1}", "base.yaml")
    text = "BASE: base.yaml\nTRAIN: {NUM_EPOCHS: 2, BASE_LR: 0.2, END_LR: 0.2, ACCUM_ITER: 2}"
    loaded = load_text(text, "-accum_iter", "3", "-opts", "TRAIN.NUM_EPOCHS=4", "TRAIN.BASE_LR=0.4")
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


@pytest.mark.parametrize(
    ("name", "word", "expected"), [("step", "", False), ("step", "true", True), ("cosine", "", True)]
)
def test_after_warmup_defaults_to_false_for_step_schedule(name, word, expected):
    words = [f"TRAIN.LR_SCHEDULER.NAME={name}", *([f"TRAIN.LR_SCHEDULER.AFTER_WARMUP={word}"] if word else [])]
    assert load(["-opts", *words], needs_file=False).config.TRAIN.LR_SCHEDULER.AFTER_WARMUP is expected


TOGETHER = """
-eval -opts DATA.BATCH_SIZE=7 TRAIN.CUTMIX_ALPHA=1
-eval -dataset csv -opts DATA.LABEL_SEPARATOR=; TRAIN.DISTILLATION_TYPE=soft TRAIN.TEACHER_MODEL=none
-amp -opts PRECISION.MIN_LOSS_SCALING=8 PRECISION.INIT_LOSS_SCALING=8 PRECISION.MAX_LOSS_SCALING=8
-compile max-autotune-no-cudagraphs -accum_iter 2
-opts TRAIN.CLIP_MODE=agc DIST.STRATEGY=fsdp2
-compile reduce-overhead -image_size 16 -opts MODEL.PATCH_SIZE=16 MODEL.FREEZE=[*,!head]
-dataset csv -data_path photos -opts DATA.COLUMNS=[a,b] DATA.SAMPLER=balanced RESUME.ALLOW_CHANGED=[TRAIN.BASE_LR,SPLIT]
-dataset shards -data_path s3://bucket/photos -opts MODEL.TYPE=timm MODEL.NAME=resnet18 RESUME.ALLOW_CHANGED=[IMAGES]
"""


@pytest.mark.parametrize("words", TOGETHER.strip().splitlines())
def test_seemingly_contradictory_settings_are_accepted(words):
    assert load_text("", *words.split()).config


@pytest.mark.parametrize(
    ("text", "size", "amp", "num_notes"),
    [("auto}\nAMP: auto", None, False, 2), ("7}\nAMP: true", 7, True, 0), ("7}\nAMP: Auto", 7, False, 1)],
)
def test_programs_that_do_not_train_use_defaults_for_auto(text, size, amp, num_notes):
    loaded = without_auto(load_text(f"DATA: {{BATCH_SIZE: {text}"))
    assert loaded.config.DATA.BATCH_SIZE == (size or SETTINGS["DATA.BATCH_SIZE"].default)
    assert loaded.config.AMP is amp and len(loaded.notes) == num_notes
    assert "x.yaml" in loaded.origins["DATA.BATCH_SIZE"] and "x.yaml" in loaded.origins["AMP"]


@pytest.mark.parametrize("text", cases_of("mistakes-without_effect"))
def test_settings_without_effect_are_noted_in_one_line(text):
    (note,) = load_text(text).notes
    assert_names(note, *names_of("mistakes-without_effect", text))


@pytest.mark.parametrize("words", cases_of("mistakes-of_another_schedule"))
def test_setting_of_another_schedule_is_refused(words):
    with refused(ConfigError, *names_of("mistakes-of_another_schedule", words)):
        load_text("", "-opts", *(f"TRAIN.LR_SCHEDULER.{word}" for word in words.split()))


def test_settings_with_effect_load_and_reload_without_notes():
    options = f"AMP=true PRECISION.RESIDUAL=half DATA.CACHE=9 {' '.join(ema(0.9))}"
    options += " TRAIN.CUTMIX_MINMAX=0.2,0.8 TRAIN.MIXUP_MODE=elem TRAIN.LR_SCHEDULER.NAME=wsd"
    loaded = load_text("", "-opts", *options.split(), "TRAIN.LR_SCHEDULER.DECAY_FRACTION=0.5")
    again = load_text(to_yaml(loaded.config, loaded.origins))
    assert (loaded.notes, again.notes, again.config) == ([], [], loaded.config)


def test_timm_model_on_command_line_drops_vit_fields():
    text = "MODEL: {TYPE: vit, NAME: resnet18, EMBED_DIM: 64, DEPTH: 4, DROPOUT: 0.2}"
    loaded = load_text(text, "-opts", "MODEL.TYPE=timm")
    assert (loaded.config.MODEL.EMBED_DIM, loaded.config.MODEL.DEPTH) == (768, 12)
    (note,) = loaded.notes
    assert_names(note, "MODEL.EMBED_DIM 64", "MODEL.DEPTH 4", "x.yaml")
    assert "DROPOUT" not in note and loaded.config.MODEL.DROPOUT == 0.2
    assert load_text(to_yaml(loaded.config, loaded.origins)).notes == []


@pytest.mark.parametrize("case", cases_of("mistakes-of_timm_models"))
def test_unsupported_timm_model_settings_are_refused(case):
    text, _, words = case.partition(" -opts ")
    config = load_text(text, "-opts", *words.split()).config
    with refused(ConfigError, *names_of("mistakes-of_timm_models", case)):
        build_model(config, 10)


@pytest.mark.parametrize("typed", ["micro_f1", None])
def test_multilabel_data_changes_default_metric_but_keeps_a_chosen_metric(tmp_path, typed):
    words = ["-dataset", "csv", "-opts", "DATA.LABEL_SEPARATOR=|"] + ([f"TRAIN.BEST_METRIC={typed}"] if typed else [])
    config = load(words, needs_file=False).config
    assert config.TRAIN.BEST_METRIC == (typed or "map") and config.TRAIN.LOSS == "bce"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["-data_path", "x.CSV"], "csv"),
        (["-data_path", "x.parquet"], "parquet"),
        (["-data_path", "photos"], "imagefolder"),
        (["-data_path", "x.csv", "-dataset", "shards"], "shards"),
    ],
)
def test_ending_of_a_typed_path_chooses_the_kind_of_data(words, expected):
    loaded = load(["-cfg", "finetune", "-pretrained", "resnet50", *words])
    assert loaded.config.DATA.DATASET == expected
    assert ("ending" in loaded.origins["DATA.DATASET"]) is (expected in ("csv", "parquet"))


def test_settings_file_overrides_settings_of_the_weights():
    weights = Layer("the weights", {"MODEL.DROPOUT": "0.1", "MODEL.DROPPATH": "0.2"})
    model = resolve(parse([]), read_layers(write("MODEL: {DROPOUT: 0.3}")), weights).config.MODEL
    assert (model.DROPOUT, model.DROPPATH) == (0.3, 0.2)


@pytest.mark.parametrize(
    "given", [{"NAME": "", "MODEL.RESUME": "auto"}, {"NAME": " ", "MODEL.RESUME": "auto"}, {"SAVE": ""}]
)
def test_empty_name_or_path_in_a_settings_file_is_refused(given):
    key = next(iter(given))
    with refused(ConfigError, key, "empty", "x.yaml"):
        load_text(yaml_of(given))


def test_empty_name_is_accepted_for_a_new_run():
    assert load_text("NAME: ''").config.NAME == ""


@pytest.mark.parametrize("dataset", ["imagefolder", "csv", "shards", "digits"])
@pytest.mark.parametrize(
    "start",
    [
        "https:/me:secret@",
        "https://me:secret@",
        "s3:/me:secret@",
        "HTTPS://me:secret@",
        "gs://bucket/x?Signature=secret&",
    ],
)
def test_refused_url_of_data_hides_its_password(dataset, start):
    with pytest.raises(ConfigError) as caught:
        load_text(f"DATA: {{DATASET: {dataset}, DATA_PATH: '{start}server/x'}}\nMODEL: {{TYPE: vit}}")
    assert "DATA.DATA_PATH" in str(caught.value) and "secret" not in str(caught.value)

"""Every mistake a user can make ends with exit code 2 and one message that names it and its remedy."""

import signal

import numpy as np
import pytest
import torch
from PIL import Image

import main_single_gpu
from tests.support.configs import SMALL
from tests.support.runs import run
from utils.errors import exit_code

FOLDERS = SMALL.replace("digits", "imagefolder").replace("BATCH_SIZE: 32", "BATCH_SIZE: 2")


@pytest.fixture(autouse=True)
def keep_signal_handlers():
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


@pytest.fixture
def person(tmp_path, capsys):
    """Types a command with the settings file; returns the message that it ended with, having checked that it did."""

    def type_in(*flags, settings=SMALL, exit_with=2, begins=False):
        path = tmp_path / "settings.yaml"
        path.write_text(settings)
        cfg = [] if "-cfg" in flags else ["-cfg", str(path)]
        code = exit_code(main_single_gpu.main, [*cfg, "-output", str(tmp_path / "output"), "-epochs", "1", *flags])
        captured = capsys.readouterr()
        assert code == exit_with, captured.err
        assert "Traceback" not in captured.err
        if exit_with == 2:
            assert captured.err.startswith("error: ") or "\nerror: " in captured.err
            assert bool(list((tmp_path / "output").glob("train-*"))) is begins, (
                "only a run that began leaves its folder"
            )
        return captured.err if exit_with else captured.out

    return type_in


def make_images(root, classes=("cat", "dog"), count=3):
    """DATA_PATH/{train,val}/CLASS/N.png"""
    for part in ("train", "val"):
        for name in classes:
            folder = root / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = np.random.default_rng(number).integers(256, size=(12, 10), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return root


def test_no_cfg():
    result = run("main_single_gpu.py")
    assert result.returncode == 2
    assert "-cfg" in result.stderr and "configs/vit_digits.yaml" in result.stderr and "Traceback" not in result.stderr


def test_cfg_that_is_not_there(person):
    assert "vit_digits.yaml" in person("-cfg", "configs/vit_digit.yaml")


@pytest.mark.parametrize(
    "addition, told",
    [
        ("TRAIN: {BASE_LRR: 1}", "unknown key TRAIN.BASE_LRR; did you mean TRAIN.BASE_LR?"),
        ("DATA: {BATCH_SIZE: many}", "DATA.BATCH_SIZE is 'many'"),
        ("AMP: true\nAMP: false", "AMP"),
        ("BASE: settings.yaml", "settings.yaml -> "),
    ],
    ids=["unknown key", "wrong type", "duplicate key", "BASE loop"],
)
def test_settings_that_cannot_be(person, addition, told):
    assert told in person(settings=addition)


def test_batch_size_0(person):
    assert "-batch_size" in person("-batch_size", "0")


def test_unknown_data_set_and_model_offer_the_nearest(person):
    assert "did you mean cifar10 or" in person("-dataset", "cifar1")
    assert "resnet50" in person("-opts", "MODEL.TYPE=timm", "MODEL.NAME=resnet5O", settings="DATA: {DATASET: digits}")


@pytest.mark.parametrize(
    "options, told",
    [
        ("CUSTOM_WHITE_LIST=[LayerNrm]", "did you mean LayerNorm"),
        ("CUSTOM_BLACK_LIST=[blocks.9.mlp]", "did you mean blocks.1.mlp"),
        ("CUSTOM_BLACK_LIST=[head] CUSTOM_WHITE_LIST=[head]", "take it out of one of them"),
        ("INCR_RATIO=1", "a number from 1.0001 to 1,000,000"),
        ("DECR_RATIO=1", "a number from 0.0001 to 0.9999"),
        ("DECR_RATIO=0", "a number from 0.0001 to 0.9999"),
        ("DECR_EVERY_N_NAN_OR_INF=0", "a whole number from 1 to 1,000,000,000"),
        ("INCR_EVERY_N_STEPS=0", "a whole number from 1 to 1,000,000,000"),
        ("MIN_LOSS_SCALING=0", "a number from 1e-06 to 1e+38"),
        ("INIT_LOSS_SCALING=inf", "a number from 1 to 1e+38"),
        ("INIT_LOSS_SCALING=8 MIN_LOSS_SCALING=16", "must lie between PRECISION.MIN_LOSS_SCALING, 16"),
        ("INIT_LOSS_SCALING=8 MAX_LOSS_SCALING=4", "and PRECISION.MAX_LOSS_SCALING, 4"),
        ("MIN_LOSS_SCALING=16 MAX_LOSS_SCALING=4", "must not be larger than PRECISION.MAX_LOSS_SCALING, 4"),
        ("MAX_CONSECUTIVE_SKIPS=0", "a whole number from 1 to 1,000,000,000"),
        ("DOCTOR_SKIPS=0", "a whole number from 1 to 1,000,000,000, or None"),
        ("SHADOW_STEPS=0", "a whole number from 1 to 1,000,000,000, or None"),
        ("DTYPE=half", "float16"),
    ],
)
def test_settings_of_precision_that_cannot_be(person, options, told):
    message = person("-amp", "-opts", *(f"PRECISION.{each}" for each in options.split()))
    assert f"error: PRECISION.{options.split('=')[0]}" in message.replace("-opts: ", "") and told in message


def test_float16_on_a_device_that_refuses_it(person, monkeypatch):
    def no_float16(*args, **kwargs):
        raise RuntimeError("not implemented for 'Half'")

    monkeypatch.setattr(torch.nn.functional, "linear", no_float16)
    message = person("-amp", "-amp_dtype", "float16")
    assert "PRECISION.DTYPE: float16 cannot be computed in" in message and "-amp_dtype bfloat16" in message


def test_missing_data_path(person, tmp_path):
    for name in ("imagenet2012", "imagefolder", "csv", "caltech101", "caltech256"):
        assert str(tmp_path / "nowhere") in person("-dataset", name, "-data_path", str(tmp_path / "nowhere"))


def test_empty_class_folder(person, tmp_path):
    root = make_images(tmp_path / "data")
    (root / "train" / "bird").mkdir()
    assert "bird" in person("-data_path", str(root), settings=FOLDERS)


def test_hidden_folders_are_no_classes(person, tmp_path):
    root = make_images(tmp_path / "data")
    for part in ("train", "val"):
        (root / part / ".ipynb_checkpoints").mkdir()
    assert "2 classes" in person("-data_path", str(root), settings=FOLDERS, exit_with=0)


def test_class_in_val_but_not_in_train(person, tmp_path):
    root = make_images(tmp_path / "data")
    (root / "val" / "dog").rename(root / "val" / "wolf")
    assert "wolf" in person("-data_path", str(root), settings=FOLDERS)


def test_list_line_without_label(person, tmp_path):
    root = make_images(tmp_path / "data")
    (root / "train_list.txt").write_text("train/cat/0.png 0\ntrain/dog/0.png\n")
    (root / "val_list.txt").write_text("val/cat/0.png 0\n")
    message = person("-dataset", "imagenet2012", "-data_path", str(root))
    assert "train_list.txt" in message and "2" in message


def test_label_of_num_classes_or_more(person, tmp_path):
    root = make_images(tmp_path / "data")
    for part in ("train", "val"):
        (root / f"{part}_list.txt").write_text(f"{part}/cat/0.png 0\n{part}/dog/0.png 7\n")
    message = person("-dataset", "imagenet2012", "-data_path", str(root), "-num_classes", "2")
    assert "train_list.txt, line 2" in message and "NUM_CLASSES is 2" in message


def test_unreadable_image_is_named(person, tmp_path):
    root = make_images(tmp_path / "data")
    (root / "train" / "dog" / "1.png").write_bytes(b"no picture")
    message = person("-data_path", str(root), settings=FOLDERS, begins=True)
    assert "dog/1.png" in message and "MAX_BAD_FRACTION" in message


def test_a_few_unreadable_images_are_named_and_the_run_goes_on(person, tmp_path):
    root = make_images(tmp_path / "data")
    for part in ("train", "val"):
        (root / part / "dog" / "1.png").write_bytes(b"no picture")
    told = person("-data_path", str(root), "-opts", "DATA.MAX_BAD_FRACTION=0.5", settings=FOLDERS, exit_with=0)
    assert "train/dog/1.png" in told and "val/dog/1.png" in told


def test_checkpoint_of_another_architecture_shows_the_first_differing_keys(person, tmp_path):
    from configs.load import load
    from models import build_model

    (tmp_path / "other.yaml").write_text(SMALL.replace("DEPTH: 2", "DEPTH: 3"))
    other = build_model(load(["-cfg", str(tmp_path / "other.yaml")]).config, 10)
    torch.save(other.state_dict(), tmp_path / "other.pth")
    assert "blocks.2." in person("-pretrained", str(tmp_path / "other.pth"))


def test_pretrained_and_resume_with_nothing_there(person, tmp_path):
    assert "nothing.pth" in person("-pretrained", str(tmp_path / "nothing.pth"))
    assert "nothing.pth" in person("-resume", str(tmp_path / "nothing.pth"))


def test_a_run_starts_with_what_is_doubtful_about_it_and_no_more(person):
    told = person("-opts", "TRAIN.WARMUP_EPOCHS=2", exit_with=0).splitlines()
    assert [line for line in told if line.startswith("check: ")] == [
        "check: warm-up: 2 of 1 epochs; set TRAIN.WARMUP_EPOCHS lower: the rate never gets to TRAIN.BASE_LR"
    ]
    assert "check: " not in person(exit_with=0)


def test_eval_without_weights(person):
    assert "-pretrained or -resume" in person("-eval")


def test_eval_of_weights_without_a_head_that_fits(person, tmp_path):
    from configs.load import load
    from models import build_model

    (tmp_path / "other.yaml").write_text(SMALL)
    other = build_model(load(["-cfg", str(tmp_path / "other.yaml")]).config, 12)
    torch.save(other.state_dict(), tmp_path / "other.pth")
    assert "has 12 classes, this model has 10" in person("-eval", "-pretrained", str(tmp_path / "other.pth"))


def test_output_that_cannot_be_written(person, tmp_path):
    (tmp_path / "file").write_text("")
    assert "SAVE: cannot write to" in person("-output", str(tmp_path / "file" / "output"))
    assert "SAVE: cannot write to" in person("-output", "/proc/halfstep")


def test_a_device_that_is_not_there(person):
    if not torch.cuda.is_available():
        assert "DEVICE is cuda" in person("-opts", "DEVICE=cuda")


def test_torchvision_that_does_not_fit_torch_says_what_to_do(monkeypatch, capsys):
    def program(arguments):
        raise RuntimeError("operator torchvision::nms does not exist")

    assert exit_code(program, []) == 2
    assert "pip install -r requirements.txt" in capsys.readouterr().err


def test_our_own_mistake_ends_with_1_and_a_traceback(capsys):
    assert exit_code(lambda arguments: 1 // 0, []) == 1
    assert "ZeroDivisionError" in capsys.readouterr().err

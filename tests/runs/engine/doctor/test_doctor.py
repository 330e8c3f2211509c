"""The doctor names the exact module at which half precision overflows, and its remedy works."""

import contextlib
import math
from functools import partial
from pathlib import Path

import pytest
import torch

from configs.load import load
from datasets import Normalize, Preparation, build_train_data
from engine.doctor.diagnosis import Case, diagnose
from engine.doctor.overflow import Batches, precision_of, read_overflow, save_overflow
from engine.precision import Precision
from engine.train.loss import CrossEntropy
from models import build_model
from models.transforms import choose_transforms
from tests.support.cases import cases_of, names_of
from tests.support.configs import CPU, replaced, small_config
from tests.support.opened import open_sets
from tests.support.refusals import assert_names
from tests.support.runs import run_folder, typed
from tests.support.trainers import big_logits
from utils.distributed import Process

pytestmark = pytest.mark.slow


def make_case(folder, plant, scale=65536.0, black_list=()) -> Case:
    """Return a ViT of 8 blocks in float16 with a planted fault, and one batch of 4."""
    config = small_config(folder, "AMP=true", "PRECISION.DTYPE=float16", "MODEL.DEPTH=8", "MODEL.DROPOUT=0.1")
    config = replaced(config, PRECISION={"INIT_LOSS_SCALING": scale, "CUSTOM_BLACK_LIST": tuple(black_list)})
    torch.manual_seed(0)
    model = build_model(config, 10)
    precision = Precision(config, CPU)
    transforms = choose_transforms(config, CPU, precision.half)
    transforms.apply(model)
    with torch.no_grad():
        plant(model)
    images, targets = torch.randn(4, 1, 8, 8), torch.arange(4)
    loss = CrossEntropy(config.TRAIN)
    return Case(model, precision, transforms, loss, lambda batch: batch, [((images, targets), 1.0)], scale)


def nothing(model):
    pass


def big_mlp(model):
    model.blocks[7].mlp.fc1.weight.fill_(3e4).mul_(torch.randn_like(model.blocks[7].mlp.fc1.weight).sign())


def big_gradient(model):
    """Plant large gradients: inputs and outputs are zero, but the weights scale the gradient up."""
    model.blocks[5].mlp.fc1.weight.zero_()
    model.blocks[5].mlp.fc1.bias.zero_()
    model.blocks[5].mlp.fc2.weight.normal_(std=1e4)


@pytest.mark.long
@pytest.mark.parametrize(
    ("plant", "place", "is_forward", "black_list"),
    [
        (big_mlp, "blocks.7.mlp.fc1", True, ["blocks.7.mlp"]),
        (partial(big_logits, block=3), "blocks.3.attn logits (q·k)", True, ["blocks.3.attn"]),
        (big_gradient, "blocks.5.mlp.fc2", False, ["blocks.5.mlp"]),
        # A run computes only the class token in the last block.
        (partial(big_logits, block=7), "blocks.7.attn logits (q·k)", True, ["blocks.7.attn"]),
    ],
)
def test_doctor_locates_planted_overflow_and_prescription_fixes_it(tmp_path, plant, place, is_forward, black_list):
    found = diagnose(make_case(tmp_path, plant))
    assert (str(found.first_non_finite), found.is_forward, found.black_list) == (place, is_forward, black_list)
    assert found.is_fixed
    assert diagnose(make_case(tmp_path, plant, found.best_scale, found.black_list)).first_non_finite is None


@pytest.mark.long
def test_healthy_model_gets_the_largest_fitting_loss_scale(tmp_path):
    case = make_case(tmp_path, nothing, scale=1024.0)
    found = diagnose(case)
    assert (found.first_non_finite, found.black_list, found.is_fixed) == (None, [], True)
    assert found.prescription(small_config(tmp_path, "AMP=true", "PRECISION.CUSTOM_BLACK_LIST=[head]").PRECISION) == {}
    for scale, breaks in ((found.best_scale, False), (found.best_scale * 8, True)):
        assert bool(diagnose(make_case(tmp_path, nothing, scale)).first_non_finite) == breaks


def test_doctor_table_has_rows_for_all_parts_of_attention(tmp_path):
    def fuse(model):
        for block in model.blocks:
            block.attn.fused_attn = True

    for plant, names in ((nothing, ("softmax", "attention x values")), (fuse, ("attention core",))):
        places = {str(row.place) for row in diagnose(make_case(tmp_path, plant)).rows}
        assert places >= {f"blocks.0.attn {name}" for name in ("logits (q·k)", *names)}, places


def test_gradients_that_underflow_in_half_precision_are_counted(tmp_path):
    low, high = (diagnose(make_case(tmp_path, nothing, scale)) for scale in (2**-18, 4096.0))
    lost_low, lost_high = (
        next(row.underflow for row in found.rows if str(row.place) == "blocks.0.attn.qkv") for found in (low, high)
    )
    assert lost_low > 0.9 > 0.1 > lost_high
    all_lost = diagnose(make_case(tmp_path, nothing, 2**-40))
    assert {row.underflow for row in all_lost.rows} <= {1.0, None}, "only gradients that are not zero in float32 count"


def test_doctor_names_constants_that_are_zero_in_float16(tmp_path):
    def plant(model):
        model.blocks[2].norm1.eps = model.of_the_model = 1e-8
        model.blocks[4].norm2.weight.fill_(2e-8)
        model.blocks[4].norm2.bias[0] = 1e-9  # one of many elements is not a constant
        model.blocks[5].mlp.register_buffer("temperature", torch.tensor(1e-9))

    case = make_case(tmp_path, plant)
    diagnosis = diagnose(case)
    found = {each.name: each for each in diagnosis.vanishing}
    lines = [line for line in diagnosis.lines() if line.startswith("vanishes: ")]
    assert sorted(line.split()[1] for line in lines) == sorted(found)
    case.model.blocks[5].mlp.act.eps = 1e-8  # in a module that computes in half precision
    again = {each.name: each.in_half for each in diagnose(case).vanishing}
    planted = {"blocks.2.norm1.eps", "blocks.4.norm2.weight", "blocks.5.mlp.temperature", "of_the_model"}
    assert set(found) == planted
    assert not found["blocks.2.norm1.eps"].in_half and again["blocks.5.mlp.act.eps"]


def test_doctor_row_has_largest_activation_and_scaled_gradient(tmp_path):
    seen, rows = [], []
    for scale in (64.0, 1024.0):
        case = make_case(tmp_path, nothing, scale)
        of_labels = case.loss
        case.loss = lambda logits, targets, of=of_labels: seen.append(logits.detach()) or of(logits, targets)
        rows.append(next(row for row in diagnose(case).rows if str(row.place) == "head"))
    assert rows[0].activation == rows[1].activation == seen[0].abs().max().item(), "activations are those in float32"
    assert rows[1].gradient == pytest.approx(16 * rows[0].gradient) and rows[0].gradient > 0


def test_nan_counts_as_largest_activation_of_a_module(tmp_path):
    case = make_case(tmp_path, lambda model: model.blocks[2].mlp.fc1.weight.fill_(torch.nan))
    assert math.isnan({str(row.place): row for row in diagnose(case).rows}["blocks.2.mlp.fc1"].activation)


def test_doctor_replay_leaves_the_model_unchanged(tmp_path):
    case = make_case(tmp_path, big_mlp)
    case.model.norm = torch.nn.Sequential(torch.nn.Flatten(1), torch.nn.BatchNorm1d(80), torch.nn.Unflatten(1, (5, 16)))
    before = {name: value.clone() for name, value in case.model.state_dict().items()}
    classes = [type(module) for module in case.model.modules()][1:]
    diagnose(case)
    assert all(torch.equal(value, before[name]) for name, value in case.model.state_dict().items())
    assert all(parameter.grad is None for parameter in case.model.parameters())
    assert not any(module._forward_hooks or "forward" in vars(module) for module in case.model.modules())
    assert [type(module) for module in case.model.modules()][1:] == classes


# The script, and the batch that a stopped run saves.

POISONED = "AMP=true PRECISION.DTYPE=float16 MODEL.DEPTH=3 PRECISION.MAX_CONSECUTIVE_SKIPS=3 REPORT_FREQ=1"
POISONED += " TRAIN.MIXUP_ALPHA=0.8 TRAIN.RANDOM_ERASE_PROB=0.5"


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Return the folder and output of a run that starts from weights with large logits."""
    folder = tmp_path_factory.mktemp("stopped")
    torch.manual_seed(0)
    model = build_model(small_config(folder, *POISONED.split()), 10)
    big_logits(model)
    torch.save(model.state_dict(), folder / "weights.pth")
    flags = ["-cfg", str(folder / "small.yaml"), "-pretrained", str(folder / "weights.pth"), "-batch_size", "4"]
    options = ["-opts", *POISONED.split(), "TRAIN.ACCUM_ITER=2", "MODEL.DROPOUT=0.1"]
    result = typed("main_single_gpu.py", *flags, "-output", str(folder / "output"), *options)
    assert result.returncode == 3, result.stderr
    return run_folder(folder / "output"), result.stdout


def test_stopped_run_saves_batch_and_prints_doctor_command(stopped):
    folder, said = stopped
    assert f"halfstep doctor {folder}" in said.splitlines()[-1]
    saved = torch.load(folder / "overflow-batch.pth", weights_only=True)
    assert saved["images"].dtype is torch.uint8 and saved["images"].shape == (8, 1, 8, 8)
    assert saved["step"] == 2 and saved["sizes"] == [4, 4] and saved["shares"] == [0.5, 0.5]
    config = load(["-cfg", str(folder / "config.yaml")]).config
    train_set, _ = open_sets(config)
    with contextlib.closing(build_train_data(config, train_set, Process(CPU)).windows(2, 3)) as windows:
        batches = list(next(windows).batches)
    assert torch.equal(saved["images"], torch.cat([batch.images for batch in batches]))
    prepare = Preparation(config, Normalize(config.DATA))
    for batch, (again, _) in zip(batches, read_overflow(folder / "overflow-batch.pth").batches, strict=True):
        (images, targets), (same_images, same_targets) = prepare(batch), prepare(again)
        assert torch.equal(images, same_images) and not torch.equal(images, prepare.normalize(batch.images))
        assert all(torch.equal(one, other) for one, other in zip(targets, same_targets, strict=True))


def test_every_process_saves_its_micro_batches_with_their_shares(tmp_path, all_digits):
    config = small_config(tmp_path, "DATA.DROP_LAST=false", "DATA.BATCH_SIZE=160", "TRAIN.ACCUM_ITER=3")
    train_set, _ = open_sets(config)
    with contextlib.closing(build_train_data(config, train_set, Process(CPU)).windows(2, 3)) as windows:
        batches = list(next(windows).batches)  # the last window of an epoch of 1,438 images
    sizes = [batch.num_samples for batch in batches]
    shares = [2 * size / sum(sizes) for size in sizes]  # as in a process that has twice as many images as the others
    for rank in range(3):
        save_overflow(tmp_path, Batches(2, rank, list(zip(batches, shares, strict=True))))
    assert {read_overflow(path).rank for path in tmp_path.glob("overflow-*.pth")} == {0, 1, 2}
    saved = read_overflow(tmp_path / "overflow-batch.pth").batches
    assert len(sizes) == 3 and len({*sizes}) == 2
    assert [(batch.num_samples, share) for batch, share in saved] == list(zip(sizes, shares, strict=True))


def test_doctor_script_names_module_and_writes_settings(stopped):
    folder, _ = stopped
    said = typed("scripts/doctor.py", folder).done().stdout
    assert_names(said, "step 2", "process 0", "8 images", "blocks.1.attn logits (q·k)")
    written = (folder / "doctor.yaml").read_text()
    assert "BASE: config.yaml" in written and "CUSTOM_BLACK_LIST: [blocks.1.attn]" in written


@pytest.fixture(scope="module")
def trained(tmp_path_factory, small_yaml) -> Path:
    """Return the folder of a float32 run of one epoch, which has 4 updates of 80 images."""
    output = tmp_path_factory.mktemp("trained")
    words = ["-cfg", str(small_yaml), "-output", str(output), "-epochs", "1", "-batch_size", "80"]
    typed("main_single_gpu.py", *words).done()
    return run_folder(output)


def test_doctor_with_another_half_dtype_uses_default_loss_scale(tmp_path):
    config, state = small_config(tmp_path), {"amp_scaler": {"dtype": "torch.bfloat16", "scale": 2.0}}
    scales = [precision_of(config, state, half)[1] for half in (None, "bfloat16", "float16")]
    assert scales == [2.0, 2.0, config.PRECISION.INIT_LOSS_SCALING]


@pytest.mark.parametrize("mode", ["autocast", "naive"])
def test_doctor_without_saved_batch_replays_the_next_batch(trained, tmp_path, mode):
    (tmp_path / "mode.yaml").write_text(f"BASE: {trained}/config.yaml\nPRECISION: {{MODE: {mode}}}")
    words = [str(trained / "last.pth"), "-amp_dtype", "float16", "-cfg", str(tmp_path / "mode.yaml")]
    said = typed("scripts/doctor.py", *words).done().stdout
    assert_names(said, "step 4", "process 0", "80 images")
    assert "doctor.yaml" not in said and not (trained / "doctor.yaml").exists()


@pytest.mark.parametrize("words", cases_of("doctor-mistakes_of_the_doctor"))
def test_doctor_exits_with_2_for_bad_arguments(trained, tmp_path, words):
    given = words.format(run=trained, empty=tmp_path).replace("(nothing)", "").split()
    typed("scripts/doctor.py", *given).refused(*names_of("doctor-mistakes_of_the_doctor", words))

"""A sharded model (FSDP2) trains like an unsharded one, and any number of processes can read its checkpoints."""

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from engine.checkpoint.format import checkpoint_bytes
from models import build_model
from models.weights.sharded import Shards, span
from tests.support.cases import cases_of, names_of
from tests.support.configs import SMALL, ema, small_config
from tests.support.refusals import refused
from tests.support.run_hash import state_hash
from tests.support.runs import launch
from utils.errors import ConfigError

pytestmark = pytest.mark.slow

# Includes state between updates, and updates whose second micro-batch is smaller.
COMMON = ",".join([*ema(0.5), "TRAIN.WARMUP_EPOCHS=0", "TRAIN.ACCUM_ITER=2", "MODEL.EMBED_DIM=18"])
FSDP = "DIST.STRATEGY=fsdp2"
BF16, FP16 = "AMP=true,PRECISION.DTYPE=bfloat16", "AMP=true,PRECISION.DTYPE=float16,PRECISION.INIT_LOSS_SCALING=128"
# Updates whose rounding does not depend on a weight's place in memory: the rate is a power of two, nothing is scaled.
# So two strategies have bit-identical weights. With AdamW or clipping, they differ in the last bit (fused
# multiply-adds, and the order of the norm's sum, which depend on the processor). The cast to half then turns 2^-24 of a
# weight between two half-precision values into 2^-9, and gradient norms differ by more than 1e-5.
EXACT = "TRAIN.OPTIMIZER.NAME=SGD,TRAIN.OPTIMIZER.MOMENTUM=0,TRAIN.BASE_LR=0.0625,TRAIN.LR_SCHEDULER.NAME=constant"
EXACT += ",TRAIN.WEIGHT_DECAY=0,TRAIN.GRAD_CLIP=100"
BF16, FP16 = f"{EXACT},{BF16}", f"{EXACT},{FP16}"
FROZEN = f"MODEL.FREEZE=blocks.0.*,{BF16},PRECISION.RESIDUAL=half"
DROPOUT = "MODEL.DROPPATH=0.3,MODEL.DROPOUT=0.2,MODEL.DEPTH=3"
LISTS = f"{BF16},PRECISION.CUSTOM_BLACK_LIST=blocks.0.mlp"

IN_FLOAT32 = {"fp32": "", "dropout": DROPOUT}
IN_HALF = {"bf16": BF16, "fp16": FP16, "frozen": FROZEN, "lists": LISTS}
PAIRS = IN_FLOAT32 | IN_HALF
# Without and with a static graph.
DDP_COMPILED = {"accumulating": "MODEL.DEPTH=1", "static": "MODEL.DEPTH=1,TRAIN.ACCUM_ITER=1"}


def cases(folder) -> dict[str, str]:
    found = {}
    for name, options in PAIRS.items():
        found[f"ddp {name}"] = f"{options},evaluate,DATA.BATCH_SIZE_EVAL=2"
        found[f"fsdp2 {name}"] = f"{options},{FSDP},evaluate,DATA.BATCH_SIZE_EVAL=2"
    for strategy in ("ddp", "fsdp2"):
        found[f"{strategy} bf16 half"] = f"{BF16},DIST.STRATEGY={strategy},PRECISION.REDUCE=half"
    found["compiled"] = f"{BF16},{FSDP},compile,evaluate,DATA.BATCH_SIZE_EVAL=2"
    for name, options in DDP_COMPILED.items():
        found[f"ddp {name}"] = f"{EXACT},{options},evaluate,DATA.BATCH_SIZE_EVAL=2"
        found[f"compiled {name}"] = f"{EXACT},{options},compile=model,evaluate,DATA.BATCH_SIZE_EVAL=2"
    found["built"] = f"{FSDP},measure,MODEL.DEPTH=24"
    found["poison"] = f"{FSDP},poison"
    found["as on GPUs"] = f"{FSDP},gpu,evaluate,DATA.BATCH_SIZE_EVAL=2"
    found["poison as on GPUs"] = f"{BF16},{FSDP},gpu,poison"
    found["saved"] = f"{FSDP},save={folder / 'fsdp2'}"
    found["saved by ddp"] = f"save={folder / 'ddp'}"
    found["loaded"] = f"{FSDP},load={folder / 'fsdp2/last.pth'}"
    found["loaded from ddp"] = f"{FSDP},load={folder / 'ddp/last.pth'}"
    found["loaded by ddp"] = f"load={folder / 'fsdp2/last.pth'}"
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sharding")


@pytest.fixture(scope="module")
def runs(folder) -> dict:
    """Return the results of two processes, by case."""
    settings = folder / "settings.yaml"
    settings.write_text(SMALL)
    asked = (f"{name}:{COMMON},{options}" for name, options in cases(folder).items())
    return launch("tests.support.programs.train_sharded", 2, settings, folder / "found.pth", *asked)


def assert_alike(one, other, tolerance=1e-5):
    """With tolerance 0, weights must be bit-identical, but not norms, whose squares are added in another order."""
    for mine, theirs in zip(one["updates"], other["updates"], strict=True):
        assert mine[0] == pytest.approx(theirs[0], rel=tolerance, abs=0)
        assert mine[1:] == pytest.approx(theirs[1:], rel=1e-5)
    for key in ("state_dict", "state_dict_ema"):
        for name, weight in one[key].items():
            torch.testing.assert_close(
                weight, other[key][name], rtol=0, atol=tolerance, msg=lambda text, n=name: n + text
            )
    for kind in ("raw", "ema"):
        assert one[kind] == pytest.approx(other[kind], rel=tolerance, abs=0)


@pytest.mark.long
@pytest.mark.parametrize("name", PAIRS)
def test_fsdp2_matches_ddp_in_losses_weights_and_scores(runs, name):
    assert_alike(runs[f"fsdp2 {name}"], runs[f"ddp {name}"], tolerance=0 if name in IN_HALF else 1e-5)
    assert len({loss for loss, _, _ in runs[f"ddp {name}"]["updates"]}) == 4


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_gradients_reduced_in_half_precision_stay_close_to_float32(runs, strategy):
    half, full = (runs[f"{strategy} bf16{kind}"]["updates"] for kind in (" half", ""))
    assert [skipped for _, _, skipped in half] == [0] * 4
    norms = [(mine[1], theirs[1]) for mine, theirs in zip(half, full, strict=True)]
    assert all(mine == pytest.approx(theirs, rel=3e-3) for mine, theirs in norms)
    assert all(abs(mine / theirs - 1) > 1e-7 for mine, theirs in norms[:1])


def test_compiled_sharded_blocks_match_ddp(runs):
    assert_alike(runs["compiled"], runs["ddp bf16"], tolerance=0)


def test_gpu_code_path_under_fsdp2_matches_ddp(runs):
    assert_alike(runs["as on GPUs"], runs["ddp fp32"], tolerance=1e-5)


@pytest.mark.parametrize("name", DDP_COMPILED)
def test_compiled_ddp_model_matches_eager_model(runs, name):
    assert_alike(runs[f"compiled {name}"], runs[f"ddp {name}"])


def test_fsdp2_gathers_matrices_in_half_and_norms_in_float32(runs):
    has_types = hasattr(MixedPrecisionPolicy(), "param_dtype_override_fn")
    half = torch.bfloat16 if has_types else torch.float32
    types = {"patch_embed.proj": half, "norm1": torch.float32, "mlp.fc1": half, "norm": torch.float32, "head": half}
    assert runs["fsdp2 bf16"]["gathered"] == runs["poison as on GPUs"]["gathered"] == types
    assert set(runs["fsdp2 fp32"]["gathered"].values()) == {torch.float32}


def test_black_listed_module_is_gathered_in_float32(runs):
    half = torch.bfloat16 if hasattr(MixedPrecisionPolicy(), "param_dtype_override_fn") else torch.float32
    gathered = runs["fsdp2 lists"]["gathered"]
    assert gathered["mlp.fc1"] == torch.float32 and gathered["head"] == half


def test_each_of_two_fsdp2_processes_holds_half_the_bytes_of_ddp(runs):
    assert 0.5 <= runs["fsdp2 fp32"]["bytes"] / runs["ddp fp32"]["bytes"] < 0.53


def test_host_never_holds_full_model_and_ema_together(runs, tmp_path):
    """Count float32 numbers: the model plus a block or two of model and EMA. Both together would be twice as many."""
    config = small_config(tmp_path, "MODEL.DEPTH=24", *COMMON.split(","))
    model = build_model(config, 10)
    whole = sum(tensor.nbytes for tensor in model.state_dict().values())
    building = whole + 2 * max(sum(each.nbytes for each in block.parameters()) for block in model.blocks)
    # At the end the process has half of both, and briefly one more shard besides its block.
    assert runs["built"]["building"] == pytest.approx(building, rel=0.05) and building < 1.1 * whole
    saving = checkpoint_bytes(config.TRAIN, build_model(small_config(tmp_path, *COMMON.split(",")), 10))
    assert runs["ddp fp32"]["bytes"] == pytest.approx(saving, rel=0.01)  # and a few counters of Adam


def test_non_finite_gradient_in_one_process_skips_the_update_everywhere(runs):
    for name in ("poison", "poison as on GPUs"):
        assert [skipped for _, _, skipped in runs[name]["updates"]] == [0, 1, 1, 1]
        assert all(torch.isfinite(weight).all() for weight in runs[name]["state_dict"].values())


@pytest.mark.parametrize("name", ["loaded", "loaded from ddp", "loaded by ddp"])
def test_fsdp2_and_ddp_runs_resume_from_each_others_checkpoints(runs, name):
    unbroken, later = runs["saved"], runs[name]
    for mine, theirs in zip(later["updates"], unbroken["updates"][2:], strict=True):
        assert mine[:2] == pytest.approx(theirs[:2], rel=1e-4)
    for weight, other in zip(later["state_dict"].values(), unbroken["state_dict"].values(), strict=True):
        torch.testing.assert_close(weight, other, rtol=0, atol=1e-5)
    if name == "loaded":
        assert state_hash(later["optimizer"]) == state_hash(unbroken["optimizer"])


@pytest.mark.long
@pytest.mark.parametrize("world_size", [1, 3])
def test_training_continues_from_sharded_checkpoint_with_another_world_size(runs, folder, world_size):
    batch = {1: "DATA.BATCH_SIZE=64", 3: "DATA.BATCH_SIZE=22"}[world_size]  # the global batch need not stay at 128
    case = f"other:{COMMON},{batch},{FSDP},load={folder / 'fsdp2/last.pth'}"
    settings = folder / "settings.yaml"
    found = launch("tests.support.programs.train_sharded", world_size, settings, folder / f"{world_size}.pth", case)[
        "other"
    ]
    losses, unbroken = ([loss for loss, _, _ in each["updates"]] for each in (found, runs["saved"]))
    # With one process, each update has the same images as before; with three, nearly the same.
    assert losses == pytest.approx(unbroken[2:], rel={1: 1e-5, 3: 3e-3}[world_size])


@pytest.mark.parametrize("option", cases_of("mistakes-of_shards"))
def test_options_unsupported_by_fsdp2_are_refused(tmp_path, option):
    with refused(ConfigError, *names_of("mistakes-of_shards", option)):
        small_config(tmp_path, "AMP=true", "COMPILE=blocks", FSDP, option)
    small_config(tmp_path, "AMP=true", "COMPILE=true", option)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_tensor_rows_are_divided_like_fsdp2_chunks_and_can_be_sliced(world_size):
    for length in (1, 2, 7, 10):
        whole = torch.arange(length)
        shares = [whole[slice(*span(length, rank, world_size))] for rank in range(world_size)]
        chunks = [*whole.chunk(world_size), *[whole[:0]] * world_size][:world_size]
        assert all(torch.equal(*pair) for pair in zip(shares, chunks, strict=True))
        parts = Shards(shares)
        assert parts.shape == whole.shape and torch.equal(parts.whole(), whole)
        for start in range(length):
            for stop in range(start, length + 1):
                assert torch.equal(parts.rows(start, stop), whole[start:stop])

"""-explain_precision reports the type in which each module computes, and changes nothing."""

import pytest
import torch

from extras.explain import COLUMNS, collapse, explain, record_types
from models import build_model
from tests.support.configs import small_config
from tests.support.pretend_device import DEVICE, on_pretend_device
from tests.support.printed import same_text
from tests.support.run_hash import run_hash
from tests.support.runs import rows_of, run, run_folder
from tests.support.trainers import Lines, make_trainer
from utils.text import align


def table(model, half) -> dict[str, tuple[str, str, str, str]]:
    """Return {module: (computes in, takes, returns, weights)}."""
    autocast = torch.autocast("cpu", dtype=half, enabled=half is not None)
    return {seen.path: seen.row()[2:6] for seen in record_types(model, torch.ones(2, 1, 8, 8), autocast)}


def test_explained_dtypes_match_autocast(tmp_path):
    model = build_model(small_config(tmp_path), 10)
    rows = table(model, torch.bfloat16)
    half, single = "bfloat16", "float32"
    assert rows["blocks.0.attn.qkv"] == (half, single, half, single)
    assert rows["blocks.1.mlp.fc2"] == (half, half, half, single)
    assert rows["blocks.1.norm2"] == (single,) * 4
    assert rows["blocks.0"][0] == single  # the residual stream
    assert "blocks.0.attn" in rows and "blocks.0.drop_path1" not in rows
    assert all(kinds[:3] == (single,) * 3 for kinds in table(model, None).values())


def test_module_outside_autocast_is_reported_as_float32(tmp_path):
    model = build_model(small_config(tmp_path), 10)
    norm = model.blocks[0].mlp.fc1
    forward = norm.forward
    norm.forward = lambda x: torch.autocast("cpu", enabled=False)(forward)(x.float())
    rows = table(model, torch.bfloat16)
    assert rows["blocks.0.mlp.fc1"][0] == "float32" and rows["blocks.1.mlp.fc1"][0] == "bfloat16"
    rows = [(f"stages.{a}.blocks.{b}.x", "half" if b != 3 else "single") for a in range(2) for b in range(12)]
    assert [row[0] for row in collapse(rows)] == ["stages.0-1.blocks.0-2,4-11.x", "stages.0-1.blocks.3.x"]


def test_explaining_changes_no_random_state_or_weights(tmp_path):
    model = build_model(small_config(tmp_path, "MODEL.DROPOUT=0.5"), 10)
    model.norm = torch.nn.Sequential(torch.nn.Flatten(1), torch.nn.BatchNorm1d(80), torch.nn.Unflatten(1, (5, 16)))
    model.head.weight.grad = torch.ones_like(model.head.weight)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    table(model, torch.bfloat16)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model.head.weight.grad, torch.ones_like(model.head.weight))
    assert all(p.grad is None for name, p in model.named_parameters() if name != "head.weight")
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.slow
def test_explain_flag_writes_table_without_changing_run_hash(tmp_path, small_yaml):
    hashes, options = [], "-amp -epochs 1 -opts MODEL.DROPPATH=0.2 MODEL.DROPOUT=0.1"
    for name in ("plain", "told"):
        flags = ["-cfg", str(small_yaml), "-output", str(tmp_path / name)]
        flags += ["-explain_precision"] * (name == "told")
        result = run("main_multi_gpu.py", *flags, *options.split(), processes=2).done()
        hashes.append(run_hash(run_folder(tmp_path / name)))
    assert hashes[0] == hashes[1]
    assert result.stdout.count("blocks.0-1.attn.qkv") == 1
    rows = {row["module"]: row for row in rows_of(run_folder(tmp_path / "told") / "precision.csv")}
    assert rows["blocks.1.attn.qkv"]["computes_in"] == "bfloat16" and rows["blocks.1.attn.qkv"]["weights"] == "float32"
    assert not (run_folder(tmp_path / "plain") / "precision.csv").exists()


def test_naive_mode_is_explained_as_computing_only_in_half(tmp_path):
    trainer = make_trainer(small_config(tmp_path, "AMP=true", "PRECISION.MODE=naive"))
    explain(trainer, Lines(), tmp_path)
    rows = rows_of(tmp_path / "precision.csv")
    assert {row["computes_in"] for row in rows} == {row["returns"] for row in rows} == {"bfloat16"}
    assert {row["weights"] for row in rows} <= {"bfloat16", ""}


def test_explain_merges_identical_modules_into_one_row():
    cells = ("Linear", "bfloat16", "float32", "bfloat16", "float32", "addmm")
    rows = [(f"blocks.{number}.attn.qkv", *cells) for number in (0, 1, 2, 4, 6, 7)]
    rows += [("blocks.3.attn.qkv", *cells[:-1], "mm"), ("head", *cells), ("stages.0.1.x", *cells)]
    same_text("extras/explain/explain_precision", "\n".join(align([COLUMNS, *collapse(rows)])))


@pytest.mark.slow
@on_pretend_device
def test_explained_dtypes_match_between_device_and_host(tmp_path):
    config, rows = small_config(tmp_path, "AMP=true", "PRECISION.DTYPE=float16"), {}
    for device in ("cpu", DEVICE):
        explain(make_trainer(config, device=torch.device(device)), Lines(), tmp_path)
        rows[device] = {row["module"]: row["computes_in"] for row in rows_of(tmp_path / "precision.csv")}
    for module in ("blocks.0.attn.qkv", "blocks.0.norm1"):
        assert rows["cpu"][module] == rows[DEVICE][module]

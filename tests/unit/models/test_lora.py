"""MODEL.LORA: adapters train, all other weights stay, and merging gives plain weights."""

import sys

import pytest
import timm
import torch

from engine.predict.classifier import load_classifier
from engine.quick_checks import OK
from models import add_adapters, build_model
from models.weights.state import merged
from scripts.export import main
from tests.support.configs import small_config
from tests.support.refusals import refused
from tests.support.runs import epochs_of, rows, run_folder, status_of, typed
from tests.support.trainers import make_trainer, update
from utils.errors import ConfigError

pytestmark = pytest.mark.slow

RANK = "MODEL.LORA.RANK=4"


@pytest.fixture(scope="module", autouse=True)
def public_datasets(tmp_path_factory):
    """The metadata of the public package `datasets`, which peft requires through transformers."""
    site = tmp_path_factory.mktemp("site")
    (site / "datasets-4.0.0.dist-info").mkdir()
    (site / "datasets-4.0.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: datasets\nVersion: 4.0.0\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        yield


def trained(tmp_path, *options: str):
    """Return a trainer of a model with adapters after three updates."""
    return update(make_trainer(small_config(tmp_path, RANK, "TRAIN.WARMUP_EPOCHS=0", *options)), 3)


def test_lora_trains_only_adapters_and_classifier(tmp_path):
    begun = make_trainer(small_config(tmp_path, RANK)).model.state_dict()
    ended = trained(tmp_path).model.state_dict()
    moved = {name for name, tensor in ended.items() if not torch.equal(tensor, begun[name])}
    assert {name.rpartition(".")[0] for name in moved if ".lora_" not in name} == {"head"}
    assert len([name for name in moved if ".lora_" in name]) == 2 * 2 * 4  # A and B, blocks, layers per block


def test_ema_of_lora_model_skips_frozen_weights_and_uses_half_adapter_inputs(tmp_path):
    trainer = trained(tmp_path, "AMP=true", "TRAIN.MODEL_EMA=true", "MODEL.LORA.TARGETS=[blocks.*.fc2]")
    average = trainer.ema.model
    weight, before = average.blocks[0].attn.qkv.weight, average.head.weight.clone()
    with torch.no_grad():
        weight += 1
    kept = weight.clone()
    seen = []
    average.blocks[0].mlp.fc2.lora_A["default"].register_forward_pre_hook(
        lambda module, given: seen.append(given[0].dtype)
    )
    with trainer.precision.autocast():
        average(torch.zeros(1, 1, 8, 8))
    update(trainer)
    assert seen == [torch.bfloat16]
    assert torch.equal(weight, kept) and not torch.equal(average.head.weight, before)


@pytest.mark.parametrize(
    "options",
    [
        ["AMP=true", "TRAIN.GRAD_CHECKPOINTING=true"],
        ["MODEL.LORA.TARGETS=[all-linear]", "MODEL.LORA.ALPHA=7", "AMP=true", "PRECISION.MODE=naive"],
    ],
)
def test_merged_lora_weights_give_the_logits_of_unmerged_model(tmp_path, options):
    trainer = trained(tmp_path, *options)
    config = trainer.config
    plain = build_model(config, 10)
    plain.load_state_dict(merged(trainer.model.state_dict(), {"MODEL.LORA.ALPHA": config.MODEL.LORA.ALPHA}))
    images = torch.randn(32, 1, 8, 8)
    with torch.no_grad():
        ours, theirs = trainer.model.eval()(images), plain.eval()(images)
    assert (ours - theirs).abs().max() <= 1e-6 * ours.abs().max()
    torch.manual_seed(0)
    plain = build_model(config, 10).eval()
    with torch.no_grad():
        begun = plain(images)
        assert torch.equal(add_adapters(plain, config).eval()(images), begun)  # unchanged before the first update
    assert (ours - begun).abs().max() > 1e-2 * ours.abs().max()


def test_lora_is_refused_for_unsupported_layers_unmergeable_weights_or_missing_peft(tmp_path, monkeypatch):
    config = small_config(tmp_path, RANK)
    state = add_adapters(build_model(config, 10), config).state_dict()
    with refused(ConfigError):
        merged(state, {})
    name = "blocks.1.mlp.fc1"
    with refused(ConfigError, name):
        merged(state | {f"{name}.base_layer.weight": torch.ones(2, 2)}, {"MODEL.LORA.ALPHA": 4.0})
    with refused(ConfigError, "MODEL.LORA.TARGETS"):
        add_adapters(timm.create_model("test_resnet", num_classes=10), config)
    monkeypatch.setitem(sys.modules, "peft", None)
    with refused(ConfigError, "MODEL.LORA.RANK", "4", "pip install peft"):
        add_adapters(build_model(config, 10), config)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, small_yaml):
    """Return the settings' flags, and the folder of a run with EMA."""
    output = tmp_path_factory.mktemp("run")
    options = ["MODEL.DROPOUT=0.2", "TRAIN.MODEL_EMA=true", "DATA.BATCH_SIZE=160"]
    flags = ["-cfg", str(small_yaml), "-opts", RANK, *options]
    typed("main_single_gpu.py", *flags, f"SAVE={output}").done()
    return flags, run_folder(output)


@pytest.mark.long
def test_check_loads_weights_before_adding_adapters(finished):
    flags, folder = finished
    ended = typed("main_single_gpu.py", *flags, "-check", "-check_images", 50, "-pretrained", folder / "last.pth")
    assert rows(ended.stdout)["model"][0] == OK


@pytest.mark.usefixtures("signal_handlers")
@pytest.mark.parametrize("word", ["-resume", "-pretrained"])
def test_evaluation_of_lora_without_peft_matches_training_scores(finished, tmp_path, monkeypatch, word):
    monkeypatch.setitem(sys.modules, "peft", None)
    _, folder = finished
    typed("main_single_gpu.py", "-eval", word, folder / "last.pth", "-output", tmp_path).done()
    status = status_of(run_folder(tmp_path))
    last = epochs_of(folder)[-1]
    raw = word == "-resume" or torch.load(folder / "last.pth", weights_only=True)["preferred"] == "state_dict"
    key = "eval_loss" if raw else "eval_loss_ema"
    assert status["raw" if raw else "ema"]["loss"] == pytest.approx(last[key], rel=1e-5)


def test_exported_lora_weights_load_in_timm_with_equal_logits(finished, tmp_path):
    _, folder = finished
    main([str(folder / "last.pth"), "-output", str(tmp_path / "plain.safetensors")])
    arguments = {"img_size": 8, "patch_size": 4, "in_chans": 1, "embed_dim": 16, "depth": 2, "num_heads": 2}
    theirs = timm.create_model(
        "vit_tiny_patch16_224", checkpoint_path=str(tmp_path / "plain.safetensors"), num_classes=10, **arguments
    )
    ours = load_classifier(folder / "last.pth").model
    images = torch.randn(4, 1, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs.eval()(images), rtol=0, atol=1e-6)

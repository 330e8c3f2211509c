"""Models and weights for images that are not square, compared with timm's models with the same img_size."""

import pytest
import timm
import torch
from timm.layers import resample_abs_pos_embed

from configs.image_size import to_image_size
from configs.schema import Config, Data, Model
from configs.values import flatten
from models import build_model
from models.sized import sized
from models.weights.load import load_pretrained
from models.weights.record import preprocessing_of
from tests.support.refusals import refused
from utils.errors import ConfigError

SMALL_SWIN = {"embed_dim": 16, "depths": (1, 1, 1, 1), "num_heads": (1, 2, 4, 8)}
SMALL_VIT = {"embed_dim": 24, "depth": 2, "num_heads": 3}
NAMES = {
    "vit_tiny_patch16_224": SMALL_VIT,
    "swin_tiny_patch4_window7_224": SMALL_SWIN,
    "beit_base_patch16_224": SMALL_VIT,
    "test_efficientnet": {},
    "test_convnext": {},
}
CLASSES = 5
FIELDS = {"EMBED_DIM": 24, "DEPTH": 2, "NUM_HEADS": 3}


def config_of(name: str, size: int | str) -> Config:
    return Config(DATA=Data(IMAGE_SIZE=size), MODEL=Model(TYPE="timm", NAME=name, KWARGS=NAMES[name]))


def load(config: Config, path) -> tuple[torch.nn.Module, list[str]]:
    model = build_model(config, CLASSES).eval()
    return model, load_pretrained(model, str(path), settings=flatten(config), sized=sized(config, CLASSES))


def logits(model: torch.nn.Module, *shape: int) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.randn(2, 3, *shape, generator=torch.Generator().manual_seed(0)))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_square_weights_give_the_outputs_of_timms_model_of_that_shape(tmp_path, name):
    torch.manual_seed(0)
    square = timm.create_model(name, num_classes=CLASSES, **NAMES[name])
    for parameter in square.parameters():
        torch.nn.init.normal_(parameter, std=0.1)  # positions and biases start near 0
    torch.save(square.state_dict(), tmp_path / "square.pth")
    size = {"img_size": (160, 320)} if timm.get_pretrained_cfg(name).fixed_input_size else {}
    overlay = {"file": str(tmp_path / "square.pth"), "num_classes": CLASSES, "custom_load": False}
    expected = timm.create_model(
        name, pretrained=True, pretrained_cfg_overlay=overlay, num_classes=CLASSES, **NAMES[name], **size
    )
    model, _ = load(config_of(name, "160x320"), tmp_path / "square.pth")
    torch.testing.assert_close(logits(model, 160, 320), logits(expected, 160, 320), rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if "test" not in name])
def test_positions_of_weights_follow_shape_there_and_back(tmp_path, name):
    """Positions that change slowly survive a smaller and a larger grid, unless a grid is read as another one."""
    wide, square = (build_model(config_of(name, size), CLASSES) for size in ("160x320", 224))
    state = wide.state_dict()
    key = next(each for each in reversed(state) if each.endswith(("pos_embed", "bias_table")))
    state[key] = torch.linspace(0, 1, len(state[key].flatten())).view(state[key].shape)
    config = config_of(name, "160x320")
    record = {"config": flatten(config), "data": preprocessing_of(config.DATA), "class_names": list("abcde")}
    torch.save({"state_dict": state, **record}, tmp_path / "wide.pth")
    model, (_, line) = load(config_of(name, 224), tmp_path / "wide.pth")
    assert "160 x 320 to 224 x 224" in line and model.state_dict()[key].shape == square.state_dict()[key].shape
    same, lines = load(config, tmp_path / "wide.pth")
    assert len(lines) == 1 and torch.equal(same.state_dict()[key], state[key])


@pytest.mark.parametrize("new", ["32x32", "16x64", "64x16"])
@pytest.mark.parametrize("old", ["32x32", "16x64"])
def test_grids_of_equal_numbers_of_patches_are_not_confused(tmp_path, old, new):
    before, after = (
        Config(DATA=Data(IMAGE_SIZE=to_image_size(size)), MODEL=Model(PATCH_SIZE=8, **FIELDS)) for size in (old, new)
    )
    state = build_model(before, CLASSES).state_dict()
    record = {"config": flatten(before), "data": preprocessing_of(before.DATA), "class_names": list("abcde")}
    torch.save({"state_dict": state, **record}, tmp_path / "before.pth")
    model, _ = load(after, tmp_path / "before.pth")
    grids = {"32x32": [4, 4], "16x64": [2, 8], "64x16": [8, 2]}
    expected = resample_abs_pos_embed(state["pos_embed"], new_size=grids[new], old_size=grids[old])
    assert torch.equal(model.pos_embed.data, expected)


@pytest.mark.parametrize(
    ("size", "patch", "near"), [("30x64", 8, "32x64"), ("32x60", 16, "32x64"), ("20x20", 16, 16), (36, 8, 32)]
)
def test_shape_that_patches_do_not_fill_is_refused_with_the_nearest(size, patch, near):
    config = Config(DATA=Data(IMAGE_SIZE=size), MODEL=Model(PATCH_SIZE=patch, **FIELDS))
    with refused(ConfigError, "DATA.IMAGE_SIZE", f"the nearest is {near}"):
        build_model(config, 2)


def test_model_of_timm_that_takes_only_squares_is_refused_by_name():
    config = Config(DATA=Data(IMAGE_SIZE="96x192"), MODEL=Model(TYPE="timm", NAME="mvitv2_tiny"))
    with refused(ConfigError, "mvitv2_tiny", "96 x 192"):
        build_model(config, 2)

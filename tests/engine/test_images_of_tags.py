"""Images are prepared as every one of timm's pretrained weights expects them, from its name alone."""

from collections import defaultdict

import numpy as np
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_data_config

from configs.schema import Data
from datasets import Normalize
from datasets.transforms.crop import EvalTransform
from datasets.transforms.decode import PixelRules, to_array
from engine.settings import load_settings
from models.weights.metadata import metadata_of
from tests.support.refusals import refused
from utils.errors import ConfigError

SIZES = [(160, 120), (97, 131), (61, 47), (33, 190), (211, 64), (90, 90), (128, 127), (25, 31), (150, 149), (17, 17)]
LARGEST = 512  # pixels a side; larger images differ in size only


def photograph(width: int, height: int) -> Image.Image:
    """Blobs of colour with some noise."""
    rng = np.random.default_rng(width * height)
    coarse = Image.fromarray(rng.integers(0, 256, (6, 7, 3), dtype=np.uint8)).resize((width, height), 3)
    return Image.fromarray(np.clip(np.asarray(coarse) + rng.normal(0, 12, (height, width, 3)), 0, 255).astype("u1"))


def ours(data: Data, image: Image.Image) -> torch.Tensor:
    pixels = torch.empty(data.IMAGE_SIZE, data.IMAGE_SIZE, 3, dtype=torch.uint8).permute(2, 0, 1)
    EvalTransform(data)(to_array(image, PixelRules(3)), pixels)
    return Normalize(data)(pixels[None])[0]


def test_every_tag_has_the_pipeline_of_timm():
    pipelines, photographs = defaultdict(set), [photograph(*size) for size in SIZES]
    for tag in timm.list_pretrained():
        known = timm.get_pretrained_cfg(tag).to_dict()
        found = metadata_of(tag)
        assert found.model == {"MODEL.TYPE": "timm", "MODEL.NAME": tag}
        values = {key.removeprefix("DATA."): tuple(v) if isinstance(v, list) else v for key, v in found.images.items()}
        pipelines[tuple(resolve_data_config({}, pretrained_cfg=known).items())].add(tuple(values.items()))
    for number, (theirs, found) in enumerate(pipelines.items()):
        assert len(found) == 1
        theirs, settings = dict(theirs), dict(found.pop())
        if "IMAGE_SIZE" not in settings:
            assert theirs["input_size"][1] != theirs["input_size"][2]
            continue
        if settings["IMAGE_SIZE"] > LARGEST:
            smaller = settings["IMAGE_SIZE"] // 8
            assert theirs["input_size"] == (3, settings["IMAGE_SIZE"], settings["IMAGE_SIZE"])
            settings["IMAGE_SIZE"], theirs["input_size"] = smaller, (3, smaller, smaller)
        transform, data = create_transform(**theirs), Data(**settings)
        image = photographs[number % 10]  # one for each pipeline; with all ten, the same holds
        difference = (ours(data, image) - transform(image)) * 255 * torch.tensor(theirs["std"])[:, None, None]
        assert difference.abs().max() <= 2.01, (theirs, image.size)


def test_settings_follow_a_tag_and_weights_that_cannot_be_followed_are_refused():
    tag = "convnext_tiny.fb_in22k_ft_in1k_384"
    loaded = load_settings(["-eval", "-pretrained", f"hf-hub:timm/{tag}"])
    assert (loaded.config.DATA.CROP_MODE, loaded.config.MODEL.NAME) == ("squash", tag)
    assert tag in loaded.origins["DATA.CROP_MODE"]
    sizes = {tag: timm.get_pretrained_cfg(tag).input_size[1:] for tag in timm.list_pretrained()}
    for tag in [tag for tag, (height, width) in sizes.items() if height != width][:1]:  # older timms have none
        with refused(ConfigError, "DATA.IMAGE_SIZE", tag):
            load_settings(["-eval", "-pretrained", tag])
        assert load_settings(["-eval", "-pretrained", tag, "-image_size", "512"]).config.DATA.CROP_PCT == 1.0
    with refused(ConfigError, "hf-hub:someone/something", "someone/something", "-pretrained"):
        load_settings(["-eval", "-pretrained", "hf-hub:someone/something"])

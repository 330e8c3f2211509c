"""Preparation of a batch on its device gives the same pixels as a plain loop, with every implementation."""

import numpy as np
import pytest
import torch

from configs.schema import Config
from datasets import Mixed, Normalize, Piece, Preparation, build_preparation
from datasets.order import sample_rng
from datasets.transforms import preparation
from datasets.transforms.erase_and_mix import BatchedErasing, Erasing
from tests.support.batches import ERASES, MIXES, SIDE, batch, settings
from tests.support.configs import CPU, replaced, small_config
from tests.support.loading import first_batch
from tests.support.loading import settings as digits
from tests.support.pretend_device import DEVICE, on_pretend_device, waits
from tests.support.trainers import make_trainer

pytestmark = pytest.mark.slow


def erased_one_by_one(images: torch.Tensor, piece: Piece, config: Config) -> torch.Tensor:
    """Erase with each random number drawn where it is needed."""
    erasing, images, mode = Erasing(config, CPU), images.clone(), config.TRAIN.RANDOM_ERASE_MODE
    for image, index, repeat in zip(images, piece.indices.tolist(), piece.repeats.tolist(), strict=True):
        rng = sample_rng(config.SEED, piece.epoch, index, "erasing", repeat)
        if rng.random() >= config.TRAIN.RANDOM_ERASE_PROB:
            continue
        for left, top, width, height in erasing.boxes(rng):
            box = image[:, top : top + height, left : left + width]
            if mode == "const":
                box.fill_(0.0)
                continue
            x, y = (int(rng.random() * side) for side in config.DATA.shape[::-1])
            width, height = (width, height) if mode == "pixel" else (1, 1)
            box.copy_(erasing.noise[:, y : y + height, x : x + width].expand_as(box))
    return images


@pytest.mark.parametrize("kind", [Erasing, BatchedErasing])
@pytest.mark.parametrize(
    ("mode", "channels", "size"), [("pixel", 3, SIDE), ("pixel", 3, "8x30"), ("rand", 1, SIDE), ("const", 3, SIDE)]
)
def test_random_erasing_of_a_batch_matches_erasing_each_image(kind, mode, channels, size):
    config = replaced(settings(channels, RANDOM_ERASE_MODE=mode, **ERASES), DATA={"IMAGE_SIZE": size})
    images, piece = torch.randn(40, channels, *config.DATA.shape), batch(40).piece
    wanted = erased_one_by_one(images, piece, config)
    erasing = kind(config, CPU)
    assert torch.equal(erasing(images.clone(), torch.tensor(erasing.rows(piece))), wanted)
    height, width = config.DATA.shape
    assert (wanted != images)[:, :, height // 2 :, -3:].any(), "no box reaches the end of the wider side"
    assert 10 < (wanted != images).flatten(1).any(1).sum() < 40 and 0.9 < erasing.noise.std() < 1.1


def test_erasing_boxes_of_loader_match_boxes_drawn_on_demand():
    config = replaced(digits(IMAGE_SIZE=16, BATCH_SIZE=16), TRAIN={"RANDOM_ERASE_PROB": 0.5, "RANDOM_ERASE_COUNT": 2})
    prepare = Preparation(config, Normalize(config.DATA))
    loaded = first_batch(config)
    wanted = prepare(loaded._replace(boxes=None))[0]
    assert loaded.boxes.shape == (16, 2, 6) and torch.equal(prepare(loaded)[0], wanted)
    assert torch.equal(torch.cat([prepare(part)[0] for part in loaded.parts(7)]), wanted)
    assert not torch.equal(prepare(loaded._replace(boxes=np.zeros_like(loaded.boxes)))[0], wanted)


@pytest.mark.parametrize(
    ("half", "kind", "channels"), [(torch.float16, Erasing, 3), (torch.bfloat16, BatchedErasing, 1)]
)
@pytest.mark.parametrize("train", [{}, ERASES, MIXES, ERASES | MIXES], ids=["plain", "erased", "mixed", "both"])
def test_half_precision_images_equal_float32_images_rounded_once(half, kind, train, channels):
    config, images = settings(channels, **train), batch(9, channels)
    prepare = Preparation(config, Normalize(config.DATA))
    if train.keys() & ERASES.keys():
        prepare.erase = kind(config, CPU)
    (wanted, targets), (got, _) = prepare(images), prepare(images, half)
    assert torch.equal(getattr(targets, "first", targets), images.targets)
    assert wanted.dtype == torch.float32 and got.dtype == half and torch.equal(got, wanted.to(half))
    assert wanted.is_contiguous() and got.is_contiguous()


def test_mixing_ends_at_mixup_off_epoch_and_skips_batches_without_positions():
    config, one = settings(3, MIXUP_OFF_EPOCH=2, **MIXES), batch(4)
    prepare = Preparation(config, Normalize(config.DATA))
    prepared = [prepare(one._replace(piece=one.piece._replace(epoch=epoch))) for epoch in range(4)]
    assert [isinstance(targets, Mixed) for _, targets in prepared] == [True, True, False, False]
    plain = [torch.equal(images, prepare.normalize(one.images)) for images, _ in prepared]
    assert plain == [False, False, True, True]
    prepare = Preparation(config := settings(3, **ERASES | MIXES), Normalize(config.DATA))
    assert torch.equal(prepare(one._replace(piece=None))[0], prepare.normalize(one.images))  # as for halfstep doctor


@pytest.mark.long
def test_image_preparation_compiles_one_graph_per_image_size(monkeypatch):
    graphs, compile_any = [], torch.compile

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda function, **options: compile_any(function, backend=backend, **options))
    config = settings(RANDOM_ERASE_PROB=0.7, **MIXES)
    plain, compiled = (Preparation(config, Normalize(config.DATA), is_compiled) for is_compiled in (False, True))
    plain.erase = compiled.erase = BatchedErasing(config, CPU)
    for count in (8, 6, 4, 7):
        assert torch.equal(compiled(batch(count))[0], plain(batch(count))[0])
    assert len(graphs) == 4
    kinds = {device: Preparation(config, Normalize(config.DATA).to(device)).erase for device in ("cpu", "meta")}
    assert type(kinds["cpu"]) is Erasing and type(kinds["meta"]) is BatchedErasing


@on_pretend_device
def test_device_preparation_matches_host_without_synchronizing(tmp_path):
    plain = batch(9)
    pinned = plain._replace(images=plain.images.pin_memory(), targets=plain.targets.pin_memory())
    for mode in ("pixel", "rand", "const"):
        config = settings(RANDOM_ERASE_MODE=mode, **ERASES, **MIXES)
        prepares = [Preparation(config, Normalize(config.DATA).to(device)) for device in (CPU, DEVICE)]
        with waits() as seen:
            (here, targets), (there, same_targets) = (prepare(pinned, torch.bfloat16) for prepare in prepares)
        assert seen == {} and there.device.type == torch.device(DEVICE).type and torch.equal(here, there.cpu())
        assert all(torch.equal(*pair) for pair in zip(targets, (each.cpu() for each in same_targets), strict=True))


@pytest.mark.parametrize("rows", [np.arange(6).reshape(2, 3), [(0.5, 1), (2, 3)]])
def test_rows_of_numpy_and_of_python_are_pinned_for_a_device_with_streams(monkeypatch, rows):
    pinned = []
    monkeypatch.setattr(preparation, "has_streams", lambda device: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    found = preparation.copied(rows, CPU)
    assert pinned[0] is found and np.array_equal(found.numpy(), np.asarray(rows))


@on_pretend_device
def test_prepared_images_have_dtype_of_the_models_first_layer(tmp_path):
    for options, dtype in (
        ("", torch.float32),
        ("AMP=true", torch.bfloat16),
        ("AMP=true PRECISION.DTYPE=float16", torch.float16),
        ("AMP=true PRECISION.CUSTOM_BLACK_LIST=[patch_embed]", torch.float32),
        ("AMP=true PRECISION.MODE=naive", torch.bfloat16),
    ):
        trainer = make_trainer(small_config(tmp_path, *options.split()), device=torch.device(DEVICE))
        windows = trainer.data.windows(0, 1)
        images, _ = trainer.prepare_batch(next(next(windows).batches))
        assert images.dtype == dtype


@pytest.mark.parametrize("is_compiled", [False, True])
def test_preparation_is_compiled_only_on_request(tmp_path, monkeypatch, is_compiled):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiled.append(options) or function)
    config = small_config(tmp_path)
    build_preparation(config, Normalize(config.DATA), is_compiled)
    assert compiled == [{"dynamic": False}] * is_compiled

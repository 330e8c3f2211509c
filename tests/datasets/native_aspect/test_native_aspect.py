"""DATA.TOKENS: mixing and erasing of patches, runs, predictions, exports, -check, and settings that are refused."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data.naflex_random_erasing import PatchRandomErasing

from datasets import build_normalize, build_preparation
from datasets.native_aspect.batches import EvalSequenceTransform, PatchBoxes, PatchErasing, PatchMixing
from datasets.native_aspect.grids import grids_of, new_batch, pack, pictures_of, size_of
from datasets.types import Batch
from engine.predict.classifier import load_classifier
from engine.predict.predictor import Predictor
from engine.train.distillation import load_teacher
from models import build_model
from models.weights.files import read_weights
from models.weights.load import load_pretrained
from tests.datasets.native_aspect.photos import GREY, SHAPES, VIT, noise, piece_of, settings
from tests.support.cases import cases_of, names_of
from tests.support.configs import CPU, replaced
from tests.support.loading import first_batch
from tests.support.refusals import assert_names, refused
from tests.support.runs import epochs_of, run, run_folder, typed
from tests.support.trainers import make_trainer, update
from utils.distributed import Process
from utils.errors import ConfigError

pytestmark = pytest.mark.slow


def batch_of(
    shapes: list[tuple[int, int]], length: int = 64, patch: int = 8, shade: int | None = None, channels: int = 3
) -> torch.Tensor:
    """Return a batch of pictures with these widths and heights in patches."""
    batch = new_batch(len(shapes), length, patch, channels)
    for number, (columns, rows_of) in enumerate(shapes):
        pixels = np.array(noise(columns * patch, rows_of * patch, seed=number))
        if shade is not None:
            pixels[:] = shade * (number + 1)
        pack(torch.from_numpy(pixels[:, :, :channels]).permute(2, 0, 1), patch, batch[number])
    return batch


# Batches


def test_rows_that_pad_an_evaluation_batch_change_no_other_logits(folder):
    config = settings(folder)
    model, normalize = build_model(config, 5).eval(), build_normalize(config.DATA)
    batch = batch_of([(6, 4), (3, 8)], length=24)
    padded = torch.cat((batch, torch.zeros_like(batch)))
    with torch.no_grad():
        logits, expected = model(normalize(padded)), model(normalize(batch))
    assert logits.isfinite().all()
    torch.testing.assert_close(logits[:2], expected, rtol=0, atol=1e-6)


def test_normalized_batch_turns_back_into_its_pictures(folder):
    config = settings(folder)
    normalize, batch = build_normalize(config.DATA), batch_of([(6, 4), (3, 8), (1, 1)], length=24)
    for found, expected in zip(normalize.pixels(normalize(batch)), pictures_of(batch), strict=True):
        assert np.array_equal(found.permute(1, 2, 0).numpy(), expected)
    mirrored = normalize.pixels(normalize.mirrored(normalize(batch)))
    for found, expected in zip(mirrored, pictures_of(batch), strict=True):
        assert np.array_equal(found.permute(1, 2, 0).numpy(), expected[:, ::-1])


# Mixing and erasing


def mixed(folder, shapes, *options: str, step: int = 5):
    """Return a batch before and after mixing, and the shares."""
    config = settings(folder, "TRAIN.MIXUP_PROB=1", *options)
    mixing, batch, piece = PatchMixing(config, 8), batch_of(shapes, shade=40), piece_of(len(shapes), step)
    before, grids = [each.astype(float) for each in pictures_of(batch.clone())], grids_of(batch)
    mixes = mixing.draw(piece, grids)
    mixing.mix(batch, mixes)
    return before, [each.astype(float) for each in pictures_of(batch)], mixing.shares(mixes, grids)


@pytest.mark.parametrize("kind", ["MIXUP", "CUTMIX"])
@pytest.mark.parametrize("shapes", [[(8, 8), (8, 8)], [(16, 4), (4, 16)], [(9, 3), (6, 5)], [(1, 9), (1, 7)]], ids=str)
def test_mixed_targets_have_the_share_of_the_mixed_pixels(folder, kind, shapes):
    for step in range(6):
        before, after, shares = mixed(folder, shapes, f"TRAIN.{kind}_ALPHA=1", step=step)
        for own, partner in ((0, 1), (1, 0)):
            # Each picture has one shade, so the mean shade shows how much of it is left.
            start, end = before[own].mean(), before[partner].mean()
            assert (after[own].mean() - end) / (start - end) == pytest.approx(shares[own], abs=0.02)


def test_only_the_central_overlap_of_two_images_is_mixed(folder):
    before, after, shares = mixed(folder, [(16, 4), (4, 16)], "TRAIN.MIXUP_ALPHA=1")
    changed = (before[0] != after[0]).any(axis=2)
    assert changed[:, 48:80].all() and not changed[:, :48].any() and not changed[:, 80:].any()
    assert shares[0] == pytest.approx(shares[1])


def test_last_image_without_a_partner_and_late_epochs_are_not_mixed(folder):
    before, after, shares = mixed(folder, [(4, 4)] * 3, "TRAIN.MIXUP_ALPHA=1")
    assert (before[2] == after[2]).all() and shares[2] == 1 and shares[0] < 1
    before, after, shares = mixed(folder, [(4, 4)] * 2, "TRAIN.MIXUP_ALPHA=1", "TRAIN.MIXUP_PROB=0")
    assert (before[0] == after[0]).all() and (shares == 1).all()
    mixing = PatchMixing(settings(folder, "TRAIN.MIXUP_ALPHA=1", "TRAIN.MIXUP_OFF_EPOCH=1"), 8)
    assert mixing.is_on(piece_of(2)) and not mixing.is_on(piece_of(2)._replace(epoch=1))


@pytest.mark.parametrize(("grey", "channels"), [((), 3), (GREY, 1)], ids=["colour", "grey"])
@pytest.mark.parametrize("mode", ["const", "rand", "pixel"])
def test_erased_boxes_cover_whole_patches_inside_the_image(folder, mode, grey, channels):
    options = ["TRAIN.RANDOM_ERASE_PROB=1", "TRAIN.RANDOM_ERASE_COUNT=2", f"TRAIN.RANDOM_ERASE_MODE={mode}"]
    config = settings(folder, *options, *grey)
    batch = batch_of([(10, 6), (3, 20), (1, 2)], channels=channels)
    piece, prepare = piece_of(3), build_preparation(config, build_normalize(config.DATA))
    images, _ = prepare(Batch(batch, torch.zeros(3, dtype=torch.int64), 3, [], piece))
    plain = build_normalize(config.DATA)(batch)
    changed = (images["patches"] != plain["patches"]).any(2)
    assert not (changed & ~plain["patch_valid"]).any()
    counts = changed.sum(1).tolist()
    assert 0 < counts[0] <= 60 / 3 + 10 and 0 < counts[1] <= 60 / 3 + 10
    erased = images["patches"][changed].unflatten(1, (-1, channels))
    if mode == "const":
        assert not erased.any()
    else:
        varies = (erased != erased[:, :1]).any().item()
        assert varies == (mode == "pixel") and erased.std() > 0.1
        assert mode == "pixel" or len(erased.unique(dim=0)) <= 2 * 3, "each box has one colour"


@pytest.mark.parametrize("most", [1, 3])
def test_share_of_erased_patches_equals_timms(folder, most):
    config = settings(
        folder, "TRAIN.RANDOM_ERASE_PROB=0.5", "TRAIN.RANDOM_ERASE_MODE=const", f"TRAIN.RANDOM_ERASE_COUNT={most}"
    )
    rows_of, columns, count = 6, 10, 1500
    boxes = PatchBoxes(config).draw(piece_of(count), np.tile([rows_of, columns], (count, 1)))
    found = len(PatchErasing(config, CPU, 192).rows(boxes, 60)[0]) / (60 * count)
    coord = torch.stack(torch.meshgrid(torch.arange(rows_of), torch.arange(columns), indexing="ij"), 2).view(1, -1, 2)
    random.seed(0)  # timm draws from the global state
    torch.manual_seed(0)
    erase = PatchRandomErasing(0.5, max_count=most, device="cpu")
    erased = erase(torch.ones(count, 60, 1, 1), coord.expand(count, -1, -1))
    assert found == pytest.approx((erased == 0).float().mean().item(), rel=0.12)


def test_repeats_of_an_image_have_different_erased_boxes(folder):
    boxes = PatchBoxes(settings(folder, "TRAIN.RANDOM_ERASE_PROB=1"))
    piece = piece_of(2)._replace(indices=np.zeros(2, int), repeats=np.arange(2))
    one, other = boxes.draw(piece, np.tile([6, 10], (2, 1)))
    assert not np.array_equal(one, other)


def test_saved_batch_without_boxes_is_prepared_the_same(folder):
    """The doctor replays saved images, which were mixed when they were read."""
    config = settings(folder, "TRAIN.MIXUP_ALPHA=1", "TRAIN.RANDOM_ERASE_PROB=0.5")
    batch = first_batch(config)
    prepare = build_preparation(config, build_normalize(config.DATA))
    images, targets = prepare(batch)
    again, same = prepare(batch._replace(boxes=None))
    assert torch.equal(images["patches"], again["patches"]) and torch.equal(targets.share, same.share)
    assert 0 < targets.share.min() < 1
    assert torch.equal(targets.second, targets.first.view(-1, 2).flip(1).flatten())


# Runs


@pytest.fixture(scope="module")
def trained(tmp_path_factory, start):
    """Return the folder of a run."""
    output = tmp_path_factory.mktemp("trained")
    ended = start(output, "REPORT=true", "DATA.TRAIN_TOKENS=[12,24]", "TRAIN.MIXUP_ALPHA=0.8").done()
    assert_names(ended.stdout, "own aspect ratio", "24 patches of 8 x 8", "drawn for each update from 12, 24")
    return run_folder(output)


def test_compiled_run_equals_an_eager_run_with_several_lengths(tmp_path, start):
    found = {}
    for mode in ("false", "true", "blocks"):
        options = [f"COMPILE={mode}", "DATA.TRAIN_TOKENS=[12,24]", "DATA.BATCH_SIZE=10"]
        start(tmp_path / mode, *options, compile_without_code=[{"XDG_CACHE_HOME": str(tmp_path)}]).done()
        found[mode] = epochs_of(run_folder(tmp_path / mode))[-1]["eval_loss"]
    assert found["true"] == pytest.approx(found["false"], rel=1e-4)
    assert found["blocks"] == pytest.approx(found["false"], rel=1e-4)


def test_evaluation_and_prediction_read_images_like_the_run(trained, folder, tmp_path):
    metrics = epochs_of(trained)[0]
    ended = run("main_single_gpu.py", "-eval", "-pretrained", str(trained / "best.pth"), "-output", str(tmp_path))
    assert f"{metrics['eval_loss']:.4f}" in ended.done().stdout
    photos = [folder / "photos/val/bird" / f"{width}x{height}-0.png" for width, height in SHAPES]
    typed("scripts/predict.py", trained, *photos, "-sheet", tmp_path / "sheet.png", "-json", tmp_path / "x.json").done()
    assert Image.open(tmp_path / "sheet.png").width > 300
    predictor = Predictor(load_classifier(trained), Process(CPU))
    found = predictor(list(map(str, photos)), draw=lambda batch: batch.pictures)
    assert [each.picture.shape[:2] for each in found] == [size_of(height, width, 8, 24) for width, height in SHAPES]
    plain = json.loads((tmp_path / "x.json").read_text())["images"][1]["predictions"][0]["probability"]
    mirror = tmp_path / "mirror.png"
    Image.open(photos[1]).transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(mirror)
    found = []
    for photo in (photos[1], mirror):
        typed("scripts/predict.py", trained, photo, "-flip", "-json", tmp_path / "y.json").done()
        found.append(json.loads((tmp_path / "y.json").read_text())["images"][0]["predictions"][0]["probability"])
    assert found[0] == pytest.approx(found[1], abs=1e-4) and found[0] != plain


@pytest.mark.parametrize("options", [[], VIT, ["MODEL.NAME=vit_tiny_patch16_224", "MODEL.KWARGS.depth=1"]], ids=str)
def test_exported_models_load_in_timm_and_give_equal_logits(tmp_path, folder, start, options):
    start(tmp_path / "o", *options).done()
    source = run_folder(tmp_path / "o") / "best.pth"
    for target, more in (("w.safetensors", ()), ("hf", ("-to", "hf"))):
        typed("scripts/export.py", source, *more, "-output", tmp_path / target).done()
    assert read_weights(tmp_path / "w.safetensors").state
    theirs = timm.create_model(f"local-dir:{tmp_path / 'hf'}", pretrained=True).eval()
    config = settings(folder, *options)
    model = build_model(config, 2).eval()
    model.load_state_dict(read_weights(tmp_path / "w.safetensors").state)
    images = build_normalize(config.DATA)(batch_of([(6, 4), (3, 8)], length=24, patch=model.get_patch_size()[0]))
    with torch.no_grad():
        torch.testing.assert_close(theirs(images), model(images), rtol=0, atol=1e-5)
        photo = folder / "photos/val/bird/200x50-0.png"
        read = new_batch(1, 24, model.get_patch_size()[0], 3)
        EvalSequenceTransform(config, model.get_patch_size()[0])(np.array(Image.open(photo)), read[0])
        expected = model(build_normalize(config.DATA)(read))
        found = run_code_of_card(tmp_path / "hf", Image.open(photo))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def run_code_of_card(folder: Path, image: Image.Image) -> torch.Tensor:
    """Return the logits that the code in the model card of an exported folder computes for an image."""
    code = (folder / "README.md").read_text().split("```python\n")[1].split("```")[0]
    names = {"image": image}
    exec(code.replace("local-dir:FOLDER", f"local-dir:{folder}"), names)
    return names["logits"]


def test_square_model_refuses_naflexvit_weights_and_names_the_setting(folder, tmp_path):
    config = settings(folder, *VIT)
    torch.save(build_model(config, 2).state_dict(), tmp_path / "native.pth")
    square = build_model(replaced(config, DATA={"TOKENS": None}), 2)
    with pytest.raises(ConfigError, match="Remedy: set DATA.TOKENS, because"):
        load_pretrained(square, str(tmp_path / "native.pth"))


def test_graph_exports_attention_maps_and_embeddings_are_refused(trained, tmp_path, folder):
    photo = folder / "photos/val/bird/64x64-0.png"
    for target in ("x.onnx", "x.pt2"):
        ended = typed("scripts/export.py", trained / "best.pth", "-output", tmp_path / target)
        ended.refused("-to", "DATA.TOKENS", "hf")
        assert not (tmp_path / target).exists()
    ended = typed("scripts/predict.py", trained, photo, "-attention", tmp_path / "maps")
    ended.refused("-attention", "DATA.TOKENS")
    ended = typed("scripts/embed.py", trained, photo.parent, "-output", tmp_path / "x.npz")
    ended.refused("DATA.TOKENS")


def test_position_embedding_of_weights_is_resized_to_the_image_size(folder, tmp_path):
    small = build_model(settings(folder, *VIT), 5)
    torch.save(small.state_dict(), tmp_path / "small.pth")
    large = build_model(settings(folder, *VIT, "DATA.IMAGE_SIZE=64"), 5)
    lines = load_pretrained(large, str(tmp_path / "small.pth"))
    assert_names("\n".join(lines), "embeds.pos_embed", "[1, 4, 4, 32]", "[1, 8, 8, 32]")
    resized = torch.nn.functional.interpolate(
        small.embeds.pos_embed.permute(0, 3, 1, 2), (8, 8), mode="bicubic", antialias=True
    )
    torch.testing.assert_close(large.embeds.pos_embed.detach(), resized.permute(0, 2, 3, 1).detach())


# Distillation

SOFT = "TRAIN.DISTILLATION_TYPE=soft"


def test_naflex_teacher_gets_the_images_of_the_student(trained, folder, start, tmp_path):
    options = [SOFT, f"TRAIN.TEACHER_MODEL={trained / 'best.pth'}", "DATA.IMAGENET_MEAN=[0.4,0.4,0.4]"]
    start(tmp_path, *options).done()
    config = settings(folder, *options)
    teacher, _ = load_teacher(config, ["bird", "cat"], 2)
    batch, theirs = batch_of([(6, 4), (3, 8)], length=24), settings(folder)
    expected = teacher.model(build_normalize(theirs.DATA)(batch))
    torch.testing.assert_close(teacher(build_normalize(config.DATA)(batch)), expected, rtol=0, atol=1e-4)


def test_teacher_that_cannot_read_the_images_is_refused(trained, folder):
    with refused(ConfigError, "TRAIN.TEACHER_MODEL", "resnet10t", "DATA.TOKENS"):
        make_trainer(settings(folder, SOFT, "TRAIN.TEACHER_MODEL=resnet10t"))
    teacher = f"TRAIN.TEACHER_MODEL={trained / 'best.pth'}"
    with refused(ConfigError, "TRAIN.TEACHER_MODEL", "DATA.TOKENS", "16 x 16", "8 x 8"):
        make_trainer(settings(folder, SOFT, teacher, "MODEL.KWARGS.patch_size=16"))


# -check and refusals


@pytest.mark.parametrize("options", cases_of("native_aspect-mistakes"))
def test_unsupported_setting_is_refused_by_name(folder, tmp_path, options):
    words = ["-cfg", folder / "native.yaml", "-output", tmp_path, "-epochs", "1", "-opts", *options.split()]
    typed("main_single_gpu.py", *words).refused(*names_of("native_aspect-mistakes", options))


def test_extreme_shapes_train_and_evaluate(folder, tmp_path):
    for part in ("train", "val"):
        for name in ("bird", "cat"):
            (tmp_path / "photos" / part / name).mkdir(parents=True)
            for number, shape in enumerate(2 * [(1, 1), (500, 1), (1, 500)]):
                noise(*shape, seed=number).save(tmp_path / "photos" / part / name / f"{number}.png")
    trainer = update(make_trainer(settings(tmp_path)), 2)
    assert np.isfinite(trainer.report().loss)
    words = ["-cfg", tmp_path / "native.yaml", "-output", tmp_path / "o", "-epochs", "1"]
    run("main_single_gpu.py", *map(str, words)).done()


def test_image_too_long_for_timms_search_becomes_one_row_of_patches():
    assert size_of(1, 190_000_000, 8, 2) == (8, 16) and size_of(190_000_000, 1, 8, 2) == (16, 8)

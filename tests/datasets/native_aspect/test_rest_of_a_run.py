"""Models with DATA.TOKENS in other parts of a run: the doctor, deterministic kernels, teachers, memory and messages."""

from collections.abc import Callable

import numpy as np
import pytest
import timm
import torch

from datasets import build_normalize
from datasets.loading.workers import AHEAD_OF_PROCESS, shared_bytes
from datasets.native_aspect.batches import EvalSequenceTransform, blank_batch
from datasets.native_aspect.grids import new_batch, pictures_of, set_grid
from engine.batch_size import StepTrial
from engine.first_passes import try_largest
from engine.memory import too_large
from engine.train.distillation import load_teacher
from models import build_model
from models.compilation import parts_to_compile
from models.transforms import choose_transforms
from models.weights.load import load_pretrained
from tests.datasets.native_aspect.photos import GREY, VIT, noise, settings
from tests.support.configs import CPU, replaced
from tests.support.refusals import assert_names, refused
from tests.support.runs import run_folder, typed
from tests.support.trainers import make_trainer, update
from utils.distributed import Process
from utils.errors import ConfigError
from utils.torch_internals import TorchDispatchMode

pytestmark = pytest.mark.slow

# The doctor


def test_doctor_replays_saved_batch_of_a_stopped_run(start, tmp_path):
    options = "AMP=true PRECISION.DTYPE=float16 PRECISION.MAX_CONSECUTIVE_SKIPS=2 TRAIN.BASE_LR=1000"
    stopped = start(tmp_path / "o", *options.split(), "DATA.TRAIN_TOKENS=[12]", "TRAIN.RANDOM_ERASE_PROB=0.5")
    assert stopped.returncode == 3 and "halfstep doctor" in stopped.stdout, stopped.printed
    saved = run_folder(tmp_path / "o")
    said = typed("scripts/doctor.py", saved).done().stdout
    assert_names(said, "process 0: 8 images", "first: embeds.proj")


# Deterministic kernels

GPU = torch.device("cuda")


class LikeCuda(TorchDispatchMode):
    """Refuses the gradients for which CUDA has no deterministic kernel."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not ("backward" in str(func) and ("upsample" in str(func) or "grid_sampler" in str(func))), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("positions", ["learned", "factorized"])
def test_deterministic_gradients_of_position_embeddings_equal_default_ones(folder, positions, is_compiled):
    config = settings(folder, "DETERMINISTIC=true", f"MODEL.KWARGS.pos_embed={positions}", "MODEL.KWARGS.depth=1")
    plain, chosen = build_model(config, 5), build_model(config, 5)
    chosen.load_state_dict(plain.state_dict())
    choose_transforms(config, GPU, None, training=True).apply(chosen)
    if is_compiled:
        chosen.compile(backend="eager", dynamic=False)
    for length in (24, 40, 24):
        images = build_normalize(config.DATA)(blank_batch(config, 2, length))
        total = chosen(images).square().sum()
        with LikeCuda():
            total.backward()
        plain(images).square().sum().backward()
    found = {name: each.grad for name, each in chosen.named_parameters() if "pos_embed" in name}
    assert len(found) == (1 if positions == "learned" else 2)
    for name, grad in found.items():
        assert grad.abs().max() > 1e-3
        torch.testing.assert_close(grad, plain.get_parameter(name).grad, rtol=1e-4, atol=1e-5)


def test_grid_sample_with_deterministic_kernels_is_refused_on_gpus(folder):
    config = settings(folder, "DETERMINISTIC=true", "MODEL.KWARGS.pos_embed_use_grid_sample=true")
    model = build_model(config, 5)
    with refused(ConfigError, "MODEL.KWARGS", "pos_embed_use_grid_sample", "DETERMINISTIC"):
        choose_transforms(config, GPU, None, training=True).apply(model)


# Memory


@pytest.mark.parametrize("lengths", [[], [12], [12, 40]], ids=str)
def test_shared_memory_fits_the_largest_batches_of_the_workers(folder, lengths):
    config = settings(folder, "MODEL.KWARGS.patch_size=32", f"DATA.TRAIN_TOKENS={lengths}", "DATA.BATCH_SIZE_EVAL=4")
    batches = [new_batch(count, max([24, *lengths]), 32, 3) for count in (8, 4)]  # for training and evaluation
    assert shared_bytes(config, 3) == 3 * AHEAD_OF_PROCESS * sum(each.nbytes for each in batches)


LENGTHS = {"[]": ("DATA.TOKENS", "24"), "[12]": ("DATA.TRAIN_TOKENS", "12"), "[12,40]": ("DATA.TRAIN_TOKENS", "40")}


@pytest.mark.parametrize("lengths", LENGTHS)
def test_shortage_of_memory_names_the_setting_of_the_largest_images(folder, lengths):
    error = str(too_large(settings(folder, f"DATA.TRAIN_TOKENS={lengths}"), CPU, "no memory"))
    assert_names(error, *LENGTHS[lengths])
    assert "DATA.IMAGE_SIZE" not in error


def test_memory_trials_use_the_largest_training_length(folder):
    seen = []

    class Watched(StepTrial):
        def begin(self, config, train_data) -> None:
            super().begin(config, train_data)
            self.trainer.model.register_forward_pre_hook(lambda model, images: seen.append(images[0]["patches"].shape))

    config = settings(folder, "DATA.TRAIN_TOKENS=[12,40]")
    Watched(config, 2, Process(CPU)).update(8, times=4)
    assert seen == [(8, 40, 192)] * 4
    trainer, seen = make_trainer(config), []
    trainer.model.register_forward_pre_hook(lambda model, images: seen.append(images[0]["patches"].shape))
    assert try_largest(trainer) is None and seen == [(config.DATA.BATCH_SIZE, 40, 192)]


# Models


def drop_rates(model) -> dict[str, float]:
    """Return the rate of each dropout and each drop path by the name of its module."""
    modules = {name.removeprefix("embeds."): each for name, each in model.named_modules()}
    rates = {name: getattr(each, "p", getattr(each, "drop_prob", 0.0)) for name, each in modules.items()}
    return {name: rate for name, rate in rates.items() if isinstance(rate, float) and rate}


@pytest.mark.parametrize("name", ["DROPOUT", "ATTENTION_DROPOUT", "DROPPATH"])
def test_drop_rates_of_a_plain_vit_are_the_same_with_tokens(folder, name):
    config = settings(folder, *VIT, f"MODEL.{name}=0.2")
    expected = drop_rates(build_model(replaced(config, DATA={"TOKENS": None}), 5))
    assert expected and drop_rates(build_model(config, 5)) == expected


@pytest.mark.parametrize("mode", ["true", "blocks"])
def test_model_compiles_once_for_each_number_of_patches(folder, mode):
    config, graphs = settings(folder, f"COMPILE={mode}"), []

    def count(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        graphs.append(graph)
        return graph.forward

    model, normalize = build_model(config, 5), build_normalize(config.DATA)
    torch.compiler.reset()
    for part in parts_to_compile(model, config):
        part.compile(backend=count, dynamic=False)
    counts = []
    for length in (12, 24, 12, 24, 40):
        images = blank_batch(config, 2, length)
        model(normalize(images)).sum().backward()
        set_grid(images, 1, length)  # the graph is the same for any aspect ratio
        model(normalize(images)).sum().backward()
        counts.append(len(graphs))
    each = counts[0]
    assert counts == [each, 2 * each, 2 * each, 2 * each, 3 * each]
    assert each == 1 or mode == "true"
    torch.compiler.reset()


REFUSED = {
    "MODEL.KWARGS=null MODEL.KWARGS.depth=1 MODEL.NAME=eva02_enormous_patch14_clip_224": "MODEL.NAME",
    "MODEL.KWARGS=null MODEL.NAME=vit_tiny_r_s16_p8_224": "MODEL.NAME",
    f"{' '.join(VIT)} MODEL.KWARGS.class_token=false": "class_token",
    "MODEL.KWARGS.embed_dimm=1": "did you mean embed_dim",
}


@pytest.mark.parametrize("options", REFUSED)
def test_model_refusal_names_only_settings_of_the_user(folder, options):
    with refused(ConfigError, REFUSED[options]) as caught:
        build_model(settings(folder, *options.split()), 5)
    assert "use_naflex" not in str(caught.value) and "mlp_ratio" not in str(caught.value)


# Weights


@pytest.mark.parametrize("tokens", ["null", "16"])
def test_grey_model_starts_from_weights_of_rgb_images(folder, tmp_path, tokens):
    rgb = build_model(settings(folder, *VIT, f"DATA.TOKENS={tokens}"), 5).eval()
    torch.save(rgb.state_dict(), tmp_path / "rgb.pth")
    config = settings(folder, *VIT, *GREY, "DATA.TOKENS=16")
    grey = build_model(config, 5).eval()
    assert "  embeds.proj adapted from 3 to 1 channel" in load_pretrained(grey, str(tmp_path / "rgb.pth"))
    square, patches = torch.randn(1, 1, 32, 32), square_and_patches(settings(folder, *VIT))[1]
    pixels = square.unflatten(3, (4, 8)).unflatten(2, (4, 8)).permute(0, 2, 4, 3, 5, 1).reshape(1, 16, 64, 1)
    torch.nn.init.normal_(rgb.head.weight)
    grey.head.load_state_dict(rgb.head.state_dict())
    # Equal values in all three channels give the logits of the grey image.
    colours = pixels.expand(-1, -1, -1, 3).flatten(2)
    expected = rgb(patches | {"patches": colours}) if tokens == "16" else rgb(square.expand(-1, 3, -1, -1))
    torch.testing.assert_close(grey(patches | {"patches": pixels.flatten(2)}), expected, rtol=0, atol=1e-5)
    assert expected.abs().max() > 0.1


TIMMS = ["MODEL.NAME=vit_tiny_patch16_224", "DATA.IMAGE_SIZE=32"]
POOLED = "MODEL.KWARGS.global_pool=avg"
PLAIN = [[], [POOLED], ["MODEL.POS_EMBED=sincos2d"], ["MODEL.POS_EMBED=none"]]


@pytest.mark.parametrize("options", [*([*VIT, *each] for each in PLAIN), TIMMS, [*TIMMS, POOLED]], ids=str)
def test_square_image_gives_the_logits_of_the_loaded_plain_vit(folder, tmp_path, options):
    config = settings(folder, "DATA.TOKENS=16", *options)
    plain = build_model(replaced(config, DATA={"TOKENS": None}), 5).eval()
    torch.nn.init.normal_(plain.head.weight)
    torch.nn.init.normal_(plain.cls_token)
    torch.save(plain.state_dict(), tmp_path / "plain.pth")
    model = build_model(config, 5).eval()
    load_pretrained(model, str(tmp_path / "plain.pth"))
    assert type(model).__name__ == "NaFlexVit"
    square, patches = square_and_patches(config)
    with torch.no_grad():
        torch.testing.assert_close(model(patches), plain(square), rtol=0, atol=1e-5)
        assert plain(square).abs().max() > 0.1


def test_sampled_position_embedding_gives_the_logits_without_antialiasing(folder):
    sampling = "MODEL.KWARGS.pos_embed_use_grid_sample=true"
    sampled, exact, default = (
        build_model(settings(folder, *words), 5).eval()
        for words in ([sampling], ["MODEL.KWARGS.pos_embed_antialias=false"], [])
    )
    with torch.no_grad():
        torch.nn.init.normal_(sampled.head.weight)
        torch.nn.init.normal_(sampled.embeds.pos_embed)
        for model in (exact, default):
            model.load_state_dict(sampled.state_dict())
        config = settings(folder)
        images = build_normalize(config.DATA)(blank_batch(config, 2, 24))
        torch.testing.assert_close(sampled(images), exact(images), rtol=0, atol=1e-4)
        assert (sampled(images) - default(images)).abs().max() > 0.1
    trainer = update(make_trainer(settings(folder, sampling, "DATA.TRAIN_TOKENS=[12,24]")), 2)
    assert np.isfinite(trainer.report().loss)


# Teachers

SOFT = "TRAIN.DISTILLATION_TYPE=soft"


def square_and_patches(config) -> tuple[torch.Tensor, dict]:
    """Return a normalized image of 32 x 32 pixels as a square [1, C, H, W], and as 16 patches of 8 x 8 pixels."""
    packed = new_batch(1, 16, 8, 3)
    EvalSequenceTransform(config, 8)(np.array(noise(32, 32)), packed[0])
    square = torch.from_numpy(pictures_of(packed)[0]).permute(2, 0, 1)[None]
    plain = replaced(config, DATA={"TOKENS": None})
    return build_normalize(plain.DATA)(square), build_normalize(replaced(config, DATA={"TOKENS": 16}).DATA)(packed)


@pytest.fixture(scope="module")
def runs(start, tmp_path_factory) -> dict:
    """Return the folders of two runs of a ViT for one epoch: `patches` with DATA.TOKENS, `squares` without."""
    found = {}
    for name, options in (("patches", "DATA.IMAGE_SIZE=64"), ("squares", "DATA.TOKENS=null")):
        output = tmp_path_factory.mktemp(name)
        start(output, *VIT, options).done()
        found[name] = run_folder(output)
    return found


def test_timm_teacher_keeps_the_position_embedding_of_its_weights(folder, tmp_path):
    plain = timm.create_model("test_vit", num_classes=2)
    torch.save(plain.state_dict(), tmp_path / "teacher.pth")
    options = SOFT, "TRAIN.TEACHER_MODEL=test_vit", f"TRAIN.TEACHER_PRETRAINED={tmp_path}/teacher.pth"
    teacher, lines = load_teacher(settings(folder, *options, "DATA.IMAGE_SIZE=64"), ["bird", "cat"], 2)
    assert teacher.model.embeds.pos_embed.shape == (1, 10, 10, 64) and not any("resized" in line for line in lines)


def test_plain_run_as_teacher_reads_the_patches_of_the_student(folder, runs):
    config = settings(folder, SOFT, f"TRAIN.TEACHER_MODEL={runs['squares']}/best.pth")
    teacher, _ = load_teacher(config, ["bird", "cat"], 2)
    alone, _ = load_teacher(replaced(config, DATA={"TOKENS": None}), ["bird", "cat"], 2)
    square, patches = square_and_patches(config)
    assert type(teacher.model).__name__ == "NaFlexVit" != type(alone.model).__name__
    torch.testing.assert_close(teacher(patches), alone(square), rtol=0, atol=1e-5)


def test_teacher_with_tokens_gets_squares_of_at_most_that_many_patches(folder, start, runs, tmp_path):
    options = [*VIT, "DATA.TOKENS=null", SOFT, f"TRAIN.TEACHER_MODEL={runs['patches']}/best.pth"]
    config = settings(folder, *options)
    teacher, _ = load_teacher(config, ["bird", "cat"], 2)
    assert "images resized to 32 x 32" in teacher.describe()  # at most 24 patches of 8 x 8: 4 x 4
    square, patches = square_and_patches(config)
    torch.testing.assert_close(teacher(square), teacher(patches), rtol=0, atol=1e-5)
    start(tmp_path, *options).done()

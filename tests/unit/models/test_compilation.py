"""torch.compile: the same numbers as eager, no unnecessary graph, and a private folder for kernels."""

import contextlib
import errno
import fcntl
import os
import stat
from unittest import mock

import numpy as np
import pytest
import torch
from timm.layers import DropPath
from torch import nn

from configs.load import load
from configs.schema import Config
from datasets import BadImages, build_eval_data
from engine.batch_size import measure_step
from engine.evaluation.evaluate import Inference, evaluate
from models import build_model
from models.compilation import FOLDER, NUM_WORKERS, compile_model, prepare_compiler
from models.transforms import choose_transforms
from models.transforms.blocks import SharedDropPath
from tests.support.compiled import MODES, assert_compiled_losses_match
from tests.support.configs import CPU, small_config
from tests.support.opened import open_sets
from tests.support.refusals import assert_names, refused
from tests.support.runs import ROOT, run
from tests.support.trainers import make_trainer, train
from utils.distributed import Process
from utils.errors import ConfigError

pytestmark = pytest.mark.slow


def compile_with(monkeypatch: pytest.MonkeyPatch, backend) -> None:
    """Let this backend compile, and forget earlier graphs."""
    compile_any = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, **kw: compile_any(self, **kw | {"backend": backend}))
    torch._dynamo.reset()


def graphs_of_two_epochs(config: Config, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return new graph counts: in an epoch with a smaller last batch, in evaluations of weights and EMA, and again."""
    graphs, found = [], []

    def backend(graph, inputs):
        assert not any(isinstance(each, torch.SymInt) for each in inputs), "a graph for dynamic sizes is slower"
        graphs.append(graph)
        return graph.forward

    compile_with(monkeypatch, backend)
    trainer, (_, val) = make_trainer(config), open_sets(config)
    data, bad = build_eval_data(config, val, Process(CPU)), BadImages(val, 0.0, print)
    assert len(val) % data.batch_size and trainer.data.num_samples % trainer.data.global_batch
    for _ in range(2):
        train(trainer)
        trainer.end_epoch()
        found.append(len(graphs))
        for model in [trainer.model, trainer.ema.model] if trainer.ema else [trainer.model]:
            evaluate(
                [model],
                data,
                Inference(trainer.prepare.normalize, trainer.precision, trainer.process),
                bad,
                trainer.task.tally,
            )
            found.append(len(graphs))
    return np.diff([0, *found]).tolist()


@pytest.mark.long
@pytest.mark.parametrize("case", MODES)
def test_compiled_epoch_matches_eager_losses(tmp_path, monkeypatch, case):
    compile_with(monkeypatch, "aot_eager")
    assert_compiled_losses_match(tmp_path, case)


def test_drop_path_with_tensor_rate_keeps_the_mean(tmp_path):
    model = nn.ModuleList([DropPath(0.25), DropPath(0.25, scale_by_keep=False), nn.Linear(1, 1)])
    SharedDropPath().apply(model)
    ones = torch.ones(10_000, 2, 3)
    scaled, plain = (module(ones) for module in model[:2])
    for dropped in (scaled, plain):
        assert dropped.amax((1, 2)).equal(dropped.amin((1, 2)))  # drops whole images
        assert abs((dropped[:, 0, 0] == 0).float().mean() - 0.25) < 0.02
    assert scaled.max() == pytest.approx(1 / 0.75) and plain.max() == 1
    assert all(module.eval()(ones).equal(ones) for module in model[:2])
    elsewhere = build_model(small_config(tmp_path, "MODEL.DROPPATH=0.1"), 10).to("meta")
    SharedDropPath().apply(elsewhere)
    assert {each.device.type for each in elsewhere.buffers()} == {"meta"}, "on the CPU, DDP could not send it with NCCL"


def test_compiling_blocks_of_a_model_without_blocks_is_refused(tmp_path):
    with refused(ConfigError, "COMPILE", "blocks", "true"):
        compile_model(nn.Linear(1, 1), small_config(tmp_path, "COMPILE=blocks"))


def test_memory_estimates_do_not_compile_the_model(tmp_path, monkeypatch):
    """Compilation would take longer than the estimates and predictions of a compiled run."""
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: pytest.fail("compiled"))
    measure_step(small_config(tmp_path, "AMP=true", "PRECISION.MODE=naive", "COMPILE=true"), 10)


# --- all graphs are made in the first epoch: two for training (full batch, remainder), one for evaluation, which pads

# Small sizes for each kind of model, with all that affects graphs: dropout, drop path, EMA, accumulation, mixing.
SMALLER = "AMP=true DATA.DATASET=digits DATA.IMAGE_CHANNELS=1 DATA.IMAGENET_MEAN=[0.5] DATA.IMAGENET_STD=[0.5]"
SMALLER += " DATA.BATCH_SIZE=128 DATA.BATCH_SIZE_EVAL=50 DATA.NUM_WORKERS=0 DATA.DROP_LAST=false MODEL.PRETRAINED=None"
OF_KIND = {
    "vit": "DATA.IMAGE_SIZE=8 MODEL.PATCH_SIZE=4 MODEL.EMBED_DIM=16 MODEL.NUM_HEADS=2",
    "timm": "DATA.IMAGE_SIZE=16 MODEL.NAME=test_resnet "
    "AMP=false",  # half-precision convolutions take a minute on many CPUs
}


def of_recipe(stem: str, scope: str) -> Config:
    flags = ["-cfg", str(ROOT / "configs" / f"{stem}.yaml")]
    kind = load(flags).config.MODEL.TYPE
    depth = ["MODEL.DEPTH=3" if scope == "blocks" else "MODEL.DEPTH=2"] if kind == "vit" else []
    return load([*flags, "-opts", *SMALLER.split(), *OF_KIND[kind].split(), *depth, f"COMPILE={scope}"]).config


COPIED = "COMPILE=blocks MODEL.DEPTH=3 AMP=true MODEL.DROPPATH=0.1 TRAIN.MODEL_EMA=true DATA.DROP_LAST=false"
COPIED += " PRECISION.MODE=naive TRAIN.GRAD_CHECKPOINTING=true"
# The first block has no drop path, so its graph differs. The last block computes only the class token, unless it has
# adapters.
GRAPHS = {
    "vit_base_patch16_224": (lambda _: of_recipe("vit_base_patch16_224", "true"), [2, 1, 0, 0]),
    "lora": (lambda _: of_recipe("lora", "true"), [2, 1, 0, 0, 0, 0]),
    "blocks on a GPU": (lambda _: of_recipe("vit_cifar10", "blocks"), [4, 2, 0, 0]),
    "convolutions on a GPU": (lambda _: of_recipe("timm", "true"), [2, 1, 0, 0, 0, 0]),
    "blocks recomputed and copied": (lambda folder: small_config(folder, *COPIED.split()), [4, 2, 0, 0, 0, 0]),
}


@pytest.mark.long
@pytest.mark.parametrize("case", GRAPHS)
def test_run_compiles_graphs_only_in_its_first_epoch(case, tmp_path, monkeypatch):
    def choose(config, device, *others, **options):
        return choose_transforms(config, torch.device("cuda"), *others, **options)

    if "GPU" in case:
        monkeypatch.setattr("engine.build.choose_transforms", choose)
        monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    make, expected = GRAPHS[case]
    assert graphs_of_two_epochs(make(tmp_path), monkeypatch) == expected


# --- the folder of kernels


def mode(path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_compiler_cache_folder_is_made_private(tmp_path):
    for _ in range(2):
        environment = {"XDG_CACHE_HOME": str(tmp_path)}
        (line,) = prepare_compiler(environment, 4)
        folder = tmp_path / "halfstep" / "compile"
        assert environment[FOLDER] == str(folder)
        assert_names(line, folder)
        assert mode(folder) == mode(folder.parent) == 0o700
        folder.chmod(0o777)
        folder.parent.chmod(0o755)


def test_compiler_cache_is_in_home_folder_unless_user_sets_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    set_by_user = {FOLDER: "mine", NUM_WORKERS: "1"}
    environment = dict(set_by_user)
    assert prepare_compiler(environment, 4) == [] and environment == set_by_user and not list(tmp_path.iterdir())
    for others in ({}, {"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "relative"}):
        prepare_compiler(others, 4)
        assert others[FOLDER] == str(tmp_path / ".cache/halfstep/compile")


UNUSABLE = {
    "of another user": mock.patch("os.geteuid", return_value=os.geteuid() + 1),
    "without locks": mock.patch.object(fcntl, "flock", side_effect=OSError(errno.ENOSYS, "not implemented")),
    "in a home that nobody knows": mock.patch("pathlib.Path.home", side_effect=RuntimeError("no home")),
    "below a file": contextlib.nullcontext(),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_unusable_compiler_cache_folder_is_reported_and_never_used(tmp_path, case):
    (tmp_path / "file").touch()
    place = {"in a home that nobody knows": "", "below a file": str(tmp_path / "file")}.get(case, str(tmp_path))
    environment = {"XDG_CACHE_HOME": place}
    with UNUSABLE[case]:
        (line,) = prepare_compiler(environment, 192)
    assert FOLDER not in environment and environment[NUM_WORKERS] == "32"
    assert_names(line, FOLDER)


@pytest.mark.long
def test_missing_cpp_compiler_is_named_with_install_hint(small_yaml, tmp_path):
    flags = ["-cfg", str(small_yaml), "-compile", "-output", str(tmp_path / "output"), "-opts", "MODEL.DEPTH=1"]
    ended = run("main_single_gpu.py", *flags, environment={"PATH": str(tmp_path), "CXX": "g++", FOLDER: str(tmp_path)})
    ended.refused("-compile", "g++")
    assert "Traceback" not in ended.stderr

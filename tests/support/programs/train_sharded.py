"""Trains the small model for a few updates, once per case, in all processes that a test starts.

python -m tests.support.programs.train_sharded SETTINGS.yaml OUT.pth CASES, once per process as launchers do. A CASE is
NAME:OPTION,OPTION..., with options as for -opts or these words: `poison` (in the second update one number in the last
process's part of the gradient is infinite), `gpu` (compute as GPUs do), `compile` (compile blocks but generate no
code),
`evaluate`, `measure` (the host memory for building), `save=FOLDER` (save after two updates), `load=FILE` (resume from
it).
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from configs.load import load
from datasets import BadImages, ImageSet, build_eval_data, build_train_data
from engine.batch_size import peaks_of_cpu_tensors
from engine.build import build_trainer
from engine.checkpoint.find import read_checkpoint
from engine.checkpoint.format import save_checkpoint
from engine.checkpoint.sharded_saver import ShardedSaver
from engine.evaluation.evaluate import Inference, evaluate
from engine.plan import StepPlan
from engine.train.ema import fused_lerp
from engine.train.fused_loss_scale import FusedLossScaler
from engine.train.trainer import Trainer
from models import build_model
from models.transforms.gpu_kernels import GpuKernels
from models.weights.sharded import PIECES
from tests.support.opened import open_sets
from utils.distributed import Process
from utils.launch import find_launched_rank
from utils.log import Log
from utils.program import exit_now

OWN = ("poison", "gpu", "compile", "evaluate", "save", "load", "measure")
UPDATES, SAVED_AFTER = 4, 2


def train(settings: str, options: list[str], process: Process) -> dict:
    """Return losses, gradient norms and skips of the updates, the weights, and the bytes of state in this process."""
    words: dict[str, str] = {name: value for name, _, value in (each.partition("=") for each in options) if name in OWN}
    config = load(["-cfg", settings, "-opts", *(each for each in options if each.split("=")[0] not in OWN)]).config
    train_set, eval_set = open_sets(config)
    torch.manual_seed(0)
    model = build_model(config, 10)
    data = build_train_data(config, train_set, process)
    with as_on_gpus(model) if "gpu" in words else contextlib.nullcontext():
        log = Log(process.rank)
        plan = StepPlan.of_trial(config, process, train_set)
        if "measure" in words:
            del model
            ((peak, _),) = peaks_of_cpu_tensors(lambda: build_trainer(plan, build_model(config, 10), data, log))
            return {"building": peak}
        trainer = build_trainer(plan, model, data, log)
    if "load" in words:
        trainer.load_state_dict(read_checkpoint(Path(words["load"]), lazily=True))
    found = {"updates": [], "gathered": {}}
    watch(trainer.model, found["gathered"])
    if "evaluate" in words:  # gathered weights must be released before the weights change
        score(trainer, eval_set, process)
    if "compile" in words:
        compile_parts(trainer.model, words["compile"])
    for window in data.windows(trainer.step, UPDATES):
        if "poison" in words and trainer.step == 1 and process.rank == process.world_size - 1:
            poison_once(trainer)
        trainer.update(window)
        report = trainer.report()
        found["updates"].append((report.loss, report.grad_norm, report.skipped))
        if "save" in words and trainer.step == SAVED_AFTER:
            save(Path(words["save"]), trainer, process)
    if "evaluate" in words:
        found |= score(trainer, eval_set, process)
    found["bytes"] = held(trainer)
    state = trainer.parallel.gather_state(trainer.state_dict())
    if process.is_first:
        found |= {key: state[key] for key in ("state_dict", "state_dict_ema", "optimizer") if key in state}
    return found


def compile_parts(model: torch.nn.Module, which: str) -> None:
    """Compile the whole model, or each of its blocks."""
    for part in [model] if which == "model" else model.blocks:
        part.compile(backend="aot_eager", dynamic=False)


@contextlib.contextmanager
def as_on_gpus(model: torch.nn.Module) -> Iterator[None]:
    GpuKernels().apply(model)
    with (
        mock.patch("engine.precision.LossScaler", FusedLossScaler),
        mock.patch("engine.train.ema.foreach_lerp", fused_lerp),
    ):
        yield


def score(trainer: Trainer, eval_set: ImageSet, process: Process) -> dict[str, tuple[float, ...]]:
    """Evaluate weights and EMA weights. Return loss, top-1, recall and F1. The last process gets one batch less."""
    few = eval_set.take(np.arange(5 * process.world_size - 1))
    data = build_eval_data(trainer.config, few, process)
    bad, found = BadImages(few, 1.0, lambda line: None), {}
    for name, model in (("raw", trainer.model), ("ema", trainer.ema.model)):
        ((scores, _),) = evaluate(
            [model],
            data,
            Inference(trainer.prepare.normalize, trainer.precision, process),
            bad,
            trainer.task.tally,
        )
        found[name] = (scores.loss, scores.top1, scores.macro_recall, scores.macro_f1)
    return found


def watch(model: torch.nn.Module, gathered: dict[str, torch.dtype]) -> None:
    """Record the type of the weights of some layers during their computation."""
    for name, layer in (
        ("patch_embed.proj", model.patch_embed.proj),
        ("norm1", model.blocks[0].norm1),
        ("mlp.fc1", model.blocks[0].mlp.fc1),
        ("norm", model.norm),
        ("head", model.head),
    ):
        layer.register_forward_pre_hook(lambda layer, taken, name=name: gathered.update({name: layer.weight.dtype}))


def poison_once(trainer: Trainer) -> None:
    parallel, part = trainer.parallel, next(each for each in trainer.parameters if each.numel())
    collect = parallel.gradients_to_optimizer

    def spoil() -> None:
        collect()
        part.grad.view(-1)[0] = float("inf")
        parallel.gradients_to_optimizer = collect

    parallel.gradients_to_optimizer = spoil


def held(trainer: Trainer) -> int:
    """Return the bytes of weights, EMA weights and optimizer in this process."""
    state = trainer.state_dict()
    tensors = [*state["state_dict"].values(), *state.get("state_dict_ema", {}).values()]
    tensors += [each for moments in state["optimizer"]["state"].values() for each in moments.values()]
    return sum(each.nbytes for each in tensors)


def save(folder: Path, trainer: Trainer, process: Process) -> None:
    """Save a sharded checkpoint. A first save must fail in all processes, because the last one's disk is full."""
    process.first(lambda: folder.mkdir(parents=True))
    if not trainer.parallel.is_sharded:
        state = trainer.state_dict()
        process.first(lambda: save_checkpoint(folder / "last.pth", state))
        return
    saver = ShardedSaver(folder, 1, process, warn=print)
    rest, pieces = trainer.parallel.split_for_save(trainer.state_dict())
    is_full = process.rank == process.world_size - 1
    with (
        mock.patch.object(saver, "_put_pieces", side_effect=OSError("no room")) if is_full else contextlib.nullcontext()
    ):
        saver.save({**rest, PIECES: pieces}, [])
        saver.wait()
    assert saver.failure and not (folder / "last.pth").exists()
    saver.save({**rest, PIECES: pieces}, [])
    saver.wait()
    assert not saver.failure


if __name__ == "__main__":
    settings, out, *cases = sys.argv[1:]
    process = Process.start("cpu", find_launched_rank(os.environ))
    found = {}
    for name, _, options in (case.partition(":") for case in cases):
        torch.set_autocast_cache_enabled(True)  # an earlier case may have changed it
        found[name] = train(settings, [each for each in options.split(",") if each], process)
    if process.is_first:
        torch.save(found, out)
    process.close()
    exit_now(0)

"""Models compiled by a backend that takes no time, in place of torch's own, and how many graphs that makes."""

import numpy as np
import pytest
import torch
from torch import nn

from configs.schema import Config
from datasets import BadImages, build_eval_data, load_image_sets
from engine.evaluation.evaluate import evaluate
from tests.support.configs import CPU
from tests.support.trainers import make_trainer, train
from utils.distributed import Process


def compile_with(monkeypatch: pytest.MonkeyPatch, backend) -> None:
    """Let this backend compile, and forget earlier graphs."""
    compile_any = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, **kw: compile_any(self, **kw | {"backend": backend}))
    torch._dynamo.reset()


def graphs_of_two_epochs(config: Config, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """New graphs of: an epoch, whose last batch is smaller; scoring its weights and the EMA; and the same again."""
    graphs, found = [], []

    def backend(graph, inputs):
        assert not any(isinstance(each, torch.SymInt) for each in inputs), "a graph for all sizes is slower"
        graphs.append(graph)
        return graph.forward

    compile_with(monkeypatch, backend)
    trainer, (_, val) = make_trainer(config), load_image_sets(config)
    data, bad = build_eval_data(config, val, Process(CPU)), BadImages(val, 0.0, print)
    assert len(val) % data.batch_size and trainer.data.num_samples % trainer.data.global_batch
    for _ in range(2):
        train(trainer)
        trainer.end_epoch()
        found.append(len(graphs))
        for model in [trainer.model, trainer.ema.model] if trainer.ema else [trainer.model]:
            evaluate(model, data, trainer.prepare.normalize, trainer.precision, trainer.process, bad)
            found.append(len(graphs))
    return np.diff([0, *found]).tolist()

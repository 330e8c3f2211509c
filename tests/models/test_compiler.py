"""The compiler stays away from runs that do not compile, and is whole when somebody asks for it later."""

import subprocess
import sys

from tests.support.runs import ROOT

START = """
import sys
import torch
from models.transforms.compiler import compiler_put_off
before = torch.compiler.disable
with compiler_put_off():
    import timm
    left_out = torch.compiler.disable(lambda x: x + 1)
assert torch.compiler.disable is before
"""
TRAIN = """
from engine.train.optim import FULL_MOMENT, HALF_MOMENT
for classes in (FULL_MOMENT, HALF_MOMENT):
    for name, cls in classes.items():
        weight = torch.nn.Parameter(torch.ones(3))
        weight.grad = torch.ones(3)
        optimizer = cls([weight], lr=0.1, fused=True, **({"momentum": 0.9} if name == "SGD" else {}))
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.zero_grad()
        assert weight.max() < 0.91, (name, weight)
assert not [name for name in sys.modules if name.startswith("torch._dynamo")], "imported"
"""
USE = """
from torchvision.ops import roi_align
assert roi_align.__globals__["is_compile_supported"]("cpu") == torch._dynamo.utils.is_compile_supported("cpu")
model = torch.nn.Linear(3, 3)
assert torch.allclose(torch.compile(model, backend="eager")(torch.ones(3)), model(torch.ones(3)))
assert left_out(1) == 2
assert "torch._dynamo" in sys.modules
"""
EARLIER = "import torch._dynamo\n"
FOREIGN = START.replace("import timm", "from torch._dynamo.utils import counters; import timm")


def ends_well(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_neither_timm_nor_an_optimizer_imports_the_compiler():
    ends_well(START + TRAIN)


def test_the_compiler_works_when_it_is_asked_for_later():
    ends_well(START + USE)


def test_whoever_imports_something_else_of_it_gets_that():
    ends_well(FOREIGN + USE)


def test_a_compiler_that_is_there_already_stays_in_use():
    ends_well(EARLIER + START + USE)

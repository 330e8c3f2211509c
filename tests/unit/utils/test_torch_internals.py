"""Private names of torch, torchvision and timm are only in utils/torch_internals.py, and exist when installed."""

import ast
from pathlib import Path

import pytest
import timm
import torch

from tests.support.modules import parsed
from tests.support.runs import ROOT
from utils import torch_internals

ROOMS = ("configs", "datasets", "engine", "models", "utils", "scripts")
FILES = [*ROOT.glob("main_*.py"), *(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))]
LIBRARIES = ("torch", "torchvision", "timm", "torchao")
ATTRIBUTES = set(
    "_forward_hooks _forward_pre_hooks _backward_hooks _state_dict_hooks _modules _parameters _buffers "
    "_per_optimizer_states _found_inf_per_device _check_scale_growth_tracker _scale _growth_tracker _pos_embed "
    "_init_weights _execution_engine _BatchNorm _NormBase".split()
)
IN_GETATTR = ATTRIBUTES | {"_data", "_labels"}  # as plain attributes, these may be our own names


def root_of(node: ast.expr) -> str | None:
    """Return the name at which an expression begins, as `torch` in `torch.nn.Linear(2, 2).weight`."""
    while not isinstance(node, ast.Name):
        below = [getattr(node, name) for name in ("value", "func") if isinstance(getattr(node, name, None), ast.expr)]
        if not below:
            return None
        node = below[0]
    return node.id


def private_names(path: Path) -> list[str]:
    """Return the private names of libraries in a file: as attributes, in imports, and as strings in getattr."""
    tree, found, roots = parsed(path), [], set(LIBRARIES)
    is_private = lambda name: name[0] == "_" and name[:2] != "__"  # noqa: E731
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None)
            imported = [module] if module else [alias.name for alias in node.names]
            if imported[0].split(".")[0] in LIBRARIES:
                names = [part for name in imported for part in name.split(".")] + [alias.name for alias in node.names]
                found += [name for name in names if is_private(name)]
                roots |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            found += [node.attr] if root_of(node.value) in roots or node.attr in ATTRIBUTES else []
        elif isinstance(node, ast.Call) and getattr(node.func, "id", None) == "getattr":
            found += [each.value for each in node.args if isinstance(each, ast.Constant) and each.value in IN_GETATTR]
    return found


@pytest.mark.long
def test_only_torch_internals_module_uses_private_library_names():
    found = {str(path): private_names(path) for path in FILES}
    assert [path for path, names in found.items() if names] == [torch_internals.__file__]


def number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdigit())


def test_installed_torch_and_timm_have_every_private_name():
    assert number(torch_internals.TORCH_VERSIONS[0]) <= number(torch.__version__)
    assert number(torch.__version__)[:2] <= number(torch_internals.TORCH_VERSIONS[1])
    assert number(torch_internals.TIMM_VERSIONS[0]) <= number(timm.__version__)  # a newer version is allowed
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([weight]), torch.amp.GradScaler("cpu", init_scale=4.0)
    called = []
    scaled = scaler.scale(weight.sum())
    scaled.register_hook(
        lambda gradient: torch_internals.call_after_backward(lambda: called.append(weight.grad.item()))
    )
    scaled.backward()
    scaler.unscale_(optimizer)
    assert called == [4.0] and torch_internals.scale_and_growth(scaler)[0] == 4
    assert torch_internals.found_inf(scaler) == 0
    scaler.update()
    torch_internals.set_found_inf(scaler, optimizer, torch.ones(()))
    before = weight.item()
    scaler.step(optimizer)
    assert weight.item() == before and torch_internals.found_inf(scaler) == 1
    layer = torch.nn.Linear(2, 2)
    assert torch_internals.own_parameter(layer, "weight") is layer.weight and not torch_internals.has_hooks(layer)
    layer.register_forward_pre_hook(lambda module, inputs: None)
    assert torch_internals.has_hooks(layer)
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1)
    assert torch_internals.add_position_embedding(vit, torch.zeros(1, 4, 192)).shape == (1, 5, 192)

"""torch.compile of a model (COMPILE), and the folder that keeps its kernels between runs."""

import fcntl
import os
import tempfile
import warnings
from collections.abc import MutableMapping
from pathlib import Path

from torch import nn

from configs.schema import Config
from models.transforms.base import blocks_of
from utils.errors import cause_of
from utils.text import counted
from utils.torch_internals import allow_graphs

# Each block needs graphs for training, the last batch and evaluation. Micro-batches halved for lack of memory add more.
MAX_GRAPHS = 64
BLOCKS = "blocks"


def compile_model(model: nn.Module, config: Config) -> None:
    """Compile the model in place, so that names of weights stay the same.

    Each batch size gets its own graph. By default, when torch sees a second size, it replaces the first graph by one
    graph for all sizes, which is slower for the first size too.
    """
    allow_graphs(MAX_GRAPHS)
    # torch 2.11 warns that TF32 is not used. PRECISION.MATMUL decides whether it is.
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")
    mode = config.COMPILE if config.COMPILE not in (True, BLOCKS) else None
    for part in parts_to_compile(model, config):
        part.compile(mode=mode, dynamic=False)


def parts_to_compile(model: nn.Module, config: Config) -> list[nn.Module]:
    """Return the modules to compile: the model, or its blocks, which are alike, so that one compilation serves all."""
    return list(blocks_of(model, "COMPILE is blocks", "COMPILE true")) if config.COMPILE == BLOCKS else [model]


FOLDER, NUM_WORKERS = "TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"  # environment variables of torch
MAX_WORKERS = 32  # torch has the same limit


def prepare_compiler(environment: MutableMapping[str, str], num_cores: int) -> list[str]:
    """Set the environment variables that the user has not set, before torch's compiler is imported. Return log lines.

    `num_cores` is this process's share of the cores. By default, torch starts a worker for every core in each process.
    """
    environment.setdefault(NUM_WORKERS, str(min(num_cores, MAX_WORKERS)))
    if FOLDER in environment:
        return []
    try:
        # The user's cache folder by the XDG specification, which ignores relative paths.
        cache = Path(environment.get("XDG_CACHE_HOME", ""))
        folder = (cache if cache.is_absolute() else Path.home() / ".cache") / "halfstep" / "compile"
        _make_private(folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home folder
        return [
            f"compile: cannot create a private folder for kernels ({cause_of(error)}), so kernels may be lost; "
            f"set {FOLDER} to a folder"
        ]
    environment[FOLDER] = str(folder)
    return [f"compile: kernels are kept in {folder}; compiled by {counted(int(environment[NUM_WORKERS]), 'process')}"]


def _make_private(folder: Path) -> None:
    """Create a folder that only this user can access, because its contents are executed. Raise OSError on failure."""
    for place in (folder.parent, folder):
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = place.stat()
        if status.st_uid != os.geteuid():
            raise PermissionError(f"{place} belongs to another user")
        if status.st_mode & 0o077:
            place.chmod(0o700)
    with tempfile.TemporaryFile(dir=folder) as file:  # torch locks files here, which some network drives do not support
        fcntl.flock(file, fcntl.LOCK_EX)

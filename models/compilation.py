"""torch.compile of a model (COMPILE), and where its kernels are kept from one run to the next."""

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

# Of each block: training, its last batch, evaluation; each anew for micro-batches that were halved for lack of memory.
MAX_GRAPHS = 64
BLOCKS = "blocks"


def compile_model(model: nn.Module, config: Config) -> None:
    """Compile in place, so that names of weights stay the same.

    A graph for each batch size: the one for all sizes that torch makes of the second is slower for the first, too.
    """
    allow_graphs(MAX_GRAPHS)
    # torch 2.11 names a call of its own; here PRECISION.MATMUL decides.
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")
    mode = config.COMPILE if config.COMPILE not in (True, BLOCKS) else None
    for part in parts_to_compile(model, config):
        part.compile(mode=mode, dynamic=False)


def parts_to_compile(model: nn.Module, config: Config) -> list[nn.Module]:
    """The model, or its blocks: they are alike, so that one compilation serves all of them."""
    return list(blocks_of(model, "COMPILE is blocks", "COMPILE true")) if config.COMPILE == BLOCKS else [model]


FOLDER, NUM_WORKERS = "TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"  # torch's own variables
MAX_WORKERS = 32  # torch's limit, too


def prepare_compiler(environment: MutableMapping[str, str], num_cores: int) -> list[str]:
    """Set what the user has not set, before torch's compiler is imported. Returns lines for the log.

    `num_cores`: this process's share. torch would start a worker for every core in each process of a run.
    """
    environment.setdefault(NUM_WORKERS, str(min(num_cores, MAX_WORKERS)))
    if FOLDER in environment:
        return []
    try:
        # The user's folder for caches, as desktop systems define it; relative paths do not count.
        cache = Path(environment.get("XDG_CACHE_HOME", ""))
        folder = (cache if cache.is_absolute() else Path.home() / ".cache") / "halfstep" / "compile"
        _make_private(folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        return [f"compile: no folder of your own for kernels ({cause_of(error)}), so they may not last; set {FOLDER}"]
    environment[FOLDER] = str(folder)
    return [f"compile: kernels are kept in {folder}; made by {counted(int(environment[NUM_WORKERS]), 'process')}"]


def _make_private(folder: Path) -> None:
    """Create the folder for this user alone, because what lies in it is executed; an OSError if that cannot be."""
    for each in (folder.parent, folder):
        each.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = each.stat()
        if status.st_uid != os.geteuid():
            raise PermissionError(f"{each} belongs to another user")
        if status.st_mode & 0o077:
            each.chmod(0o700)
    with tempfile.TemporaryFile(dir=folder) as file:  # torch locks files here, which not every network drive can
        fcntl.flock(file, fcntl.LOCK_EX)

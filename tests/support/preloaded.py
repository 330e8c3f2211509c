"""Imports modules that runs import, early or late, once in the server of forks.py. This only makes tests faster."""

import atexit
import contextlib
import functools
import gc
import importlib
import os
import pkgutil
import weakref
from importlib import metadata

MODULES = (
    "main_single_gpu main_multi_gpu engine.run scripts.embed scripts.labels timm timm.data torchvision.datasets "
    "torch.utils.tensorboard matplotlib.pyplot matplotlib.backends.backend_agg safetensors.torch numpy.random "
    "PIL.BmpImagePlugin PIL.GifImagePlugin PIL.JpegImagePlugin PIL.PngImagePlugin PIL.PpmImagePlugin"
).split()
PACKAGES = ("configs", "datasets", "engine", "models", "utils")

os.environ["OMP_NUM_THREADS"] = "1"  # torch reads it when it is imported
for package in map(importlib.import_module, PACKAGES):
    MODULES += [module.name for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
for each in MODULES:
    with contextlib.suppress(ImportError):  # some modules are optional
        importlib.import_module(each)
importlib.import_module("tests.support.contracts").install()
in_process = importlib.import_module("tests.support.in_process")
in_process.read_few_digits()
in_process.save_time()
in_process.CHANGES.pop_all()  # so that nothing undoes it
# The start of several processes looks for backends in all installed packages.
metadata.entry_points = functools.cache(metadata.entry_points)
metadata.entry_points(group="torch.distributed.backends")
importlib.import_module("engine.report.report").TEMPLATES.get_template("page.html")  # compiles it
weakref.finalize._registry.clear()  # a private name: forks need not clean up what the imported modules made
gc.collect()
gc.freeze()  # exempt existing objects from garbage collection, so that forks need not copy their memory

SERVER = os.getpid()


@atexit.register
def end_at_once() -> None:
    """Exit without cleaning up the imported modules, which would take half a second and print leak warnings."""
    if os.getpid() == SERVER:
        os._exit(0)

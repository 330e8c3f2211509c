"""What runs import, much of it late: the server of forks.py imports it once. It matters only for how long the tests take."""

import atexit
import contextlib
import gc
import importlib
import os

MODULES = (
    "main_single_gpu main_multi_gpu engine.run timm timm.data torchvision.datasets torch.utils.tensorboard "
    "matplotlib.pyplot matplotlib.backends.backend_agg safetensors.torch numpy.random "
    "PIL.JpegImagePlugin PIL.PngImagePlugin"
).split()

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported
for each in MODULES:
    with contextlib.suppress(ImportError):  # some are optional
        importlib.import_module(each)
gc.collect()
gc.freeze()  # what is there now stays: a fork that looks for garbage need not copy it

SERVER = os.getpid()


@atexit.register
def end_at_once() -> None:
    """Without taking down all that is imported, which takes half a second and prints what it leaks."""
    if os.getpid() == SERVER:
        os._exit(0)

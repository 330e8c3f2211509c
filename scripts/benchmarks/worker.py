"""Trains at the request of common.StepWorker. Each question and each answer is a line of JSON.

The first argument is the role (step, timm or loader); the others are the command line of a training program.
"""

import json
import math
import os
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from configs.schema import Config
from engine.record.columns import peak_memory
from engine.settings import load_settings
from utils.errors import ConfigError, UserError, ensure
from utils.host import synchronize

NOT_FINITE = "this case computes values that are not finite"


def main(argv: list[str]) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of libraries must not mix with the answers
    try:
        worker = ROLES[argv[0]](argv[1:])
        for line in sys.stdin:
            method, *arguments = json.loads(line)
            answers.write(json.dumps({"result": getattr(worker, method)(*arguments)}) + "\n")
    except Exception as error:
        answers.write(json.dumps({"refused": reason_of(error)}) + "\n")


def reason_of(error: Exception) -> str:
    """Return the reason why this case cannot be measured. Print the traceback of an unexpected error."""
    from engine.memory import shortage

    if shortage(error):
        return "out of memory"
    first_line = (str(error).strip() or "no message").splitlines()[0]
    if isinstance(error, UserError):
        return first_line
    traceback.print_exception(error)
    return f"{type(error).__name__}: {first_line}"


class LoaderWorker:
    """A worker whose updates only load batches onto the device, as for a training step. The data never ends."""

    num_ahead = 0  # updates whose batches may be loaded before a turn begins; they are not timed

    def __init__(self, argv: list[str]):
        from configs.auto import without_auto
        from datasets import CacheProgress, build_train_data, choose_workers, open_data
        from utils.distributed import Process

        config = without_auto(load_settings(argv)).config
        self.process = Process.start(config.DEVICE)
        self.device = self.process.device
        opened = open_data(config, cache=CacheProgress(print, print))
        self.config, train_set = opened.config, opened.train
        self.data = build_train_data(self.config, train_set, self.process)
        self.num_classes = config.MODEL.NUM_CLASSES or len(train_set.classes)
        self.windows = self.data.windows(0, sys.maxsize)
        self.num_images = self.data.global_batch
        if self.data.order.window_size(0) < self.num_images:
            raise ConfigError(
                f"-batch_size: an update takes {self.num_images} images, but there are only {len(train_set)}; lower it"
            )
        workers = choose_workers(config, train_set, self.process)
        per_batch = workers.count if workers.kind == "processes" else 1
        self.num_ahead = 2 + per_batch * workers.ahead if workers.count else 0

    def images_per_update(self) -> int:
        return self.num_images

    def update(self, steps: int) -> None:
        """Run `steps` updates, and wait until the device has finished them."""
        for _ in range(steps):
            for _ in next(self.windows).batches:
                pass
        synchronize(self.device)

    def time_updates(self, warm_up: int, steps: int) -> float:
        """Return the seconds that `steps` updates take, after at least `warm_up` updates that are not timed."""
        self.update(max(warm_up, self.num_ahead))
        start = time.perf_counter()
        self.update(steps)
        seconds = time.perf_counter() - start
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # another process on the same device takes the next turn
        return seconds

    def peak_memory(self) -> int:
        """Return the peak memory use so far, in bytes."""
        return peak_memory(self.device)

    def peak_and_flops(self, product: str) -> tuple[float, int]:
        """Return the FLOP/s of square matrix products in this type, and the FLOPs of a forward pass for one image."""
        return matmul_peak(self.device, product), forward_flops(self.config, self.num_classes)


class TrainerWorker(LoaderWorker):
    """A worker whose updates train with halfstep's Trainer."""

    def __init__(self, argv: list[str]):
        from engine.build import build_trainer
        from engine.plan import StepPlan
        from models import add_adapters, build_model
        from utils.log import Log

        super().__init__(argv)
        torch.manual_seed(self.config.SEED)
        model = add_adapters(build_model(self.config, self.num_classes), self.config)
        plan = StepPlan.of_trial(self.config, self.process, self.data.image_set)
        self.trainer = build_trainer(plan, model.to(self.device), self.data, Log(0))

    def update(self, steps: int) -> None:
        for _ in range(steps):
            self.trainer.update(next(self.windows))
        self.trainer.report()  # waits for the device
        ensure(bool(torch.isfinite(self.trainer.counters.totals).all()), NOT_FINITE)


class TimmWorker(LoaderWorker):
    """A worker that trains like timm's train.py: the same model, in a plain loop that reads the loss in every step.

    It uses timm's optimizer and train.py's settings of torch, and compiles the model with COMPILE=true. The images are
    already on the device as normalised float32, so loading and normalising are not timed.
    """

    def __init__(self, argv: list[str]):
        import timm
        from timm.optim import create_optimizer_v2

        from configs.auto import without_auto
        from utils.distributed import choose_device

        self.config = config = without_auto(load_settings(argv)).config
        self.device, self.num_images, self.num_classes = choose_device(config.DEVICE, 0), config.DATA.BATCH_SIZE, 1000
        if self.device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.benchmark = True
        model = timm.create_model(config.MODEL.NAME, num_classes=self.num_classes).to(self.device).train()
        self.optimizer = create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05)
        self.model = torch.compile(model) if config.COMPILE else model
        side = config.DATA.IMAGE_SIZE
        self.images = torch.randn(self.num_images, config.DATA.IMAGE_CHANNELS, side, side, device=self.device)
        self.targets = torch.randint(self.num_classes, (self.num_images,), device=self.device)

    def update(self, steps: int) -> None:
        for _ in range(steps):
            with torch.autocast(self.device.type, torch.bfloat16):
                loss = torch.nn.functional.cross_entropy(self.model(self.images), self.targets)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            ensure(math.isfinite(loss.item()), NOT_FINITE)


ROLES = {"step": TrainerWorker, "timm": TimmWorker, "loader": LoaderWorker}


def forward_flops(config: Config, num_classes: int) -> int:
    """Count the floating-point operations of the model's forward pass for one image. A multiply-add counts as 2.

    The model is on the meta device, where nothing is computed. Call this only after the memory peak was read, since the
    new model and torch's counter need memory too.
    """
    from torch.utils.flop_counter import FlopCounterMode

    from models import build_model

    model = build_model(config, num_classes).eval().to("meta")
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False  # the counter cannot see inside fused attention
    side = config.DATA.IMAGE_SIZE
    image = torch.empty(1, config.DATA.IMAGE_CHANNELS, side, side, device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(image)
    return counter.get_total_flops()


def matmul_peak(device: torch.device, product: str) -> float:
    """Return the highest FLOP/s of a square matrix product. Sizes double until a product takes long enough to time."""
    from torch.utils.benchmark import Timer

    from engine.precision import check_matmul, set_matmul

    mode = "tf32" if product == "tf32" else "ieee"
    check_matmul(mode, device)
    set_matmul(mode)
    dtype = getattr(torch, "float32" if product == "tf32" else product)
    best, size = 0.0, 256
    while size <= 16384:
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        # Timer waits for the device.
        timer = Timer("a @ b", globals={"a": a, "b": b}, num_threads=torch.get_num_threads())
        seconds = min(timer.timeit(3).mean for _ in range(5))
        best = max(best, 2 * size**3 / seconds)
        if seconds > 0.005:
            break
        size *= 2
    return best


if __name__ == "__main__":
    main(sys.argv[1:])

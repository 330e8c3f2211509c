"""Functions that plant faults in a run before it starts. tests/support/in_process.py calls them."""

import ctypes
import dataclasses
import importlib
import importlib.machinery
import itertools
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import CodeType

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

import engine.build
import engine.callback_list
import engine.eval_run
import engine.evaluate_weights
import engine.first_passes
import engine.memory
import engine.report.plot
import engine.saves
import engine.session
import engine.settings
import engine.stages
import engine.update_times
from datasets.loading.readers import Reader, TrainReader
from datasets.sources import arrays
from datasets.sources.images import FileStorage
from engine.checkpoint.async_saver import AsyncSaver
from engine.checkpoint.sharded_saver import ShardedSaver
from engine.evaluation import all_scores
from engine.evaluation.evaluate import Evaluation
from engine.evaluation.scores import Scores
from engine.record.metrics import Recorder
from engine.session import Session
from engine.tasks.classes import PerImage
from engine.train.callback import Callback
from engine.train.forecast import Forecast, RunTimes
from engine.train.trainer import Trainer
from tests.support.forks import DEADLINE, ForkingPopen
from tests.support.in_process import SHIPPED_DIGITS, TO_PNG, change
from tests.support.planted_in_saves import (  # noqa: F401
    fill,
    fill_disk,
    find_no_room,
    kill_at,
    kill_before,
    list_all_operations,
    list_operations,
)
from tests.support.run_hash import state_hash
from utils.program import StopSignal


def before_each(owner, name: str, do: Callable) -> None:
    """Call `do` with the same arguments before each call of this function."""
    function = getattr(owner, name)

    def changed(*arguments, **options):
        do(*arguments, **options)
        return function(*arguments, **options)

    change(owner, name, changed)


def before_nth(owner, name: str, nth: int, do: Callable[[], None]) -> None:
    """Call `do` before the nth call of this function."""
    calls = itertools.count(1)
    before_each(owner, name, lambda *arguments, **options: next(calls) == nth and do())


def jump(days: float) -> None:
    """Move the wall clock forward or back by this many days at every second reading."""
    real, looks = time.time, [0]

    def jumping() -> float:
        looks[0] += 1
        return real() + looks[0] % 2 * days * 86400

    change(time, "time", jumping)
    strftime, localtime = time.strftime, time.localtime
    change(time, "strftime", lambda form, moment=None: strftime(form, moment or localtime(time.time())))


def set_time_zone(name: str) -> None:
    """Set the local time zone, as TZ=NAME does. This is not a fault."""
    os.environ["TZ"] = name
    time.tzset()


def start_python_as_forks() -> None:
    """Start child Python programs as forks, which need not import torch again. This is not a fault."""
    change(subprocess, "Popen", ForkingPopen)


def forget_our_modules() -> None:
    """Unload our modules and use PYTHONPATH, as in a new interpreter in another folder.

    The program must find them itself.
    """
    root = Path(__file__).resolve().parents[2]
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None) or ""
        if path.startswith(f"{root}/") and ".venv" not in path:
            del sys.modules[name]
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != root]
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    if elastic := sys.modules.get("torch.distributed.elastic.rendezvous.api"):
        elastic.rendezvous_handler_registry._registry.pop("one machine", None)  # utils.one_machine adds it again


def disable_asserts() -> None:
    """Load our modules again without their asserts, as python -O does."""
    forget_our_modules()

    def compile_without_asserts(loader: importlib.machinery.SourceFileLoader, name: str) -> CodeType:
        return compile(loader.get_data(loader.path), loader.path, "exec", dont_inherit=True, optimize=1)

    change(importlib.machinery.SourceFileLoader, "get_code", compile_without_asserts)


def limit_files(size: int) -> None:
    """Make writes after this many bytes of a file fail, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def limit_open_files(step: int) -> None:
    """Make it impossible to open more files from this update on."""

    def limit(trainer, window):
        if trainer.step == step:
            number = max(map(int, os.listdir("/proc/self/fd")))
            resource.setrlimit(resource.RLIMIT_NOFILE, (number, number))

    before_each(Trainer, "update", limit)


def impatient(seconds: float) -> None:
    """Set the number of seconds for which requests to a server are retried."""
    import datasets.sources.server

    change(datasets.sources.server, "PATIENCE", seconds)


def score(*figures: list) -> None:
    """Replace the results of evaluations by these pairs of top-1 and loss. With EMA: raw weights and EMA in turn.

    A third value says which images are right, such as "1101" for all of four images but the third.
    """
    remaining = iter(figures)

    def evaluate(models, *arguments, **options) -> list[Evaluation]:
        found = [next(remaining) for _ in models]
        return [
            Evaluation(Scores(loss, top1, 100.0, 359, 0), images_with(*are_right)) for top1, loss, *are_right in found
        ]

    change(engine.evaluate_weights, "evaluate", evaluate)


def images_with(are_right: str = "") -> PerImage:
    """Return the results of images of two classes."""
    found = PerImage()
    found.indices, found.counts = np.arange(len(are_right)), np.ones((3, 2), np.int64)
    predictions = torch.tensor([int(each) for each in are_right])
    if are_right:
        found.add(torch.nn.functional.one_hot(predictions, 2).float(), torch.ones_like(predictions), predictions)
    return found


def spoil_evaluations() -> None:
    """Make the first validation image NaN in all evaluations during the training."""

    def spoil(model, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor] | None:
        if id(model) not in waiting:
            return None
        waiting.remove(id(model))
        images = inputs[0].clone()
        images[0] = float("nan")
        return (images,)

    evaluate, waiting = engine.evaluate_weights.evaluate, set()

    def spoiled(models, *arguments, **options) -> list[Evaluation]:
        if os.environ.get("RANK", "0") == "0":
            waiting.update(map(id, models))
        hooks = [model.register_forward_pre_hook(spoil) for model in models]
        found = evaluate(models, *arguments, **options)
        for hook in hooks:
            hook.remove()
        return found

    change(engine.evaluate_weights, "evaluate", spoiled)


def name_hosts(processes_per_host: int) -> None:
    """Name this machine differently in every `processes_per_host` processes, as if they ran on several machines."""
    name = f"host{int(os.environ['RANK']) // processes_per_host}"
    change(socket, "gethostname", lambda: name)


def ignore(*numbers: int) -> None:
    """Ignore these signals from the start, as nohup ignores SIGHUP."""
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


# {moment: (owner, function, n)}. The nth call of the function sends the signal. An update has two micro-batches.
MOMENTS = {
    "before the settings are read": (engine.settings, "load_settings", 1),
    "choice": ("engine.choice.choose", "measure", 2),
    "batch size": ("engine.batch_size", "calculate", 1),
    "first start of the first layer": ("engine.features.channels", "features_of_images", 1),
    "start with one channel": ("engine.features.channels", "features_of_images", 3),
    "features": ("engine.features.start", "features_of_images", 1),
    "fit": ("engine.features.linear", "fit_linear", 1),
    "scored start": ("engine.features.start", "set_to_zero", 1),
    "start-up": (engine.build, "build_train_data", 1),
    "training": (Trainer, "update", 3),
    "accumulation": (Trainer, "prepare_batch", 6),
    "evaluation": (engine.evaluate_weights, "evaluate", 1),
}


def tell(rank: int, moment: str, *numbers: int) -> None:
    """Send these signals to the process of this rank at this moment, one after the other."""
    owner, name, nth = MOMENTS[moment]
    owner = importlib.import_module(owner) if isinstance(owner, str) else owner
    if os.environ.get("RANK", "0") == str(rank):
        before_nth(owner, name, nth, lambda: [os.kill(os.getpid(), number) for number in numbers])


# {moment: (owner, function, n)}. The run's folder is moved before the nth call of the function.
MOVES = {
    "the start": (engine.stages, "quick_checks", 1),
    "a save": (engine.saves.Saves, "save", 1),
    "a write": (torch, "save", 3),
    "a sharded save": (ShardedSaver, "_put", 1),
    "a sign of life": (Session, "_write_status", 3),
    "the figures": (Recorder, "close", 1),
}
OF_ANOTHER_RUN = (".lock", "last.pth", "best.pth", "checkpoint-1.pth", "status.json")


def move_folder(output: str, before: str, rank: int = 0, is_replaced: bool = True) -> None:
    """Rename the run's folder to `moved` at this moment. `is_replaced`: put files of another run in its place."""

    def move() -> None:
        (folder,) = Path(output).iterdir()
        folder.rename(folder.with_name("moved"))
        for each in OF_ANOTHER_RUN if is_replaced else ():
            (folder / each).parent.mkdir(parents=True, exist_ok=True)
            (folder / each).write_text("of another run")

    if os.environ.get("RANK", "0") == str(rank):
        before_nth(*MOVES[before], move)


def signal_at(step: int, number: int, ranks: list[int], nth: int = 1) -> None:
    """Send this signal to the processes of these ranks when this update starts for the nth time."""
    visits = []

    def send(trainer, window):
        visits.append(trainer.step)
        if trainer.process.rank in ranks and trainer.step == step and visits.count(step) == nth:
            os.kill(os.getpid(), number)

    before_each(Trainer, "update", send)


def signal_at_image(nth: int, number: int) -> None:
    """Send this signal to the program before it reads an image for the nth time."""
    program = os.getpid()  # a loader process may read the image
    before_nth(FileStorage, "read", nth, lambda: os.kill(program, number))


def fill_disk_at_image(nth: int, path: str) -> None:
    """Fill the disk before the program reads an image for the nth time."""
    before_nth(FileStorage, "read", nth, lambda: fill(path))


def signal_at_ranking(number: int) -> None:
    """Send this signal before the images are ranked by the scores of each class, at the end of the run."""
    before_nth(all_scores, "log_sum_exp", 1, lambda: os.kill(os.getpid(), number))


def list_reads(name: str, file: str) -> None:
    """Append a line to `file` whenever a file with this name is opened for reading."""

    def note(event: str, details: tuple) -> None:
        if event == "open" and str(details[0]).endswith(f"/{name}") and details[1] == "r":
            with open(file, "a") as lines:
                lines.write("read\n")

    sys.addaudithook(note)


def hold(folder: str, steps: list[int]) -> None:
    """Let the first start of a Slurm job wait at update steps[0], the second at steps[1] ... until a signal arrives
    or the folder contains a file `go`. Each waiting process creates a file there."""
    start = int(os.environ.get("SLURM_RESTART_COUNT", "0"))

    def wait(trainer, window):
        if trainer.step in steps[start : start + 1]:
            told, handler = threading.Event(), signal.getsignal(signal.SIGUSR1)
            signal.signal(signal.SIGUSR1, lambda *arguments: (told.set(), handler(*arguments)))
            Path(folder, f"waits.{start}.{trainer.process.rank}").touch()
            while not told.is_set() and not Path(folder, "go").exists():
                time.sleep(0.05)

    before_each(Trainer, "update", wait)


def limit_free_memory(size: int) -> None:
    """Report this many bytes as free host memory."""
    change(engine.memory, "free_host_memory", lambda: size)


def run_out(trainer: Trainer, fits: int, step: int) -> None:
    """Run out of memory from this step on with more than `fits` images, after a backward has made most gradients."""

    def fail(gradient: torch.Tensor) -> None:
        if len(gradient) > fits and trainer.step >= step:
            raise torch.OutOfMemoryError("out of memory, as arranged")

    def watch(module, inputs, output: torch.Tensor) -> None:
        if output.requires_grad:  # in an evaluation, it does not
            output.register_hook(fail)

    trainer.model.patch_embed.register_forward_hook(watch)


def run_out_of_memory(fits: int, step: int, rank: int) -> None:
    """Make the process of this rank run out of memory, as `run_out` does, on a device that raises an error then."""

    def limit(trainer, log):
        if trainer.process.rank == rank:
            run_out(trainer, fits, step)

    change(engine.first_passes, "raises_when_full", lambda device: True)
    change(engine.stages, "raises_when_full", lambda device: True)
    before_each(engine.first_passes, "fit_micro_batches", limit)


def time_updates_as(*speedups: float) -> None:
    """Time updates as always, but report this speedup of half precision in each process, by its rank."""
    time_updates = engine.update_times.time_updates

    def report(time_both, batch_size, elapsed) -> dict[int, list[tuple[float, float]]]:
        time_updates(time_both, batch_size, elapsed)
        return {batch_size: [(speedups[dist.get_rank() if dist.is_initialized() else 0], 1.0)]}

    change(engine.update_times, "time_updates", report)


def compute_in_float64() -> None:
    make = engine.build.make_model

    def make_double(*arguments, **options) -> torch.nn.Module:
        return make(*arguments, **options).double()

    change(engine.build, "make_model", make_double)
    change(engine.eval_run, "make_model", make_double)


def count_seconds() -> None:
    """Let the clock for RUN.MAX_TIME advance by one second per reading. A save takes no time."""
    limit, clock = engine.callback_list.TimeLimit, itertools.count(1).__next__

    def limit_of_readings(seconds, start, times):
        return limit(seconds, 0, unmeasured(times), clock)

    change(engine.callback_list, "TimeLimit", limit_of_readings)


def unmeasured(times: RunTimes) -> RunTimes:
    """Return times that stay 0, whatever a run measures."""
    return dataclasses.replace(times, longest_save=lambda: 0.0, evaluation_in_updates=0.0)


def pass_time(seconds: float, later_seconds: float, step: int) -> None:
    """Set the duration of an update for TRAIN.BUDGET; from this step on `later_seconds`. Nothing else takes time.

    To process 1, an update seems to take twice as long as to process 0.
    """
    import engine.train.budget

    now, allowance = [0.0], engine.train.budget.Allowance

    def clock() -> float:
        return now[0]

    class PassingForecast(Forecast):
        def __init__(self, config, times, start, beat, say):
            times = dataclasses.replace(times, longest_save=lambda: 0.0)
            super().__init__(config, times, 0.0, beat, say, clock)

        def on_start_scored(self, trainer, scores, seconds):
            super().on_start_scored(trainer, scores, 0.1)

        def on_epoch_end(self, trainer, result):
            super().on_epoch_end(trainer, dataclasses.replace(result, evaluation_seconds=0.0))

    def pass_on(trainer, window):
        now[0] += (seconds if trainer.step < step else later_seconds) * (1 + trainer.process.rank)

    before_each(Trainer, "update", pass_on)
    change(engine.callback_list, "Forecast", PassingForecast)
    change(engine.train.budget, "Allowance", lambda text, started, saved: allowance(text, 0.0, saved, clock))


def kill_after_choice(later: int) -> None:
    """Kill every process with SIGKILL, `later` updates after the first update that uses the budget's choice."""

    def kill(trainer, window):
        choices = trainer.schedule.choices
        if choices and trainer.step == choices[0][0] + later:
            os.kill(os.getpid(), signal.SIGKILL)

    before_each(Trainer, "update", kill)


def save_at_once() -> None:
    """Let training wait until a save is on the disk, however busy the machine is. This is not a fault."""
    for saver in (AsyncSaver, ShardedSaver):

        def save(self, state, also, save=saver.save):
            save(self, state, also)
            self.wait()

        change(saver, "save", save)


def take_at_once() -> None:
    """Count a signal as repeated however soon it follows the first one."""
    change(StopSignal, "SECONDS_TO_REPEAT", -1.0)


class Poison(Callback):
    """A callback that makes the images, the loss or a gradient non-finite in these updates and processes."""

    def __init__(self, what: str, ranks: list[int], steps: list[int]):
        self.what, self.ranks, self.steps = what, ranks, steps
        self.factor = 1.0

    def on_epoch_start(self, trainer: Trainer) -> None:
        if trainer.epoch:
            return
        prepare_batch, loss = trainer.prepare_batch, trainer.loss
        if self.what == "gradient":
            trainer.parameters[0].register_hook(lambda grad: grad * self.factor)
        if self.what == "input":
            trainer.prepare_batch = lambda batch: ((placed := prepare_batch(batch))[0] * self.factor, placed[1])
        if self.what == "loss":
            trainer.loss = lambda *arguments: loss(*arguments) * self.factor

    def before_update(self, trainer: Trainer) -> None:
        if trainer.process.rank in self.ranks and trainer.step in self.steps:
            self.factor = float("inf" if self.what == "loss" else "nan")

    def on_update(self, trainer: Trainer) -> None:
        self.factor = 1.0


def poison(what: str, ranks: list[int], steps: list[int]) -> None:
    choose, callback = engine.stages.choose_callbacks, Poison(what, ranks, steps)

    def choose_and_poison(*run):
        watchers = choose(*run)
        return watchers._replace(callbacks=[callback, *watchers.callbacks])

    change(engine.stages, "choose_callbacks", choose_and_poison)


def note_weights(path: str) -> None:
    """Let each process write the hash of its final state to PATH.RANK."""
    train = engine.stages.train

    def noting(run: engine.stages.Run) -> engine.stages.Outcome:
        outcome = train(run)
        weights = dict(run.trainer.model.state_dict())
        assert all(torch.isfinite(tensor).all() for tensor in weights.values())
        Path(f"{path}.{run.session.process.rank}").write_text(state_hash(weights))
        return outcome

    change(engine.stages, "train", noting)


def keep_first_state(path: str) -> None:
    """Write the whole state of the run before its first update to a file. This is not a fault."""
    visits = itertools.count()

    def keep(trainer, window) -> None:
        if next(visits) == 0:
            state = trainer.parallel.gather_state(trainer.state_dict())  # collective
            if trainer.process.rank == 0:
                torch.save(state, path)

    before_each(Trainer, "update", keep)


def kill_worker(step: int, rank: int = 0) -> None:
    """Kill the loader process that reads for this update in the process of this rank, with SIGKILL."""

    def kill(reader, piece):
        if piece.step == step and os.environ.get("RANK", "0") == str(rank):
            os.kill(os.getpid(), signal.SIGKILL)

    before_each(Reader, "__getitem__", kill)


def end_thread(step: int) -> None:
    """End the loader thread that reads for this update with an error."""

    def end(reader, piece, *room):
        if piece.step == step:
            raise RuntimeError(f"{threading.current_thread().name} is told to end")

    before_each(TrainReader, "fill", end)


def limit_shared_memory(size: str) -> None:
    """Give this process its own /dev/shm of this size."""
    new_mounts = 0x00020000  # CLONE_NEWNS
    assert ctypes.CDLL(None).unshare(new_mounts) == 0
    # Otherwise this mount would be visible to all processes.
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", "/dev/shm"], check=True)


def enter_network(name: str) -> None:
    """Join a named network namespace, as `ip netns exec` does, and use its name as the host name."""
    system, new_uts = ctypes.CDLL(None), 0x04000000
    with open(f"/run/netns/{name}") as namespace:
        assert system.setns(namespace.fileno(), 0) == 0 and system.unshare(new_uts) == 0
    socket.sethostname(name)


def draw_nothing() -> None:
    """Draw no pictures and no image tables, which take longer than these runs."""
    from engine.report.image_results import BestResults, ResultFiles

    change(engine.report.plot.Plotter, "draw", lambda *arguments, **options: None)
    change(ResultFiles, "write", lambda *arguments, **options: True)
    change(BestResults, "complete", lambda *arguments, **options: True)
    change(BestResults, "close", lambda *arguments: None)  # which would read best.pth


def draw_curves() -> None:
    """Draw the curves, which `save_time` leaves out. This is not a fault."""
    change(engine.report.plot, "to_png", TO_PNG)


def judge_no_labels() -> None:
    """Start fine-tuning without the seconds that counting wrong labels takes."""
    from engine.features import doubts

    change(doubts, "MOST_JUDGED", 0)


def read_all_digits() -> None:
    """Let the data set `digits` have all its images. This is not a fault."""
    change(arrays, "DIGITS", SHIPPED_DIGITS)


def mislabel(*numbers: int) -> None:
    """Give these validation images the label of another class."""
    opened = engine.build.open_data

    def mislabelled(*arguments, **options):
        data = opened(*arguments, **options)
        targets = data.val.targets.copy()
        targets[list(numbers)] = (targets[list(numbers)] + 1) % len(data.val.classes)
        return data._replace(val=replace(data.val, targets=targets))

    change(engine.build, "open_data", mislabelled)


def kill_before_results() -> None:
    """Kill the run with SIGKILL before it writes per-image results: best.pth and last.pth are already on the disk."""
    from engine.report.image_results import ResultFiles

    change(ResultFiles, "write", lambda *arguments: os.kill(os.getpid(), signal.SIGKILL))


def compile_without_code(variables: dict[str, str]) -> None:
    """Let torch.compile trace and differentiate without generating code, which takes a minute."""
    set_variables(variables)
    compile_any = torch.nn.Module.compile

    def trace(module: torch.nn.Module, **options) -> None:
        compile_any(module, **options | {"backend": "aot_eager"})

    change(torch.nn.Module, "compile", trace)


def set_variables(variables: dict[str, str]) -> None:
    os.environ.update(variables)


def break_update(step: int) -> None:
    """Raise an AssertionError in this update, as after a mistake in the program."""

    def fail(trainer, window):
        assert window.step != step, "a planted mistake"

    before_each(Trainer, "update", fail)


def keep_statuses(path: str) -> None:
    """Record every version of status.json, one per line. Write it at each heartbeat, without a minimum interval."""
    write = engine.session.write_text

    def keep(file: Path, text: str, *check) -> None:
        write(file, text, *check)
        if file.name == "status.json":
            with open(path, "a") as kept:
                print(json.dumps(json.loads(text)), file=kept)

    change(engine.session, "write_text", keep)
    change(Session, "SECONDS_BETWEEN_BEATS", -1.0)


def draw_each_update() -> None:
    """Draw the progress bar at every step, however fast the machine is. This is not a fault."""
    update = tqdm.update

    def drawn(bar, count: int = 1) -> None:
        update(bar, count)
        bar.refresh()

    change(tqdm, "update", drawn)


def die_when_shown(step: int, *patterns: str) -> None:
    """Wait at the start of this update until files that match these patterns are in SAVE; then kill with SIGKILL."""

    def die(trainer, window):
        if trainer.step == step:
            while not all(list(Path(trainer.config.SAVE).glob(each)) for each in patterns):
                time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)

    before_each(Trainer, "update", die)


def wait_long_for_trackers() -> None:
    """Let the end of a run wait until its trackers have ended, however busy the machine is. This is not a fault."""
    import engine.record.trackers

    change(engine.record.trackers, "PATIENCE", DEADLINE)
    change(engine.record.trackers, "LONGEST_END", DEADLINE)

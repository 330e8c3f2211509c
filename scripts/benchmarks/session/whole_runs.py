"""Runs as a user types them: from JPEGs with a trace; the batch size that is found; one that is stopped and resumed."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from scripts.benchmarks.parts.common import ROOT
from scripts.benchmarks.session.loading import make_photos
from scripts.benchmarks.session.plan import Context
from scripts.benchmarks.session.probes.checks import Probes, require
from scripts.benchmarks.session.speed import NO_DROPOUT, TINY

BFLOAT16 = ("AMP=true", "PRECISION.DTYPE=bfloat16")


class Run:
    """A run of main_single_gpu.py, whose lines are read as it prints them."""

    def __init__(self, output: Path, *flags):
        shutil.rmtree(output, ignore_errors=True)
        self._output, self.begin, self.lines = output, time.perf_counter(), []
        command = [sys.executable, ROOT / "main_single_gpu.py", "-output", output, *flags]
        self._process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True)

    def wait_for(self, words: str) -> float:
        """Seconds from its start until it prints them."""
        for line in self._process.stdout:
            print(line, end="", file=sys.stderr)
            self.lines.append(line)
            if re.search(words, line):
                return time.perf_counter() - self.begin
        raise AssertionError(f"the run ended without {words!r}: {''.join(self.lines[-1:])}")

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def end(self) -> int:
        """Its exit code."""
        for line in self._process.stdout:
            print(line, end="", file=sys.stderr)
            self.lines.append(line)
        return self._process.wait()

    @property
    def folder(self) -> Path:
        (folder,) = self._output.iterdir()
        return folder

    def status(self) -> dict:
        return json.loads((self.folder / "status.json").read_text())


def time_run(context: Context) -> None:
    """Three epochs, the first of which compiles, with saves within them."""
    journal, batch = context.journal, context.pick(256, 8)
    flags = ["-cfg", ROOT / "configs/vit_small_patch16_224.yaml", "-dataset", "imagefolder", "-epochs", 3]
    flags += ["-data_path", make_photos(context), "-batch_size", batch, "-profile", 3, "-opts", *BFLOAT16, *NO_DROPOUT]
    flags += ["PRECISION.RESIDUAL=half", "MODEL.NUM_CLASSES=1000", "SAVE_STEPS=20"]
    flags += context.pick(["COMPILE=true"], TINY)
    run = Run(context.scratch / "whole_run", *flags)
    journal.row(what="seconds from the command to the first step", value=run.wait_for(r"Step\["))
    code, seconds = run.end(), time.perf_counter() - run.begin
    journal.row(what="seconds of the whole run, 3 epochs", value=seconds)
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    for epoch, row in enumerate(rows, start=1):
        journal.row(what=f"images/s in epoch {epoch}", value=float(row["images_per_s"]))
        journal.row(what=f"% of epoch {epoch} waiting for data", value=float(row["data_wait_pct"]))
    (saving,) = re.findall(r"blocked training for (\S+) s", (run.folder / "log.txt").read_text())
    journal.row(what="seconds for which saving blocked training", value=float(saving))
    shutil.copy(run.folder / "trace.json.gz", context.folder)
    journal.note("trace.json.gz has 3 updates, for ui.perfetto.dev")
    sys.exit(code)


def check_recovery(context: Context) -> None:
    """The search for a batch size fills the memory beside the small runs that are stopped."""
    context.journal.columns("probe", "verdict", "figure", "seconds")
    probes = Probes(context)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(find_batch_size, context)
        probes.check("SIGTERM and resume", lambda: stop_and_resume(context))
        probes.check("batch size auto", found.result, only_on_cuda=True)
    probes.end()


def find_batch_size(context: Context) -> str:
    flags = ["-cfg", ROOT / "configs/vit_small_patch16_224.yaml", "-dataset", "synthetic", "-batch_size", "auto"]
    words = [*BFLOAT16, "DATA.SYNTHETIC_SIZE=8192", "TRAIN.WARMUP_EPOCHS=0", *context.pick((), TINY)]
    run = Run(context.scratch / "auto", *flags, "-epochs", 1, "-opts", *words)
    run.wait_for(r"an epoch is \d+ updates? of")
    (found,) = re.findall(r"updates? of ([\d,]+ images)", run.lines[-1])
    run.wait_for(r"Step\[")
    run.stop()
    run.end()
    return found


def stop_and_resume(context: Context) -> str:
    flags = ["-cfg", ROOT / "configs/vit_digits.yaml", "-epochs", 3]
    options = ["-opts", *BFLOAT16, f"DEVICE={context.device}", "SAVE_STEPS=10", "REPORT_FREQ=1", "TENSORBOARD=false"]
    options += context.pick((), ["MODEL.DEPTH=2"])
    run = Run(context.scratch / "stopped", *flags, *options)
    run.wait_for(r"Step\[0012")
    run.stop()
    code, stopped = run.end(), run.status()
    assert stopped["state"] == "stopped" and 0 < stopped["step"] < stopped["total_steps"], stopped
    resumed = Run(context.scratch / "resumed", *flags, "-resume", run.folder, *options)
    assert resumed.end() == 0, resumed.lines[-1:]
    done = run.status()  # a resumed run goes on in its folder
    figure = f"stopped at step {stopped['step']} with exit code {code}, done at {done['step']} of {done['total_steps']}"
    return require(done["state"] == "done" and done["step"] == done["total_steps"], figure)

"""The tests of tests/gpu, each as a row as soon as it ends."""

import re
import subprocess
import sys

from scripts.benchmarks.parts.common import ROOT
from scripts.benchmarks.session.plan import Context


def run_tests(context: Context) -> None:
    report = context.folder / "gpu_tests.xml"
    options = ["-vv", "-rs", "-p", "no:cacheprovider", f"--junitxml={report}", "--ignore=tests/gpu/test_probes.py"]
    command = [sys.executable, "-m", "pytest", *options, "tests/gpu"]  # the probes are a part of their own
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        for line in process.stdout:
            print(line, end="", file=sys.stderr)  # into session.log, with what failed and why
            if found := re.match(r"tests/gpu/(\S+\.py::.+?) (PASSED|FAILED|SKIPPED|ERROR)", line):
                verdict = "needs CUDA" if context.dry and found[2] == "SKIPPED" else found[2].lower()
                context.journal.row(test=found[1], verdict=verdict)
            elif re.match(r"=+ .* in [0-9.]+s", line):
                context.journal.note(line.strip("= \n"))
    sys.exit(process.returncode)

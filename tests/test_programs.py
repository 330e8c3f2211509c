"""The complete output of the programs: a run, its log, its end, and the commands that use it."""

from pathlib import Path

import pytest
from PIL import Image

from tests.support.cases import assert_cases
from tests.support.configs import SMALL
from tests.support.runs import typed

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with settings, images and a run of one epoch, and the run's output."""
    folder = tmp_path_factory.mktemp("programs")
    (folder / "small.yaml").write_text(SMALL)
    for number in range(2):
        Image.new("L", (8, 8), 9).save(folder / f"{number}.png")
    (folder / "cut.png").write_bytes(b"no picture")
    return folder


@pytest.fixture
def type_in(folder, monkeypatch, signal_handlers):
    """Return a function that runs a program in that folder and returns its stdout, then a separator and its stderr."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr("engine.record.next_steps._python", lambda: "python")
    monkeypatch.setattr("engine.precision.policy.half_speedup", lambda device, half: 2.0)
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))

    def call(program: str, words: str, code: int = 0) -> str:
        ended = typed(program, *words.split())
        assert ended.returncode == code, ended.printed
        return "\n---\n".join(filter(None, (ended.stdout.strip("\n"), ended.stderr.strip("\n"))))

    return call


def test_output_of_programs_have_their_settings_and_values(type_in):
    run, single = "-cfg small.yaml -output o -name run -epochs 1 -batch_size 480", "main_single_gpu.py"
    printed = type_in(single, f"{run} -opts TRAIN.MODEL_EMA=true DATA.SYNTHETIC_SIZE=64")
    log = [line for line in Path("o/run/log.txt").read_text().splitlines() if line[20:] not in printed]
    pages = {"a run": printed, "further lines of log.txt": "\n".join(log)}
    for name, program, words in (
        ("the run again", single, "-resume o/run"),
        ("what -check says of going on", single, "-resume o/run -epochs 2 -check"),
        ("an evaluation", single, "-eval -resume o/run -output e"),
        ("an export", "scripts/export.py", "o/run -output x.safetensors -raw"),
        ("an export of all", "scripts/export.py", "o/run/last.pth -output x.pth"),
        ("an average", "scripts/export.py", "o/run/best.pth o/run/last.pth -output x.safetensors"),
        ("another format", "scripts/export.py", "x.safetensors -output y.pth"),
        ("a report", "scripts/report.py", "o/run"),
    ):
        pages[name] = type_in(program, words)
    pages["predictions"] = type_in("scripts/predict.py", "o/run 0.png cut.png 1.png -raw", code=2)
    assert_cases("programs", pages)

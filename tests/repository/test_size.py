"""Limits on the code to read first and on the code, ours and torch's, that a plain run loads."""

import json

import pytest

from tests.support.modules import ROOT
from tests.support.runs import run_fresh

# A new reader who reads these files in this order understands the program.
READING_PATH = (
    "engine/run.py",
    "engine/stages.py",
    "engine/plan.py",
    "engine/build.py",
    "engine/train/trainer.py",
    "datasets/loading/readers.py",
    "engine/evaluation/evaluate.py",
    "engine/saves.py",
)
READING_LINES = 1_650
LOADED_LINES = 15_800  # lines of our modules in a plain run, with its report, tables and TensorBoard
ROOMS = ("configs", "datasets", "engine", "models", "scripts", "utils")
# A plain run that prints the project's imported files at its end, and then uses torch's compiler for the first time.
RUN = """
import json, sys
from pathlib import Path
from main_single_gpu import main

code = main(sys.argv[1:])
found = {str(Path(module.__file__)) for module in sys.modules.values() if getattr(module, "__file__", None)}
from engine.batch_size import peaks_of_cpu_tensors

peaks_of_cpu_tensors(list)
assert "torch._dynamo" not in sys.modules
assert sys.modules.get("wandb", sys) is not None
import timm, torch
from torchvision.ops import roi_align

assert roi_align.__globals__["is_compile_supported"]("cpu") == torch._dynamo.utils.is_compile_supported("cpu")
model = torch.nn.Linear(3, 3)
assert torch.allclose(torch.compile(model, backend="eager")(torch.ones(3)), model(torch.ones(3)))
assert torch.compiler.disable(lambda x: x + 1)(1) == 2 and torch.compiler.disable.__module__ == "torch.compiler"
print(json.dumps(sorted(found)))
sys.exit(code)
"""
SMALL = "-amp -opts MODEL.DEPTH=1 MODEL.EMBED_DIM=32 MODEL.NUM_HEADS=2".split()


def lines_of(path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_files_for_a_first_reader_stay_within_their_total_line_limit():
    counts = {name: lines_of(ROOT / name) for name in READING_PATH}
    assert sum(counts.values()) <= READING_LINES, f"move code that a first reader can skip to another file: {counts}"


@pytest.mark.slow
def test_plain_run_loads_few_lines_and_torchs_compiler_only_when_requested(tmp_path):
    (tmp_path / "plain.py").write_text(RUN)
    flags = "-cfg configs/vit_digits.yaml -dataset digits -epochs 1 -output".split()
    words = [*flags, str(tmp_path / "output"), *SMALL]
    ended = run_fresh(str(tmp_path / "plain.py"), *words, environment={"PYTHONPATH": str(ROOT)}).done()
    rooms = tuple(str(ROOT / room) + "/" for room in ROOMS)
    loaded = {
        name: lines_of(ROOT / name) for name in json.loads(ended.stdout.splitlines()[-1]) if name.startswith(rooms)
    }
    print(f"a plain run loads {sum(loaded.values()):,} lines in {len(loaded)} files")
    largest = sorted(loaded, key=loaded.get)[-20:]
    assert sum(loaded.values()) <= LOADED_LINES, f"import later whatever few runs need; the largest files: {largest}"

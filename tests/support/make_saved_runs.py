"""Makes the saved runs of a release since 3.0.0, which later versions must be able to resume:

    python -m tests.support.make_saved_runs [KIND ...]

Each run is stopped in the middle of an epoch. Its folder is copied to tests/data/saved_runs/VERSION/KIND. Then the run
is resumed to its end, and the losses are written next to the copy, in KIND.json.
"""

import json
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from tests.support import native_images, several_labels
from tests.support.forks import ROOT, end_server
from tests.support.number_rows import write_digits
from tests.support.runs import Run, epochs_of, rows_of, run, run_folder
from utils import VERSION

SAVED = ROOT / "tests/data/saved_runs"
# {kind: (settings file in SAVED, processes, the update before which the run is stopped, more flags)}
KINDS = {
    "float16": ("synthetic.yaml", 1, 6, "-amp -amp_dtype float16"),
    "sharded": ("synthetic.yaml", 2, 6, "-opts DIST.STRATEGY=fsdp2 DATA.BATCH_SIZE=4"),
    "ddp": ("synthetic.yaml", 2, 6, "-opts DATA.BATCH_SIZE=4 TRAIN.OPTIMIZER.NAME=lamb"),
    "folds": ("digits.yaml", 1, 26, "-opts DATA.FOLD=1/5 TRAIN.AUTO_AUGMENT=rand-m9-mstd0.5-inc1 TRAIN.MIXUP_ALPHA=0"),
    "lora": ("digits.yaml", 1, 26, "-opts MODEL.LORA.RANK=2"),
    "shape": ("digits.yaml", 1, 26, "-image_size 8x12"),
    "labels": ("labels.yaml", 1, 10, ""),
    "numbers": ("numbers.yaml", 1, 10, ""),
    "native": ("native.yaml", 1, 10, ""),
}
NEVER_READ = ("*.html", "*.png", "*.txt", ".*", "*.csv.gz", "checkpoint-*.pth", "previous.pth", "tensorboard")


def program_of(processes: int) -> str:
    return "main_multi_gpu.py" if processes > 1 else "main_single_gpu.py"


def write_data(folder: Path) -> None:
    """Write the images of the runs that read files into the current folder of these runs."""
    for name in ("numbers", "labels"):
        (folder / name).mkdir()
    write_digits(folder / "numbers", 300, missing=range(0, 300, 5))
    several_labels.write_digits(folder / "labels", 300)
    native_images.draw(folder / "native", 64, 32, size=(16, 16))


def losses_of(folder: Path) -> dict:
    """Return the training loss of each update and the validation loss of the last epoch."""
    last = epochs_of(folder)[-1]
    steps = {row["step"]: float(row["loss"]) for row in rows_of(folder / "steps.csv")}
    return {"steps": steps, "eval_loss": last["eval_loss"]}


def make(kind: str, work: Path) -> None:
    """Stop the run of this kind, copy its folder, resume it, and write its losses."""
    file, processes, step, flags = KINDS[kind]
    output = work / "output"
    shutil.copy(SAVED / file, work)  # relative paths, so that the run names no folder of this machine
    write_data(work)
    words = ["-cfg", file, "-output", output.name, *flags.split()]
    faults = {"signal_at": [step, signal.SIGTERM, list(range(processes))]}
    stopped = Run(program_of(processes), *words, processes=processes, faults=faults, cwd=work).wait()
    assert "stopped by signal 15" in stopped.printed, stopped.printed
    folder = run_folder(output)
    copy = SAVED / VERSION / kind / folder.name
    shutil.rmtree(copy.parent, ignore_errors=True)
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(*NEVER_READ))
    status = copy / "status.json"
    status.write_text(status.read_text().replace(f"{work.resolve()}/", ""))  # no folder of this machine
    run(program_of(processes), "-resume", str(folder), "-output", str(output), processes=processes, cwd=work).done()
    (SAVED / VERSION / f"{kind}.json").write_text(json.dumps(losses_of(folder)) + "\n")


if __name__ == "__main__":
    for each in sys.argv[1:] or KINDS:
        with tempfile.TemporaryDirectory() as work:
            make(each, Path(work))
    end_server()

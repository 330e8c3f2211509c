"""Prints the run hash of 14 variants of a short training run on the data set digits.

    python scripts/maintenance/run_hashes.py                     # all variants, in this checkout
    python scripts/maintenance/run_hashes.py -tree ../before     # all variants, in another checkout
    python scripts/maintenance/run_hashes.py ema lamb            # only these variants

A change that is not meant to alter training must leave every hash unchanged. Compare only hashes from the same machine
with the same packages. All variants together take about four minutes on two cores.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.support.run_hash import run_hash  # noqa: E402

DIGITS = ("-cfg", "configs/vit_digits.yaml", "-epochs", "2")
LORA = ("-cfg", "configs/lora.yaml", "-pretrained", "weights/vit_fractals.safetensors", "-dataset", "digits")
COMMON = ("TRACK=[]", "REPORT=false", "DATA.NUM_WORKERS=0")
TEACHER = "float32"  # the variant whose best.pth is the teacher for distillation
# {variant: (flags, settings after -opts, number of processes)}
VARIANTS: dict[str, tuple[tuple[str, ...], tuple[str, ...], int]] = {
    TEACHER: (DIGITS, (), 1),
    "amp": ((*DIGITS, "-amp"), ("PRECISION.DTYPE=bfloat16",), 1),
    "float16": ((*DIGITS, "-amp"), ("PRECISION.DTYPE=float16",), 1),
    "accumulation": (DIGITS, ("TRAIN.ACCUM_ITER=2",), 1),
    "two_processes": (DIGITS, ("DATA.BATCH_SIZE=32",), 2),
    "ema": (DIGITS, ("TRAIN.MODEL_EMA=true", "TRAIN.MODEL_EMA_DECAY=0.9"), 1),
    "mixup_cutmix": (DIGITS, ("TRAIN.MIXUP_ALPHA=0.8", "TRAIN.CUTMIX_ALPHA=1.0"), 1),
    "randaugment": (DIGITS, ("TRAIN.AUTO_AUGMENT=rand-m9-mstd0.5-inc1",), 1),
    "layer_decay": (DIGITS, ("TRAIN.LAYER_DECAY=0.75",), 1),
    "lamb": (DIGITS, ("TRAIN.OPTIMIZER.NAME=lamb",), 1),
    "naive": ((*DIGITS, "-amp"), ("PRECISION.MODE=naive", "PRECISION.DTYPE=bfloat16"), 1),
    "lora": ((*LORA, "-epochs", "1"), ("DATA.HFLIP=0", "TRAIN.WARMUP_EPOCHS=0"), 1),
    "distillation": (DIGITS, ("TRAIN.DISTILLATION_TYPE=soft",), 1),
    "fsdp2": (DIGITS, ("DIST.STRATEGY=fsdp2", "DATA.BATCH_SIZE=32"), 2),
}


def words_of(name: str, output: Path) -> list[str]:
    """Return the flags of a variant that is trained in OUTPUT/NAME."""
    flags, options, _ = VARIANTS[name]
    if name == "distillation":
        options = (*options, f"TRAIN.TEACHER_MODEL={output / TEACHER / 'best.pth'}")
    return [*flags, "-seed", "1", "-output", str(output), "-name", name, "-opts", *COMMON, *options]


def train(tree: Path, output: Path, name: str) -> str:
    """Train a variant with the programs of `tree`. Return its run hash."""
    _, _, num_processes = VARIANTS[name]
    script = ["main_single_gpu.py"] if num_processes == 1 else ["main_multi_gpu.py", "-ngpus", str(num_processes)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *script, *words_of(name, output)], cwd=tree, env=environment, capture_output=True, text=True
    )
    if done.returncode != 0:
        sys.exit(f"{name}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return run_hash(output / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"variants to train: {', '.join(VARIANTS)}")
    parser.add_argument("-tree", type=Path, default=ROOT, help="checkout whose programs are used (default: this one)")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.names if name not in VARIANTS]:
        parser.error(f"unknown variant {', '.join(unknown)}; choose from {', '.join(VARIANTS)}")
    wanted = set(arguments.names or VARIANTS)
    if "distillation" in wanted:
        wanted.add(TEACHER)
    with tempfile.TemporaryDirectory() as output:
        for name in VARIANTS:
            if name in wanted:
                print(f"{name:14} {train(arguments.tree.resolve(), Path(output), name)}", flush=True)


if __name__ == "__main__":
    main()

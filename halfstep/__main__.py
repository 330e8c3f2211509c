"""The program `halfstep`: replaces itself by the program of a command.

halfstep train photos
"""

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE if (HERE / "main_single_gpu.py").exists() else HERE.parent  # of an installed package, or of a clone
sys.path.insert(0, str(ROOT))  # for the imports below, inside functions because most commands do not need them
TRAIN, MULTI = "scripts/train.py", "main_multi_gpu.py"
# {command: (its file, its first words, what it does)}, in the order of a user's day
COMMANDS = {
    "models": ("scripts/models.py", [], "list pretrained models, with accuracy and speed"),
    "check": (TRAIN, ["-check"], "read all images and try a few updates, before a long run"),
    "train": (TRAIN, [], "train or fine-tune a model: train FOLDER"),
    "resume": (TRAIN, ["-resume"], "continue a run: resume RUN, or the newest run that was killed"),
    "evaluate": (TRAIN, ["-eval"], "score weights on labelled images: evaluate latest FOLDER"),
    "report": ("scripts/report.py", [], "write the page of a run again"),
    "predict": ("scripts/predict.py", [], "classify images with a run or weights: predict latest FOLDER"),
    "labels": ("scripts/labels.py", [], "find wrong labels and copies, choose images to label next"),
    "embed": ("scripts/embed.py", [], "write features of images, find similar images"),
    "export": ("scripts/export.py", [], "write a run for timm, ONNX, the Hugging Face hub or a web page"),
    "compare": ("scripts/compare.py", [], "test whether one run is better than another"),
    "sweep": ("scripts/sweep.py", [], "train with several settings, seeds or folds"),
    "doctor": ("scripts/doctor.py", [], "find the module in which half precision overflows"),
    "make-shards": ("scripts/make_shards.py", [], "pack a data set into tar files"),
    "from-timm": ("scripts/from_timm.py", [], "translate a command of timm's train.py into a settings file"),
    "completion": ("scripts/completion.py", [], "print the completion of halfstep for a shell: bash, zsh or fish"),
}
# Flags and settings of a run in several processes
SEVERAL = {"NGPUS", "DIST_URL", "WORLD_SIZE", "RANK", "DIST.URL", "DIST.WORLD_SIZE", "DIST.RANK"}


def main() -> int:
    name, *words = sys.argv[1:] or ["-h"]
    if name in ("-h", "-help", "--help", "help"):
        from utils.program import exit_code

        return exit_code(print_commands, [])
    if name in ("-version", "--version"):
        name, words = "train", ["-version"]
    if name not in COMMANDS:
        from utils.errors import did_you_mean

        near = did_you_mean(name, COMMANDS)
        print(f"error: {name} is not a command of halfstep{near}; halfstep -h lists the commands", file=sys.stderr)
        return 2
    script, first, _ = COMMANDS[name]
    if name in ("resume", "evaluate") and words and not words[0].startswith("-"):
        first = [*first, *(["-pretrained"] if name == "evaluate" else []), words.pop(0)]
    elif name == "resume":
        first = [*first, "auto"]
    os.environ.pop("PYTHONSAFEPATH", None)  # it keeps the folder of the file off the path
    if script == TRAIN and has_several_processes(words):
        script = MULTI
    # The process stays the same, so that signals and launchers reach the program. Python puts the folder of the file,
    # and not this one, first on the path.
    os.execv(sys.executable, [sys.executable, str(ROOT / script), *first, *words])


def print_commands(words: list[str]) -> int:
    print("halfstep trains image classifiers. halfstep COMMAND -h shows the flags of a command.\n")
    print("\n".join(f"  halfstep {name:<12}{about}" for name, (_, _, about) in COMMANDS.items()))
    return 0


def has_several_processes(words: list[str]) -> bool:
    """Return whether the run has several processes, by its flags or by the variables of a launcher."""
    flags = [word for word in words if word.startswith("-") or "=" in word]
    if SEVERAL & {word.partition("=")[0].lstrip("-").replace("-", "_").upper() for word in flags}:
        return True
    if not any("RANK" in name or "PROCID" in name for name in os.environ):  # of each launcher; the import takes 40 ms
        return False
    from utils.launch import is_one_of_several

    return is_one_of_several(os.environ)


if __name__ == "__main__":
    sys.exit(main())

"""The last lines of a run: commands for the next steps, to copy into the shell that started the run."""

import shlex
from pathlib import Path

from configs.schema import Config
from datasets import ImageSet
from utils.commands import alias, command, path_word
from utils.distributed import Process
from utils.runs import weights_in
from utils.text import align


def after_training(config: Config, process: Process, folder: Path, eval_set: ImageSet, state: str) -> list[str]:
    """Return the next steps after training. A run that would only end in the same way again gets no resume command.

    `state` is the state in status.json, or "early stop".
    """
    longer = {"early stop": ["-opts", "TRAIN.EARLY_STOP=none"], "stopped": [], "save_failed": []}
    if not config.TRAIN.BUDGET:  # a finished run has used up its budget
        longer["done"] = ["-epochs", 2 * config.TRAIN.NUM_EPOCHS]
    rows = _files(folder, "report.html")
    if state in ("done", "early stop") and (weights := weights_in(folder)):
        rows += _use_of(weights, eval_set)
        if config.DATA.DATASET == "imagefolder":
            from datasets.sources.folder import find_test_folders

            for test_folder in find_test_folders(eval_set):
                rows.append(("test", command("evaluate", weights, "-data_path", test_folder)))
    if state in longer and (folder / "last.pth").exists():
        rows += [("train longer" if longer[state] else "continue", resume_command(process, folder, longer[state]))]
    return _lines(rows)


def after_failure(process: Process, folder: Path) -> list[str]:
    """Return the next step after an error that the user did not cause."""
    return _lines([("continue", resume_command(process, folder, []))] if (folder / "last.pth").exists() else [])


def after_evaluation(weights: Path | None, folder: Path, eval_set: ImageSet) -> list[str]:
    """Return the next steps after an evaluation. `weights`: the evaluated file, or None if no halfstep run wrote it."""
    rows = _files(folder, "mistakes.png") or _files(folder, "status.json")
    return _lines(rows + (_use_of(weights, eval_set) if weights else []))


def _files(folder: Path, name: str) -> list[tuple[str, str]]:
    return [("look at", shlex.quote(path_word(folder / name)))] if (folder / name).exists() else []


def _use_of(weights: Path, eval_set: ImageSet) -> list[tuple[str, str]]:
    target = weights.with_suffix(".safetensors")
    rows = [("export", command("export", weights, "-output", target))] if target != weights else []
    has_files = eval_set.root is not None and Path(image := eval_set.name(0)).is_file()
    if has_files and image.isprintable():  # so that users can copy the command
        rows.insert(0, ("predict", command("predict", weights, Path(image))))
    return rows


def resume_command(process: Process, folder: Path, words: list[str | int]) -> str:
    """Return the command that continues a run, with additional flags."""
    if process.world_size == 1:
        return command("resume", folder, *words)
    if process.local_size == process.world_size:
        return command("resume", folder, "-ngpus", process.world_size, *words)
    return f"the same command with {shlex.join(['-resume', path_word(folder), *map(str, words)])}"


def _lines(rows: list[tuple[str, str]]) -> list[str]:
    if not rows:
        return []
    if line := alias():
        rows = [("type first", line), *rows]
    return ["next:", *align([(f"  {what}", how) for what, how in rows])]

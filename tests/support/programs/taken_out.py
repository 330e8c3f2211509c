"""Uses halfstep in a folder that lacks one extra, in a process that has already imported torch, timm and halfstep.

Arguments: the folder, a settings file, and the words of a command that needs the missing extra.
"""

import gc
import importlib
import sys
from pathlib import Path

PROGRAM = ("configs", "datasets", "engine", "extras", "models", "scripts", "utils", "main_single_gpu", "main_multi_gpu")


def forget_modules() -> None:
    """Unload halfstep's modules, so that they are imported again from the first folder in sys.path."""
    for name in [name for name in sys.modules if name.split(".")[0] in PROGRAM]:
        del sys.modules[name]


def modules_of(root: Path) -> list[str]:
    """Return all modules of the program in a folder."""
    files = [path for room in PROGRAM for path in (root / room).rglob("*.py")] + [*root.glob("main_*.py")]
    return sorted(path.relative_to(root).with_suffix("").as_posix().replace("/", ".") for path in files)


def use(root: Path, small: str, asking: list[str]) -> None:
    for name in modules_of(root):
        importlib.import_module(name)
    main = importlib.import_module("main_single_gpu").main
    exit_code = importlib.import_module("utils.program").exit_code
    output = str(root / "runs")
    train = ["-cfg", small, "-output", output, "-name", "run"]
    try:
        main(["-h"])
    except SystemExit as end:
        assert not end.code
    assert exit_code(main, [*train, "-epochs", "1"]) == 0
    gc.collect()  # release the lock on the run's folder; normally it ends with the process
    assert exit_code(main, ["-resume", f"{output}/run", "-epochs", "2"]) == 0
    if asking:
        script, *words = asking
        main = importlib.import_module(script).main
        words = [word.format(small=small, output=output) for word in words]
        assert exit_code(main, words) == 2


if __name__ == "__main__":
    folder, settings, *command = sys.argv[1:]
    forget_modules()
    sys.path.insert(0, folder)
    use(Path(folder), settings, command)

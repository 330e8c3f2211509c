"""Uses halfstep in a folder without one extra, in a process that has already imported torch, timm and halfstep.

Arguments: the folder, a file of settings, and the words of a command that asks for the missing extra.
"""

import gc
import importlib
import sys
from pathlib import Path

PROGRAM = ("configs", "datasets", "engine", "extras", "models", "scripts", "utils", "main_single_gpu", "main_multi_gpu")


def forget_modules() -> None:
    """Let the modules of halfstep be imported anew, from the folder that comes first in sys.path."""
    for name in [name for name in sys.modules if name.split(".")[0] in PROGRAM]:
        del sys.modules[name]


def modules_of(root: Path) -> list[str]:
    """All modules of the program in a folder."""
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
    gc.collect()  # the lock on a run's folder usually ends with its process
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

"""Prints the completion of halfstep for a shell, so that Tab completes commands, flags, settings, files and runs.

source <(halfstep completion bash)            in ~/.bashrc
source <(halfstep completion zsh)             in ~/.zshrc
halfstep completion fish | source             in ~/.config/fish/config.fish
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from any folder

from utils.program import exit_code  # isort: skip
from scripts.command_line import Parser

FOLDER = Path(__file__).with_name("completions")
WORDS = FOLDER / "words"  # the program that finds the words, for all shells
SHELLS = ("bash", "zsh", "fish")


def main(argv: list[str]) -> int:
    parser = Parser(__doc__, "completion")
    parser.add_argument("shell", choices=SHELLS, help="your shell")
    shell = parser.parse_args(argv).shell
    print((FOLDER / f"halfstep.{shell}").read_text().replace("PROGRAM", WORDS.read_text()), end="")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))

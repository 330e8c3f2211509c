"""Writes a settings file that trains like timm's train.py with the given arguments.

    halfstep from-timm torchrun --nproc_per_node 4 train.py --model resnet50 > my.yaml      a whole command line
    halfstep from-timm output/train/20260102-030405-resnet50-224/args.yaml > my.yaml        train.py's own file

A comment after each setting names the argument that it comes from. Stderr has the command to train with. If an argument
has no equivalent setting, the exit code is 2, and no settings are written.
docs/from-timm.md lists arguments whose setting has another meaning or default.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from any folder

from utils.program import exit_code  # isort: skip


def main(argv: list[str]) -> int:
    from scripts.translating_timm import translate

    translation = translate(argv[1:] if argv[:1] == ["--"] else argv, __doc__)
    print(translation.yaml, end="")
    print(*translation.remarks, f"train with: {translation.command}", sep="\n", file=sys.stderr)
    return 0


if __name__ == "__main__":  # with --, argparse leaves the two-dash flags of train.py unchanged
    sys.exit(exit_code(main, ["--", *sys.argv[1:]]))

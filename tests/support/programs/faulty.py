"""Runs a program with planted faults, which are different for each start by torchrun.

torchrun ... -m tests.support.programs.faulty '[{"signal_at": [5, 9, [1]]}, {}]' FILE ARGUMENTS
"""

import json
import os
import sys

from tests.support.forks import run_program

if __name__ == "__main__":
    _, faults, program, *arguments = sys.argv
    faults = json.loads(faults)[int(os.environ["TORCHELASTIC_RESTART_COUNT"])]
    run_program(program, arguments, faults)

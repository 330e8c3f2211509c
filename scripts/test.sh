#!/usr/bin/env bash
# Runs every test, in the environment that quickstart.sh makes (made here if it is not there yet), and at the end kills
# some runs at random moments. With arguments of pytest's, only what they ask for.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
enter_environment requirements.txt requirements-dev.txt
python -m ruff check .
python -m ruff format --check .
# One thread: the tests run several processes at once, whose spinning threads would wait for each other.
export OMP_NUM_THREADS=1
# -rs: what is skipped, and for want of what.
# Each file by one worker, whose fixtures serve all of its tests.
python -m pytest -rs -n auto --dist loadfile "$@"
if [ $# -eq 0 ] && [ "$(uname)" = Linux ]; then
    python tests/kill/kill_runs.py -quick
fi

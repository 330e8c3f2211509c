#!/usr/bin/env bash
# Runs every test, in the environment that quickstart.sh makes (made here if it is not there yet).
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
enter_environment requirements.txt requirements-dev.txt
python -m ruff check .
python -m ruff format --check .
exec python -m pytest "$@"

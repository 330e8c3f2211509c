#!/usr/bin/env bash
# Runs all tests in the environment of quickstart.sh, which it creates if needed, and kills some runs at random moments.
# With arguments for pytest, it runs only the tests that they select.
#
#   bash scripts/test.sh            everything
#   bash scripts/test.sh -quick     after every edit: 1 to 3 minutes on 2 cores; without tests marked slow
#   bash scripts/test.sh -release   before a release: tests/release, and 20 times as many drawn examples for each property,
#                                   from a new seed; with EXAMPLES_SEED=SEED before it, from this seed
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
enter_environment requirements.txt requirements-dev.txt

is_quick=false is_release=false options=()
if [[ "${1:-}" =~ ^--?quick$ ]]; then
    is_quick=true
    shift
    options=(-m "not slow") # slow tests start programs, compile, or take long for other reasons
elif [[ "${1:-}" =~ ^--?release$ ]]; then
    is_release=true
    shift
fi
python -m ruff check .
python -m ruff format --check .
# One thread: the tests run several processes at once, and their spinning threads would wait for each other.
export OMP_NUM_THREADS=1
# Many processes import the same modules: let Python store their byte code, even if PYTHONDONTWRITEBYTECODE is set.
unset PYTHONDONTWRITEBYTECODE
# A worker for each core. tests/support/distribution.py says which tests share a worker and its fixtures.
parallel=(-n "$(getconf _NPROCESSORS_ONLN)" --dist loadscope)
# -rs lists skipped tests, and says what they need.
if $is_release; then
    export EXAMPLES_SEED="${EXAMPLES_SEED:-$((RANDOM * 32768 + RANDOM))}" # read by tests/support/properties.py
    echo "the examples of properties are drawn from the seed $EXAMPLES_SEED"
    python -m pytest -rs "${parallel[@]}" -m hypothesis "$@" # Hypothesis marks the tests of properties
    exec python -m pytest -rs tests/release "$@"             # one after another, because many use all cores
fi
if $is_quick; then
    python -m pytest -rs "${parallel[@]}" "${options[@]}" "$@"
    echo "-quick left out the slow tests and the killed runs of tests/kill/kill_runs.py"
elif [ $# -gt 0 ] || [ "$(uname)" != Linux ]; then
    python -m pytest -rs "${parallel[@]}" "$@"
else
    # The killed runs mostly wait, so they run beside the tests.
    killed_runs=$(mktemp)
    (
        exec &>"$killed_runs"
        exec python tests/kill/kill_runs.py -quick
    ) &
    pid=$! status=0
    trap 'kill "$pid" 2>/dev/null || true; rm -f "$killed_runs"' EXIT
    python -m pytest -rs "${parallel[@]}" || status=$?
    wait "$pid" || status=$?
    cat "$killed_runs"
    exit $status
fi

#!/usr/bin/env bash
# Runs the tests in the environment of quickstart.sh, which it creates if needed, and kills some runs at random moments.
# With arguments for pytest, it runs the tests that they select, also long ones.
#
#   bash scripts/test.sh            before a commit: 7 minutes on 2 cores; without tests marked long
#   bash scripts/test.sh -all       all tests, as in continuous integration: about 16 minutes
#   bash scripts/test.sh -quick     after every edit: a minute; tests/unit and tests/repository, without slow and long tests
#   bash scripts/test.sh -release   before a release: tests/release, and 20 times as many drawn examples for each property,
#                                   from a new seed; with EXAMPLES_SEED=SEED before it, from this seed
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
enter_environment requirements.txt requirements-dev.txt

mode=everyday
if [[ "${1:-}" =~ ^--?(all|quick|release)$ ]]; then
    mode=${BASH_REMATCH[1]}
    shift
elif [ $# -gt 0 ]; then
    mode=chosen
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
if [ $mode = release ]; then
    export EXAMPLES_SEED="${EXAMPLES_SEED:-$((RANDOM * 32768 + RANDOM))}" # read by tests/support/properties.py
    echo "the examples of properties are drawn from the seed $EXAMPLES_SEED"
    python -m pytest -rs "${parallel[@]}" -m hypothesis "$@" # Hypothesis marks the tests of properties
    exec python -m pytest -rs tests/release "$@"             # one after another, because many use all cores
fi
if [ $mode = quick ]; then
    echo "-quick leaves out tests marked slow or long, all folders but tests/unit and tests/repository, and the killed runs"
    exec python -m pytest -rs "${parallel[@]}" -m "not slow and not long" tests/unit tests/repository "$@"
fi
if [ $mode = chosen ]; then
    exec python -m pytest -rs "${parallel[@]}" "$@"
fi
marks="" # all tests
if [ $mode = everyday ]; then
    echo "the tests marked long are left out; -all runs them too"
    marks="not long"
fi
if [ "$(uname)" != Linux ]; then
    exec python -m pytest -rs "${parallel[@]}" -m "$marks" "$@"
fi
# The killed runs mostly wait, so they run beside the tests.
killed_runs=$(mktemp)
(
    exec &>"$killed_runs"
    exec python tests/kill/kill_runs.py -quick
) &
pid=$! status=0
trap 'kill "$pid" 2>/dev/null || true; rm -f "$killed_runs"' EXIT
python -m pytest -rs "${parallel[@]}" -m "$marks" "$@" || status=$?
wait "$pid" || status=$?
cat "$killed_runs"
exit $status

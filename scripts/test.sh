#!/usr/bin/env bash
# Runs every test in the environment of quickstart.sh, which it creates if needed, and finally kills some runs at random
# moments. With arguments for pytest, it runs only the tests that they select.
#
#   bash scripts/test.sh            everything
#   bash scripts/test.sh -quick     for every edit: at most 2 minutes on 2 cores; names the tests that it leaves out
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
enter_environment requirements.txt requirements-dev.txt

# Tests that -quick leaves out, because they start programs, compile, or are slow for other reasons.
SLOW=(tests/faults tests/kill tests/scripts tests/engine/{checkpoint,parallel,record} tests/test_entry_points.py
    tests/extras/{attention_maps,doctor,float8,lora,memory,operator_lists,profiler,report,timm_arguments}
    tests/data_zoo tests/test_photos_page.py tests/datasets/test_loader.py tests/engine/check/test_preflight.py
    tests/engine/test_{across_time,best,metrics,run_folder}.py tests/engine/train/test_{step,stop_conditions}.py
    tests/models/test_compilation.py tests/utils/test_{host,launchers,program}.py)

is_quick=false options=()
if [[ "${1:-}" =~ ^--?quick$ ]]; then
    is_quick=true
    shift
    for each in "${SLOW[@]}"; do
        options+=("--ignore=$each")
    done
fi
python -m ruff check .
python -m ruff format --check .
# One thread: the tests run several processes at once, and their spinning threads would wait for each other.
export OMP_NUM_THREADS=1
# -rs lists skipped tests with reasons. loadfile: the tests of a file share a worker and its fixtures. There is one more
# worker than cores, because some tests only wait for processes.
python -m pytest -rs -n $(($(getconf _NPROCESSORS_ONLN) + 1)) --dist loadfile ${options[@]+"${options[@]}"} "$@"
if $is_quick; then
    echo "-quick left out: ${SLOW[*]}, and the killed runs of tests/kill/kill_runs.py"
elif [ $# -eq 0 ] && [ "$(uname)" = Linux ]; then
    python tests/kill/kill_runs.py -quick
fi

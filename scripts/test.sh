#!/usr/bin/env bash
# Runs every test, in the environment that quickstart.sh makes (made here if it is not there yet), and at the end kills
# some runs at random moments. With pytest's arguments, only what they select.
#
#   bash scripts/test.sh            everything
#   bash scripts/test.sh -quick     for every edit: at most 2 minutes on 2 cores; names the tests that it leaves out
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
enter_environment requirements.txt requirements-dev.txt

# What -quick leaves out: what starts programs, compiles, or takes its time for other reasons.
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
# One thread: the tests run several processes at once, whose spinning threads would wait for each other.
export OMP_NUM_THREADS=1
# -rs: what is skipped, and why. loadfile: the tests of a file share one worker and its fixtures. One worker more than cores,
# because some tests wait for processes that end, or do not.
python -m pytest -rs -n $(($(getconf _NPROCESSORS_ONLN) + 1)) --dist loadfile ${options[@]+"${options[@]}"} "$@"
if $is_quick; then
    echo "-quick left out: ${SLOW[*]}, and the killed runs of tests/kill/kill_runs.py"
elif [ $# -eq 0 ] && [ "$(uname)" = Linux ]; then
    python tests/kill/kill_runs.py -quick
fi

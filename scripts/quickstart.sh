#!/usr/bin/env bash
# From a fresh clone to a trained Vision Transformer: installs, trains on handwritten digits, shows where the plots are.
set -euo pipefail
cd "$(dirname "$0")/.."
before=${VIRTUAL_ENV:-}
source scripts/environment.sh
enter_environment requirements.txt
halfstep -version
halfstep train -cfg vit_digits -amp auto "$@"
if [ "$before" != "$VIRTUAL_ENV" ]; then
    echo "first, to continue in this shell:"
    [ "$OLDPWD" = "$PWD" ] || echo "  cd $(printf %q "$PWD")"
    echo "  source .venv/bin/activate"
fi

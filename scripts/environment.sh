# Sourced by the other scripts: `enter_environment FILE...` makes .venv if need be, installs the requirements, activates it.
enter_environment() {
    if [ ! -x .venv/bin/python ]; then
        local python="${PYTHON:-python3}"
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
            echo "error: $python is older than Python 3.11; name another one: PYTHON=python3.12 bash $0" >&2
            exit 2
        }
        echo "making .venv ..."
        "$python" -m venv .venv
    fi
    source .venv/bin/activate
    local file
    for file in "$@"; do
        cmp --silent "$file" ".venv/$file" && continue
        echo "installing $file (torch is several GB: the first time takes minutes) ..."
        python -m pip install --quiet --disable-pip-version-check -r "$file"
        cp "$file" ".venv/$file" # marks it as installed
    done
}

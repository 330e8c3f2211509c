# Sourced by the other scripts. `enter_environment FILE...` creates .venv if needed, activates it, installs requirements, and
# writes the program `halfstep`, which starts this clone.
enter_environment() {
    local file python pythons=("${PYTHON:-python3}")
    if [ ! -e .venv/bin/activate ]; then # venv creates this file last
        [ -n "${PYTHON:-}" ] || pythons+=(python3.14 python3.13 python3.12 python3.11)
        for python in "${pythons[@]}"; do
            "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break
        done || {
            echo "error: no Python 3.11 or newer (tried ${pythons[*]}); install one, or name it: PYTHON=python3.12 bash $0" >&2
            exit 2
        }
        echo "creating .venv with $python ..."
        "$python" -m venv .venv
    fi
    source .venv/bin/activate
    for file in "$@"; do
        cmp --silent "$file" ".venv/$file" && continue
        echo "installing $file (torch is several GB: the first time takes minutes) ..."
        python -m pip install --quiet --disable-pip-version-check -r "$file"
        cp "$file" ".venv/$file" # marks it as installed
    done
    write_program
}

write_program() {
    local lines new=.venv/bin/halfstep.$$ # of this shell, because another may write the program too
    lines=$(printf '#!/usr/bin/env bash\nexec %q %q "$@"' "$PWD/.venv/bin/python" "$PWD/halfstep/__main__.py")
    [ "$(cat .venv/bin/halfstep 2>/dev/null)" = "$lines" ] && return
    echo "$lines" >"$new"
    chmod +x "$new"
    mv "$new" .venv/bin/halfstep # at once, because another shell may start it
}

#!/bin/sh
# Brings .venv up to date with pyproject.toml. The stamp is written last and holds the clone's path, so that an
# interrupted set-up, a moved clone or a removed Python is noticed here and mended, not met later as an odd error.
set -eu
cd "$(dirname "$0")/.."
python=.venv/bin/python
stamp=.venv/.complete

# A PYTHON that the user names is the one .venv must be made of.
base=""
if [ -n "${PYTHON:-}" ]; then base=$(sh .ci/find_python.sh); fi

whole() {
    [ "$(cat "$stamp" 2>/dev/null)" = "$PWD" ] || return 1
    made_of=$("$python" -c 'import os, pip, sys; print(os.path.realpath(sys._base_executable))' 2>/dev/null) || return 1
    [ -z "$base" ] || [ "$base" = "$made_of" ]
}

if ! whole; then
    base=${base:-$(sh .ci/find_python.sh)}
    echo "setup: making .venv with $("$base" -V) ($base)"
    "$base" -m venv --clear .venv
elif [ -z "$(find pyproject.toml -newer "$stamp")" ]; then
    exit 0
fi
rm -f "$stamp"
echo "setup: installing jaxpar and its dependencies into .venv (a minute or two the first time)"
PIP_DISABLE_PIP_VERSION_CHECK=1 "$python" -m pip install -qq --editable '.[dev]'
printf '%s\n' "$PWD" >"$stamp"

#!/bin/sh
# Brings .venv up to date with pyproject.toml. The stamp is written last and holds the clone's path, so that an
# interrupted set-up, a moved clone or a removed Python is noticed here and mended, not met later as an odd error.
set -eu
cd "$(dirname "$0")/.."
python=.venv/bin/python
stamp=.venv/.complete

whole() { [ "$(cat "$stamp" 2>/dev/null)" = "$PWD" ] && "$python" -c 'import pip' 2>/dev/null; }

if whole && [ -z "$(find pyproject.toml -newer "$stamp")" ]; then exit 0; fi

if ! whole; then
    base=$(sh .ci/find_python.sh)
    echo "setup: making .venv with $("$base" -V) ($base)"
    "$base" -m venv --clear .venv
fi
rm -f "$stamp"
echo "setup: installing jaxpar and its dependencies into .venv (about two minutes)"
PIP_DISABLE_PIP_VERSION_CHECK=1 "$python" -m pip install -qq --editable '.[dev]'
printf '%s\n' "$PWD" >"$stamp"

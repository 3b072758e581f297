#!/bin/sh
# Prints the path of a Python that can hold jaxpar: 3.12 or newer, and able to make a virtual environment.
# Every candidate is run, because a pyenv shim or a dangling link exists without working.

# In an activated .venv the Python is that environment's base: .venv may be deleted and made again from it.
probe='import os, sys, venv, ensurepip
sys.version_info >= (3, 12) or sys.exit(1)
print(os.path.realpath(sys._base_executable))'

accept() { # prints the path and ends the search if $1 is good
    found=$("$1" -c "$probe" 2>/dev/null) && [ -n "$found" ] && printf '%s\n' "$found" && exit 0
}

if [ -n "${PYTHON:-}" ]; then # the user's own choice is taken or refused, never replaced
    accept "$PYTHON"
    echo "PYTHON=$PYTHON cannot be used: jaxpar needs a Python >= 3.12 that runs and has the modules venv and ensurepip." >&2
    exit 1
fi

for name in python3.13 python3.12 python3.14 python3 python; do accept "$name"; done

if command -v pyenv >/dev/null 2>&1; then
    for path in "$(pyenv root)"/versions/3.*/bin/python; do accept "$path"; done
fi

if command -v uv >/dev/null 2>&1; then # only what uv already has: nothing may be installed outside .venv
    accept "$(UV_PYTHON_DOWNLOADS=never uv python find --system --no-project '>=3.12' 2>/dev/null)"
fi

echo "No Python >= 3.12 with venv found: install one (e.g. python3.12 and python3.12-venv), or run 'make setup PYTHON=/path/to/python3.12'." >&2
exit 1

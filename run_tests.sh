#!/usr/bin/env bash
# Set up if needed, then run the tests: ./run_tests.sh [--all | --exhaustive | --cuda] [pytest arguments]
#
#   --all          also the tests marked slow, with torchtitan, and where npm is there, with an Azure server
#   --exhaustive   also the full products of topologies and kill points; --seed N repeats what was drawn at random
#   --cuda         only the tests on a CUDA device, in the environment at hand: nothing is set up or downloaded
#   PYTHON         see scripts/env.sh
#
# Paths among the arguments are relative to the repository. The exit code is pytest's, or 3: set-up impossible.

source "$(dirname "${BASH_SOURCE[0]}")/scripts/env.sh"

AZURITE=3.35.0 # its version

selection=(-m "not slow and not exhaustive")
arguments=()
is_fast=1
on_device=""
for argument in "$@"; do
    case $argument in
    --all) selection=(-m "not exhaustive" --hypothesis-profile thorough) is_fast="" ;;
    --exhaustive) selection=(--hypothesis-profile exhaustive) is_fast="" ;;
    --cuda) selection=(-m cuda) on_device=1 ;;
    *) arguments+=("$argument") ;;
    esac
done

if [[ -n $on_device ]]; then
    PYTHON="${PYTHON:-python3}"
    "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null ||
        give_up "--cuda: expected an environment whose torch sees a CUDA device, $PYTHON has none; name one in PYTHON."
    cd "$ROOT"
    # Other plugins of this environment may warn, which would end the run.
    export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
    exec "$PYTHON" -m pytest -p xdist -p _hypothesis_pytestplugin -n 0 "${selection[@]}" ${arguments[@]+"${arguments[@]}"}
fi
set_up test
cd "$ROOT"
# In .venv, where a fresh clone has none. Without npm or a network, the tests on an Azure server are skipped.
azurite="$VENV/azurite/node_modules/.bin"
if [[ -z $is_fast && -d $VENV && ! -x $azurite/azurite-blob ]] && command -v npm >/dev/null; then
    say "installing azurite $AZURITE, the Azure server of the tests."
    timeout 120 npm install --prefix "$VENV/azurite" --no-audit --no-fund "azurite@$AZURITE" >/dev/null 2>&1 ||
        say "npm could not install it; the tests on an Azure server are skipped."
fi
# torchtitan, in a folder of its own: it wants other packages, and only its tests have it on their path.
titan="$VENV/torchtitan" wanted="tests/integrations/torchtitan.txt"
install_titan() {
    rm -rf "$titan" "$titan.unfinished"
    timeout 300 "$PYTHON" -m pip install --disable-pip-version-check --quiet --no-deps --target "$titan.unfinished" \
        -r "$wanted" >&2 || return
    cp "$wanted" "$titan.unfinished/wanted.txt" && mv "$titan.unfinished" "$titan"
}
if [[ -z $is_fast && -d $VENV ]] && ! cmp -s "$wanted" "$titan/wanted.txt" &&
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    say "installing torchtitan for its tests."
    install_titan || say "pip could not install it; its tests are skipped."
fi
export PATH="$azurite:$PATH"
unset PYTHONDONTWRITEBYTECODE # each process would compile all files again, and each collection rewrite all tests
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # several processes with all cores each would be slower
# Several processes (tests/slots.py). `-n 0` among the arguments is one process, as --pdb needs.
exec "$PYTHON" -m pytest -n auto ${selection[@]+"${selection[@]}"} ${arguments[@]+"${arguments[@]}"}

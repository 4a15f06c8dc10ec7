#!/usr/bin/env bash
# Sets up where that is needed, then runs the tests: ./run_tests.sh [--all] [pytest arguments]
#
#   --all     the tests marked slow too
#   PYTHON    see scripts/env.sh
#
# Paths among the arguments are relative to the repository. The exit code is pytest's, or 3: set-up impossible.

source "$(dirname "${BASH_SOURCE[0]}")/scripts/env.sh"

selection=(-m "not slow")
arguments=()
for argument in "$@"; do
    if [[ $argument == --all ]]; then
        selection=()
    else
        arguments+=("$argument")
    fi
done

set_up test
cd "$ROOT"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # tests start several processes; each with all cores would be slower
exec "$PYTHON" -m pytest ${selection[@]+"${selection[@]}"} ${arguments[@]+"${arguments[@]}"}

#!/usr/bin/env bash
# Set up if needed, then run the tests: ./run_tests.sh [--all | --exhaustive] [pytest arguments]
#
#   --all          also the tests marked slow
#   --exhaustive   also the full products of topologies and kill points
#   PYTHON         see scripts/env.sh
#
# Paths among the arguments are relative to the repository. The exit code is pytest's, or 3: set-up impossible.

source "$(dirname "${BASH_SOURCE[0]}")/scripts/env.sh"

selection=(-m "not slow and not exhaustive")
thorough=(--hypothesis-profile thorough)
arguments=()
for argument in "$@"; do
    case $argument in
    --all) selection=(-m "not exhaustive" "${thorough[@]}") ;;
    --exhaustive) selection=("${thorough[@]}") ;;
    *) arguments+=("$argument") ;;
    esac
done

set_up test
cd "$ROOT"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # several processes with all cores each would be slower
# Two processes, each running one file of tests at a time. `-n 0` among the arguments is one process, as --pdb needs.
exec "$PYTHON" -m pytest -n 2 --dist loadfile --no-loadscope-reorder ${selection[@]+"${selection[@]}"} ${arguments[@]+"${arguments[@]}"}

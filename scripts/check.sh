#!/usr/bin/env bash
# Format, lint, types and words: what must hold before a commit. Sets up where that is needed; PYTHON as in scripts/env.sh.

source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

set_up dev
cd "$ROOT"
"$PYTHON" -m ruff format --check
"$PYTHON" -m ruff check
"$PYTHON" -m mypy
"$PYTHON" scripts/check_words.py
PATH="$(dirname "$PYTHON"):$PATH" shellcheck --external-sources --source-path=SCRIPTDIR ./*.sh scripts/*.sh .ci/run

#!/usr/bin/env bash
# Build the documentation as a site in site/; a warning fails: scripts/build_docs.sh
# Show it in a browser while you write, at the address that it prints: scripts/build_docs.sh serve
#
#   PYTHON   an interpreter that has mkdocs-material; by default that of .venv-docs, which the first call makes
#
# Arguments are those of mkdocs. Neither torch nor this package is needed: docs/api.md and docs/config.md are in the tree.

set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
MATERIAL="mkdocs-material>=9.6,<10" # the extra `docs` of pyproject.toml

if [[ -z ${PYTHON:-} ]]; then
    PYTHON=.venv-docs/bin/python
    if ! "$PYTHON" -c 'import material' 2>/dev/null; then
        printf 'set-up: making .venv-docs, once.\n' >&2
        python3 -m venv --clear .venv-docs
        "$PYTHON" -m pip install --quiet --disable-pip-version-check -c requirements.txt "$MATERIAL" >&2
    fi
fi
export NO_MKDOCS_2_WARNING=1 # Material's advertisement of its successor
[[ $# -gt 0 ]] || set -- build --strict
exec "$PYTHON" -m mkdocs "$@"

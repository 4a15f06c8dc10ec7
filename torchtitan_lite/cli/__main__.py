"""`python -m torchtitan_lite.cli`: the same as the command `torchtitan-lite`."""

from __future__ import annotations

import sys

from torchtitan_lite.cli.app import main

if __name__ == "__main__":
    sys.exit(main())

"""Train a model from a TOML config; `torchtitan-lite-train` of the installed package is the same command."""

import sys

from torchtitan_lite.train import main

if __name__ == "__main__":
    sys.exit(main())

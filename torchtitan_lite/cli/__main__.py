"""The command `torchtitan-lite`, also as `python -m torchtitan_lite.cli`.

Importing the parser takes half a second, in which Ctrl-C must end the command as it does later.
"""

from __future__ import annotations

import sys


def main() -> int:
    """Run the verb on the command line; return the exit code."""
    try:
        from torchtitan_lite.cli import app
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    return app.main()


if __name__ == "__main__":
    sys.exit(main())

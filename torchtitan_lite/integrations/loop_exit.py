"""What each integration needs of the other library's loop: its version, and a way out of it.

These loops have no exit for a signal, so the ranks leave from within, once they have saved.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import NoReturn

from torchtitan_lite.checkpoint import CheckpointManager
from torchtitan_lite.distributed.process_group import close_process_group
from torchtitan_lite.log import logger


def warn_of_another_version(package: str, tried: str) -> None:
    """Warn if the installed `package` does not begin with the version `tried`."""
    found = version(package)
    if not f"{found}.".startswith(f"{tried}."):
        logger.warning("Tested with %s %s only, and %s is installed", package, tried, found)


def leave(manager: CheckpointManager, signal: int) -> NoReturn:
    """Close `manager`, unless it is closed, and the process group, then raise SystemExit with 128 + `signal`.

    **Collective**.
    """
    manager.close()
    close_process_group()
    raise SystemExit(128 + signal)

"""What the system refuses about a folder, as one error that names it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchtitan_lite.errors import FolderUnusable, TorchtitanLiteError


@contextmanager
def usable(folder: Path) -> Iterator[None]:
    """Raise `FolderUnusable` for an OSError in the block; errors of this package pass."""
    try:
        yield
    except TorchtitanLiteError:
        raise
    except OSError as error:
        raise FolderUnusable(str(folder), str(error)) from error

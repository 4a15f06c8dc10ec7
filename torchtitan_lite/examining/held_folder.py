"""A folder that is held while it is written into: what has its name meanwhile may become another folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class HeldFolder:
    """The folder that was `folder` when it was opened."""

    folder: Path
    path: Path
    """Leads to this folder whatever its name is, in this process and while it is held."""

    def has_its_name(self) -> bool:
        """Return whether the name still is this folder's."""
        try:
            return os.path.samestat(self.path.stat(), self.folder.lstat())
        except FileNotFoundError:
            return False


@contextmanager
def held(folder: Path, *, follows_link: bool = True) -> Iterator[HeldFolder]:
    """Yield `folder`, held in the block. An OSError about a file in it has the name of the folder.

    Unless it `follows_link`, a link to a folder is an OSError, too.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if follows_link else os.O_NOFOLLOW))
    path = Path(f"/proc/self/fd/{fd}")
    try:
        yield HeldFolder(folder, path)
    except OSError as error:
        if error.errno is None or not str(error.filename).startswith(f"{path}/"):
            raise
        raise OSError(error.errno, error.strerror, str(folder / Path(str(error.filename)).name)) from error
    finally:
        os.close(fd)

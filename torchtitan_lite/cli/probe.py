"""`probe`: what the file system of a folder does for checkpoints, and what two clients of it see of each other.

Run it before a long training: the starts of a job try the first part, too, but only a person knows a second mount.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from torchtitan_lite.cli.screen import Screen, plain_table
from torchtitan_lite.cli.writing_verbs import holding, store_to_write
from torchtitan_lite.config.argument_parser import Option, Positional
from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.disk.durable import DISK
from torchtitan_lite.disk.mounts import mount_of
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.store import layout
from torchtitan_lite.store.probe import LOCKS, NEEDS, WANTS, has_locks, probe
from torchtitan_lite.stores import usable

if TYPE_CHECKING:
    from rich.console import RenderableType

_PAUSE_SECONDS = 0.01
_MOST_SECONDS = 60.0
"""For how long the second client is watched."""


@dataclass(frozen=True)
class Probe:
    """Try what the file system of a folder does for checkpoints.

    With --second also what two clients see of each other, and after how long.
    Leaves nothing in the folder, which no job may hold.
    """

    folder: Annotated[str, Positional("FOLDER")]
    """A folder of checkpoints, or one that is to be; it exists."""
    second: Annotated[str, Option("MOUNT")] = ""
    """The same folder through another client, such as a second mount of it."""

    def run(self, screen: Screen) -> None:
        store = store_to_write(self.folder, screen)
        if (root := store.root) is None:
            raise ConfigError(f"{self.folder} is in an object store, whose promises each start of a job tries")
        if self.second and not Path(self.second).is_dir():
            raise ConfigError(f"--second {self.second} is no folder: mount it first")
        with usable(store.address), holding(store, "probe"):
            lacks = probe(root)
            seen = _seen_by_second(root, Path(self.second).absolute()) if self.second else {}
        data = {"folder": str(root), "mount": mount_of(root), "lacks": lacks, "second": seen}
        screen.show(data, lambda: _table(root, lacks, seen))


def _seen_by_second(root: Path, second: Path) -> dict[str, float | bool]:
    """Return after how many seconds the client of `second` sees what that of `root` does, and whether it sees locks.

    Raises ConfigError for another folder.
    """
    folder = root / layout.probe_dir(os.urandom(4).hex())
    file, theirs = folder / "file", second / folder.name / "file"
    found: dict[str, float | bool] = {}
    try:
        theirs.parent.is_dir()  # A client may remember that there is none.
        DISK.make_dir(folder)
        found["a new folder"] = _seconds_until(theirs.parent.is_dir)
        if not theirs.parent.is_dir():
            raise ConfigError(f"{second} does not show within {_MOST_SECONDS:g} s what is made in {root}")
        DISK.write_atomically(file, b"one")
        found["a new file"] = _seconds_until(lambda: theirs.read_bytes() == b"one")
        DISK.write_atomically(file, b"other")
        found["new contents under its name"] = _seconds_until(lambda: theirs.read_bytes() == b"other")
        found[LOCKS] = has_locks(file, theirs)
        DISK.remove_file(file)
        found["that it was removed"] = _seconds_until(lambda: not os.path.lexists(theirs))
    finally:
        with suppress(OSError):
            DISK.remove_tree(folder)
    return found


def _seconds_until(is_seen: Callable[[], bool]) -> float:
    """Return after how many seconds it `is_seen`, `_MOST_SECONDS` if not by then."""
    began = time.monotonic()
    while (passed := time.monotonic() - began) < _MOST_SECONDS:
        with suppress(OSError):  # Not there yet, or no longer, as this client sees it.
            if is_seen():
                return passed
        time.sleep(_PAUSE_SECONDS)
    return _MOST_SECONDS


def _table(root: Path, lacks: list[str], seen: dict[str, float | bool]) -> RenderableType:
    from rich.console import Group

    table = plain_table("what it does", "there", "what happens")
    for need in NEEDS:
        table.add_row(need, "yes", "")
    for want, follows in WANTS.items():
        table.add_row(want, "no" if want in lacks else "yes", follows if want in lacks else "")
    parts: list[RenderableType] = [f"{root} ({mount_of(root)})", "", table]
    if seen:
        views = plain_table("what the first client does", "the second sees it")
        for what, value in seen.items():
            views.add_row(what, _shown(value))
        parts += ["", views, "", _advice(seen)]
    return Group(*parts)


def _shown(value: float | bool) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"after {value:.2f} s" if value < _MOST_SECONDS else f"not within {value:g} s"


def _advice(seen: dict[str, float | bool]) -> str:
    least = 2 * max(value for value in seen.values() if not isinstance(value, bool))
    usual = Checkpoint().lease_timeout_seconds
    if least <= usual:
        return f"checkpoint.lease_timeout_seconds is {usual:g} unless it is set: long enough for this."
    return f"Set checkpoint.lease_timeout_seconds to more than {least:.0f}, or lower the caches of the client."

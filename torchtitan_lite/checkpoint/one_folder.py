"""All ranks see the folder that the coordinator has taken: found at the start, not when the first save fails.

Hosts may have folders of one path that are not one folder. The lock file that the coordinator just wrote has a random
token, so every rank looks for that: nothing else is written, and nothing is left. A network file system may show a new
file to other hosts late, so a rank that does not see it looks again. Who only loads takes no lock, and does not look.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchtitan_lite.checkpoint.run_folders import RunFolders
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import FolderNotShared
from torchtitan_lite.log import counted

LOOK_SECONDS = 60.0
"""As long as NFS may remember by default which files a folder has (acdirmax)."""
_PAUSE_SECONDS = 0.5
_MOST_PLACES = 4


def refuse_where_not_shared(
    folders: RunFolders, tokens: Sequence[str], peers: Peers, *, timeout_seconds: float
) -> None:
    """Raise `FolderNotShared` on every rank unless all see the locks with `tokens` in `folders`. **Collective**.

    Raises `FolderUnusable`, on every rank, where one may not look: in an object store, for lack of credentials. Waits
    only where a rank does not see them: at most `LOOK_SECONDS`, and half of `timeout_seconds`, for which the other
    ranks wait.
    """
    if peers.world_size == 1:
        return
    seconds = min(LOOK_SECONDS, timeout_seconds / 2)
    unseen = peers.together(lambda: find_unseen(lambda: folders.first_without(tokens), seconds))
    if peers.max_over_ranks(unseen is not None)[0]:
        views = peers.gather(_View(platform.node(), folders.addresses, unseen))
        error = _error(views)
        error.reported_elsewhere = not peers.is_coordinator
        raise error


def find_unseen(
    look: Callable[[], int | None],
    seconds: float,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> int | None:
    """Return None as soon as `look` returns None, else what it returns after `seconds`. Any rank."""
    until = clock() + seconds
    while (unseen := look()) is not None and clock() < until:
        sleep(_PAUSE_SECONDS)
    return unseen


@dataclass(frozen=True)
class _View:
    """What one rank sees."""

    host: str
    addresses: Sequence[str]
    unseen: int | None
    """Which of `addresses` is another one than the coordinator's; None for none."""


def _error(views: Sequence[_View]) -> FolderNotShared:
    """Return the error for `views`, by rank, of which at least one does not see a folder: the same on every rank."""
    number = next(view.unseen for view in views if view.unseen is not None)
    ranks_in: dict[tuple[str, str], list[int]] = {}
    for rank, view in enumerate(views):
        if view.unseen == number:
            ranks_in.setdefault((view.host, view.addresses[number]), []).append(rank)
    blind = [f"{_in_words(ranks)} on {host} ({root})" for (host, root), ranks in ranks_in.items()]
    if len(blind) > _MOST_PLACES:
        blind[_MOST_PLACES:] = [f"{len(blind) - _MOST_PLACES} more folders"]
    return FolderNotShared(views[0].addresses[number], views[0].host, blind)


def _in_words(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"{counted(len(ranks), 'rank')} from rank {ranks[0]}"

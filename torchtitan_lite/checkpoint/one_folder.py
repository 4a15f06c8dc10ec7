"""All ranks see the folders that the coordinator has taken: found at the start, not when the first save fails.

Hosts may have folders of one path that are not one folder. The lock file that the coordinator just wrote has a random
token, so every rank looks for that: nothing else is written, and nothing is left. A network file system may show a new
file to other hosts late, so a rank that does not see it looks again. Who only loads takes no lock, and does not look.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torchtitan_lite.checkpoint.run_folders import RunFolders
from torchtitan_lite.config.job_config import JobConfig
from torchtitan_lite.distributed.misfits import HostView, SharedFolder, alike, build_facts, versions_and_config
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.stores import look_seconds

_PAUSE_SECONDS = 0.5


def seen_folders(folders: RunFolders, tokens: Sequence[str], *, timeout_seconds: float) -> list[SharedFolder]:
    """Return how this rank sees `folders`, whose identities are the `tokens` of their locks. Any rank.

    Raises `FolderUnusable` where one may not look: in an object store, for lack of credentials. Waits only where this
    rank does not see a lock, for `look_seconds`.
    """
    unseen = find_unseen(lambda: folders.unseen(tokens), look_seconds(timeout_seconds))
    return [
        SharedFolder(address, mount, "" if number in unseen else token)
        for number, (address, mount, token) in enumerate(zip(folders.addresses, folders.mounts, tokens, strict=False))
    ]


def refuse_misfits(
    folders: RunFolders, tokens: Sequence[str], config: JobConfig, clock: tuple[float, float], peers: Peers
) -> None:
    """Raise `FolderNotShared` or `HostsDiffer` on every rank for what does not fit together. **Collective**.

    `tokens` as for `seen_folders`; `clock` is what `clock_around` returned.
    """
    section = config.checkpoint
    needs_clock = section.keep_for_hours > 0 or not folders.are_all_on_disk

    def view(seen: Sequence[SharedFolder]) -> HostView:
        return HostView({**versions_and_config(config), **build_facts()}, seen, clock=clock, needs_clock=needs_clock)

    alike(lambda: seen_folders(folders, tokens, timeout_seconds=section.timeout_seconds), view, peers)


def find_unseen(
    look: Callable[[], Sequence[int]],
    seconds: float,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Sequence[int]:
    """Return as soon as `look` finds nothing, else what it finds after `seconds`. Any rank."""
    until = clock() + seconds
    while (unseen := look()) and clock() < until:
        sleep(_PAUSE_SECONDS)
    return unseen

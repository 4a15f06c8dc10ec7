"""What a run may not leave behind or gather: processes, shared memory, files, descriptors, threads, mappings, bytes."""

from __future__ import annotations

import ctypes
import os
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from tests import keepers
from tests.processes import children, own_children

PR_SET_CHILD_SUBREAPER = 36
MOST_DESCRIPTORS, MOST_THREADS, MOST_MAPPINGS, MOST_KILOBYTES = 6, 4, 40, 12_000
"""That a process may gain from the middle of a long start to its end. Saves of several kinds hold a few at a time."""
VITALS_OF_LONG_START = 6
KEEPER_DESCRIPTORS, KEEPER_KILOBYTES = 64, 8_000
CHECKPOINTS = re.compile(r"step-\d+(\.corrupt(-\d+)?|\.abandoned-\w+)?|folder.id|writer.lock|(rollbacks|uploads).json")
FILES = re.compile(r"checkpoint|samples|config.json|(configs|events|ledger|metrics).jsonl(\.\d+)?|ledger.now(\.\d+)?")
"""A run that starts at step 0 again sets the lines of the earlier one aside."""
UNFINISHED = re.compile(r"\.(.+)\.tmp")
"""What a kill may leave of a small file, until that is written the next time."""


class Leaks:
    """Finds what the processes of one life leave. This process adopts orphans, so all of them descend from it."""

    def __init__(self, runtime: Path) -> None:
        self._runtime = runtime
        self._shared = {*Path("/dev/shm").iterdir()}
        self._before = {os.getpid(), *children(os.getpid())}
        self._judged: set[tuple[str, int]] = set()
        self._keepers: dict[int, list[dict[str, int]]] = {}

    def processes(self) -> list[int]:
        """Return the processes of the life that run, but keepers."""
        for pid in own_children(os.getpid()):
            if pid not in self._before and _has_ended(pid):
                os.waitpid(pid, os.WNOHANG)
        other = self._before | {*keepers.keepers_in(self._runtime)}
        return [pid for pid in children(os.getpid()) if pid not in other and not _has_ended(pid)]

    def after_start(self, lines: list[dict[str, Any]]) -> list[str]:
        """Return what the start that has just ended leaves, and what its ranks gathered."""
        found = [f"{path} is left" for path in {*Path("/dev/shm").iterdir()} - self._shared]
        of_ranks: dict[tuple[str, int], list[dict[str, int]]] = defaultdict(list)
        for line in lines:
            if "vitals" in line and (line["start"], line["rank"]) not in self._judged:
                of_ranks[line["start"], line["rank"]].append(line["vitals"])
        self._judged |= of_ranks.keys()
        for (start, rank), vitals in of_ranks.items():
            if len(vitals) >= VITALS_OF_LONG_START:
                gathered = _gathered(vitals[len(vitals) // 2], vitals[-1])
                found += [f"rank {rank} of start {start} {what}" for what in gathered]
        for pid in keepers.keepers_in(self._runtime):
            found += self._of_keeper(pid)
        return found

    def _of_keeper(self, pid: int) -> list[str]:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
            now = {"kilobytes": int(status[status.index("RssAnon:") :].split()[1])}
            now["descriptors"] = len([*Path(f"/proc/{pid}/fd").iterdir()])
        except (OSError, ValueError):
            return []
        first = self._keepers.setdefault(pid, [now])[0]
        found = []
        if now["descriptors"] > KEEPER_DESCRIPTORS:
            found.append(f"the keeper has {now['descriptors']} descriptors")
        if now["kilobytes"] > first["kilobytes"] + KEEPER_KILOBYTES:
            found.append(f"the keeper grew from {first['kilobytes']} to {now['kilobytes']} kB")
        return found

    def at_the_end(self, root: Path, dump: Path, *, was_killed: bool) -> list[str]:
        """Return the files that a finished run should not have."""
        found = []
        for folder, known in ((root, CHECKPOINTS), (dump, FILES)):
            for name in sorted(path.name for path in folder.iterdir()):
                unfinished = UNFINISHED.fullmatch(name) if was_killed else None
                if not known.fullmatch(unfinished[1] if unfinished else name):
                    found.append(f"{folder / name} is left")
        return found


def adopt_orphans() -> None:
    """Make this process the parent of all its descendants whose parent ends before them."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "cannot adopt orphans")


def _has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def _gathered(middle: dict[str, int], last: dict[str, int]) -> list[str]:
    most = {"descriptors": MOST_DESCRIPTORS, "threads": MOST_THREADS, "mappings": MOST_MAPPINGS}
    most["kilobytes"] = MOST_KILOBYTES
    return [
        f"went from {middle[what]} to {last[what]} {what}" for what in most if last[what] > middle[what] + most[what]
    ]

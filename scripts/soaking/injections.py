"""What is done to a run: to its processes, its disk, its checkpoints and the store that it uploads to."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from scripts.soaking.drawn import LASTING, STOPS, Happening
from scripts.soaking.expected import Expected
from scripts.soaking.references import STEPS
from scripts.soaking.stores import Stores
from tests import keepers
from tests.forked import Forked
from tests.processes import children, command_line, own_children, send

HELPERS = ("writer_process", "upload_process", "watch_process", "helper_process")


@dataclass
class Lasting:
    """Something that takes a while, and how it is ended."""

    kind: str
    until: float
    undo: Callable[[], object]


class Injections:
    """What was and is being done to the run whose checkpoints are `expected`, on the small file system `disk`."""

    def __init__(self, disk: Path, runtime: Path, stores: Stores, expected: Expected) -> None:
        self._disk, self._runtime, self._stores, self._expected = disk, runtime, stores, expected
        self._lasting: list[Lasting] = []
        self.events: list[str] = []
        """KIND, and after a `+` what was under way."""
        self.torchrun: Forked | None = None
        """Of the start that runs."""
        self.uploads = ""
        """Where that start uploads to."""
        self.is_recovering = False
        """Whether nothing was trained yet since the last end of a rank."""

    @property
    def stops_something(self) -> bool:
        """Whether a process is stopped."""
        return any(each.kind in STOPS for each in self._lasting)

    def note(self, kind: str) -> None:
        """Add an event."""
        under_way = {each.kind for each in self._lasting}
        if self.is_recovering and self.torchrun is not None:
            under_way.add("recovery")
        self.events.append(f"{kind} + {', '.join(sorted(under_way))}" if under_way else kind)

    def undo(self, now: float = float("inf")) -> None:
        """End what is over at `now`; by default all."""
        for each in [each for each in self._lasting if each.until <= now]:
            each.undo()
            self._lasting.remove(each)

    def do(self, happening: Happening) -> None:
        """Carry out `happening`, if there is what it needs."""
        kind, which = happening.kind, happening.which
        what, _, whom = kind.partition(" ")
        if what in ("damage", "remove"):
            self._spoil(kind, which)
        elif whom in ("helper", "keeper") or kind == "stop rank":
            self._signal(happening)
        elif kind == "full disk":
            if self._fill():
                self._begin(happening, partial((self._disk / "filler").unlink, missing_ok=True))
        elif kind in LASTING:
            if self.uploads == "bucket":
                self._begin(happening, self._stores.slow() if kind == "slow store" else self._stores.hang())
        elif (ranks := self._ranks()) and self.torchrun is not None:
            self.note(kind)
            self._end(kind, self.torchrun, ranks, which)

    def kill_all(self, processes: Callable[[], list[int]]) -> None:
        """End all `processes`, and what is under way."""
        self.undo()
        while left := processes():
            for pid in left:
                send(pid, signal.SIGKILL)
            time.sleep(0.01)

    def _begin(self, happening: Happening, undo: Callable[[], object]) -> None:
        self.note(happening.kind)
        self._lasting.append(Lasting(happening.kind, time.monotonic() + happening.seconds, undo))

    def _ranks(self) -> list[int]:
        return own_children(self.torchrun.pid) if self.torchrun is not None else []

    def _signal(self, happening: Happening) -> None:
        """Stop or kill one process."""
        what, _, whom = happening.kind.partition(" ")
        ranks = self._ranks()
        of_ranks = sorted(pid for rank in ranks for pid in children(rank))
        helpers = [pid for pid in of_ranks if any(name in command_line(pid) for name in HELPERS)]
        pids = {"rank": ranks, "helper": helpers, "keeper": keepers.keepers_in(self._runtime)}[whom]
        if not pids:
            return
        pid = pids[int(happening.which * len(pids))]
        if what == "kill":
            self.note(happening.kind)
            send(pid, signal.SIGKILL)
        else:
            self._begin(happening, partial(send, pid, signal.SIGCONT))
            send(pid, signal.SIGSTOP)

    def _end(self, kind: str, torchrun: Forked, ranks: list[int], which: float) -> None:
        chosen = ranks[int(which * len(ranks))]
        if kind == "kill rank":
            send(chosen, signal.SIGKILL)
        elif kind == "SIGTERM":
            send(torchrun.pid, signal.SIGTERM)
        elif kind == "SIGTERM to a rank":
            send(chosen, signal.SIGTERM)
        else:
            if kind == "kill torchrun":
                torchrun.kill()
                time.sleep(which)  # Until the ranks are ended, too, as the end of a container does.
            for pid in ranks:
                send(pid, signal.SIGKILL)
        self.is_recovering = True

    def _spoil(self, kind: str, which: float) -> None:
        """Damage or remove a checkpoint; one that is not damaged is always left."""
        intact = self._expected.intact()
        if len(intact) < 2:
            return
        step = intact[-1] if "latest" in kind else intact[int(which * len(intact))]
        folder = self._expected.root / f"step-{step}"
        if kind.startswith("remove"):
            self._expected.took(step)
            shutil.rmtree(folder, ignore_errors=True)
            self.note(kind)
        elif step < STEPS and self._flip(folder, which):  # A run that has ended loads nothing.
            self._expected.damaged(step)
            self.note(kind)

    def _flip(self, folder: Path, which: float) -> bool:
        """Change one bit of a file of tensors in `folder`; return False where a purge has it."""
        with suppress(OSError):
            files = sorted(folder.glob("*.distcp"))
            path = files[int(which * len(files))] if files else folder / "gone"
            with path.open("r+b") as file:
                file.seek(int(which * path.stat().st_size))
                byte = file.read(1)[0]
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte ^ 1 << int(which * 8)]))
            return True
        return False

    def _fill(self) -> bool:
        """Leave no room on the small disk; return whether there is one."""
        filler = self._disk / "filler"
        if not self._disk.is_mount() or filler.exists():
            return False
        with filler.open("wb") as file:
            for size in (2**20, 2**12):
                with suppress(OSError):
                    while True:
                        os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, size)
        return True

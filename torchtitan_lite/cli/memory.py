"""`memory`: what the keeper of a folder of checkpoints holds on this host, and how to free it.

The keeper holds memory that no `ls` shows and no step on disk accounts for. Only what it answers is read: this verb
keeps nothing from ending, and starts a keeper only with --keep, for a container that outlives the trainer's.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from torchtitan_lite.checkpoint.staging.mark import UnusableMark, read_mark
from torchtitan_lite.cli.named_checkpoint import folder_of_checkpoints, local, refuse_step
from torchtitan_lite.cli.screen import Screen, age, plain_table
from torchtitan_lite.config.argument_parser import Positional
from torchtitan_lite.distributed.environment import runtime_folder
from torchtitan_lite.errors import CheckpointNotFound, ConfigError, FolderInUse, UnknownFormat
from torchtitan_lite.log import counted, readable_bytes
from torchtitan_lite.memory.images.card import Card
from torchtitan_lite.memory.keeper.client import HeldMemory, Keeper, KeeperDescription

if TYPE_CHECKING:
    from rich.console import RenderableType

_OF_LOGIND = Path("/run/user")
"""Where XDG_RUNTIME_DIR of each user is, by default."""
_UNUSED_SECONDS = 600.0
"""How long a keeper without a job lives; a job brings its own checkpoint.memory_ttl_seconds."""
_BLOCK_BYTES = 512
"""The unit of st_blocks."""


@dataclass(frozen=True)
class Memory:
    """List the checkpoints that this host keeps in memory for a folder, or free them.

    A job that was killed resumes from them.
    """

    folder: Annotated[str, Positional("FOLDER")]
    """A folder of checkpoints, or the dump folder of a run. It may have been deleted."""
    end: bool = False
    """Free them, and end the process that holds them; refused while a job uses them."""
    keep: bool = False
    """Start the process that holds them, and wait until it ends: for a container of its own, next to the job's."""

    def run(self, screen: Screen) -> None:
        root = _root(self.folder)
        if self.keep and self.end:
            raise ConfigError("--keep starts what --end ends: give one of them")
        if self.keep:
            _hold_memory(root, screen)
            return
        keeper = _keeper_of(root)
        found = _HeldHere.of(root, keeper, time.time())
        if found.keeper is None and not root.is_dir():
            finding = "it is not a folder" if root.exists() else "it does not exist, and no memory is held for it"
            raise CheckpointNotFound(str(root), None, finding=finding)
        if self.end and found.keeper is not None:
            if living := keeper.end():
                raise FolderInUse(str(root), _processes(living))
            freed = f"{root}: freed {counted(len(found.images), 'image')}, {readable_bytes(found.memory_bytes)}"
            screen.show(found.to_json() | {"ended": True}, lambda: freed)
        else:
            screen.show(found.to_json() | {"ended": False}, found.render)


@dataclass(frozen=True)
class _Image:
    """One entry of the keeper."""

    name: str
    memory_bytes: int
    card: Card | None
    num_bytes: int
    finding: str
    """Why there is no card; empty if there is one."""

    @classmethod
    def of(cls, held: HeldMemory) -> _Image:
        card, num_bytes, finding = None, 0, ""
        try:
            marked = read_mark(held.mark_fd)
            if marked is None:
                finding = "not valid: being filled, or empty"
            else:
                card, num_bytes = Card.parse(marked.card), marked.num_bytes
        except (UnusableMark, UnknownFormat, ValueError, OSError) as error:
            finding = f"not valid: {error}"
        memory_bytes = sum(os.fstat(fd).st_blocks * _BLOCK_BYTES for fd in (held.arena_fd, held.mark_fd))
        return cls(held.name, memory_bytes, card, num_bytes, finding)

    def to_json(self) -> dict[str, Any]:
        card = self.card
        return {
            "name": self.name,
            "memory_bytes": self.memory_bytes,
            "bytes": self.num_bytes,
            "step": card.key.step if card else None,
            "rank": card.rank if card else None,
            "world_size": card.world_size if card else None,
            "run": card.run.lineage.run_id if card else None,
            "created_at": card.created_at if card else None,
            "finding": self.finding,
        }


@dataclass(frozen=True)
class _HeldHere:
    root: Path
    keeper: KeeperDescription | None
    images: Sequence[_Image]
    now: float

    @classmethod
    def of(cls, root: Path, keeper: Keeper, now: float) -> _HeldHere:
        described = keeper.describe()
        held = keeper.held() if described is not None else []
        try:
            images = [_Image.of(each) for each in held]
        finally:
            for each in held:
                each.close()
        images.sort(key=lambda image: image.name)
        # The latest step first; without a card last.
        images.sort(key=lambda image: (-image.card.key.step, image.card.rank) if image.card else (1, 0))
        return cls(root, described, images, now)

    @property
    def memory_bytes(self) -> int:
        return sum(image.memory_bytes for image in self.images)

    def to_json(self) -> dict[str, Any]:
        keeper = self.keeper
        return {
            "folder": str(self.root),
            "keeper": None if keeper is None else keeper.pid,
            "living": [] if keeper is None else list(keeper.living),
            "seconds_left": None if keeper is None else keeper.seconds_left,
            "images": [image.to_json() for image in self.images],
        }

    def render(self) -> RenderableType:
        if self.keeper is None:
            return f"{self.root}: nothing is kept in memory on this host"
        from rich.console import Group

        held = f"{counted(len(self.images), 'image')}, {readable_bytes(self.memory_bytes)}"
        held += f", kept by process {self.keeper.pid}"
        table = plain_table("step", "rank", "size", "age", "run")
        for image in self.images:
            table.add_row(*self._row(image))
        return Group(f"{self.root}: {held}", self._use(), *(("", table) if self.images else ()))

    def _use(self) -> str:
        assert self.keeper is not None
        if self.keeper.living:
            return f"In use by {_processes(self.keeper.living)}"
        return f"No job uses it: freed in {age(self.keeper.seconds_left or 0.0)}"

    def _row(self, image: _Image) -> tuple[str, ...]:
        card = image.card
        if card is None:
            return "", "", readable_bytes(image.memory_bytes), "", image.finding
        rank, old = f"{card.rank} of {card.world_size}", age(self.now - card.created_at)
        return str(card.key.step), rank, readable_bytes(image.num_bytes), old, card.run.lineage.run_id


def _hold_memory(root: Path, screen: Screen) -> None:
    """Hold what a job at `root` keeps until the run has finished, no job has used it for a while, or SIGTERM comes."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # As process 1 it would do nothing by itself.
    keeper = Keeper(root, _UNUSED_SECONDS, runtime=runtime_folder())
    keeper.start()
    found = _HeldHere.of(root, keeper, time.time())
    screen.show(found.to_json() | {"ended": False}, found.render)
    keeper.wait()


def _keeper_of(root: Path) -> Keeper:
    """Return the keeper of `root` that runs: this shell may have another folder for sockets than the job."""
    keepers = [Keeper(root, 0.0, runtime=each) for each in (runtime_folder(), _OF_LOGIND / str(os.geteuid()), None)]
    return next((keeper for keeper in keepers if keeper.describe() is not None), keepers[0])


def _root(spelling: str) -> Path:
    local(spelling, "memory")
    refuse_step(spelling)
    try:
        return folder_of_checkpoints(spelling)
    except CheckpointNotFound:
        return Path(spelling)


def _processes(pids: Sequence[int]) -> str:
    known = [str(pid) for pid in pids if pid]
    others = ["a process of another container"] if len(known) < len(pids) else []
    words = [f"process {', '.join(known)}"] if len(known) == 1 else [f"processes {', '.join(known)}"] if known else []
    return " and ".join([*words, *others])

"""What the next start of a run must find: no step that was reported is lost, whatever ended the starts before it.

It follows what each start reported and what is on the disk now, and knows nothing of what the keeper holds. Promised
are the latest committed checkpoint that is not damaged, and, with `memory_interval` and while the keeper lives, the
latest step that every rank reported as an image, or the step that was resumed from memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tests.e2e.bare_start import BareStart
from torchtitan_lite.store import layout
from torchtitan_lite.store.manifest import CheckpointInfo, CheckpointKind
from torchtitan_lite.store.store import CheckpointStore

ALL_DAMAGED = "AllCheckpointsDamaged"


@dataclass(frozen=True)
class Held:
    """An image that every rank has reported."""

    step: int
    branch: int | None = None
    """The step at which its branch begins, if that has saved nothing yet: other starts do not count it."""


@dataclass(frozen=True)
class Command:
    """Which step a start wants, and how it says so."""

    how: str = "latest"
    step: int = -1

    @property
    def keys(self) -> dict[str, object]:
        """The keys of [checkpoint] that say it."""
        if self.how in ("latest", "load(step)"):
            return {}
        return {"load_step": self.step, "new_branch": self.how != "load_step"}


@dataclass(frozen=True)
class Expected:
    """What a start must resume."""

    least: int
    only: frozenset[int] | None = None
    """The steps that it may resume, if not all."""

    def wrong(self, resumed: int) -> str:
        """Return what is wrong with the step `resumed`; empty if nothing is."""
        if resumed >= self.least and (self.only is None or resumed in self.only):
            return ""
        among = "" if self.only is None else f", one of {sorted(self.only)}"
        return f"step {self.least} or a later one was promised{among}; step {resumed} was resumed"


@dataclass
class Promises:
    """The promises to the next start of the job in `folder`."""

    folder: Path
    has_tier: bool
    """Whether it makes images that no save replaces: `memory_interval` is not 0."""
    interval: int = 0
    """The steps from one save to the next; 0 if other things decide."""
    held: Held | None = None
    _damaged: set[tuple[int, int, int]] = field(default_factory=set)
    """Step, inode and time of each damaged folder."""
    _of_branches: dict[int, set[int]] = field(default_factory=dict)
    """The steps that were trained on branches from a step."""

    @property
    def root(self) -> Path:
        """The folder of checkpoints."""
        return self.folder / "checkpoint"

    def committed(self) -> list[CheckpointInfo]:
        """Return the full checkpoints on disk that nothing has damaged, by ascending step."""
        full = [info for info in CheckpointStore(self.root).committed() if info.kind is CheckpointKind.FULL]
        return [info for info in full if self._identity(info.step) not in self._damaged]

    def on_disk(self) -> int:
        """Return the latest step on disk, 0 for none."""
        return max((info.step for info in self.committed()), default=0)

    def damaged_on_disk(self) -> list[Path]:
        """Return the folders that are damaged and have not been set aside."""
        folders = [(step, self.root / layout.step_dir(step)) for step, *_ in self._damaged]
        return [path for step, path in folders if path.exists() and self._identity(step) in self._damaged]

    def note_damaged(self, step: int) -> None:
        """Note that a file of `step` was changed."""
        self._damaged.add(self._identity(step))

    def expected(self, command: Command) -> Expected:
        """Return what a start with `command` must resume."""
        if command.how in ("load(step)", "load_step, new_branch"):
            return Expected(command.step, frozenset({command.step}))
        if command.how == "load_step" and not self._is_on_branch(command.step):
            steps = self._of_branches.get(command.step, set())
            return Expected(max(command.step, self._held_on(command.step)), frozenset({command.step} | steps))
        return Expected(max(self.on_disk(), self._held_on(None)))

    def _held_on(self, branch: int | None) -> int:
        return self.held.step if self.held is not None and self.held.branch == branch else 0

    def may_be_refused(self) -> bool:
        """Return whether the next start may end because all checkpoints are damaged."""
        return self.held is None and not self.committed() and bool(self.damaged_on_disk())

    def note_end(self, start: BareStart, command: Command, before: list[CheckpointInfo], kept_since: int) -> str:
        """Note how `start` ended, before which `before` was on disk; return what is wrong with the disk now.

        Only images of steps from `kept_since` on are at the keeper.
        """
        saved = {line["step"] for line in start.of_event("save_started")}
        acknowledged = max((line["step"] for line in start.of_event("committed")), default=None)
        new = [info.step for info in self.committed() if info not in before]
        on_disk = self.on_disk()
        if acknowledged is not None and on_disk < acknowledged:
            return f"step {acknowledged} was committed, step {on_disk} is on disk"
        if not new and on_disk != max((info.step for info in before), default=0):
            return f"nothing was committed, and step {on_disk} is on disk"
        if new and not {*new} <= saved:
            return f"{new} are new on disk, {sorted(saved)} were saved"
        if start.resumed is not None:
            if command.how == "latest" and self._owes(start, before) and start.resumed + 1 not in saved:
                return f"step {start.resumed} was resumed from memory, and what was overdue was not saved"
            self._note_images(start, command, kept_since, has_saved=bool(saved), has_committed=bool(new))
        elif kept_since:
            self.held = None
        return ""

    def _owes(self, start: BareStart, before: list[CheckpointInfo]) -> bool:
        """Return whether the disk lacked a multiple of `interval`, and `start` had the time to save its first step.

        Where a load from memory reads no damaged file, it takes the file's step for durable.
        """
        if not (self.interval and start.is_from_memory) or start.resumed is None or self._damaged:
            return False
        on_disk = max((info.step for info in before), default=0)
        is_overdue = self.interval * (on_disk // self.interval + 1) <= start.resumed
        return is_overdue and start.trained() > start.resumed + 1

    def _note_images(
        self, start: BareStart, command: Command, kept_since: int, *, has_saved: bool, has_committed: bool
    ) -> None:
        assert start.resumed is not None
        branch = None if command.how == "latest" or has_committed else command.step
        if command.how == "load_step" and self._is_on_branch(command.step):
            branch = None
        if command.step != -1:
            self._of_branches.setdefault(command.step, set()).update(line["step"] for line in start.of_event("trained"))
        images = {step for step in start.steps("image_ready") if step >= kept_since} if self.has_tier else set()
        stays = start.is_from_memory and not kept_since and (self.has_tier or not has_saved)
        if images:
            self.held = Held(max(images), branch)
        else:
            self.held = Held(start.resumed, branch) if stays else None

    def _is_on_branch(self, step: int) -> bool:
        """Return whether the latest checkpoint is of a branch from `step`."""
        return any(info.lineage.branch_point == step for info in self.committed()[-1:])

    def _identity(self, step: int) -> tuple[int, int, int]:
        found = (self.root / layout.step_dir(step)).stat()
        return step, found.st_ino, found.st_mtime_ns

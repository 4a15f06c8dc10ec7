"""One copy of the state on its way to being an image, with the card that describes it to later starts, and its marker.

The marker makes images of complete copies: digests each, has the keeper hold its memory, and sets its mark. Nothing of
that is done in the thread that trains, except for digests that come with a copy. What goes wrong is a warning, never a
failed save. A copy that was overwritten meanwhile becomes no image, and a commit that happens meanwhile gets into the
cards of all images.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch

from torchtitan_lite import faults
from torchtitan_lite.checkpoint.context import RunContext
from torchtitan_lite.checkpoint.format.description import PlacedObject, table_of_objects
from torchtitan_lite.checkpoint.planning.rank_file import RankPlan
from torchtitan_lite.checkpoint.reading.folder import joined_structures, joined_tables
from torchtitan_lite.checkpoint.saving.target import Origin
from torchtitan_lite.checkpoint.saving.writer import versions
from torchtitan_lite.checkpoint.staging.arena import StagingArena
from torchtitan_lite.checkpoint.staging.mark import Mark, read_mark
from torchtitan_lite.checkpoint.staging.stager import StagedCopy
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.disk.threads import Background
from torchtitan_lite.disk.writer_process import WriterProcess
from torchtitan_lite.events import ImageReady
from torchtitan_lite.log import logger
from torchtitan_lite.memory.images.card import Card, CardRun, CardTables, Commit, ImageKey
from torchtitan_lite.memory.images.host_replicas import HostReplicas
from torchtitan_lite.memory.images.pool import Pool
from torchtitan_lite.memory.images.tier import Tier


@dataclass
class Image:
    """A copy under way to becoming an image."""

    step: int
    origin: Origin
    plan: RankPlan
    objects: Sequence[PlacedObject]
    staged: StagedCopy
    began_seconds: float
    copy: int
    """Which copy of this start it is."""
    check: Callable[[StagedCopy], None] = lambda staged: staged.wait()
    """Waits until the copy is complete; raises if the state changed meanwhile."""
    created_at: float = field(default_factory=time.time)
    stall_seconds: float = 0.0

    def card(self, record: FileRecord, tier: Tier, world_size: int) -> Card:
        """Return the card of this image, whose digests are `record`, as one of `tier` among those of all ranks."""
        tables = [each for each in (self.plan.description, self.plan.own) if each is not None]
        return Card(
            key=ImageKey(self.step, tier.start, self.copy),
            rank=tier.rank,
            world_size=world_size,
            run=CardRun(
                folder_id=tier.folder_id,
                lineage=self.origin.lineage,
                trained_seconds=self.origin.trained_seconds,
                topology=self.origin.topology,
                versions=versions(),
                config=self.origin.config,
            ),
            commits=tier.commits,
            created_at=self.created_at,
            file=self.plan.file_name if record.size else "",
            record=record,
            tables=CardTables(
                table_of_objects(self.objects),
                joined_tables([each.tensors for each in tables]) if tables else None,
                joined_structures([each.structure for each in tables]) if tables else None,
            ),
        )


def staged_record(staged: StagedCopy) -> FileRecord:
    """Return the digests of what is in the arena, taken in this thread."""
    return FileRecord.of(staged.arena.memory[: staged.num_bytes])


def renew_card(mark: Mark, commits: tuple[Commit, ...], rank: int, known: Card | None = None) -> None:
    """Write into the card of a valid image of `rank` that `commits` are the latest checkpoints on disk now.

    Else the image would count again where its owner deletes that checkpoint, to roll back to the one before. The card
    is parsed unless it is `known`. A card that cannot be renewed is given up.
    """
    try:
        if (marked := read_mark(mark.fd)) is not None:
            card = dataclasses.replace(known or Card.parse(marked.card), commits=commits)
            mark.set(marked.step, marked.num_bytes, card.to_bytes())
    except (ValueError, OSError) as error:
        logger.warning("The in-memory snapshot of rank %d is discarded: %s", rank, error)
        mark.clear()


MAX_FAILED = 3


class Marker:
    """Makes images of the copies in the arenas of `pool`, for `tier`. Any thread.

    Copies that come without digests get them from `process`; without one, from this process.
    """

    def __init__(
        self,
        tier: Tier,
        pool: Pool,
        process: WriterProcess | None,
        context: RunContext,
        replicas: HostReplicas,
    ) -> None:
        self._replicas = replicas
        self._tier, self._pool, self._process, self._world_size = tier, pool, process, context.peers.world_size
        self._clock, self._emit = context.clock, context.emit
        self._background = Background("images")
        self._lock = threading.Lock()
        self.num_failed = 0
        """The images that failed in a row."""
        self._joined: int | None = None
        self._cards: WeakKeyDictionary[StagingArena, Card] = WeakKeyDictionary()
        """The card of the last image in each arena, if this process wrote it: each commit renews all of them."""

    @property
    def has_failed(self) -> bool:
        """Return whether too many images have failed in a row to make more."""
        return self.num_failed >= MAX_FAILED

    def start_process(self) -> None:
        """Start the process that digests, if there is one, unless it lives. Main thread."""
        if self._process is not None:
            self._process.start()

    def helpers(self) -> list[int]:
        """Return the pids of the processes that map the arenas, too."""
        self._joined = self._process.pid if self._process is not None else None
        return [] if self._joined is None else [self._joined]

    def mark_later(self, image: Image) -> None:
        """Digest and mark `image`, once it is copied, in a thread, which releases its arena then."""
        device = torch.cuda.current_device() if torch.cuda.is_available() else None

        def work() -> None:
            if device is not None:
                torch.cuda.set_device(device)  # A new thread begins with device 0.
            try:
                self._finish(image)
            finally:
                self._pool.release(image.staged.slot)

        self._background.run(image.copy, work)

    def mark(self, image: Image, record: FileRecord) -> bool:
        """Make `image` valid if the keeper holds it; `record` are its digests. Raises nothing."""
        try:
            return self._mark(image, record)
        except Exception as error:
            self.note_failed(image.step, error)
            return False

    def renew_cards(self) -> None:
        """Write into the cards of all images which checkpoints are the latest on disk now."""
        self._pool.for_each_valid(self._renew_card)

    def note_failed(self, step: int, error: Exception) -> None:
        """Note that `step` got no image, because of `error`."""
        with self._lock:
            self.num_failed += 1
            number = self.num_failed
        if number <= MAX_FAILED:
            logger.warning("Step %d has no in-memory snapshot of rank %d: %s", step, self._tier.rank, error)

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds` until no copy is being digested; return whether that is so."""
        return self._background.wait(seconds)

    def close(self, seconds: float) -> None:
        """Wait up to `seconds` for the digest under way, and stop. Idempotent."""
        if not self._background.close(seconds):
            logger.warning("An in-memory snapshot is not complete after %.0f s; closing without it", seconds)

    def _finish(self, image: Image) -> None:
        try:
            image.check(image.staged)
            record = image.staged.record or self._digested(image)
        except Exception as error:
            self.note_failed(image.step, error)
        else:
            self.mark(image, record)

    def _digested(self, image: Image) -> FileRecord:
        if self._process is None:
            return staged_record(image.staged)
        # By the second thread of that process: behind a disk write the image would become valid seconds later.
        return self._process.digest(image.staged.arena, image.staged.num_bytes, image.step)

    def _mark(self, image: Image, record: FileRecord) -> bool:
        faults.point("mark", step=image.step)
        staged, mark = image.staged, image.staged.arena.mark
        if not self._tier.keep(staged.arena):
            return False
        assert mark is not None, "the keeper holds it"
        if self._process is not None and self._process.pid != self._joined:
            # Not before: the keeper may not have started by then.
            self._tier.join_again(self.helpers())
        card = image.card(record, self._tier, self._world_size)
        data = card.to_bytes()

        def write() -> None:
            mark.set(image.step, staged.num_bytes, data)
            # In here, where no card is renewed: that of the image before would be written next to these bytes.
            self._cards[staged.arena] = card

        if not self._pool.validate(staged.slot, staged.number, write):
            return False
        if card.commits[-1:] != self._tier.commits[-1:]:  # A save was committed meanwhile.
            self.renew_cards()
        self._replicas.send(staged.slot, image.copy)
        with self._lock:
            self.num_failed = 0
        at_risk_steps, at_risk_seconds = image.origin.at_risk
        self._emit(
            ImageReady(
                image.step,
                seconds=self._clock() - image.began_seconds,
                stall_seconds=image.stall_seconds,
                at_risk_steps=at_risk_steps,
                at_risk_seconds=at_risk_seconds,
            )
        )
        return True

    def _renew_card(self, arena: StagingArena) -> None:
        assert arena.mark is not None, "a valid image has one"
        renew_card(arena.mark, self._tier.commits, self._tier.rank, self._cards.get(arena))

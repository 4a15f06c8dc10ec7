"""One copy of the state on its way to being an image, and the card that describes it to later starts."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torchtitan_lite.checkpoint.format.completed import joined_structures, joined_tables
from torchtitan_lite.checkpoint.format.description import PlacedObject, table_of_objects
from torchtitan_lite.checkpoint.images.card import Card, CardRun, CardTables, ImageKey
from torchtitan_lite.checkpoint.images.commits import Commit
from torchtitan_lite.checkpoint.images.tier import Tier
from torchtitan_lite.checkpoint.planning.rank_file import RankPlan
from torchtitan_lite.checkpoint.saving.target import Origin
from torchtitan_lite.checkpoint.saving.writer import versions
from torchtitan_lite.checkpoint.staging.mark import Mark, read_mark
from torchtitan_lite.checkpoint.staging.stager import StagedCopy
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.log import logger


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


def record_of(staged: StagedCopy) -> FileRecord:
    """Return the digests of what is in the arena, taken in this thread."""
    return FileRecord.of(staged.arena.memory[: staged.num_bytes])


@dataclass(frozen=True)
class WrittenCard:
    """The card in a mark, and the size of the image that it describes."""

    card: Card
    num_bytes: int


def renew_card(mark: Mark, commits: tuple[Commit, ...], rank: int, written: WrittenCard | None = None) -> None:
    """Write into the card of a valid image of `rank` that `commits` are the latest checkpoints on disk now.

    Else the image would count again where its owner deletes that checkpoint, to roll back to the one before. The card
    is read from the mark unless it is known as `written`. A card that cannot be renewed is given up.
    """
    try:
        known = written or _written_in(mark)
        if known is not None:
            card = dataclasses.replace(known.card, commits=commits)
            mark.set(card.key.step, known.num_bytes, card.to_bytes())
    except (ValueError, OSError) as error:
        logger.warning("An image in memory of rank %d is given up: %s", rank, error)
        mark.clear()


def _written_in(mark: Mark) -> WrittenCard | None:
    marked = read_mark(mark.fd)
    return None if marked is None else WrittenCard(Card.parse(marked.card), marked.num_bytes)

"""Whether an image belongs to the run that a start resumes.

Paths and inodes come back, jobs lose their folder to others, and people roll back and delete steps. So an image says
what its start knew of the folder, and counts only where the folder still agrees with it. Pure functions of values; the
caller has made sure that no process writes into the image any more.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from torchtitan_lite.checkpoint.reading.source import LoadSource, counts_again
from torchtitan_lite.memory.images.card import Card, Commit, ImageKey

_REPLICA = ".replica."


@dataclass(frozen=True)
class ImageFacts:
    """What matters of the card of one rank's image."""

    key: ImageKey
    """Of the copy that it is a part of."""
    rank: int
    world_size: int
    folder_id: str
    run_id: str
    branch_point: int | None
    latest: Commit | None
    before: tuple[Commit, ...] = ()
    topology: str = ""
    counts_again: bool = False
    """Whether its run began without the step counter of what it loaded (`exclude_from_loading`)."""

    @classmethod
    def of_card(cls, card: Card) -> ImageFacts:
        """Return what matters of `card`."""
        return cls(
            card.key,
            card.rank,
            card.world_size,
            folder_id=card.run.folder_id,
            run_id=card.run.lineage.run_id,
            branch_point=card.run.lineage.branch_point,
            latest=card.commits[-1] if card.commits else None,
            before=card.commits[:-1],
            topology=card.run.topology,
            counts_again=counts_again(card.run.config),
        )


@dataclass(frozen=True, kw_only=True)
class OnDisk:
    """What the folder of checkpoints and the configuration say, and what a load would take from disk."""

    folder_id: str
    """Empty if the folder has none."""
    latest: Commit | None = None
    """The full checkpoint with the highest step."""
    latest_start: str = ""
    """The start that committed it; empty if it is unknown."""
    rests: frozenset[Commit] = frozenset()
    """What is left of damaged checkpoints."""
    abandoned: frozenset[int] = frozenset()
    """The steps that a commit in the folder abandons."""
    wanted: int = -1
    """The step that the user named; -1 for the latest."""
    is_exact: bool = False
    """Whether that very step is wanted, whatever came after it."""
    new_branch: bool = False
    chosen: LoadSource | None = None
    """What a load would take from disk of this run; None for nothing."""


def why_not(image: ImageFacts, disk: OnDisk) -> str:
    """Return why `image` does not count, as the end of a sentence about it; the empty string if it counts.

    An image of the very step that is chosen on disk counts only if its contents are the same, too: the caller compares.
    """
    return _why_stale(image, disk) or _why_not_chosen(image, disk)


def _why_stale(image: ImageFacts, disk: OnDisk) -> str:
    known, latest = image.latest, disk.latest
    if latest is None:
        if known is not None and not _is_damaged_commit(known, disk):
            return f"it was made next to a step {known.step}, which is gone"
        if not disk.folder_id or image.folder_id != disk.folder_id:
            return "it is of another folder with this name"
        return ""
    if known == latest or (latest.step == image.key.step and disk.latest_start == image.key.start):
        return ""
    is_after = known is None or latest.step > known.step or known.step in disk.abandoned  # Or on a branch.
    if disk.latest_start == image.key.start and is_after:
        return ""
    if known is not None and latest in image.before and _is_damaged_commit(known, disk):
        return ""  # Only damage makes it the latest: nothing was committed since.
    made = "before there was one" if known is None else f"next to another step {known.step}"
    return f"the latest step on disk, {latest.step}, is of another start, and it was made {made}"


def _is_damaged_commit(known: Commit, disk: OnDisk) -> bool:
    """Return whether `known` is on disk, damaged. Its owner has not deleted it, so no rollback was wanted."""
    return any(rest.is_rest_of(known) for rest in disk.rests)


def _why_not_chosen(image: ImageFacts, disk: OnDisk) -> str:
    chosen = disk.chosen
    if disk.is_exact and (chosen is None or image.key.step != chosen.step):
        return f"step {disk.wanted} is wanted"
    if chosen is None:
        counts = image.branch_point is None or _has_saved(image, disk)
        return "" if counts else f"it is of a branch from step {image.branch_point}"
    # The steps of such a run do not compare with those on disk.
    if chosen.lineage.counts_again:
        return _why_not_again(image, chosen, disk)
    if image.key.step < chosen.step:
        return f"step {chosen.step} is on disk"
    if image.key.step == chosen.step:
        return ""
    if kept := [step for step, run_id in chosen.lineage.ancestors if run_id == image.run_id and image.key.step > step]:
        return f"the run rolled back to step {kept[0]}"
    if disk.new_branch and disk.wanted != -1:
        return "a new branch is wanted"
    if chosen.is_explicit:
        return "" if image.branch_point == disk.wanted else f"it is of no branch from step {disk.wanted}"
    if image.run_id == chosen.lineage.run_id or _has_saved(image, disk):
        return ""
    return f"it is of run {image.run_id}, and run {chosen.lineage.run_id} is resumed"


def _has_saved(image: ImageFacts, disk: OnDisk) -> bool:
    """Return whether the latest commit is of the run of `image`: where the disk takes another, that one is damaged."""
    return any(commit is not None and commit.run_id == image.run_id for commit in (image.latest, disk.latest))


def _why_not_again(image: ImageFacts, chosen: LoadSource, disk: OnDisk) -> str:
    """Return why `image` is not of the run that counts its steps again and has saved nothing yet."""
    if disk.new_branch:
        return "a new branch is wanted"
    if not image.counts_again:
        return "the run counts its steps from the start again"
    is_same = image.branch_point == chosen.lineage.branch_point
    return "" if is_same else "it is of another branch that counts its steps again"


def replica_name(start: str, rank: int) -> str:
    """Return a new name under which a keeper can hold a replica of `rank`."""
    # Random, because the process before this one may have left some of the same start.
    return f"{start}{_REPLICA}{rank}.{secrets.token_hex(4)}"


def is_replica(name: str) -> bool:
    """Return whether a keeper holds a replica under `name`."""
    return _REPLICA in name

"""What may accompany a run: copies in memory, copies at other hosts, uploads. A run has a list of companions.

The list is empty unless keys of the configuration name some. The manager and the saves call each companion at the
moments below, in the order of the list and at the end in reverse, and ask nothing else of it, so that a run can be
read, and runs, without them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

from torchtitan_lite.checkpoint.format.flattening import State
from torchtitan_lite.checkpoint.reading.source import LoadSource, Sources
from torchtitan_lite.checkpoint.saving.target import Origin, RankContent, SaveTarget
from torchtitan_lite.checkpoint.staging.stager import Copying, StagedCopy
from torchtitan_lite.events import Emit, Event, contained
from torchtitan_lite.store.manifest import CheckpointInfo


class Companion:
    """Accompanies a run, and does nothing at any moment. Main thread, all ranks, unless a moment says otherwise."""

    def sources(self, others: Sources) -> Sources:
        """Return what there is to load besides the checkpoints on disk: `others`, and what is here."""
        return others

    def copying(self) -> Copying | None:
        """Return how saves copy the state, None for as they do by themselves. The first answer counts."""
        return None

    def begin(self, origin: Origin) -> Origin:
        """Return `origin` with what is agreed on for this start. **Collective**, before a load, under the lease."""
        return origin

    def loaded(self, source: LoadSource | None) -> None:
        """Note that the run continues from `source`, None for a fresh start. **Collective**."""

    def rolled_back(self, step: int) -> None:
        """Note that the run rolled back to `step`, after `settle`."""

    def start(self, run_id: str) -> None:
        """Start processes, for the run `run_id`, right before the loop or after its first step. Idempotent."""

    def hear(self, event: Event) -> None:
        """Note what happened on this rank, and return at once: saves wait. Any thread. What it raises is a warning.

        `Committed` comes on the coordinator alone, of every save, before a later one can remove that checkpoint. What
        companions emit themselves is not heard.
        """

    def sized(self, num_bytes: int) -> None:
        """Note how large a copy of this rank is, before the first one; -1 if that is not known. **Collective**."""

    def numbers(self) -> tuple[int, ...]:
        """Return what this rank adds to the exchange of a plan: numbers of which the maximum over all ranks counts."""
        return ()

    def agreed(self, step: int, maxima: Sequence[int]) -> None:
        """Note the maxima of all ranks' `numbers`: the copy of a save of `step` is begun next. **Collective**."""

    def copied(self, target: SaveTarget, staged: StagedCopy, content: RankContent) -> RankContent:
        """Return `content`, which waits for the copy `staged` and writes it, with what is to be done when it has.

        The save of `target` has just begun to make that copy.
        """
        return content

    def durable(self, committed: CheckpointInfo | None) -> None:
        """Note that the copy of a background save is durable: on the coordinator what was committed. Any thread.

        Saves without a copy, as the last one, do not call it; `hear` hears of all.
        """

    def not_saved(self, step: int, make_state: Callable[[], State], make_origin: Callable[[], Origin]) -> bool:
        """Note that `step` is trained and not saved; return whether it was copied all the same. **Collective**."""
        return False

    def wait_for_staging(self) -> None:
        """Wait until the state may change."""

    def settle(self) -> None:
        """Wait until nothing reads the state any more: a load changes it."""

    def protected(self) -> AbstractSet[int]:
        """Return the steps on disk that no rule removes for now. **Coordinator only**, any thread.

        A save that lacks room removes them all the same. While this raises, nothing is removed.
        """
        return frozenset()

    def finished(self, run_id: str) -> None:
        """Note that nothing of the run `run_id` is left to train: no later start needs what is kept for one."""

    def close(self) -> None:
        """Wait for what still needs the saver, which is closed next. Idempotent."""

    def leave(self, seconds_left: Callable[[], float]) -> None:
        """End what was started, after the saver was closed, within `seconds_left`. Idempotent.

        It is infinite unless a signal came, and 0 or less when the time is over or the run ends by an error. A purge
        under way may still ask what is protected, and be heard.
        """


def sources_of(companions: Sequence[Companion]) -> Sources:
    """Return what there is to load besides the checkpoints on disk."""
    sources = Sources()
    for each in companions:
        sources = each.sources(sources)
    return sources


def protected_by(companions: Sequence[Companion]) -> AbstractSet[int]:
    """Return the steps on disk that no rule removes for now. **Coordinator only**, any thread."""
    return frozenset[int]().union(*(each.protected() for each in companions))


def heard_by(companions: Sequence[Companion], emit: Emit) -> Emit:
    """Return `emit`, of which `companions` hear, too."""
    if not companions:
        return emit

    listeners = [emit, *(contained(type(each).__name__, each.hear) for each in companions)]

    def to_all(event: Event) -> None:
        for listen in listeners:
            listen(event)

    return to_all

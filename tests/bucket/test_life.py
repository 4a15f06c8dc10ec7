"""A folder in an object store over its complete life, with faults at any request and a head that is lost."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from tests.bucket.bucket_backend import BucketBackend
from tests.examples import examples
from tests.store.backend import FULL, WEIGHTS, Saved, There
from tests.store.life import Life, live
from torchtitan_lite.bucket.naming import HEAD


class LifeInBucket(Life):
    backend: BucketBackend

    def __init__(self) -> None:
        super().__init__()
        self.failed: dict[int, list[Saved]] = {}
        """Saves of each step that failed after the last one that did not, and full ones that weights replaced."""
        self.replaced: dict[int, list[Saved]] = {}
        """What was there of each step before its last save: all of it may be behind one that is damaged."""
        self.may_be_abandoned: set[int] = set()
        """Steps that a failed commit would have abandoned."""

    @initialize(crowded=st.booleans())
    def first(self, crowded: bool) -> None:
        backend = BucketBackend()
        if crowded:
            backend.crowd()
        self.begin(backend)

    @rule()
    def end(self) -> None:
        self.backend.job.lease.release()
        self._restart(None)

    @precondition(lambda self: self.staged is None)
    @rule(length=st.none() | st.integers(0, 500))
    def harm_the_head(self, length: int | None) -> None:
        """Lose it, or its end; then start."""
        stored = self.backend.bucket.stored
        if length is None:
            del stored[HEAD]
        else:
            self.backend.bucket.put(HEAD, stored[HEAD].data[: min(length, len(stored[HEAD].data) - 1)])
        self.backend.next_process()
        self.backend.start()
        found = self.backend.read()
        for step in self.there.keys() - found.keys():
            assert step in self.may_be_abandoned or not self.there[step].has_its_sizes
        for step in self.there.keys() & found.keys():
            behind = [] if self.there[step].has_its_sizes else self.replaced.get(step, [])
            assert found[step] in (self.there[step], *self.failed.get(step, []), *behind)
        self.there, self.aside, self.pinned = found, self.kept_aside(), frozenset()
        self._restart(None)

    def settled(self, step: int, saved: Saved, before: There, outcome: There, is_acknowledged: bool) -> None:
        super().settled(step, saved, before, outcome, is_acknowledged)
        failed = self.failed.setdefault(step, [])
        if self.there.get(step) == saved:
            replaced = [before[step]] if step in before else []
            self.failed[step] = [each for each in [*failed, *replaced] if (each.kind, saved.kind) == (FULL, WEIGHTS)]
            self.replaced.setdefault(step, []).extend(replaced)
        else:
            failed.append(saved)
            self.may_be_abandoned.update(self.there.keys() - outcome.keys())


@pytest.mark.promise(
    "A save, a removal, a pin or a start that is cut at any request, or loses its answer, leaves the old or "
    "the new state and every reported save.",
    section="bucket",
)
@pytest.mark.slow
@pytest.mark.parametrize("count", [300, pytest.param(1500, marks=pytest.mark.exhaustive)])
def test_every_acknowledged_save_loads_after_any_faults(count: int, caplog: pytest.LogCaptureFixture) -> None:
    live(LifeInBucket, examples(count), caplog)

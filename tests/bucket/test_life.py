"""A folder in an object store over its complete life: every acknowledged save loads after faults in any order.

Saves, purges, pins, quarantines and rolling back; a fault at any request of any of them; kills and the next start;
requests that are carried out late; a head that is lost or damaged. The model is what each rule says should be there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.bucket.memory_objects import Bucket, Fate, Killed, at
from tests.bucket.saving import Job, found_in, new_job, new_store, purge, remove_failed, save
from torchtitan_lite.bucket.naming import HEAD
from torchtitan_lite.errors import CheckpointUnreadable, SaveFailed


@dataclass(frozen=True)
class Fault:
    """What happens to the request `at` from now on."""

    at: int
    fate: Fate


FAULTS = st.none() | st.builds(
    Fault, st.integers(1, 16), st.sampled_from([fate for fate in Fate if fate is not Fate.CARRIED_OUT])
)
There = dict[int, bytes]


class Life(RuleBasedStateMachine):
    """One folder; `there` is what a reader must find in it."""

    examples = 0
    faults = 0

    def __init__(self) -> None:
        super().__init__()
        Life.examples += 1
        self.bucket = Bucket()
        self.there: There = {}
        self.pinned: frozenset[int] = frozenset()
        self.failed: dict[int, list[bytes]] = {}
        """Data of saves of each step that failed after the last one that did not."""
        self.may_be_abandoned: set[int] = set()
        """Steps that a failed commit would have abandoned."""
        self.run = self.step = self.number = 0

    @initialize()
    def start(self) -> None:
        self.job = new_job(self.bucket)
        self.job.lease.take()
        self.job.store.recover()

    @rule(steps=st.integers(0, 2), fault=FAULTS)
    def save(self, steps: int, fault: Fault | None) -> None:
        self.step += steps
        data = self._new_data()
        done = self._try(lambda job: save(job.store, self.step, data, run_id=f"run{self.run}"), fault)
        self._settle(done, self.there | {self.step: data})
        self._note(self.step, data)

    @rule(number=st.integers(0, 9), fault=FAULTS)
    def purge(self, number: int, fault: Fault | None) -> None:
        if not self.there:
            return
        step = sorted(self.there)[number % len(self.there)]
        done = self._try(lambda job: purge(job.store, step), fault)
        gone = (
            self.there if step in self.pinned else {other: self.there[other] for other in self.there if other != step}
        )
        self._settle(done, gone)

    @rule(number=st.integers(0, 9), fault=FAULTS)
    def quarantine(self, number: int, fault: Fault | None) -> None:
        if self.there:
            step = sorted(self.there)[number % len(self.there)]
            done = self._try(lambda job: job.store.quarantine(step, ["a finding"]), fault)
            self._settle(done, {other: self.there[other] for other in self.there if other != step})

    @rule(step=st.integers(0, 9), is_pinned=st.booleans())
    def pin(self, step: int, is_pinned: bool) -> None:
        """Another process does it."""
        with new_store(self.bucket)[0].pins.changing() as pinned:
            (pinned.add if is_pinned else pinned.discard)(step)
        self.pinned = frozenset(pinned)

    @precondition(lambda self: self.there)
    @rule(number=st.integers(0, 9), fault=FAULTS)
    def roll_back(self, number: int, fault: Fault | None) -> None:
        """Continue from a step as another run, whose first commit abandons what lies beyond it."""
        self.step = sorted(self.there)[number % len(self.there)]
        left = [info for info in self.job.store.committed() if info.step > self.step]
        abandons = tuple((info.step, info.run_id) for info in left)
        self.run += 1
        self.step += 1
        data = self._new_data()
        done = self._try(
            lambda job: save(job.store, self.step, data, run_id=f"run{self.run}", abandons=abandons), fault
        )
        kept = {step: self.there[step] for step in self.there if step not in {info.step for info in left}}
        self._settle(done, kept | {self.step: data})
        self._note(self.step, data)
        if self.there.get(self.step) != data:
            self.may_be_abandoned.update(info.step for info in left)

    @rule(fault=FAULTS)
    def restart(self, fault: Fault | None) -> None:
        """Start again on the same host; the job before may have ended or not."""
        self.job = new_job(self.bucket)
        done = self._try(_take, fault)
        if done is not True:
            self.start()

    @rule()
    def end(self) -> None:
        self.job.lease.release()
        self.start()

    @rule(length=st.none() | st.integers(0, 500))
    def harm_the_head(self, length: int | None) -> None:
        """Lose it, or its end; then start."""
        if length is None:
            del self.bucket.stored[HEAD]
        else:
            data = self.bucket.stored[HEAD].data
            self.bucket.put(HEAD, data[: min(length, len(data) - 1)])
        self.start()
        self.pinned = frozenset()
        found = found_in(self.bucket)
        for step in self.there.keys() - found.keys():
            assert step in self.may_be_abandoned
        for step in self.there.keys() & found.keys():
            assert found[step] in (self.there[step], *self.failed.get(step, []))
        self.there = found
        self.run += 1

    @invariant()
    def every_acknowledged_save_loads(self) -> None:
        if hasattr(self, "job"):
            assert found_in(self.bucket) == self.there
            assert new_store(self.bucket)[0].pins.read() == self.pinned

    def _new_data(self) -> bytes:
        self.number += 1
        return f"data {self.number}".encode()

    def _note(self, step: int, data: bytes) -> None:
        if self.there.get(step) == data:
            self.failed[step] = []
        else:
            self.failed.setdefault(step, []).append(data)

    def _try(self, act: Callable[[Job], object], fault: Fault | None) -> bool | None:
        """Return True if `act` was acknowledged, None if it may have been carried out; start again after a kill."""
        objects = self.job.objects
        if fault is not None:
            objects.fate = at(len(objects.requests) + fault.at, fault.fate)
        try:
            act(self.job)
            done: bool | None = True
        except (Killed, SaveFailed, CheckpointUnreadable, OSError):
            Life.faults += 1
            done = None
        objects.fate = at(0, Fate.CARRIED_OUT)
        if not objects.is_dead and done is None and self.job.lease.claim is not None:
            remove_failed(self.job, self.bucket, self.step)
        self.bucket.deliver()
        if objects.is_dead:
            self.start()
        return done

    def _settle(self, done: bool | None, new: There) -> None:
        found = found_in(self.bucket)
        assert found == new if done else found in (self.there, new)
        self.there = found


def _take(job: Job) -> None:
    job.lease.take()
    job.store.recover()


@pytest.mark.parametrize(
    "examples", [60, pytest.param(300, marks=pytest.mark.slow), pytest.param(1500, marks=pytest.mark.exhaustive)]
)
def test_every_acknowledged_save_loads_after_any_faults(examples: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "torchtitan_lite")
    Life.examples = Life.faults = 0
    run_state_machine_as_test(Life, settings=settings(max_examples=examples, stateful_step_count=20, deadline=None))
    print(f"examples: {Life.examples}, faults: {Life.faults}")
    assert Life.examples >= examples

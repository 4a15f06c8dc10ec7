"""What accompanies a run is called at every moment of it, in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.small_run import SmallRun
from tests.logged import logged_warnings
from tests.uploading.runs import steps_in
from torchtitan_lite.checkpoint import manager
from torchtitan_lite.checkpoint.reading.source import Sources
from torchtitan_lite.checkpoint.saving.companion import Companion
from torchtitan_lite.errors import PeerLost
from torchtitan_lite.events import Committed, Event

BEFORE_THE_LOOP = ["copying", "sources", "begin", "loaded"]
OF_A_SAVE = ["numbers", "agreed", "copied"]
OF_A_THREAD = {"durable", "protected"}
"""Of the thread that saves, so at no fixed place among the others."""
MOMENTS = [name for name in vars(Companion) if not name.startswith("_")]


class Noting(Companion):
    """Notes the moments at which it is called, and the names of events."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.events: list[str] = []

    def hear(self, event: Event) -> None:
        self.events.append(event.name)


def _noted(name: str) -> Callable[..., Any]:
    def moment(self: Noting, *given: Any) -> Any:
        self.seen.append(name)
        return getattr(Companion, name)(self, *given)

    return moment


for _name in set(MOMENTS) - {"hear"}:
    setattr(Noting, _name, _noted(_name))


class Counting(Companion):
    """Reports `numbers`, and keeps what comes back."""

    def __init__(self, *numbers: int) -> None:
        self._numbers = numbers
        self.given: list[Sequence[int]] = []

    def numbers(self) -> tuple[int, ...]:
        return self._numbers

    def agreed(self, step: int, maxima: Sequence[int]) -> None:
        self.given.append(tuple(maxima))


def accompanied(
    folder: Path, monkeypatch: pytest.MonkeyPatch, companions: Sequence[Companion], **keys: Any
) -> SmallRun:
    monkeypatch.setattr(manager, "build_companions", lambda *_: companions)
    return SmallRun(folder, **{"async_mode": "async", "interval": 2, "keep_latest_k": 2} | keys)


def test_the_moments_of_a_run_come_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    companion = Noting()
    with accompanied(tmp_path, monkeypatch, [companion]).loaded() as run:
        for _ in range(3):
            run.step()
        run.manager.wait()
        run.manager.roll_back(3, "a spike")
        run.manager.finish(3)
    waits = {"wait_for_staging", "settle"}
    seen = [name for name in companion.seen if name not in OF_A_THREAD | waits]
    assert seen == [
        *BEFORE_THE_LOOP,
        *("start", "sized", "not_saved", *OF_A_SAVE, "not_saved", "rolled_back", "finished", "close", "leave"),
    ]
    assert {*companion.seen} == {*MOMENTS} - {"hear"}
    assert [name for name in companion.events if name in ("save_started", "committed")][:2] == [
        "save_started",
        "committed",
    ]


class Failing(Companion):
    """Cannot note a commit, nor say what it still reads."""

    def hear(self, event: Event) -> None:
        if isinstance(event, Committed):
            raise OSError("full")

    def protected(self) -> frozenset[int]:
        raise LookupError("lost")


@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_a_companion_that_fails_is_named_and_the_run_saves_on_and_removes_nothing(
    async_mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    companions = [Failing(), Noting()]
    with (
        logged_warnings() as warnings,
        accompanied(tmp_path, monkeypatch, companions, async_mode=async_mode, keep_latest_k=1).loaded() as run,
    ):
        for _ in range(4):
            run.step()
    assert warnings.count("Failing failed for committed of step 4: OSError: full") == 1
    assert warnings.count("No checkpoint is removed, because one may be in use: LookupError: lost") == 1
    assert [companion.events.count("committed") for companion in companions if isinstance(companion, Noting)] == [2]
    assert steps_in(run.root) == [2, 4]


class Holding(Companion, Sources):
    """Holds something from `look` to `close`, unless it `fails` to look."""

    def __init__(self, fails: bool) -> None:
        Sources.__init__(self)
        self._fails, self.is_held = fails, False

    def sources(self, others: Sources) -> Sources:
        return self

    def look(self, topology: str) -> None:
        self.is_held = True
        if self._fails:
            raise PeerLost(1, "has ended")

    def close(self) -> None:
        self.is_held = False


@pytest.mark.parametrize("fails", [True, False], ids=["look", "after the load"])
def test_what_a_companion_holds_for_a_load_is_let_go_where_the_load_fails(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holding = Holding(fails)

    def refuse(step: int) -> None:
        assert holding.is_held
        raise PeerLost(1, "has ended")

    with accompanied(tmp_path, monkeypatch, []).loaded() as run:
        run.train(2)
    again = accompanied(tmp_path, monkeypatch, [holding])
    monkeypatch.setattr(again.manager._maker, "secure", refuse)
    with pytest.raises(PeerLost):
        again.loaded()
    assert not holding.is_held
    again.manager.close()


def test_each_companion_gets_the_maxima_of_its_own_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    companions = [Counting(4, 5), Counting(), Counting(6)]
    with accompanied(tmp_path, monkeypatch, companions).loaded() as run:
        for _ in range(2):
            run.step()
    assert [each.given for each in companions] == [[(4, 5)], [()], [(6,)]]

"""The run and branch of a checkpoint, and what a commit abandons."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import mostly_slow
from tests.store import filled
from tests.store.crashing import Contents, Cut, contents
from torchtitan_lite.errors import CheckpointNotFound
from torchtitan_lite.store.lineage import Lineage
from torchtitan_lite.store.manifest import CheckpointInfo, CheckpointKind, abandoned_by, without_abandoned
from torchtitan_lite.store.store import CheckpointStore

STEPS = st.integers(0, 10**6)
RUN_IDS = st.text("0123456789abcdef", min_size=1, max_size=8)
LINEAGES = st.builds(
    Lineage, RUN_IDS, st.none() | STEPS, st.none() | STEPS, st.lists(st.tuples(STEPS, RUN_IDS)).map(tuple)
)


def saved(step: int, run_id: str, *abandons: tuple[int, str]) -> CheckpointInfo:
    lineage = Lineage(run_id, abandons=abandons)
    return CheckpointInfo(step, Path(f"step-{step}"), CheckpointKind.FULL, 0.0, 0, lineage)


@given(LINEAGES)
def test_a_lineage_survives_json(lineage: Lineage) -> None:
    assert Lineage.from_json(json.loads(json.dumps(lineage.to_json()))) == lineage


def test_the_lineage_of_a_first_checkpoint_has_only_a_run_id() -> None:
    assert Lineage.from_json({"run_id": "a1"}) == Lineage("a1", parent_step=None, branch_point=None, abandons=())


def test_an_unknown_field_is_ignored() -> None:
    assert Lineage.from_json({"run_id": "a1", "mood": "good"}) == Lineage("a1")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("run_id", value) for value in (None, 7, "", "../up", "a b", ["a"])),
        *((name, value) for name in ("parent_step", "branch_point") for value in (-1, "3", 1.5, True, [3])),
        *(
            ("abandons", value)
            for value in (None, 3, "ab", {"4": "a"}, [4], [[4]], [["4", "a"]], [[4, 5]], [[4, "a", 1]], [[4, "../up"]])
        ),
        *(("abandons", value) for value in ([[-4, "a"]], [[True, "a"]], [[4, ""]])),
    ],
)
def test_a_wrong_field_is_named_with_what_was_found(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^lineage: {field}: expected ") as refusal:
        Lineage.from_json({"run_id": "a1", field: value})
    assert str(refusal.value).endswith(f"found {value!r}")


def test_a_run_that_never_rolled_back_abandons_nothing() -> None:
    assert abandoned_by("new", None, [saved(2, "old"), saved(4, "older")]) == ()


def test_a_branch_abandons_the_steps_of_other_runs_beyond_its_branch_point() -> None:
    committed = [saved(1, "old"), saved(2, "old"), saved(3, "old"), saved(3, "new"), saved(4, "older")]
    assert abandoned_by("new", 2, committed) == ((3, "old"), (4, "older"))


def test_a_branch_keeps_all_its_own_steps() -> None:
    assert abandoned_by("new", 0, [saved(5, "new"), saved(6, "new")]) == ()


def test_a_step_of_one_run_is_abandoned_and_not_that_of_another() -> None:
    kept = [saved(3, "new", (3, "old"), (4, "old")), saved(4, "new"), saved(5, "old")]
    assert without_abandoned([saved(3, "old"), saved(4, "old"), *kept]) == kept


@given(st.lists(st.builds(saved, STEPS, RUN_IDS)), RUN_IDS, STEPS)
def test_after_its_first_commit_a_branch_leaves_no_step_of_others_beyond_its_branch_point(
    committed: list[CheckpointInfo], run_id: str, branch_point: int
) -> None:
    first = saved(branch_point + 1, run_id, *abandoned_by(run_id, branch_point, committed))
    left = without_abandoned([*committed, first])
    assert all(info.lineage.run_id == run_id for info in left if info.step > branch_point)
    assert [info for info in left if info.step <= branch_point] == [i for i in committed if i.step <= branch_point]


class FailsFor(Cut):
    """Fails `failures` operations in a row, from operation `at` on."""

    def __init__(self, at: int, failures: int, exchanges: bool) -> None:
        super().__init__(exchanges=exchanges)
        self._failing = range(at, at + failures)

    def _operation(self) -> None:
        self.done += 1
        if self.done in self._failing:
            raise OSError(errno.EIO, "Input/output error")


def commit(store: CheckpointStore, step: int, run_id: str, branch_point: int | None = None) -> None:
    lineage = Lineage(run_id, None, branch_point, abandoned_by(run_id, branch_point, store.intact()))
    filled.commit(store, step, f"{run_id} at {step}".encode(), lineage=lineage)


def trunk(root: Path) -> dict[str, Contents]:
    """Save steps 2, 4 and 6 of a run; return the contents of 4 and 6 by the names they get when abandoned."""
    for step in (2, 4, 6):
        commit(CheckpointStore(root, durable=Cut()), step, "old")
    return {f"step-{step}.abandoned-old": contents(root / f"step-{step}") for step in (4, 6)}


@pytest.mark.parametrize("failures", mostly_slow([1, 2, 3], kept=[2]))
@pytest.mark.parametrize(("step", "exchanges"), [(3, True), (4, True), (4, False)])
def test_wherever_the_disk_fails_no_abandoned_checkpoint_is_lost(
    step: int, exchanges: bool, failures: int, tmp_path: Path
) -> None:
    for at in itertools.count(1):
        root = tmp_path / str(at)
        aside = trunk(root)
        disk = FailsFor(at, failures, exchanges)
        save_twice(CheckpointStore(root, durable=disk), step)
        assert 2 in steps(root)
        next_process = CheckpointStore(root, durable=Cut(exchanges=exchanges))
        commit(next_process, 5, "new", branch_point=2)
        for info in next_process.committed()[:-1]:
            next_process.empty(next_process.discard(info))
        next_process.recover()
        assert {name: contents(root / name) for name in aside} == aside, f"the disk failed at operation {at}"
        assert {path.name for path in root.iterdir()} == {*aside, "step-5"}
        if disk.done < at:
            break


@pytest.mark.parametrize("exchanges", [True, False])
def test_after_one_failure_of_the_disk_leftovers_are_removed(exchanges: bool, tmp_path: Path) -> None:
    for at in itertools.count(1):
        trunk(tmp_path / str(at))
        disk = FailsFor(at, 1, exchanges)
        store = CheckpointStore(tmp_path / str(at), durable=disk)
        try:
            commit(store, 4, "new", branch_point=2)
        except OSError:
            filled.remove_begun(store, 4)
            assert not [*(tmp_path / str(at)).glob("step-4.staging*")]
        if disk.done < at:
            break


def save_twice(store: CheckpointStore, step: int) -> None:
    """Save like the manager at the last step: after a failure, remove the leftovers if possible, and retry."""
    for _ in range(2):
        try:
            return commit(store, step, "new", branch_point=2)
        except OSError:
            with contextlib.suppress(OSError):
                filled.remove_begun(store, step)


def steps(root: Path) -> list[int]:
    return [info.step for info in CheckpointStore(root).committed()]


def test_an_abandoned_step_is_not_found_even_while_it_still_has_its_name(tmp_path: Path) -> None:
    store, aside = CheckpointStore(tmp_path), trunk(tmp_path)
    commit(store, 3, "new", branch_point=2)
    for name in aside:
        (tmp_path / name).rename(tmp_path / name.partition(".")[0])
    with pytest.raises(CheckpointNotFound, match=r"it has 2, 3\)"):
        store.get(6)


@pytest.mark.parametrize(
    ("lineage", "last_kept"),
    [
        (Lineage("run"), None),
        (Lineage("run", branch_point=0), 0),
        (Lineage("run", branch_point=4), 4),
        (Lineage("run", counts_again=True), -1),
        (Lineage("run", branch_point=4, counts_again=True), -1),
    ],
)
def test_a_run_that_counts_again_keeps_no_step_of_another_and_a_branch_those_up_to_its_point(
    lineage: Lineage, last_kept: int | None
) -> None:
    assert lineage.last_kept == last_kept

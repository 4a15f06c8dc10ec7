import dataclasses
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.store.filled import begun, commit
from tests.store.purges import to_purge
from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.store import layout
from torchtitan_lite.store.lineage import Lineage
from torchtitan_lite.store.manifest import CheckpointInfo, CheckpointKind
from torchtitan_lite.store.retention import KeepAll, KeepLatest, Ruling, build_retention
from torchtitan_lite.store.store import CheckpointStore


def info(step: int, kind: CheckpointKind = CheckpointKind.FULL) -> CheckpointInfo:
    return CheckpointInfo(step=step, path=Path(f"step-{step}"), kind=kind, created_at=0.0, nbytes=1)


def weights(step: int) -> CheckpointInfo:
    return info(step, CheckpointKind.WEIGHTS_ONLY)


INFOS = st.lists(
    st.builds(info, st.integers(0, 50), st.sampled_from(CheckpointKind)), unique_by=lambda found: found.step
)


def steps(infos: list[CheckpointInfo]) -> list[int]:
    return [found.step for found in infos]


def test_keeping_all_purges_nothing() -> None:
    assert to_purge(build_retention(Checkpoint()), [info(1), info(2)]) == []


def test_keep_latest_two_after_three_saves_purges_the_first() -> None:
    assert steps(to_purge(build_retention(Checkpoint(keep_latest_k=2)), [info(1), info(2), info(3)])) == [1]


def test_keeping_one_is_legal() -> None:
    assert steps(to_purge(KeepLatest(1), [info(1), info(2), info(3)])) == [1, 2]


def test_the_latest_is_the_highest_step_not_the_last_of_the_list_nor_of_the_alphabet() -> None:
    assert steps(to_purge(KeepLatest(1), [info(10), info(9), info(100)])) == [9, 10]


def test_all_stay_if_there_are_fewer_than_the_policy_keeps() -> None:
    assert to_purge(KeepLatest(5), [info(1), info(2)]) == []
    assert to_purge(KeepLatest(1), []) == []


def test_weights_only_checkpoints_are_neither_counted_nor_purged() -> None:
    committed = [weights(1), info(2), info(3), weights(4)]
    assert steps(to_purge(KeepLatest(1), committed)) == [2]
    assert [ruling.keeps for ruling in KeepLatest(1).rulings([info(2), info(3)], now=0.0)] == [{3}]


def test_a_protected_step_stays_and_is_still_counted() -> None:
    assert steps(to_purge(KeepLatest(1), [info(1), info(2), info(3)], protected={1})) == [2]


def test_keeping_none_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        KeepLatest(0)


class KeepNothing:
    def rulings(self, full: Sequence[CheckpointInfo], now: float) -> list[Ruling]:
        return [Ruling("nothing", frozenset(), frozenset(found.step for found in full))]


@pytest.mark.promise(
    "With any configuration, the latest full checkpoint stays, and so does the latest one that this run has "
    "saved or loaded.",
    section="kept",
)
@given(INFOS)
def test_the_latest_full_checkpoint_and_the_weights_stay_whatever_the_policy(committed: list[CheckpointInfo]) -> None:
    purged = steps(to_purge(KeepNothing(), committed))
    full = sorted(found.step for found in committed if found.kind is CheckpointKind.FULL)
    assert purged == full[:-1]


@given(INFOS, st.integers(1, 5), st.sets(st.integers(0, 50)))
def test_exactly_k_stay_in_addition_to_the_protected_ones(
    committed: list[CheckpointInfo], k: int, protected: set[int]
) -> None:
    purged = set(steps(to_purge(KeepLatest(k), committed, protected)))
    full = {found.step for found in committed if found.kind is CheckpointKind.FULL}
    assert full - purged == set(sorted(full)[-k:]) | full & protected
    assert purged <= full
    assert to_purge(KeepAll(), committed, protected) == []


def test_the_latest_known_good_checkpoint_stays_however_many_later_ones_there_are() -> None:
    committed = [info(1), info(2), info(3), info(4), info(5)]
    assert steps(to_purge(KeepLatest(1), committed, known_good={1, 2})) == [1, 3, 4]


def test_a_removed_or_weights_only_checkpoint_does_not_count_as_known_good() -> None:
    assert steps(to_purge(KeepLatest(1), [weights(1), info(2), info(3)], known_good={1, 9})) == [2]


def test_a_damaged_checkpoint_is_neither_counted_nor_purged() -> None:
    committed = [info(1), info(2), info(3), info(4)]
    sound = {1, 2, 4}
    assert steps(to_purge(KeepLatest(2), committed, is_sound=lambda found: found.step in sound)) == [1]
    assert to_purge(KeepLatest(3), committed, is_sound=lambda found: found.step in sound) == []


def test_checkpoints_are_not_inspected_while_none_would_be_purged() -> None:
    def is_sound(found: CheckpointInfo) -> bool:
        raise AssertionError(f"step {found.step} was looked at")

    assert to_purge(KeepLatest(2), [info(1), info(2)], is_sound=is_sound) == []
    assert to_purge(KeepAll(), [info(1), info(2), info(3)], is_sound=is_sound) == []


def test_only_full_checkpoints_are_inspected() -> None:
    looked_at: list[int] = []

    def is_sound(found: CheckpointInfo) -> bool:
        looked_at.append(found.step)
        return True

    assert steps(to_purge(KeepLatest(1), [info(1), weights(2), info(3)], is_sound=is_sound)) == [1]
    assert looked_at == [1, 3]


@pytest.mark.promise(
    "With any configuration, the latest full checkpoint stays, and so does the latest one that this run has "
    "saved or loaded.",
    section="kept",
)
@given(INFOS, st.integers(1, 5), st.sets(st.integers(0, 50)), st.sets(st.integers(0, 50)))
def test_the_last_good_checkpoint_stays_whatever_is_damaged(
    committed: list[CheckpointInfo], k: int, sound: set[int], good: set[int]
) -> None:
    purged = set(steps(to_purge(KeepLatest(k), committed, known_good=good, is_sound=lambda i: i.step in sound)))
    full = sorted(found.step for found in committed if found.kind is CheckpointKind.FULL and found.step in sound)
    assert purged == set(full[:-k]) - set([step for step in full if step in good][-1:])
    assert not full or full[-1] not in purged


def save(store: CheckpointStore, step: int, kind: CheckpointKind = CheckpointKind.FULL, *abandons: int) -> None:
    data = f"step {step}".encode()
    files = {layout.data_file(0, 0): FileRecord.of(data)}
    lineage = Lineage("b2", None, min(abandons) - 1, tuple((each, "a1") for each in abandons)) if abandons else None
    commit(store, step, data, kind=kind, files=files, lineage=lineage or Lineage("a1"))


Act = Callable[[CheckpointStore], object]


def full(*steps: int) -> Act:
    def act(store: CheckpointStore) -> None:
        for step in steps:
            save(store, step)

    return act


def damage(step: int, name: str, data: bytes | None = None) -> Act:
    """Replace a file of the checkpoint of `step` by `data`, or remove it."""

    def act(store: CheckpointStore) -> None:
        path = store.get(step).path / name
        path.unlink() if data is None else path.write_bytes(data)

    return act


def weights_alone(step: int) -> Act:
    return lambda store: save(store, step, CheckpointKind.WEIGHTS_ONLY)


def under_way(step: int) -> Act:
    """Begin a save: one rank's file is written."""
    return lambda store: (begun(store, step) / layout.data_file(0, 0)).write_bytes(b"half")


def folder(name: str, *files: str) -> Act:
    def act(store: CheckpointStore) -> None:
        (store.root / name).mkdir(parents=True)
        for file in files:
            (store.root / name / file).write_bytes(b"theirs")

    return act


def branch(step: int, *abandons: int) -> Act:
    return lambda store: save(store, step, CheckpointKind.FULL, *abandons)


def not_yet_set_aside(step: int, run_id: str) -> Act:
    """Prepare the state after a crash between the commit of a branch and the renames of what it abandons."""
    aside = layout.aside_dir(step, f"abandoned-{run_id}")
    return lambda store: (store.root / aside).rename(store.root / layout.step_dir(step))


DATA = layout.data_file(0, 0)


@dataclass(frozen=True)
class Row:
    """The folder, the policy, and the names that a purge removes; all others stay as they are."""

    name: str
    there: tuple[Act, ...]
    k: int
    gone: tuple[str, ...] = ()
    good: frozenset[int] = field(default=frozenset())


TABLE = [
    Row("k latest stay", (full(1, 2, 3, 4),), 2, ("step-1", "step-2")),
    Row("k = 1", (full(9, 10, 100),), 1, ("step-9", "step-10")),
    Row("fewer than k", (full(1, 2),), 3),
    Row("nothing there", (), 1),
    Row("a save is under way", (full(1, 2), under_way(3)), 1, ("step-1",)),
    Row("a save is under way and k = 2", (full(1, 2), under_way(3)), 2),
    Row("half a folder of ours is latest", (full(1, 2), folder("step-3", DATA)), 1, ("step-1",)),
    Row("torchtitan's own are latest", (full(1, 2), folder("step-3", ".metadata"), folder("step-4", DATA)), 2),
    Row("foreign names", (full(1, 2), folder("step-3.bak"), folder("step-007"), folder("step-9.corrupt")), 2),
    Row("empty step folders", (full(1, 2, 3), folder("step-50")), 2, ("step-1",)),
    Row("latest manifest damaged", (full(1, 2, 3), damage(3, layout.MANIFEST, b"{")), 1, ("step-1",)),
    Row("latest manifest gone", (full(1, 2, 3), damage(3, layout.MANIFEST)), 2),
    Row("latest file gone", (full(1, 2, 3), damage(3, DATA)), 1, ("step-1",)),
    Row("latest file cut", (full(1, 2, 3), damage(3, DATA, b"st")), 1, ("step-1",)),
    Row("latest file grown", (full(1, 2), damage(2, DATA, b"step 2 and more")), 1),
    Row("latest description gone", (full(1, 2), damage(2, layout.METADATA)), 1),
    Row("all but the oldest broken", (full(1, 2, 3), damage(2, DATA), damage(3, DATA)), 1),
    Row("all broken", (full(1, 2), damage(1, DATA), damage(2, DATA)), 1),
    Row("flipped in place, older one known good", (full(1, 2), damage(2, DATA, b"STEP 2")), 1, (), frozenset({1})),
    Row("known good is older than k", (full(1, 2, 3, 4),), 2, ("step-1",), frozenset({2})),
    Row("known good is latest", (full(1, 2, 3),), 1, ("step-1", "step-2"), frozenset({1, 3})),
    Row("weights alone are latest", (full(1, 2), weights_alone(3), weights_alone(4)), 1, ("step-1",)),
    Row("weights alone and one full", (weights_alone(1), full(2), weights_alone(3)), 1),
    Row("a branch", (full(1, 2, 3), branch(4, 2, 3)), 2),
    Row("a branch that is one too many", (full(1, 2, 3), branch(4, 2, 3)), 1, ("step-1",)),
    Row(
        "a branch whose abandoned ones have their names yet",
        (full(1, 2, 3), branch(4, 2, 3), not_yet_set_aside(3, "a1")),
        2,
    ),
]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_a_purge_removes_exactly_what_the_table_says(row: Row, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for act in row.there:
        act(store)
    before = contents(tmp_path)
    sound_before = sound(store)
    purge(store, row)
    assert contents(tmp_path) == {name: held for name, held in before.items() if name not in row.gone}
    assert sound(store)[-1:] == sound_before[-1:]
    purge(store, row)
    assert sound(store)[-1:] == sound_before[-1:]


def purge(store: CheckpointStore, row: Row) -> None:
    def is_sound(found: CheckpointInfo) -> bool:
        return not store.check_sizes(found)

    for found in to_purge(KeepLatest(row.k), store.committed(), known_good=row.good, is_sound=is_sound):
        store.empty(store.discard(found))


def sound(store: CheckpointStore) -> list[int]:
    return [
        found.step for found in store.committed() if found.kind is CheckpointKind.FULL and not store.check_sizes(found)
    ]


def contents(root: Path) -> dict[str, dict[str, bytes]]:
    return {path.name: {file.name: file.read_bytes() for file in path.iterdir()} for path in root.iterdir()}


def test_a_quarantined_checkpoint_is_not_counted(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    full(1, 2, 3)(store)
    store.quarantine(3, ["a byte"])
    purge(store, Row("", (), k=2))
    assert sorted(contents(tmp_path)) == ["step-1", "step-2", "step-3.corrupt"]
    shutil.rmtree(tmp_path / "step-3.corrupt")


def test_the_latest_checkpoint_without_nan_stays_whatever_the_policy() -> None:
    committed = [info(1), info(2), *(dataclasses.replace(info(step), has_nan=True) for step in (3, 4, 5))]
    assert steps(to_purge(KeepLatest(1), committed)) == [1, 3, 4]
    assert steps(to_purge(KeepLatest(1), committed, known_good={1, 3, 4, 5})) == [3, 4]


def test_the_latest_checkpoint_of_equal_ranks_stays_whatever_the_policy() -> None:
    differ = (dataclasses.replace(info(step), ranks_differ=True) for step in (3, 4, 5))
    committed = [info(1), info(2), *differ]
    assert steps(to_purge(KeepLatest(1), committed)) == [1, 3, 4]
    assert steps(to_purge(KeepLatest(1), committed, known_good={1, 3, 4, 5})) == [3, 4]

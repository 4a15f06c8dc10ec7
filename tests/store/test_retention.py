from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.store.manifest import CheckpointInfo, CheckpointKind
from torchtitan_lite.store.retention import KeepAll, KeepLatest, build_retention, to_purge


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


def test_fewer_than_asked_for_all_stay() -> None:
    assert to_purge(KeepLatest(5), [info(1), info(2)]) == []
    assert to_purge(KeepLatest(1), []) == []


def test_weights_only_is_neither_counted_nor_purged() -> None:
    committed = [weights(1), info(2), info(3), weights(4)]
    assert steps(to_purge(KeepLatest(1), committed)) == [2]
    assert KeepLatest(1).keep(committed) == {1, 3, 4}


def test_a_protected_step_stays_and_is_still_counted() -> None:
    assert steps(to_purge(KeepLatest(1), [info(1), info(2), info(3)], protected={1})) == [2]


def test_keeping_none_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        KeepLatest(0)


class KeepNothing:
    def keep(self, committed: object) -> set[int]:
        return set()


@given(INFOS)
def test_whatever_the_policy_the_newest_full_one_and_the_weights_stay(committed: list[CheckpointInfo]) -> None:
    purged = steps(to_purge(KeepNothing(), committed))
    full = sorted(found.step for found in committed if found.kind is CheckpointKind.FULL)
    assert purged == full[:-1]


@given(INFOS, st.integers(1, 5), st.sets(st.integers(0, 50)))
def test_exactly_k_stay_besides_the_protected(committed: list[CheckpointInfo], k: int, protected: set[int]) -> None:
    purged = set(steps(to_purge(KeepLatest(k), committed, protected)))
    full = {found.step for found in committed if found.kind is CheckpointKind.FULL}
    assert full - purged == set(sorted(full)[-k:]) | full & protected
    assert purged <= full
    assert to_purge(KeepAll(), committed, protected) == []

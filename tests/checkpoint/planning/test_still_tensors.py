"""Which tensors lie in the still files: a guess, and then what the digests of two saves show."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchtitan_lite.checkpoint.format.file_data import FileData, FileLayout
from torchtitan_lite.checkpoint.planning.saves_of_plan import NO_PARENT, Moved, Parent, SavesOfPlan, StillFile
from torchtitan_lite.checkpoint.planning.still_tensors import LEAST_BYTES, StillTensors
from torchtitan_lite.disk.digest import FileRecord

MIB_OF_FLOATS = 1 << 18


class Listener:
    """What a plan's saves showed."""

    def __init__(self) -> None:
        self.moved: list[Moved] = []
        self.refusals: list[str] = []

    def note(self, moved: Any, tensors: Any) -> None:
        self.moved += moved

    def note_refusal(self, step: int, refusal: str) -> None:
        self.refusals.append(refusal)


class TwoFiles:
    """The tensors `a`, `b` ... of these numbers of floats, of which the first are still ones."""

    def __init__(self, *numels: int, num_still: int = 0, full_every: int = 10) -> None:
        self.tensors = [torch.zeros(numel) for numel in numels]
        self.layout = FileLayout([(torch.float32, (numel,)) for numel in numels], num_still)
        self.keys = [chr(ord("a") + number) for number in range(len(numels))]
        self.listener = Listener()
        self.saves = SavesOfPlan(self.layout, self.keys, LEAST_BYTES, full_every, self.listener)

    def write(self, step: int, *changing: tuple[str, int]) -> Moved | None:
        """Change an element of some tensors and write both files; return what that shows."""
        for key, at in changing:
            self.tensors[self.keys.index(key)][at] += 1
        data = FileData(self.layout, self.tensors)
        still, changes = self.layout.still, (self.layout.changes_at, data.num_bytes)
        records = [FileRecord(end - begin, data.digests(begin, end)) for begin, end in (still, changes)]
        return self.saves.note_written(step, *records)


def test_the_first_save_of_a_plan_shows_nothing() -> None:
    assert TwoFiles(MIB_OF_FLOATS).write(1) is None


def test_large_tensors_whose_own_blocks_are_the_same_are_unchanged() -> None:
    files = TwoFiles(3 * MIB_OF_FLOATS, 3 * MIB_OF_FLOATS, 3 * MIB_OF_FLOATS)
    files.write(1)
    assert files.write(2, ("b", MIB_OF_FLOATS + 5)) == Moved([], {"a": 1, "c": 1})
    assert files.write(3, ("a", 2 * MIB_OF_FLOATS), ("b", 2 * MIB_OF_FLOATS), ("c", 2 * MIB_OF_FLOATS)) is None


def test_a_tensor_in_one_block_with_one_that_changes_does_not_look_unchanged() -> None:
    files = TwoFiles(LEAST_BYTES // 4, LEAST_BYTES // 4)
    files.write(1)
    assert files.write(2, ("b", 0)) is None
    assert files.write(3) == Moved([], {"a": 1, "b": 1})


def test_small_tensors_never_move() -> None:
    files = TwoFiles(LEAST_BYTES // 4 - 1)
    files.write(1)
    assert files.write(2) is None


def test_of_a_changed_block_the_tensor_that_surely_changed_explains_it() -> None:
    """The first and the last block of `b` have bytes of its neighbours, which have not changed."""
    files = TwoFiles(3 * MIB_OF_FLOATS, 3 * MIB_OF_FLOATS, 3 * MIB_OF_FLOATS, num_still=3)
    files.write(1)
    moved = files.write(2, *(("b", at) for at in range(0, 3 * MIB_OF_FLOATS, 1000)))
    assert moved == Moved(["b"], {})


def test_of_a_block_that_nothing_explains_all_tensors_may_have_changed() -> None:
    files = TwoFiles(LEAST_BYTES // 4, LEAST_BYTES // 4, 4 * MIB_OF_FLOATS, num_still=3)
    files.write(1)
    assert files.write(2, ("b", 0)) == Moved(["a", "b", "c"], {})


def test_only_a_durable_save_into_the_same_store_is_a_parent() -> None:
    files = TwoFiles(MIB_OF_FLOATS, num_still=1, full_every=2)
    files.write(1)
    assert files.saves.parent("here") == NO_PARENT
    files.saves.note_committed(Parent(1, "p1"), "here", [StillFile(7, b"")], [], {})
    assert (files.saves.parent("here"), files.saves.parent("there")) == (Parent(1, "p1"), NO_PARENT)
    for step in (2, 3):
        files.write(step)
        files.saves.note_committed(Parent(step, "p"), "here", [StillFile(7, b"", True)], [], {})
    assert files.saves.parent("here") == NO_PARENT, "two saves have shared its file"
    files.saves.note_committed(Parent(4, "p4"), "here", [StillFile(7, b"")], [], {})
    assert files.saves.parent("here") == Parent(4, "p4")
    files.saves.forget()
    assert files.saves.parent("here") == NO_PARENT


def test_what_a_save_need_not_write_is_known_unless_the_last_one_failed() -> None:
    files = TwoFiles(MIB_OF_FLOATS, num_still=1)
    assert files.saves.spared_bytes("here") == 0
    files.saves.note_committed(Parent(1, "p1"), "here", [StillFile(7, b""), StillFile(5, b"")], [], {})
    assert files.saves.spared_bytes("here") == 12
    files.saves.parent("here")
    assert files.saves.spared_bytes("here") == 0


def entry(file: int, *, pieces: int = 1, numel: int = MIB_OF_FLOATS) -> dict[str, Any]:
    """Return the manifest's entry of a tensor in the files of this index."""
    chunks = [[f"__{rank}_{file}.distcp", 0, [0], [numel // pieces]] for rank in range(pieces)]
    return {"dtype": "float32", "shape": [numel], "chunks": chunks}


@pytest.fixture
def still() -> StillTensors:
    return StillTensors(lambda: {"model.trained"}, {"model"}, 10)


def test_a_tensor_moves_once_all_ranks_have_seen_it_unchanged(still: StillTensors) -> None:
    tensors = {"a": entry(0, pieces=2)}
    still.note([Moved([], {"a": 1})], tensors)
    assert not still.is_due
    still.note([Moved([], {"a": 1}), Moved([], {"a": 1})], tensors)
    assert still.is_due and still.is_still("a", False)


def test_a_tensor_that_changed_after_all_has_to_stay_the_same_for_twice_as_long(still: StillTensors) -> None:
    for patience in (2, 4):
        still.note([Moved(["a"], {})], {"a": entry(1)})
        assert not still.is_still("a", True)
        for _ in range(patience - 1):
            still.note([Moved([], {"a": 1})], {"a": entry(0)})
            assert not still.is_still("a", True)
        still.note([Moved([], {"a": 1})], {"a": entry(0)})
        assert still.is_still("a", True)


def test_a_save_in_between_that_changes_it_begins_the_count_again(still: StillTensors) -> None:
    still.note([Moved(["a"], {})], {"a": entry(1)})
    for unchanged in ({"a": 1}, {}, {"a": 1}):
        still.note([Moved([], unchanged)], {"a": entry(0)})
    assert not still.is_still("a", True)


def test_a_move_has_to_save_as_much_as_it_costs_to_write_the_still_files(still: StillTensors) -> None:
    large = {"large": entry(1, numel=20 * MIB_OF_FLOATS)}
    still.note([Moved([], {"a": 1})], large | {"a": entry(0)})
    assert not still.is_due
    still.note([Moved([], {"a": 1, "b": 1})], large | {"a": entry(0), "b": entry(0)})
    assert still.is_due and still.is_still("a", False) and still.is_still("b", False)


def test_what_waits_moves_together_with_what_has_changed(still: StillTensors) -> None:
    tensors = {"large": entry(1, numel=20 * MIB_OF_FLOATS), "other": entry(1), "a": entry(0)}
    still.note([Moved(["other"], {"a": 1})], tensors)
    assert still.is_still("a", False) and not still.is_still("other", True)

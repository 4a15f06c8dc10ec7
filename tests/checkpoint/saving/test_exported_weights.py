"""Exported weights stay loadable: a full checkpoint of the same step takes their name and keeps the weights."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.checkpoint.conftest import StartRun
from tests.checkpoint.one_file import as_one_file
from tests.checkpoint.small_run import same
from tests.store.crashing import Crash, Cut, contents
from tests.store.filled import commit
from torchtitan_lite.store.lineage import Lineage
from torchtitan_lite.store.manifest import CheckpointKind
from torchtitan_lite.store.store import CheckpointStore


def test_weights_that_a_run_trains_on_through_stay_under_another_name_whatever_is_purged(
    start_run: StartRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = start_run(interval=2, model_weights_only=True, export_dtype="bfloat16")
    first.train(4)
    exported = as_one_file(first.root / "step-4")
    run = start_run(interval=2, keep_latest_k=1).resumed()
    with caplog.at_level(logging.INFO, "torchtitan_lite"):
        run.train(8)
    assert run.names() == ["step-4.weights", "step-8"]
    assert same(as_one_file(run.root / "step-4.weights"), exported)
    assert "The weights-only step 4 is now step-4.weights: a full checkpoint takes its name" in caplog.messages


def test_weights_set_aside_begin_another_run(start_run: StartRun, tmp_path: Path) -> None:
    first = start_run(interval=2, model_weights_only=True)
    first.train(4)
    start_run(interval=2).manager.load()
    run = start_run(interval=2).loaded().finished(4, last=False)
    begun = start_run(tmp_path / "next", seed=1, initial_load_path=str(run.root / "step-4.weights")).resumed()
    assert same(dict(begun.model.state_dict()), dict(first.model.state_dict()))


def test_weights_set_aside_a_second_time_get_a_number(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoint", durable=Cut())
    for kind in (CheckpointKind.WEIGHTS_ONLY, CheckpointKind.FULL):
        save(store, b"1", kind)
    store.empty(store.discard(store.get(4)))
    for kind in (CheckpointKind.WEIGHTS_ONLY, CheckpointKind.FULL):
        save(store, b"2", kind)
    assert sorted(path.name for path in store.root.iterdir()) == ["step-4", "step-4.weights", "step-4.weights-2"]


def test_weights_of_a_run_that_is_left_are_abandoned_as_its_other_steps_are(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoint", durable=Cut())
    save(store, b"old", CheckpointKind.WEIGHTS_ONLY)
    save(store, b"new", CheckpointKind.FULL, Lineage("run2", abandons=((4, "run1"),)))
    assert sorted(path.name for path in store.root.iterdir()) == ["step-4", "step-4.abandoned-run1"]


@pytest.mark.promise(
    "A full checkpoint of the same step replaces no exported weights: they become `step-N.weights`, after a "
    "kill at any operation, too.",
    section="kept",
)
@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize("power", [True, False])
def test_cut_anywhere_the_weights_are_there_bit_for_bit(exchanges: bool, power: bool, tmp_path: Path) -> None:
    for at in range(1, 40):
        root = tmp_path / str(at) / "checkpoint"
        durable = Cut(exchanges=exchanges)
        save(CheckpointStore(root, durable=durable), b"weights", CheckpointKind.WEIGHTS_ONLY)
        weights = contents(root / "step-4")
        cut = Cut(at, exchanges, power, unsynced=durable.unsynced)
        try:
            save(CheckpointStore(root, durable=cut), b"full", CheckpointKind.FULL)
        except Crash:
            again = CheckpointStore(root, durable=Cut(exchanges=exchanges))
            again.recover()
            there = [path for path in root.iterdir() if contents(path) == weights]
            assert [path.name in ("step-4", "step-4.weights") for path in there] == [True], (at, list(root.iterdir()))
            save(again, b"full", CheckpointKind.FULL)
        assert contents(root / "step-4.weights") == weights
        assert CheckpointStore(root).get(4).kind is CheckpointKind.FULL
        if cut.done < at:
            return
    pytest.fail("there are more operations than the test cuts")


def save(store: CheckpointStore, data: bytes, kind: CheckpointKind, lineage: Lineage | None = None) -> None:
    commit(store, 4, data, kind=kind, lineage=lineage or Lineage("run1"))

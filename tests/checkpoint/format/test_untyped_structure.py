"""Checkpoints that do not store the types of keys: DCP's own, and converted ones. The live object supplies them."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.optim import lr_scheduler

from tests.checkpoint.small_run import target
from tests.store.filled import rewrite
from torchtitan_lite.checkpoint.reading.entries import Untyped, retyped
from torchtitan_lite.checkpoint.reading.stored_checkpoint import StoredCheckpoint
from torchtitan_lite.checkpoint.saving.savers import SyncSaver
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import CheckpointDamaged, CheckpointMismatch
from torchtitan_lite.store.store import CheckpointStore

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
PEERS = Peers(timedelta(seconds=60))


def converted(folder: Path, state: dict[str, Any]) -> Path:
    """Write `state` as a conversion of DCP's does: with a path for each entry in the manifest, and no structure."""
    SyncSaver(PEERS).save(state, target(CheckpointStore(folder), 1)).durable.result()
    path = folder / "step-1"
    paths: Any = FileSystemReader(path).read_metadata().planner_data

    def change(document: dict[str, Any]) -> None:
        document["structure"] = {}
        for table in "tensors", "objects":
            for key, entry in document[table].items():
                entry["path"] = list(paths[key])

    rewrite(path, change)
    return path


def by_dcp(folder: Path, state: dict[str, Any]) -> Path:
    dcp_save(state, checkpoint_id=folder / "dcp", no_dist=True)
    return folder / "dcp"


WRITERS = {"converted": converted, "DCP": by_dcp}


@pytest.fixture(params=WRITERS.values(), ids=WRITERS)
def write(request: pytest.FixtureRequest) -> Any:
    """Return each function that writes a checkpoint without types, in turn."""
    return request.param


def read(path: Path, own: dict[Any, Any]) -> Any:
    return StoredCheckpoint(path, PEERS).read_state("s", own)


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0, momentum=0.9)


def warm_up(step: int, *, num_warmup_steps: int) -> float:
    return min(1.0, step / num_warmup_steps)


SCHEDULES: dict[str, Callable[[], Any]] = {
    "MultiStepLR": lambda: lr_scheduler.MultiStepLR(optimizer(), [2, 5]),
    "a partial": lambda: lr_scheduler.LambdaLR(optimizer(), functools.partial(warm_up, num_warmup_steps=3)),
    "OneCycleLR": lambda: lr_scheduler.OneCycleLR(optimizer(), 1.0, 10),
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_a_schedule_is_restored_into_one_like_it(tmp_path: Path, write: Any, schedule: Callable[[], Any]) -> None:
    one, other = schedule(), schedule()
    for _ in range(3):
        one.optimizer.step()
        one.step()
    found = read(write(tmp_path, {"s": one.state_dict()}), other.state_dict())
    assert found == one.state_dict()
    assert [type(value) for value in found.values()] == [type(one.state_dict()[key]) for key in found]
    other.load_state_dict(found)
    assert other.last_epoch == 3


def test_an_optimizer_that_has_stepped_shows_that_its_keys_are_numbers(tmp_path: Path, write: Any) -> None:
    one = optimizer()
    for parameter in one.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    fresh = one.state_dict()
    one.step()
    path = write(tmp_path, {"s": one.state_dict()})
    found = read(path, one.state_dict())
    assert list(found["state"]) == [0, 1]
    assert found["param_groups"] == one.state_dict()["param_groups"]
    with pytest.raises(CheckpointMismatch, match=r"s\.state has the key '0', and .* a string or a int"):
        read(path, fresh)


def retype(entries: dict[tuple[str | int, ...], Any], live: Any) -> Any:
    return retyped("s", entries, live)


@pytest.mark.parametrize(
    ("entries", "live", "expected"),
    [
        ({("a",): 1}, {}, {"a": 1}),
        ({("30",): 1}, {30: 9}, {30: 1}),
        ({("30",): 1, ("90",): 2}, {30: 9, 80: 9}, {30: 1, 90: 2}),
        ({("30",): 1}, {"30": 9}, {"30": 1}),
        ({("30",): 1}, {"a": 9}, {"30": 1}),
        ({("True",): 1, ("None",): 2, ("1.5",): 3}, {True: 0, None: 0, 1.5: 0}, {True: 1, None: 2, 1.5: 3}),
        ({("a", 0, "x"): 1}, {"a": [{}]}, {"a": [{"x": 1}]}),
        ({("a", 1, "x"): 1}, {"a": [{}, {}, {}]}, {"a": [{}, {"x": 1}, {}]}),
        ({("a", 1, "x"): 1}, {}, {"a": [{}, {"x": 1}]}),
        ({("a", 0, "x"): 1}, {"a": [{}, {"not": "empty"}]}, {"a": [{"x": 1}]}),
        ({("b",): 1}, {"a": [{}], "b": 2}, {"a": [{}], "b": 1}),
        ({("b",): 1}, {"a": {"was": "empty"}, "b": 2}, {"a": {}, "b": 1}),
        ({("c", "b"): 1}, {"c": {"a": {"d": {}}, "b": 2}}, {"c": {"a": {"d": {}}, "b": 1}}),
        ({("c", "b"): 1}, {"c": {"a": {"new": 1}, "b": 2}}, {"c": {"b": 1}}),
        ({("c", "1"): 1}, {"c": collections.Counter({1: 5})}, {"c": collections.Counter({1: 1})}),
        ({("1",): 1, ("0",): 0}, {0: 5, 1: 5}, {0: 0, 1: 1}),
        ({("a",): [1, {}]}, {"a": 3}, {"a": [1, {}]}),
    ],
    ids=repr,
)
def test_the_live_object_supplies_what_the_paths_do_not_store(entries: Any, live: Any, expected: Any) -> None:
    found = retype(entries, live)
    assert repr(found) == repr(expected)


@pytest.mark.parametrize(
    ("entries", "live"),
    [
        ({("30",): 1}, {}),
        ({("30",): 1}, {1: 2, "a": 3}),
        ({("30",): 1}, {30: 1, "30": 2}),
        ({("1.5",): 1}, {3: 1}),
        ({("True",): 1}, {3: 1}),
        ({("(1, 2)",): 1}, {}),
        ({("a", "0", "x"): 1}, {"b": 1}),
    ],
    ids=repr,
)
def test_a_key_whose_type_is_unknown_is_refused_and_not_guessed(entries: Any, live: Any) -> None:
    with pytest.raises(Untyped, match=r"s(\.a)? has the key '[^']+', and .*--checkpoint.exclude_from_loading"):
        retype(entries, live)


@pytest.mark.parametrize(
    "entries",
    [
        {("a",): 1, ("a", "b"): 2},
        {("a", "b"): 1, ("a",): 2},
        {("a", 0): 1, ("a", "0"): 2},
        {("a", 10**12): 1},
        {("a", -1): 1},
        {(0,): 1},
        {(): 1},
        {("a",) * 10_000: 1},
    ],
    ids=lambda entries: repr(entries)[:40],
)
def test_paths_that_contradict_each_other_are_refused(entries: Any) -> None:
    with pytest.raises(ValueError) as caught:
        retype(entries, {})
    assert not isinstance(caught.value, Untyped)


def test_a_path_in_a_manifest_that_cannot_be_is_damage(tmp_path: Path) -> None:
    path = converted(tmp_path, {"s": {"a": 1, "b": 2}})
    rewrite(path, lambda document: document["objects"]["s.a"].update(path=["s", "a", 10**12]))
    with pytest.raises(CheckpointDamaged, match=r"s\.a: 1 entries do not make a list of"):
        read(path, {})


def test_an_entry_whose_path_is_its_name_is_read(tmp_path: Path) -> None:
    assert read(by_dcp(tmp_path, {"s.x": 1, "s.y.z": torch.ones(1)}), {}) == {"x": 1, "y.z": torch.ones(1)}

"""A load returns what was saved: containers, keys with their types, empty ones too; or the save refuses."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import types
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.optim import lr_scheduler

from tests.checkpoint.conftest import MODES
from tests.checkpoint.format.nests import nests
from tests.checkpoint.one_file import as_one_file
from tests.checkpoint.small_run import job_config, target
from tests.ranks import on_two_ranks
from torchtitan_lite.checkpoint.format.flattening import difference
from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.checkpoint.reading.stored_checkpoint import StoredCheckpoint
from torchtitan_lite.checkpoint.saving.savers import ProcessSaver, Saver, SyncSaver, ThreadSaver
from torchtitan_lite.checkpoint.state.stateful import ModelWrapper
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import CheckpointError, CheckpointMismatch, SaveFailed
from torchtitan_lite.store.store import CheckpointStore

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
PEERS = Peers(timedelta(seconds=60))


@pytest.fixture(params=MODES)
def saver(request: pytest.FixtureRequest, process_saver: ProcessSaver) -> Iterator[Saver]:
    """Yield each kind of saver in turn."""
    if request.param == "async_with_pinned_mem":
        yield process_saver
        return
    own: Saver = (SyncSaver if request.param == "disabled" else ThreadSaver)(PEERS)
    yield own
    own.close(60)


def save(folder: Path, state: dict[str, Any], saver: Saver | None = None, step: int = 1) -> Path:
    store = CheckpointStore(folder)
    (saver or SyncSaver(PEERS)).save(state, target(store, step)).durable.result()
    return folder / f"step-{step}"


def load(path: Path, name: str = "s", own: dict[str, Any] | None = None) -> Any:
    return StoredCheckpoint(path, PEERS).read_state(name, own or {})


def comes_back(folder: Path, state: dict[Any, Any], saver: Saver | None = None) -> bool:
    """Return whether a new object, which has no state yet, loads `state` with all its types."""
    found = load(save(folder, {"s": state}, saver))
    assert difference(state, found) == ""
    return same(state, found)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b) or a != a


OF_EVERY_KIND: dict[Any, Any] = {
    "empty": {},
    "nested": {"b": {}},
    "list": [{"x": 1}, {}],
    "empties": [{}, [], (), [{}, {"a": {}}], {"a": [{}]}],
    1: "one",
    "b": True,
    -5: {2**70: 1, 1.5: {}, None: 2, True: 3, b"k": 4, (1, ("a", 2.0)): {"x": torch.arange(3)}},
    "ordered": collections.OrderedDict([("z", 1), ("a", {})]),
    "counter": collections.Counter({30: 1, 80: 2}),
    "empty_counter": collections.Counter(),
    "by_default": collections.defaultdict(list, {3: [1]}),
    "by_default_none": collections.defaultdict(None, {"a": torch.ones(1)}),
    "tensors": [torch.ones(2), {"step": torch.tensor(1.0)}, [torch.zeros(0)]],
    "leaves": [(1, {2: 3}), {4, 5}, torch.Size([1, 2]), torch.bfloat16, torch.device("cpu"), b"", b"x", 1j],
    "leaf": (collections.OrderedDict(a=1), collections.Counter("aab"), torch.ones(2), set(), bytearray(b"a")),
}


def test_every_kind_of_container_and_key_comes_back(tmp_path: Path, saver: Saver) -> None:
    assert comes_back(tmp_path, OF_EVERY_KIND, saver)


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"a": {"b": {}}},
        {"a": [{"x": 1}, {}]},
        {0: {}},
        {"1": 1, 2: 2},
        {"a": [{}]},
        {"a.b": {"c": 1}, "a": {"b": 2}},
    ],
    ids=repr,
)
def test_small_states_come_back(tmp_path: Path, state: dict[Any, Any]) -> None:
    assert comes_back(tmp_path, state)


@settings(max_examples=40, deadline=None)
@given(st.lists(nests(), min_size=1, max_size=4))
def test_any_states_come_back_from_a_checkpoint(tmp_path_factory: pytest.TempPathFactory, drawn: list[Any]) -> None:
    state = {f"s{number}": each for number, each in enumerate(drawn)}
    path = save(tmp_path_factory.mktemp("any"), state)
    stored = StoredCheckpoint(path, PEERS)
    for name, each in state.items():
        found = stored.read_state(name, {})
        assert difference(each, found) == ""
        assert same(each, found)


def test_an_optimizer_among_the_states_continues_with_its_moments(tmp_path: Path, saver: Saver) -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[Any]:
        for _ in range(steps):
            model(torch.ones(4, 3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.tolist() for parameter in model.parameters()]

    model, optimizer = made()
    trained(model, optimizer, 3)
    path = save(tmp_path, {"model": model.state_dict(), "opt": optimizer.state_dict()}, saver)
    expected = trained(model, optimizer, 3)

    model, optimizer = made()
    StoredCheckpoint(path, PEERS).read_model(ModelWrapper(model).state_dict())
    optimizer.load_state_dict(load(path, "opt", optimizer.state_dict()))
    assert trained(model, optimizer, 3) == expected


def warm_up(step: int, *, num_warmup_steps: int, num_training_steps: int) -> float:
    """Return the rate at `step`; the transformers library makes schedules of partials of such functions."""
    return min(1.0, step / num_warmup_steps) * max(0.0, 1 - step / num_training_steps)


class Decay:
    """A schedule with its own state."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __call__(self, step: int) -> float:
        self.seen = step
        return 1 / (1 + self.rate * step)


def sequential(optimizer: torch.optim.Optimizer) -> Any:
    parts = [lr_scheduler.ConstantLR(optimizer, 0.5, 2), lr_scheduler.MultiStepLR(optimizer, [2, 4], 0.1)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 5], 0.1),
    "SequentialLR": sequential,
    "a partial": lambda optimizer: lr_scheduler.LambdaLR(
        optimizer, functools.partial(warm_up, num_warmup_steps=2, num_training_steps=9)
    ),
    "an object": lambda optimizer: lr_scheduler.LambdaLR(optimizer, Decay(0.5)),
    "ChainedScheduler": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.MultiStepLR(optimizer, [4], 0.1), lr_scheduler.ConstantLR(optimizer, 0.5, 5)]
    ),
}


class Run:
    """A model of one parameter with a schedule and a manager."""

    def __init__(self, folder: Path, schedule: Callable[[torch.optim.Optimizer], Any], **states: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0, momentum=0.9)
        self.scheduler = schedule(self.optimizer)
        config = job_config(folder, interval=3, max_failed_saves=1)
        self.manager = CheckpointManager(None, [self.model], [self.optimizer], [self.scheduler], dict(states), config)

    def rates(self, first: int, last: int) -> list[float]:
        """Train these steps and save every third; return their learning rates."""
        rates = []
        for step in range(first, last + 1):
            self.model(torch.ones(1, 1)).sum().backward()
            self.optimizer.step()
            self.scheduler.step()
            rates.append(self.optimizer.param_groups[0]["lr"])
            self.manager.save(step)
        return rates


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_a_schedule_continues(tmp_path: Path, schedule: Callable[[torch.optim.Optimizer], Any]) -> None:
    straight = Run(tmp_path / "straight", schedule)
    with straight.manager:
        expected = straight.rates(1, 8)
    first = Run(tmp_path / "cut", schedule)
    with first.manager:
        first.rates(1, 3)
    again = Run(tmp_path / "cut", schedule)
    with again.manager:
        assert again.manager.load()
        assert again.rates(4, 8) == expected[3:]


class Holder:
    """A state that is what it was given."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"mine": self.state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict["mine"]


class Config(dict[str, int]):
    """A dict with an attribute."""


Pair = collections.namedtuple("Pair", "a b")
Color = enum.Enum("Color", "RED")
Size = dataclasses.make_dataclass("Size", [("width", int)])
REFUSED = {
    "a mapping of its own": ({"cfg": Config(a=1)}, r"s\.mine\.cfg is a .*Config, which would not come back"),
    "an empty one": (Config(), r"s\.mine is a .*Config"),
    "a read-only mapping": ([types.MappingProxyType({"a": 1})], r"s\.mine\.0 is a mappingproxy"),
    "a defaultdict of a function": (collections.defaultdict(lambda: 0), r"s\.mine is a defaultdict of <function"),
    "a list of its own": (type("Items", (list,), {})([torch.ones(1)]), r"s\.mine is a .*Items"),
    "a key of its own": ({torch.float32: 1}, r"s\.mine has a torch.dtype as a key"),
    "half a character": ({"\ud800": 1}, r"s\.mine has '.ud800' as a key"),
    "one name for two": ({1: 1, "1": 2}, r"two entries .* 's\.mine\.1'"),
    "a namedtuple": (Pair(1, 2), r"s\.mine holds an object that .* tuple\(it\) of a namedtuple"),
    "a frozenset": ((frozenset([1]),), r"s\.mine holds an object that .* set\(it\) of a frozenset"),
    "an enum": (collections.deque([Color.RED]), r"s\.mine holds an object that .* it\.value of an enum"),
    "a dataclass": ([1, Size(2)], r"s\.mine holds an object that .* dataclasses\.asdict\(it\)"),
    "an array of objects": (np.array([None]), r"s\.mine holds an object that .* it\.tolist\(\) of NumPy.s times, obj"),
    "times of NumPy": (np.array(["2020-01-01"], "M8[D]"), r"s\.mine holds an object that .* of NumPy.s times, obj"),
    "a long key": ({10**5000: 1}, r"s\.mine has a int as a key"),
}


@pytest.mark.parametrize(("value", "match"), REFUSED.values(), ids=REFUSED)
def test_what_would_not_come_back_is_refused_by_name(tmp_path: Path, value: Any, match: str) -> None:
    run = Run(tmp_path, SCHEDULES["MultiStepLR"], s=Holder(value))
    with run.manager, pytest.raises(SaveFailed, match=match):
        run.rates(1, 4)
    assert CheckpointStore(tmp_path / "checkpoint").committed() == []


def test_a_state_that_contains_itself_is_refused(tmp_path: Path) -> None:
    endless: dict[str, Any] = {}
    endless["a"] = endless
    around: list[Any] = [{}]
    around.append(around)
    for value in endless, {"a": around}:
        with pytest.raises(SaveFailed, match="more than 100 deep, or contains itself"):
            save(tmp_path, {"s": value})


def test_a_refusal_is_the_same_in_every_mode(tmp_path: Path, saver: Saver) -> None:
    for value in {"x": Config()}, {"x": [b"", "x" * 70_000, object()]}:
        with pytest.raises(SaveFailed, match=r"s(\['x'\]|\.x) (is a .*Config|holds an object)"):
            save(tmp_path, {"s": value}, saver)
    assert comes_back(tmp_path, {"x": 1}, saver)


LARGE = "x" * 70_000
LARGE_OBJECTS = {
    "empty bytes": [b"", LARGE],
    "empty bytes within": [{"a": [(b"", {b"": b""})]}, (LARGE, b"")],
    "many": list(range(100_000)),
    "of every plain type": [None, True, 1, 2**70, 1.5, "ä", b"\xff", (1, [2], {"a": {3: ()}}), LARGE],
    "with tensors": (torch.ones(30_000), [b"x"], collections.OrderedDict(a=torch.ones(2))),
}


@pytest.mark.parametrize("value", LARGE_OBJECTS.values(), ids=LARGE_OBJECTS)
def test_an_object_too_large_for_the_manifest_comes_back(tmp_path: Path, value: Any) -> None:
    assert comes_back(tmp_path, {"x": value})
    # DCP's tool writes b"" with a pickle that calls `bytes`, which torch does not call safe.
    assert difference({"s": {"x": value}}, as_one_file(tmp_path / "step-1", weights_only=False)) == ""


@pytest.mark.parametrize("value", [[10**700, LARGE], ["\ud800", LARGE]], ids=["a huge number", "half a character"])
def test_a_large_object_that_our_reader_does_not_take_is_refused_by_name(tmp_path: Path, value: Any) -> None:
    with pytest.raises(SaveFailed, match=r"s\.x holds an object that could not be loaded again"):
        save(tmp_path, {"s": {"x": value}})
    assert comes_back(tmp_path, {"x": value[:1]})


def test_a_large_object_is_checked_whenever_it_changes(tmp_path: Path, saver: Saver) -> None:
    value: list[Any] = [LARGE, b""]
    assert comes_back(tmp_path, {"x": value}, saver)
    value.append("\ud800")
    with pytest.raises(SaveFailed, match=r"s\.x holds"):
        save(tmp_path, {"s": {"x": value}}, saver, step=2)


def test_plain_dcp_reads_all_of_it_under_its_own_names(tmp_path: Path) -> None:
    path = save(tmp_path, {"s": OF_EVERY_KIND})
    into = {"s": {"-5": {"(1, ('a', 2.0))": {"x": torch.zeros(3, dtype=torch.int64)}}, "counter": {"30": 0}}}
    dcp_load(into, checkpoint_id=path, no_dist=True)
    assert into["s"]["-5"]["(1, ('a', 2.0))"]["x"].tolist() == [0, 1, 2]
    assert into["s"]["counter"] == {"30": 1}
    whole = as_one_file(path, weights_only=False)["s"]
    assert whole["list"] == [{"x": 1}]
    assert whole["empties"] == {"1": [], "2": ()}, "the tool loses such a list, so its positions are names"
    assert whole["counter"] == {"30": 1, "80": 2}


class WithExpanded(nn.Module):
    table: torch.Tensor

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table)


def test_an_expanded_buffer_is_refused_at_the_first_save_and_before_a_load(tmp_path: Path) -> None:
    expanded = WithExpanded(torch.ones(3, 1).expand(3, 4))
    with pytest.raises(TypeError, match=r"table is expanded: .*\[3, 4\].*clone"):
        ModelWrapper(expanded).state_dict()
    path = save(tmp_path, {"model": ModelWrapper(WithExpanded(torch.ones(3, 4))).state_dict()})
    with pytest.raises(CheckpointMismatch, match=r"table: expanded here"):
        StoredCheckpoint(path, PEERS).read_model(expanded.state_dict())
    assert ModelWrapper(WithExpanded(torch.ones(4).expand(1, 4))).state_dict()["table"].shape == (1, 4)


def test_an_expanded_tensor_of_another_state_comes_back_with_memory_of_its_own(tmp_path: Path, saver: Saver) -> None:
    found = load(save(tmp_path, {"s": {"x": torch.arange(3.0).expand(4, 3)}}, saver))["x"]
    assert torch.equal(found, torch.arange(3.0).expand(4, 3))
    assert found.is_contiguous()


def test_an_empty_state_is_in_the_checkpoint(tmp_path: Path) -> None:
    stored = StoredCheckpoint(save(tmp_path, {"s": {"a": {}}, "t": {"x": 1}}), PEERS)
    assert not stored.report({}, {}, ["s"]).missing
    assert stored.report({}, {}, ["u"]).missing == ["u"]
    assert stored.read_state("s", {"a": {"what the run has": 1}}) == {"a": {}}
    with pytest.raises(CheckpointError, match="u"):
        stored.read_state("u", {"a": 1})


@on_two_ranks
def test_entries_of_each_rank_come_back_on_both(rank: int, tmp_path: Path) -> None:
    peers = Peers(timedelta(seconds=60))
    saver, store = SyncSaver(peers), CheckpointStore(tmp_path / "checkpoint")
    apart = saver.save({"s": {"x": {} if rank else 1}}, target(store, 1)).durable
    with pytest.raises(SaveFailed, match=r"s\.x is a dict on one rank and no container on another"):
        apart.result()
    refused = saver.save({"s": {"x": Config() if rank else {}}}, target(store, 1)).durable
    with pytest.raises(SaveFailed, match=r"s\.x is a .*Config"):
        refused.result()
    state = {"s": {"common": collections.Counter({1: 2}), rank: {"mine": torch.tensor([rank]), "empty": [{}]}}}
    saver.save(state, target(store, 2)).durable.result()
    dist.barrier()
    found = StoredCheckpoint(store.root / "step-2", peers).read_state("s", {})
    both = {number: {"mine": torch.tensor([number]), "empty": [{}]} for number in (0, 1)}
    expected = {"common": collections.Counter({1: 2}), **both}
    assert difference(expected, found) == ""
    assert same(expected, found)

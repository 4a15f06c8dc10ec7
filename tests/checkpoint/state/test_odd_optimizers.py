"""Optimizers with state of other forms than one tensor of its parameter's shape, and saves that raise."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from tests.checkpoint.only_once import load_and_close, save_and_close
from tests.checkpoint.savers import Lent
from tests.checkpoint.small_run import job_config, same
from tests.checkpoint.state.odd_objects import OwnForm
from torchtitan_lite.checkpoint.format.flattening import difference
from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.checkpoint.saving.savers import ProcessSaver
from torchtitan_lite.checkpoint.seams import Seams
from torchtitan_lite.checkpoint.state.optimizer_state import nested_tensors
from torchtitan_lite.errors import CheckpointMismatch, ConfigError, SaveFailed


class Preconditioned(Optimizer):
    """State of many kinds: a list of tensors, nested dicts, a number as name, moments of another dtype."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "scale": torch.tensor(2.0)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns no loss
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["factors"] = [torch.ones(size) for size in parameter.shape]
                    state["nest"] = {"sums": torch.zeros(2), "count": 0}
                    state["exact"] = torch.zeros_like(parameter, dtype=torch.float64)
                    state["signs"] = torch.zeros_like(parameter, dtype=torch.int8)
                    state["history"] = []
                for factor in state["factors"]:
                    factor += parameter.grad.mean()
                state["nest"]["count"] += 1
                state["nest"]["sums"] += state["nest"]["count"]
                state["exact"] += parameter.grad.double() / 3
                state["signs"] = parameter.grad.sign().to(torch.int8)
                state["history"] = [*state["history"], parameter.grad.clone()][-2:]
                parameter -= group["lr"] / group["scale"] * state["exact"].float() * state["factors"][0].mean()


class WithGlobalState(torch.optim.SGD):
    """State that belongs to no parameter."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns no loss
        shared = self.state["global"]
        shared["count"] = shared.get("count", 0) + 1
        shared["sum"] = shared.get("sum", torch.zeros(3)) + 0.5
        super().step(closure)


class Lookahead(Optimizer):
    """A wrapper without hooks that keeps slow weights in the state of the optimizer that it wraps."""

    def __init__(self, base: Optimizer) -> None:
        self.base = base
        self.param_groups, self.defaults = base.param_groups, base.defaults
        self.state = defaultdict(dict)
        # As in libraries that do not call Optimizer.__init__.
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns no loss
        self.base.step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                slow = self.base.state[parameter].setdefault("slow", parameter.clone())
                slow.lerp_(parameter, 0.5)
                parameter.copy_(slow)

    def state_dict(self) -> dict[str, Any]:
        return self.base.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base.load_state_dict(state_dict)
        self.param_groups = self.base.param_groups


class Delegating:
    """No subclass of Optimizer, like wrappers of mixed-precision libraries."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


def with_empty_group(model: nn.Module) -> Optimizer:
    groups = [{"params": list(model.parameters())}, {"params": [], "lr": 0.7, "weight_decay": 0.3}]
    return torch.optim.AdamW(groups, lr=0.1)


BUILDS: dict[str, Callable[[nn.Module], Any]] = {
    "lists of tensors": lambda model: Preconditioned(model.parameters()),
    "state of no parameter": lambda model: WithGlobalState(model.parameters(), lr=0.1, momentum=0.9),
    "a wrapper": lambda model: Lookahead(torch.optim.AdamW(model.parameters())),
    "a wrapper of no class": lambda model: Delegating(torch.optim.AdamW(model.parameters())),
    "a form of its own": lambda model: OwnForm(model.parameters(), lr=0.1, momentum=0.9),
    "an empty group": with_empty_group,
    "a tensor lr": lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1)),
}


def start(folder: Path, build: Callable[[nn.Module], Any], **options: Any) -> tuple[Any, Any, CheckpointManager]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = build(model)
    seams = {"saver": options.pop("saver")} if "saver" in options else {}
    return (
        model,
        optimizer,
        CheckpointManager(None, [model], [optimizer], [], {}, job_config(folder, **options), seams=Seams(**seams)),
    )


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(torch.full((2, 3), float(step))).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("name", BUILDS)
def test_it_continues_as_if_it_had_never_stopped(
    tmp_path: Path, name: str, mode: str, process_saver: ProcessSaver
) -> None:
    lent = {"saver": Lent(process_saver)} if mode == "async_with_pinned_mem" else {}
    model, optimizer, manager = start(tmp_path, BUILDS[name], async_mode=mode, interval=3, **lent)
    with manager:
        for step in range(1, 4):
            train(model, optimizer, range(step, step + 1))
            manager.save(step)
        manager.maybe_wait_for_staging()
        at_save = _copied(optimizer.state_dict())
        train(model, optimizer, range(4, 6))
    again, other, loading = start(tmp_path, BUILDS[name])
    load_and_close(loading)
    assert same(other.state_dict(), at_save)
    train(again, other, range(4, 6))
    assert same(dict(again.state_dict()), dict(model.state_dict()))
    assert same(other.state_dict(), optimizer.state_dict())


def test_moments_of_a_higher_precision_than_the_parameter_keep_their_bits(tmp_path: Path) -> None:
    """Optimizer.load_state_dict by itself would cast them."""
    model, optimizer, manager = start(tmp_path, BUILDS["lists of tensors"])
    train(model, optimizer, range(1, 4))
    save_and_close(manager)
    seen: list[torch.dtype] = []
    again, other, loading = start(tmp_path, BUILDS["lists of tensors"])
    other.register_load_state_dict_post_hook(
        lambda loaded: seen.extend(loaded.state[parameter]["exact"].dtype for parameter in again.parameters())
    )
    load_and_close(loading)
    assert seen == [torch.float64] * 4
    state = other.state[again[0].weight]
    assert (state["exact"].dtype, state["signs"].dtype) == (torch.float64, torch.int8)


def test_a_special_form_is_refused_if_ranks_hold_parts_of_the_model(tmp_path: Path) -> None:
    parts = [nn.ModuleDict({name: nn.Linear(2, 2)}) for name in ("a", "b")]
    optimizer = OwnForm([parameter for part in parts for parameter in part.parameters()], lr=0.1)
    with pytest.raises(ConfigError, match=r"optimizers\[0\] \(OwnForm\): its state_dict\(\) does not have the form"):
        CheckpointManager(None, parts, optimizer, None, {}, job_config(tmp_path))


def test_another_optimizer_than_the_one_that_was_saved_is_refused(tmp_path: Path) -> None:
    model, optimizer, manager = start(tmp_path, lambda model: torch.optim.AdamW(model.parameters()))
    train(model, optimizer, range(1, 2))
    save_and_close(manager)
    _, _, loading = start(tmp_path, lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    with (
        loading,
        pytest.raises(CheckpointMismatch, match=r"another optimizer's: it has .*betas.* and lacks .*momentum"),
    ):
        loading.load()


@pytest.mark.parametrize("build", [lambda model: torch.optim.SGD(model.parameters(), lr=0.1), None])
def test_an_optimizer_with_a_form_of_its_own_refuses_a_checkpoint_without_its_state(
    tmp_path: Path, build: Callable[[nn.Module], Any] | None
) -> None:
    if build is None:
        alone = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        manager = CheckpointManager(None, [alone], [], [], {}, job_config(tmp_path))
    else:
        _, _, manager = start(tmp_path, build)
    save_and_close(manager)
    model, _, loading = start(tmp_path, BUILDS["a form of its own"])
    before = _copied(model.state_dict())
    with loading, pytest.raises(CheckpointMismatch, match="no state dict of OwnForm, which has a special form"):
        loading.load()
    assert same(dict(model.state_dict()), before)


def test_a_load_of_a_step_before_a_state_of_no_parameter_removes_it(tmp_path: Path) -> None:
    model, optimizer, manager = start(tmp_path, BUILDS["state of no parameter"], interval=1)
    with manager:
        manager.save(1)
        train(model, optimizer, range(1, 2))
        assert optimizer.state["global"]["count"] == 1
        assert manager.load(1)
        assert "global" not in optimizer.state


def test_parameters_of_one_group_that_had_other_settings_are_refused(tmp_path: Path) -> None:
    def decaying(model: nn.Module, *, split: bool) -> Optimizer:
        first, second = model[0].parameters(), model[1].parameters()  # type: ignore[index]  # it is a Sequential
        groups = [{"params": first, "weight_decay": 0.1}, {"params": second, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups if split else model.parameters())

    _, _, manager = start(tmp_path, lambda model: decaying(model, split=True))
    save_and_close(manager)
    _, _, loading = start(tmp_path, lambda model: decaying(model, split=False))
    with (
        loading,
        pytest.raises(CheckpointMismatch, match=r"weight_decay: 0.0 in the checkpoint, next to 0.1 of 0.weight"),
    ):
        loading.load()


@pytest.mark.parametrize("strictness", ["warn", "ignore"])
def test_state_of_a_parameter_of_another_size_is_not_read(tmp_path: Path, strictness: str) -> None:
    model, optimizer, manager = start(tmp_path, lambda model: torch.optim.AdamW(model.parameters()))
    train(model, optimizer, range(1, 3))
    save_and_close(manager, 2)
    again = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    other = torch.optim.AdamW(again.parameters())
    config = job_config(tmp_path, load_strictness=strictness)
    load_and_close(CheckpointManager(None, [again], [other], [], {}, config))
    assert not other.state.get(again[1].weight) and not other.state.get(again[1].bias)
    assert same(dict(other.state[again[0].weight]), dict(optimizer.state[model[0].weight]))


def test_a_step_that_raises_costs_a_save_nothing(tmp_path: Path, mode: str) -> None:
    """A save takes no step, so lr, gradients and averages do not change."""

    def raising(*_: Any) -> None:
        raise RuntimeError("a step that no save may take")

    model, optimizer, manager = start(
        tmp_path, lambda model: torch.optim.AdamW(model.parameters(), lr=0.5), async_mode=mode, interval=100
    )
    model(torch.ones(1, 3)).sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    with manager:
        manager.reset()
        optimizer.register_step_post_hook(raising)
        assert not manager.save(1)
    assert optimizer.param_groups[0]["lr"] == 0.5 and optimizer.param_groups[0]["weight_decay"] == 0.01
    assert same([parameter.grad for parameter in model.parameters()], gradients)


def test_an_average_in_a_step_hook_is_the_same_with_saves_and_without(tmp_path: Path, mode: str) -> None:
    def average(folder: Path, *, interval: int) -> torch.Tensor:
        model, optimizer, manager = start(
            folder, lambda model: torch.optim.SGD(model.parameters(), lr=0.1), async_mode=mode, interval=interval
        )
        kept = torch.zeros(4, 3)
        optimizer.register_step_post_hook(lambda *_: kept.lerp_(model[0].weight.detach() + torch.rand(()), 0.5))
        with manager:
            for step in range(1, 4):
                train(model, optimizer, range(step, step + 1))
                manager.save(step)
        return kept

    assert torch.equal(average(tmp_path / "never", interval=100), average(tmp_path / "always", interval=1))


def test_state_that_an_older_checkpoint_made_for_parameters_that_never_stepped_is_loaded(tmp_path: Path) -> None:
    model, optimizer, manager = start(tmp_path, lambda model: torch.optim.AdamW(model.parameters()))
    for parameter in model.parameters():
        made = {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
        optimizer.state[parameter] = {"step": torch.tensor(0.0), **made}
    save_and_close(manager)
    again, other, loading = start(tmp_path, lambda model: torch.optim.AdamW(model.parameters()))
    load_and_close(loading)
    assert same(dict(other.state[again[1].bias]), dict(optimizer.state[model[1].bias]))


def test_an_object_in_the_state_that_could_not_be_loaded_again_is_refused_by_name(tmp_path: Path) -> None:
    model, optimizer, manager = start(tmp_path, lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer.state[model[0].weight]["generator"] = torch.Generator()
    with manager, pytest.raises(SaveFailed, match=r"optimizer\.state\.0\.weight\.generator"):
        manager.save(1, force=True)


def test_a_tied_parameter_finds_its_state_under_any_of_its_names(tmp_path: Path) -> None:
    """It is saved under the first one, which may be another one if the model is built in another order."""

    def run(*order: str) -> tuple[torch.optim.Adam, CheckpointManager]:
        shared = nn.Parameter(torch.ones(2))
        model = nn.ParameterDict(dict.fromkeys(order, shared))
        optimizer = torch.optim.Adam(model.parameters())
        return optimizer, CheckpointManager(None, [model], [optimizer], [], {}, job_config(tmp_path))

    optimizer, manager = run("head", "embedding")
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
    optimizer.step()
    save_and_close(manager)
    other, loading = run("embedding", "head")
    load_and_close(loading)
    [state], [expected] = other.state.values(), optimizer.state.values()
    assert same(dict(state), dict(expected))


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, list) else value


class Remembering(torch.optim.SGD):
    """SGD that keeps `made()` in the state of each parameter, with a tensor under a plain name."""

    def __init__(self, params: Any, made: Callable[[], dict[Any, Any]]) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self._made = made

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns no loss
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] |= self._made()


KEPT: dict[str, Callable[[], dict[Any, Any]]] = {
    "a tuple of tensors": lambda: {"pair": (torch.tensor([1 / 3]), torch.tensor([7]))},
    "tuples within a list": lambda: {"pairs": [(torch.tensor([1 / 3]), 1), {"deep": (torch.tensor([1 / 3]),)}]},
    "strings": lambda: {"name": "cosine", "nest": {"names": ["a", "b"]}},
    "mappings of other kinds": lambda: {"seen": defaultdict(list, {"a": [1]}), "order": OrderedDict(z=1, a=2)},
    "keys that are not strings": lambda: {0: torch.ones(2), (1, 2): 3, None: 1.5, "a.b": torch.ones(1)},
    "containers under such keys": lambda: {0: {}, 1: [], 2: {"a": {}}, 3: {4: torch.ones(2)}},
}


@pytest.mark.parametrize("kind", KEPT)
def test_state_of_any_kind_comes_back_with_its_types(tmp_path: Path, kind: str) -> None:
    def build(seed: int) -> tuple[nn.Module, Remembering]:
        torch.manual_seed(seed)
        # torch casts loaded state to the dtype of its parameter.
        model = nn.Linear(2, 2, dtype=torch.bfloat16)
        return model, Remembering(model.parameters(), KEPT[kind])

    model, optimizer = build(0)
    model(torch.ones(2, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    save_and_close(CheckpointManager(None, model, optimizer, None, {}, job_config(tmp_path)))
    again, resumed = build(1)
    load_and_close(CheckpointManager(None, again, resumed, None, {}, job_config(tmp_path, load_only=True)))
    for ours, theirs in zip(optimizer.state.values(), resumed.state.values(), strict=True):
        assert not difference(ours, theirs)
        assert same(ours, theirs)


@pytest.mark.parametrize("value", [float("nan"), (0.9, float("nan")), {}, {"a": {}, "b": [{}]}, []], ids=repr)
def test_a_setting_that_equals_no_other_or_is_empty_comes_back(tmp_path: Path, value: Any) -> None:
    def build() -> tuple[nn.Module, Optimizer]:
        model = nn.Linear(2, 2)
        return model, torch.optim.SGD([{"params": list(model.parameters()), "extra": value}], lr=0.1)

    model, optimizer = build()
    save_and_close(CheckpointManager(None, model, optimizer, None, {}, job_config(tmp_path)))
    again, resumed = build()
    resumed.param_groups[0]["extra"] = None
    load_and_close(CheckpointManager(None, again, resumed, None, {}, job_config(tmp_path, load_only=True)))
    assert repr(resumed.param_groups[0]["extra"]) == repr(value)


@pytest.mark.parametrize("made", [np.array, lambda value: [np.array(value)]], ids=["array", "list"])
def test_a_setting_that_is_an_array_comes_back_and_is_refused_next_to_another_one(tmp_path: Path, made: Any) -> None:
    def build(values: list[list[float]]) -> tuple[nn.Module, Optimizer]:
        model = nn.Linear(2, 2)
        names = [["weight", "bias"]] if len(values) == 1 else [["weight"], ["bias"]]
        groups = [
            {"params": [getattr(model, name) for name in each], "extra": made(value)}
            for each, value in zip(names, values, strict=True)
        ]
        return model, torch.optim.SGD(groups, lr=0.1)

    model, optimizer = build([[1.0, 2.0]])
    save_and_close(CheckpointManager(None, model, optimizer, None, {}, job_config(tmp_path)))
    again, resumed = build([[3.0, 3.0]])
    load_and_close(CheckpointManager(None, again, resumed, None, {}, job_config(tmp_path, load_only=True)))
    assert repr(resumed.param_groups[0]["extra"]) == repr(made([1.0, 2.0]))
    model, optimizer = build([[1.0, 2.0], [1.0, 3.0]])
    save_and_close(CheckpointManager(None, model, optimizer, None, {}, job_config(tmp_path / "two")))
    again, resumed = build([[3.0, 3.0]])
    manager = CheckpointManager(None, again, resumed, None, {}, job_config(tmp_path / "two", load_only=True))
    with manager, pytest.raises(CheckpointMismatch, match="which is in its group now"):
        manager.load()


@pytest.mark.parametrize("name", ["a.b", 0])
def test_a_setting_whose_name_a_checkpoint_cannot_hold_is_refused_at_the_save(tmp_path: Path, name: Any) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([{"params": list(model.parameters()), name: 1}], lr=0.1)
    manager = CheckpointManager(None, model, optimizer, None, {}, job_config(tmp_path, max_failed_saves=1))
    refused = f"has a setting {name!r}. Expected names that are strings"
    with manager, pytest.raises((ConfigError, SaveFailed), match=refused):
        manager.save(1, force=True)


class WithOwnLoad(Remembering):
    """Like optimizers of libraries, it calls torch's own `load_state_dict` in its own."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)


def remembered(folder: Path, kind: type[Remembering], made: dict[str, Any], dtype: torch.dtype) -> list[dict[str, Any]]:
    """Return the states of a parameter that a run saved, and that another run of `kind` loaded."""
    states: list[dict[str, Any]] = []
    for load in (False, True):
        model = nn.Linear(2, 2, bias=False, dtype=dtype)
        optimizer = kind(model.parameters(), lambda: made)
        config = job_config(folder, load_only=load)
        with CheckpointManager(None, model, optimizer, None, {}, config) as manager:
            if load:
                assert manager.load()
            else:
                model(torch.ones(2, dtype=dtype)).sum().backward()
                optimizer.step()
                manager.save(1, force=True)
        states.append(optimizer.state[model.weight])
    return states


def test_state_keeps_its_dtypes_in_an_optimizer_that_extends_torchs_load(tmp_path: Path) -> None:
    made = {"exact": torch.tensor([1 / 3]), "pair": (torch.tensor([7]), torch.tensor([1 / 3]))}
    ours, theirs = remembered(tmp_path, WithOwnLoad, made, torch.bfloat16)
    assert not difference(ours, theirs) and same(ours, theirs)


class WithItsOwnCasts(Remembering):
    """Like optimizers that load all by themselves and cast as torch does."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        parameters = [each for group in self.param_groups for each in group["params"]]
        for number, own in state_dict["state"].items():
            parameter = parameters[number]
            self.state[parameter] = {key: value.to(parameter.dtype) for key, value in own.items()}


def test_state_keeps_its_dtypes_in_an_optimizer_that_never_calls_torchs_load(tmp_path: Path) -> None:
    made = {"exact": torch.tensor([1 / 3]), "count": torch.tensor([1 << 40])}
    ours, theirs = remembered(tmp_path, WithItsOwnCasts, made, torch.bfloat16)
    assert not difference(ours, theirs) and same(ours, theirs)


def test_matrices_come_back_in_the_order_in_which_they_lie_in_memory(tmp_path: Path) -> None:
    made = {
        "columns": torch.rand(3, 4).t(),
        "as the parameter": torch.rand(2, 2).t(),
        "sides": [torch.rand(2, 3).t(), torch.rand(3, 3), None, torch.rand(2, 3, 4).permute(2, 0, 1)],
        "nest": {"a.b": {"c": torch.rand(5, 2, 4).permute(1, 2, 0)}},
        7: torch.rand(3, 3).t(),
        "with gaps": torch.rand(4, 4)[:, ::2],
    }
    ours, theirs = remembered(tmp_path, Remembering, made, torch.float32)
    assert same(ours, theirs)
    for key, value in ours.items():
        expected = [
            each.contiguous().stride() if key == "with gaps" else each.stride() for each in nested_tensors(value)
        ]
        assert [each.stride() for each in nested_tensors(theirs[key])] == expected, key

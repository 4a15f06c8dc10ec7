"""A run's objects under names that do not depend on how it is parallelised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.checkpoint.small_run import Tiny, fqns, same
from torchtitan_lite.checkpoint.state.stateful import LRSchedulerWrapper, ModelWrapper, OptimizerWrapper
from torchtitan_lite.errors import CheckpointMismatch

PLAIN_NAMES = {
    *("first.weight", "first.bias", "second.weight", "second.bias", "norm.weight", "norm.bias"),
    *("norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "counter"),
}


def plain() -> Tiny:
    return Tiny()


def with_activation_checkpointing() -> Tiny:
    model = Tiny()
    model.first = checkpoint_wrapper(model.first)  # type: ignore[assignment]  # a wrapper behaves like what it wraps
    return model


def compiled() -> Tiny:
    model = Tiny()
    model.first = torch.compile(model.first, backend="eager")  # type: ignore[assignment]  # as above; compiles at the first call
    return model


def stepped(optimizer: torch.optim.AdamW) -> torch.optim.AdamW:
    """Return the optimizer after a step with gradients of 0 for all of its parameters."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("build", [plain, with_activation_checkpointing, compiled])
def test_names_are_those_of_the_plain_model(build: Callable[[], Tiny]) -> None:
    model = build()
    optimizer = OptimizerWrapper([model], [stepped(torch.optim.AdamW(model.parameters()))]).state_dict()
    trained = {name for name, _ in Tiny().named_parameters()}
    assert ModelWrapper(model).state_dict().keys() == PLAIN_NAMES
    assert {name.rpartition(".")[0] for name in fqns(list(optimizer), "state.")} == trained
    assert {name.rpartition(".")[0] for name in fqns(list(optimizer), "param_groups.")} == trained


def test_buffers_that_are_not_persistent_are_left_out() -> None:
    assert "table" not in ModelWrapper(Tiny()).state_dict()


def test_the_tensors_are_the_live_ones() -> None:
    model = Tiny()
    ModelWrapper(model).state_dict()["first.weight"].fill_(4.0)
    assert torch.all(model.first.weight == 4.0)


def test_a_model_takes_back_what_it_gave() -> None:
    saved = {name: tensor.clone() for name, tensor in ModelWrapper(Tiny()).state_dict().items()}
    model = Tiny()
    assert not same(ModelWrapper(model).state_dict(), saved)
    ModelWrapper(model).load_state_dict(saved)
    assert same(ModelWrapper(model).state_dict(), saved)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda state: state.pop("first.bias"), "missing in the checkpoint (1):\n    first.bias"),
        (lambda state: state.update(extra=torch.zeros(1)), "unexpected in the checkpoint (1):\n    extra"),
        (lambda state: state.update(counter=torch.zeros(3)), "counter: shape [3] in the checkpoint, [2] expected"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_completely(change: Callable[[dict[str, Any]], Any], named: str) -> None:
    model = Tiny()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state: dict[str, Any] = {name: tensor + 1 for name, tensor in before.items()}
    change(state)
    with pytest.raises(CheckpointMismatch) as refusal:
        ModelWrapper(model).load_state_dict(state)
    assert named in str(refusal.value)
    assert same(dict(model.state_dict()), before)


def test_several_parts_are_one_state() -> None:
    parts = [nn.ModuleDict({"layer0": nn.Linear(2, 2)}), nn.ModuleDict({"layer1": nn.Linear(2, 2)})]
    optimizers = [stepped(torch.optim.AdamW(part.parameters())) for part in parts]
    names = {f"layer{i}.{name}" for i in (0, 1) for name in ("weight", "bias")}
    assert ModelWrapper(parts).state_dict().keys() == names
    wrapper = OptimizerWrapper(parts, optimizers)
    state = wrapper.state_dict()
    assert {name.rpartition(".")[0] for name in fqns(list(state), "state.")} == names
    for name in state:
        state[name] = state[name] + 1 if name.endswith("exp_avg") else state[name]
    wrapper.load_state_dict(state)
    assert all(torch.all(s["exp_avg"] == 1) for optimizer in optimizers for s in optimizer.state.values())


def test_a_name_that_two_parts_share_is_refused_by_name() -> None:
    parts = [nn.Linear(2, 2), nn.Linear(2, 2)]
    with pytest.raises(ValueError, match=r"share the name 'bias' and 1 more.*own layers.*nn[.]ModuleDict"):
        ModelWrapper(parts).state_dict()
    with pytest.raises(ValueError, match="share the name"):
        OptimizerWrapper(parts, [torch.optim.AdamW(part.parameters()) for part in parts]).state_dict()


def test_optimizer_keys_are_flat_and_by_name() -> None:
    model = nn.Linear(2, 2)
    groups: list[dict[str, Any]] = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.2}]
    optimizer = stepped(torch.optim.AdamW(groups))
    state = OptimizerWrapper([model], [optimizer]).state_dict()
    assert {"state.weight.exp_avg", "state.bias.exp_avg_sq", "state.bias.step"} < state.keys()
    assert (state["param_groups.weight.lr"], state["param_groups.bias.lr"]) == (0.1, 0.2)


def test_a_parameter_finds_its_state_in_another_group_and_place() -> None:
    model = nn.Linear(2, 2)
    saved = torch.optim.AdamW([model.weight, model.bias])
    model(torch.ones(1, 2)).sum().backward()
    saved.step()
    groups: list[dict[str, Any]] = [{"params": [model.bias]}, {"params": [model.weight]}]
    other = torch.optim.AdamW(groups)
    OptimizerWrapper([model], [other]).load_state_dict(OptimizerWrapper([model], [saved]).state_dict())
    for parameter in model.parameters():
        assert same(dict(other.state[parameter]), dict(saved.state[parameter]))


def test_one_schedule_is_the_state_of_all_parts() -> None:
    def scheduler() -> torch.optim.lr_scheduler.LRScheduler:
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 1 / (1 + done))

    saved = scheduler()
    saved.optimizer.step()
    saved.step()
    others = [scheduler(), scheduler()]
    LRSchedulerWrapper(others).load_state_dict(LRSchedulerWrapper([saved, saved]).state_dict())
    assert [other.last_epoch for other in others] == [1, 1]
    assert [other.get_last_lr() for other in others] == [[0.5], [0.5]]


def lambdas(*functions: Callable[[int], float]) -> list[torch.optim.lr_scheduler.LRScheduler]:
    """Schedulers of one optimizer each, by functions that no state dict has."""
    optimizers = [torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0) for _ in functions]
    return [torch.optim.lr_scheduler.LambdaLR(*each) for each in zip(optimizers, functions, strict=True)]


def rising(done: int) -> float:
    return min(1.0, (done + 1) / 5)


def test_schedulers_that_were_equal_when_they_were_saved_resume_although_new_ones_differ() -> None:
    saved, others = lambdas(rising, lambda done: 1.0), lambdas(rising, lambda done: 1.0)
    for scheduler in saved:
        for _ in range(10):
            scheduler.optimizer.step()
            scheduler.step()
    state = LRSchedulerWrapper(saved).state_dict()
    assert "last_epoch" in state
    wrapper = LRSchedulerWrapper(others)
    wrapper.check_state(state)
    wrapper.load_state_dict(state)
    assert [other.state_dict() for other in others] == [each.state_dict() for each in saved]


def test_another_number_of_schedulers_that_differ_is_refused() -> None:
    equal, three = lambdas(rising, rising), lambdas(rising, rising, lambda done: 1.0)
    for number in (1, 2):
        state = LRSchedulerWrapper(equal[:number]).state_dict()
        with pytest.raises(CheckpointMismatch, match="the state of one scheduler, and this run has 3 that differ"):
            LRSchedulerWrapper(three).check_state(state)


def test_the_state_of_one_scheduler_has_no_number() -> None:
    assert "_number" not in LRSchedulerWrapper(lambdas(rising)).state_dict()
    assert LRSchedulerWrapper([]).state_dict() == {}


class Recorded:
    """A scheduler of no class of torch; it keeps the list that it is given."""

    def __init__(self, bounds: np.ndarray | None = None) -> None:
        self.rates: list[float] = []
        self.bounds = bounds

    def state_dict(self) -> dict[str, Any]:
        return {"rates": list(self.rates), "bounds": self.bounds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rates = state_dict["rates"]


def test_schedulers_share_nothing_of_the_state_that_they_load() -> None:
    schedulers = [Recorded(), Recorded()]
    wrapper = LRSchedulerWrapper(schedulers)
    wrapper.load_state_dict(wrapper.state_dict())
    schedulers[0].rates.append(0.5)
    assert schedulers[1].rates == []


@pytest.mark.parametrize(
    ("array", "other"),
    [
        (np.zeros(3), np.ones(3)),
        (np.zeros(3), np.zeros((3, 1))),
        (np.zeros(3), np.zeros(3, np.float32)),
        (np.array(["a", None], object), np.array(["b", None], object)),
    ],
    ids=["value", "shape", "dtype", "objects"],
)
def test_states_with_arrays_are_one_if_these_are_equal(array: np.ndarray, other: np.ndarray) -> None:
    equal, differing = (LRSchedulerWrapper([Recorded(array), Recorded(each)]) for each in (array.copy(), other))
    assert equal.state_dict().keys() == {"rates", "bounds", "_class", "_number"}
    assert differing.state_dict().keys() == {"0", "1"}


def half_trained(*, gradients: bool) -> tuple[nn.ModuleDict, torch.optim.AdamW]:
    """A model of which only one part ever had a gradient."""
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model["used"](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    if not gradients:
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("gradients", [False, True])
def test_a_parameter_that_had_no_gradient_yet_has_no_state(gradients: bool) -> None:
    model, optimizer = half_trained(gradients=gradients)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    had = {name: parameter.grad is not None for name, parameter in model.named_parameters()}
    state = OptimizerWrapper([model], [optimizer]).state_dict()
    assert state["state.used.weight.step"] == 1
    assert not fqns(list(state), "state.unused.")
    assert not optimizer.state.get(model["unused"].weight)
    assert same(dict(model.named_parameters()), before)
    assert {name: parameter.grad is not None for name, parameter in model.named_parameters()} == had
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_reading_the_state_of_an_optimizer_does_not_change_training() -> None:
    def weights(*, looked_at: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for scale in (1.0, -3.0):
            if looked_at:
                OptimizerWrapper([model], [optimizer]).state_dict()
            (model(torch.ones(1, 2)) * scale).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.weight.detach()

    assert torch.equal(weights(looked_at=True), weights(looked_at=False))


def test_parameters_that_are_not_trained_have_no_state() -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    state = OptimizerWrapper([model], [stepped(torch.optim.AdamW(model.parameters()))]).state_dict()
    assert {name.rpartition(".")[0] for name in fqns(list(state), "state.")} == {"weight"}


def test_an_optimizer_without_state_has_only_its_settings() -> None:
    model = nn.Linear(2, 2)
    wrapper = OptimizerWrapper([model], [torch.optim.SGD(model.parameters(), lr=0.5)])
    assert not fqns(list(wrapper.state_dict()), "state.")
    wrapper.load_state_dict(wrapper.state_dict() | {"param_groups.weight.lr": 0.25, "param_groups.bias.lr": 0.25})
    assert wrapper.state_dict()["param_groups.bias.lr"] == 0.25

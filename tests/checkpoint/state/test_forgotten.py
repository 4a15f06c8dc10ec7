"""A state that changes and is not in its own state_dict is named in a warning, once; none that cannot change is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.checkpoint.small_run import job_config
from tests.logged import logged_warnings
from torchtitan_lite.checkpoint.manager import CheckpointManager


class Metric(nn.Module):
    """What is kept by a metric of torchmetrics, under its names."""

    def __init__(self) -> None:
        super().__init__()
        self._defaults = {"total": torch.zeros(())}
        self._persistent = {"total": False}
        self._update_count = 0
        self.total = torch.zeros(())

    def update(self, value: float) -> None:
        self._update_count += 1
        self.total = self.total + value

    def reset(self) -> None:
        self._update_count = 0
        self.total = torch.zeros(())

    def persistent(self, mode: bool) -> None:
        self._persistent["total"] = mode

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        own = super().state_dict(*args, prefix=prefix, **kwargs)
        if self._persistent["total"]:
            own[prefix + "total"] = self.total
        return own

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        self.total = state_dict.pop(prefix + "total", self.total)
        super()._load_from_state_dict(state_dict, prefix, *rest)  # type: ignore[no-untyped-call]  # torch's is not typed


def of_torchmetrics() -> Any:
    torchmetrics = pytest.importorskip("torchmetrics")
    return torchmetrics.MetricCollection([torchmetrics.MeanMetric(), torchmetrics.SumMetric()])


class Forgetful:
    """An object with the given attributes, and an empty state dict."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class Returning(Forgetful):
    def state_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)


def warnings_of(
    folder: Path, states: dict[str, Any], within: nn.Module | None = None, each_step: Callable[[int], Any] = lambda _: 0
) -> list[str]:
    """Return the warnings of six steps, of which each second one is saved."""
    model = nn.ModuleDict({"linear": nn.Linear(2, 2)} | ({"metric": within} if within is not None else {}))
    optimizer = torch.optim.SGD(model["linear"].parameters(), lr=0.1)
    config = job_config(folder, interval=2)
    with logged_warnings() as warnings, CheckpointManager(None, model, optimizer, None, states, config) as manager:
        for step in range(1, 7):
            model["linear"](torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            each_step(step)
            manager.save(step)
    return warnings


@pytest.mark.parametrize("build", [Metric, of_torchmetrics])
@pytest.mark.parametrize("place", ["state", "model"])
def test_a_metric_whose_values_are_not_persistent_is_named(place: str, build: Any, tmp_path: Path) -> None:
    metric = build()
    states, within = ({"acc": metric}, None) if place == "state" else ({}, metric)
    (line,) = warnings_of(tmp_path / "lost", states, within, lambda step: metric.update(1.0))
    assert ("acc" if place == "state" else "model.metric") in line and "persistent(True)" in line
    metric.persistent(True)
    assert not warnings_of(tmp_path / "kept", states, within, lambda step: metric.update(1.0))


def test_a_metric_in_the_model_that_is_reset_before_each_save_or_use_is_not_named(tmp_path: Path) -> None:
    before, after, unused = Metric(), Metric(), Metric()

    def each_step(step: int) -> None:
        before.update(1.0)
        if step % 2 == 0:  # Between two saves, as an evaluation does: reset at its end, or at its start.
            before.reset()
            after.reset()
            after.update(1.0)

    assert not warnings_of(tmp_path, {}, nn.ModuleList([before, after, unused]), each_step)


def test_an_object_that_changes_and_returns_nothing_is_named(tmp_path: Path) -> None:
    """Each kind of attribute alone."""
    kinds: dict[str, tuple[Any, Callable[[Any], Any]]] = {
        "number": (0, lambda value: value + 1),
        "list": ([], lambda value: [*value, 1.0]),
        "dict": ({}, lambda value: {**value, len(value): 1}),
        "array": (torch.zeros(2).numpy(), lambda value: value + 1),
        "tensor": (torch.zeros(2), lambda value: value.add_(1)),
    }
    for kind, (initial, grown) in kinds.items():
        state = Forgetful(value=initial)

        def each_step(step: int, state: Any = state, grown: Any = grown) -> None:
            state.value = grown(state.value)

        (line,) = warnings_of(tmp_path / kind, {"forgetful": state}, each_step=each_step)
        assert line.startswith("Training changes forgetful.value, which no checkpoint has")


@pytest.mark.parametrize("first", [1, 5])
def test_one_that_changes_late_or_is_made_late_is_named(first: int, tmp_path: Path) -> None:
    changing, growing = Forgetful(value=0), Forgetful(fixed=1)

    def each_step(step: int) -> None:
        changing.value += step >= first
        if step >= first:
            growing.new = step

    for name, state in (("changing", changing), ("growing", growing)):
        (line,) = warnings_of(tmp_path / name, {name: state}, each_step=each_step)
        assert line.startswith(f"Training changes {name}")
        changing.value = 0
        vars(growing).pop("new", None)


def test_states_that_cannot_change_or_have_a_state_have_no_line(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    linear = nn.Linear(2, 2)
    returning = Returning(number=0)
    states = {
        "scaler": scaler,
        "loss": nn.CrossEntropyLoss(),
        "nothing": Forgetful(),
        "fixed": Forgetful(lr=0.1, name="a", nan=float("nan"), of_others=[linear.weight], other=returning),
        "returning": returning,
    }

    def each_step(step: int) -> None:
        returning.number += 1
        with torch.no_grad():
            linear.weight.add_(1)
        scaler.update()
        states["loss"].train(step % 4 == 0)

    assert not warnings_of(tmp_path, states, each_step=each_step)

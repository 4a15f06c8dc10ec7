"""Tensors in attributes of parameters and buffers, which no checkpoint has, are named in one warning; no others are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.checkpoint.state.odd_objects import QuantizedLinear
from tests.logged import logged_warnings
from tests.ranks import on_two_ranks
from torchtitan_lite.checkpoint import CheckpointManager
from torchtitan_lite.errors import SaveFailed


class Scaled(Tensor):
    """A class of memory, whose instances have a scale."""

    scale: Tensor


class Rounded(Tensor):
    """Keeps whole numbers only, when it is copied into."""

    def copy_(self, source: Tensor, non_blocking: bool = False) -> Tensor:
        return super().copy_(source.round(), non_blocking)


class Keeping(Rounded):
    """Copies what it is given."""

    def copy_(self, source: Tensor, non_blocking: bool = False) -> Tensor:
        return Tensor.copy_(self, source, non_blocking)


class Described(nn.Linear):
    """Has the scale of its weight in its extra state."""

    def get_extra_state(self) -> Tensor:
        scale: Any = self.weight.scale
        return scale.clone()

    def set_extra_state(self, state: Tensor) -> None:
        self.weight.scale = state  # type: ignore[assignment]  # an attribute


def warnings_of(folder: Path, model: nn.Module, **settings: Any) -> list[str]:
    """Return the warnings of three steps, each of which is saved."""
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    with (
        logged_warnings() as warnings,
        CheckpointManager.for_loop(
            model=model, optimizer=optimizer, folder=folder, interval=1, preemption_signals=(), **settings
        ) as manager,
    ):
        for step in range(1, 4):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            manager.save(step)
    return warnings


def linear(cls: type[Tensor] | None = None, **attributes: Any) -> nn.Sequential:
    """Return layers of which the weight of the first one is of the class `cls`, with `attributes`."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if cls is not None:
        model[0].weight = nn.Parameter(model[0].weight.detach().as_subclass(cls))
    for name, value in attributes.items():
        setattr(model[0].weight, name, value)
    return model


def with_buffer(persistent: bool = True) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].register_buffer("table", torch.ones(4), persistent=persistent)
    model[0].table.scale = torch.ones(1)
    return model


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (lambda: linear(scale=torch.ones(1)), "model.0.weight.scale"),
        (lambda: linear(scales=[torch.ones(1), torch.ones(2)]), "model.0.weight.scales[0], model.0.weight.scales[1]"),
        (lambda: linear(scales={"row": torch.ones(1)}), "model.0.weight.scales['row']"),
        (with_buffer, "model.0.table.scale"),
    ],
    ids=["parameter", "list", "dict", "buffer"],
)
def test_a_tensor_in_an_attribute_is_named_once(build: Callable[[], nn.Module], name: str, tmp_path: Path) -> None:
    (warning,) = warnings_of(tmp_path, build())
    assert warning.startswith(
        f"No checkpoint has tensors in attributes of parameters and buffers: {name}. A resumed run"
    )


@pytest.mark.parametrize("where", ["model", "teacher"])
def test_an_attribute_of_a_class_of_its_own_is_refused_at_the_first_save(where: str, tmp_path: Path) -> None:
    odd = linear(Scaled, scale=torch.ones(1))
    model, states = (odd, None) if where == "model" else (linear(), {"teacher": odd})
    with pytest.raises(
        SaveFailed, match=rf"TypeError: no checkpoint would have {where}.0.weight.scale, which are attributes of"
    ):
        warnings_of(tmp_path, model, states=states, max_failed_saves=1)


def test_an_attribute_of_a_module_among_the_states_is_named(tmp_path: Path) -> None:
    (warning,) = warnings_of(tmp_path, linear(), states={"teacher": linear(scale=torch.ones(1))})
    assert "teacher.0.weight.scale" in warning


def test_a_class_whose_copy_changes_the_values_is_named(tmp_path: Path) -> None:
    (warning,) = warnings_of(tmp_path, linear(Rounded))
    assert warning.startswith("A load does not bring back the values of model.0.weight (Rounded)")


def sharing() -> nn.Module:
    """Return a model whose attribute is memory of a buffer, as of a state that is saved."""
    model = linear()
    model[0].register_buffer("scale", torch.ones(4))
    model[0].weight.scale = model[0].scale[:2]
    return model


def under_its_own_key() -> nn.Module:
    model = linear(scale=torch.ones(1))

    def add(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        state["0.weight.scale"] = model[0].weight.scale.clone()

    def take(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        model[0].weight.scale = state.pop("0.weight.scale").clone()

    model.register_state_dict_post_hook(add)
    model.register_load_state_dict_pre_hook(take)
    return model


def described() -> nn.Module:
    model = Described(4, 4)
    model.weight.scale = torch.ones(1)  # type: ignore[assignment]  # an attribute
    return model


@pytest.mark.parametrize(
    "build",
    [
        linear,
        lambda: linear(Keeping),
        lambda: linear(main_grad=torch.ones(4, 4), kind="row", empty=torch.zeros(0)),
        sharing,
        under_its_own_key,
        described,
        lambda: with_buffer(persistent=False),
        lambda: torch.compile(linear(), backend="eager"),
    ],
    ids=["plain", "a copy_ that keeps", "no state", "memory", "key", "extra state", "not saved", "compiled"],
)
def test_what_is_saved_or_no_state_is_not_named(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    assert not warnings_of(tmp_path, build())


def test_attributes_of_what_is_left_out_are_not_named(tmp_path: Path) -> None:
    model = nn.Sequential(QuantizedLinear(), nn.Linear(4, 4))
    model[0].weight.scale = torch.ones(1)
    assert not warnings_of(tmp_path, model, save_trained_only=True)


@on_two_ranks
def test_what_torch_sets_on_parameters_is_not_named(rank: int, tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))

    def flat(model: nn.Module) -> nn.Module:
        precision = MixedPrecision(param_dtype=torch.bfloat16)
        return FullyShardedDataParallel(
            model, device_mesh=mesh, device_id=torch.device("cpu"), mixed_precision=precision
        )

    wraps: list[Callable[[nn.Module], nn.Module]] = [
        DistributedDataParallel,
        lambda each: fully_shard(each, mesh=mesh),
        flat,
    ]
    for number, wrap in enumerate(wraps):
        torch.manual_seed(0)
        assert not warnings_of(tmp_path / f"{number}", wrap(linear()))


@on_two_ranks
def test_attributes_of_sharded_parameters_are_named(rank: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = linear()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    model[0].weight.scale = torch.ones(1)
    assert len(warnings_of(tmp_path, model)) == (rank == 0)

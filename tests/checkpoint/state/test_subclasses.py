"""Tensors that are made of other tensors: saved by torch's protocol, loaded in place, compared by their form."""

from __future__ import annotations

import collections
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from tests.checkpoint.conftest import MODES
from tests.checkpoint.state.low_bits import (
    EightBits,
    Momentum8,
    OptimState4bit,
    OptimState8bit,
    OptimStateFp8,
    Rounding,
    Settings,
)
from tests.ranks import Ranks, on_two_ranks
from torchtitan_lite.checkpoint import CheckpointManager
from torchtitan_lite.checkpoint.format.shards import local_of
from torchtitan_lite.checkpoint.format.structure import FORM
from torchtitan_lite.checkpoint.state.first_step import states_of_others
from torchtitan_lite.checkpoint.state.run_state import RunState
from torchtitan_lite.checkpoint.state.subclasses import form_difference, parts_of
from torchtitan_lite.errors import CheckpointMismatch, ConfigError, SaveFailed

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 3))


def continued(
    folder: Path,
    steps: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    forward: Callable[[torch.Tensor], torch.Tensor] | None = None,
    rank: int = 0,
    **keys: Any,
) -> tuple[Any, torch.optim.Optimizer]:
    """Continue the run in `folder` up to `steps`, each of which is saved; return what it has then."""
    state = {"step": 0}
    with CheckpointManager.for_loop(
        model=model, optimizer=optimizer, states={"s": state}, folder=folder, interval=1, **keys
    ) as manager:
        manager.load()
        manager.reset()
        while state["step"] < steps:
            manager.maybe_wait_for_staging()
            generator = torch.Generator().manual_seed(10 * state["step"] + rank)
            (forward or model)(torch.randn(5, 8, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            state["step"] += 1
            manager.save(state["step"])
    return model, optimizer


def trained(
    folder: Path, steps: int, optimizer: Any = Momentum8, mode: str = "disabled", seed: int = 0
) -> tuple[Any, torch.optim.Optimizer]:
    """Continue a run of one process with a model of its own, whose weights depend on `seed`."""
    model = model_of(seed)
    return continued(folder, steps, model, optimizer(model.parameters()), async_mode=mode)


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return all that the next step depends on, with classes."""
    states = [optimizer.state[each] for each in model.parameters()]
    return [
        [local_of(each).tolist() for each in model.state_dict().values()],
        [(type(value), _content(value)) for state in states for value in state.values()],
    ]


def _content(value: Any) -> Any:
    if isinstance(value, DTensor):
        value = value.to_local()
    parts = parts_of("t", value).values() if isinstance(value, EightBits) else [value]
    return [each.float().tolist() for each in parts if isinstance(each, torch.Tensor)]


@pytest.mark.parametrize("mode", MODES)
def test_an_optimizer_in_8_bits_continues_bit_for_bit(mode: str, tmp_path: Path) -> None:
    straight = trained(tmp_path / "a", 6, mode=mode)
    trained(tmp_path / "b", 3, mode=mode)
    assert bits(*trained(tmp_path / "b", 6, mode=mode, seed=1)) == bits(*straight)
    kinds = {type(each) for state in straight[1].state.values() for each in state.values()}
    assert kinds == {EightBits, torch.Tensor}, "the last bias has no whole blocks"


def test_a_live_state_is_read_in_place(tmp_path: Path) -> None:
    model, optimizer = trained(tmp_path, 2)
    held = optimizer.state[next(model.parameters())]["momentum"]
    expected, address = held.codes.clone(), held.codes.data_ptr()
    held.codes.zero_()
    with CheckpointManager.for_loop(model=model, optimizer=optimizer, folder=tmp_path, load_only=True) as manager:
        manager.load()
    now = optimizer.state[next(model.parameters())]["momentum"]
    assert now is held and now.codes.data_ptr() == address and torch.equal(now.codes, expected)


def test_the_first_step_that_shows_the_classes_leaves_no_trace(tmp_path: Path) -> None:
    class Noisy(Momentum8):
        """Draws, counts, and changes its settings in each step."""

        calls = 0

        def step(self, closure: Any = None) -> None:
            torch.rand(3)
            self.calls += 1
            self.param_groups[0]["seen"] = self.calls
            super().step()

    trained(tmp_path, 2, Noisy)
    model, heard = model_of(1), []
    model(torch.ones(1, 8)).sum().backward()
    optimizer = Noisy(model.parameters(), lr=0.5)
    optimizer.register_step_pre_hook(lambda *_: heard.append("before"))
    optimizer.register_step_post_hook(lambda *_: heard.append("after"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    gradients = [each.grad for each in model.parameters()]
    with CheckpointManager.for_loop(model=model, optimizer=optimizer, folder=tmp_path) as manager:
        weights = [each.tolist() for each in model.parameters()]
        generator = torch.get_rng_state()
        owner = manager._run.optimizer
        owner.make_first_states()
        assert torch.equal(torch.get_rng_state(), generator)
        assert [each.tolist() for each in model.parameters()] == weights
        assert not heard and not optimizer.state and optimizer.calls == 0
        assert optimizer.param_groups[0]["lr"] == 0.5 and "seen" not in optimizer.param_groups[0]
        assert all(each.grad is kept for each, kept in zip(model.parameters(), gradients, strict=True))
        assert scheduler.last_epoch == 0 and scheduler.get_last_lr() == [0.5]
        assert {*owner.slots()["0.weight"].first["momentum"]} == {"codes", "scale", FORM}
        manager.load()
        assert {*map(type, optimizer.state[model[0].weight].values())} == {EightBits}


def test_an_optimizer_of_any_form_has_no_such_state() -> None:
    kept: Any = SimpleNamespace(state=[1], param_groups=[])
    strays = {"global": 3, torch.ones(1): {"m": EightBits.of(torch.ones(4))}}
    other: Any = SimpleNamespace(state=strays, param_groups=[])
    assert [*states_of_others(kept)] == [*states_of_others(other)] == [*states_of_others(object())] == []


class NeedsClosure(Momentum8):
    def step(self, closure: Any = None) -> None:
        if closure is None:
            raise RuntimeError("give a closure")
        closure()
        super().step()


class Drifting(Momentum8):
    def step(self, closure: Any = None) -> None:
        super().step()
        with torch.no_grad():
            for group in self.param_groups:
                for each in group["params"]:
                    each.add_(1)


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        (NeedsClosure, r"NeedsClosure has states of a tensor subclass.* its step\(\) raises RuntimeError: give a"),
        (Drifting, r"Drifting has states of a tensor subclass.*it changes parameters"),
    ],
)
def test_an_optimizer_that_could_not_make_its_states_again_is_refused_at_the_first_save(
    kind: type[Momentum8], match: str, tmp_path: Path
) -> None:
    model = model_of()
    optimizer = kind(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step(lambda: None)
    before = [each.tolist() for each in model.parameters()]
    with (
        CheckpointManager.for_loop(model=model, optimizer=optimizer, folder=tmp_path) as manager,
        pytest.raises(ConfigError, match=match),
    ):
        manager.save(1, now=True)
    assert [each.tolist() for each in model.parameters()] == before


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        (Settings(block=2), r"state.0.weight.momentum: a .*EightBits of codes int8 \[6, 8\], scale float32 \[12\]"),
        (Settings(rounding=Rounding.DOWN), r"context \[Settings\(block=4, rounding=Rounding.NEAREST\)\] in the checkp"),
    ],
)
def test_another_block_or_context_is_refused_before_anything_is_read(
    settings: Settings, match: str, tmp_path: Path
) -> None:
    trained(tmp_path, 2)
    with pytest.raises(CheckpointMismatch, match=match):
        trained(tmp_path, 3, lambda parameters: Momentum8(parameters, settings=settings))


def test_a_plain_state_and_one_of_8_bits_refuse_each_other(tmp_path: Path) -> None:
    class Plain(Momentum8):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, settings=Settings(block=7))

    trained(tmp_path / "plain", 2, Plain)
    model, optimizer = trained(tmp_path / "bits", 2)
    with (
        CheckpointManager.for_loop(model=model, optimizer=optimizer, folder=tmp_path / "plain") as manager,
        pytest.raises(CheckpointMismatch, match=r"momentum: a plain tensor in the checkpoint, a .*EightBits"),
    ):
        manager.load()
    with pytest.raises(CheckpointMismatch, match=r"momentum: a .*EightBits .* in the checkpoint, a plain tensor expec"):
        trained(tmp_path / "bits", 3, Plain)


def test_a_device_and_the_module_of_a_class_do_not_count() -> None:
    own = EightBits.of(torch.ones(2, 4))
    other = EightBits.of(torch.ones(2, 4), Settings(device="cuda"))
    moved = type("EightBits", (EightBits,), {"__module__": "elsewhere", "__qualname__": "EightBits"})
    forms = [parts_of("t", each)[FORM] for each in (own, other, moved(own.codes, own.scale))]
    assert [form_difference(forms[0], each) for each in forms] == [""] * 3
    in_another_order = dict(reversed(json.loads(forms[0]).items()))
    assert form_difference(json.dumps(in_another_order), forms[0]) == ""
    for odd in ("[", "{}", 5, [1], numpy.ones(2)):
        assert "unreadable form" in form_difference(odd, forms[0])
        assert form_difference(odd, None).endswith("a plain tensor expected")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_scale_that_is_not_finite_is_found_after_a_roll_back_and_in_a_save(
    value: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = trained(tmp_path, 1)
    state = RunState(None, model, optimizer, None, None)
    assert state.is_finite()
    optimizer.state[model[0].weight]["momentum"].scale[1] = value
    assert not state.is_finite()
    with CheckpointManager.for_loop(model=model, optimizer=optimizer, folder=tmp_path / "other") as manager:
        manager.save(1, now=True)
    assert "optimizer states (optimizer.state.0.weight.momentum.scale)" in caplog.text


def quantized_model() -> nn.Module:
    model = model_of()
    model[0].weight = nn.Parameter(EightBits.of(model[0].weight), requires_grad=False)
    model[1].register_buffer("table", EightBits.of(torch.arange(8.0)))
    return model


def test_weights_in_8_bits_are_loaded_in_place(tmp_path: Path) -> None:
    model = quantized_model()
    with CheckpointManager.for_loop(model=model, folder=tmp_path) as manager:
        manager.save(1, now=True)
    expected = {name: _content(value) for name, value in model.state_dict().items()}
    other = quantized_model()
    weight = other[0].weight
    with torch.no_grad():
        weight.codes.zero_()
        other[1].table.scale.zero_()
    with CheckpointManager.for_loop(model=other, folder=tmp_path) as manager:
        assert manager.load()
    assert other[0].weight is weight
    assert {name: _content(value) for name, value in other.state_dict().items()} == expected


def test_a_glob_with_a_star_leaves_all_parts_of_a_tensor_out_of_a_load(tmp_path: Path) -> None:
    with CheckpointManager.for_loop(model=quantized_model(), folder=tmp_path) as manager:
        manager.save(1, now=True)
    model = quantized_model()
    with torch.no_grad():
        model[0].weight.codes.zero_()
        model[1].table.codes.zero_()
    with CheckpointManager.for_loop(model=model, folder=tmp_path, load_exclude=["0.weight*"]) as manager:
        assert manager.load()
    assert not model[0].weight.codes.any() and model[1].table.codes.any()


def test_a_quantized_weight_and_a_plain_one_refuse_each_other(tmp_path: Path) -> None:
    for name, model in ("bits", quantized_model()), ("plain", model_of()):
        with CheckpointManager.for_loop(model=model, folder=tmp_path / name) as manager:
            manager.save(1, now=True)
    for name, model, match in (
        ("plain", quantized_model(), r"0.weight: a plain tensor in the checkpoint, a .*EightBits of codes"),
        ("bits", model_of(), r"0.weight: a .*EightBits of codes .* in the checkpoint, a plain tensor expected"),
    ):
        with (
            CheckpointManager.for_loop(model=model, folder=tmp_path / name) as manager,
            pytest.raises(CheckpointMismatch, match=match),
        ):
            manager.load()


def test_a_name_below_that_of_such_a_tensor_is_refused_by_both(tmp_path: Path) -> None:
    model = quantized_model()
    model._register_state_dict_hook(lambda _, state, prefix, meta: state.update({"0.weight.codes": torch.ones(1)}))
    with (
        CheckpointManager.for_loop(model=model, folder=tmp_path) as manager,
        pytest.raises((ConfigError, SaveFailed), match=r"model.0.weight is a .*EightBits.* is 0.weight.codes, which"),
    ):
        manager.save(1, now=True)


def test_a_context_without_a_text_is_refused_at_the_first_save(tmp_path: Path) -> None:
    class Odd(EightBits):
        def __tensor_flatten__(self) -> tuple[list[str], Any]:
            return ["codes", "scale"], collections.ChainMap()

    model = model_of()
    model[0].weight = nn.Parameter(Odd.of(model[0].weight), requires_grad=False)
    with (
        pytest.raises(SaveFailed, match=r"model.0.weight is a .*Odd, whose __tensor_flatten__ returns a collections.C"),
        CheckpointManager.for_loop(model=model, folder=tmp_path, max_failed_saves=1) as manager,
    ):
        manager.save(1, now=True)
    assert not re.findall("step-1", " ".join(each.name for each in tmp_path.iterdir()))


@on_two_ranks
def test_ranks_of_ddp_with_states_in_8_bits_continue_bit_for_bit(rank: int, tmp_path: Path) -> None:
    def until(steps: int, folder: Path, seed: int) -> list[Any]:
        model = model_of(seed)
        parallel = nn.parallel.DistributedDataParallel(model)
        return bits(*continued(folder, steps, model, Momentum8(model.parameters()), parallel, rank))

    straight = until(6, tmp_path / "a", 0)
    until(3, tmp_path / "b", 0)
    assert until(6, tmp_path / "b", 1) == straight


@on_two_ranks
def test_a_sharded_state_of_another_class_continues_on_the_same_sharding(rank: int, tmp_path: Path) -> None:
    straight = bits(*sharded(6, tmp_path / "a", EightBits, 0, 2))
    sharded(3, tmp_path / "b", EightBits, 0, 2)
    assert bits(*sharded(6, tmp_path / "b", EightBits, 1, 2)) == straight


class Counted(EightBits):
    """Says in its context how many blocks this rank has."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], [self.settings, {"blocks": self.scale.numel()}]


@on_two_ranks
def test_the_context_of_a_shard_is_compared_with_its_own(rank: int, tmp_path: Path) -> None:
    def until(steps: int, block: int = 4) -> list[Any]:
        model: Any = fully_shard(nn.Sequential(nn.Linear(8, 3, bias=False)), mesh=init_device_mesh("cpu", (2,)))
        optimizer = Momentum8(model.parameters(), kind=Counted, settings=Settings(block=block))
        return bits(*continued(tmp_path, steps, model, optimizer))

    saved = until(2)
    assert until(2) == saved
    with pytest.raises(CheckpointMismatch, match=r"momentum: context .*block.* in the checkpoint, context .* expected"):
        until(3, block=8)


def test_a_sharded_state_of_another_class_is_refused_on_another_sharding_before_anything_is_read(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    two_ranks.run(_on_two, folder=tmp_path / "two", kind="EightBits", steps=2)
    sharding = r"sharded as \[Shard\(dim=0\)\] on a mesh of \[2\]"
    fits = "It fits 2 ranks, which saved it, and this run has 1"
    with pytest.raises(CheckpointMismatch, match=rf"momentum: .*{sharding} in the checkpoint, .*\. {fits}"):
        sharded(3, tmp_path / "two", EightBits, 1, 1)
    sharded(2, tmp_path / "one", EightBits, 1, 1)
    reports = two_ranks.reports(_refused_on_two, folder=tmp_path / "one", match=f"{sharding} expected")
    assert not [each.failure for each in reports if each.failure]


def test_a_state_that_is_plain_on_another_number_of_ranks_is_refused_with_the_number_that_fits(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    # A shard of 18 values has no whole blocks of 4, and stays plain.
    whole = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 16, bias=False))
    optimizer = Momentum8(whole.parameters(), kind=OptimState8bit, settings=Settings(block=4))
    continued(tmp_path, 2, whole, optimizer, lambda batch: whole(batch[:, :6]))
    refusal = r"0.weight.momentum: a .*OptimState8bit .* in the checkpoint, a plain tensor expected. It fits 1 rank"
    reports = two_ranks.reports(_refused_on_three_rows, folder=tmp_path, match=refusal)
    assert not [each.failure for each in reports if each.failure]


def _refused_on_three_rows(rank: int, folder: Path, match: str) -> None:
    model: Any = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 16, bias=False))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = Momentum8(model.parameters(), kind=OptimState8bit, settings=Settings(block=4))
    with pytest.raises(CheckpointMismatch, match=match):
        continued(folder, 3, model, optimizer, lambda batch: model(batch[:, :6]))


def _refused_on_two(rank: int, folder: Path, match: str) -> None:
    with pytest.raises(CheckpointMismatch, match=match):
        sharded(3, folder, EightBits, 0, 2)


@on_two_ranks
def test_sharded_weights_of_another_class_are_loaded_as_the_pieces_of_each_rank(rank: int, tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))

    def model(factor: float) -> tuple[nn.Module, EightBits]:
        local = EightBits.of(torch.arange(16.0).view(4, 4) * factor + rank)
        made = nn.Linear(4, 8, bias=False)
        whole = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        made.weight = nn.Parameter(whole, requires_grad=False)
        return made, local

    saved, expected = model(1.0)
    with CheckpointManager.for_loop(model=saved, folder=tmp_path) as manager:
        manager.save(1, now=True)
    other, local = model(3.0)
    with CheckpointManager.for_loop(model=other, folder=tmp_path, load_only=True) as manager:
        manager.load()
    assert _content(local) == _content(expected)
    assert _content(local)[0][0] != [0.0] * 4 or rank == 0


KINDS = [OptimState8bit, OptimState4bit, OptimStateFp8]


def sharded(steps: int, folder: Path, kind: type[EightBits], seed: int, ranks: int) -> tuple[Any, Any]:
    """Continue the run in `folder` on FSDP2 over `ranks`; return the model and its optimizer."""
    model: Any = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 16))
    torch.manual_seed(seed)
    for each in model.parameters():
        nn.init.normal_(each, std=0.3)
    if ranks > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    return continued(folder, steps, model, Momentum8(model.parameters(), kind=kind))


def dense_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the values of the weights and their momenta, as one process has them."""
    found = []
    for each in model.parameters():
        momentum = local_of(optimizer.state[each]["momentum"])
        dense = momentum.dense() if isinstance(momentum, EightBits) else momentum
        for local in (local_of(each).detach(), dense):
            if isinstance(each, DTensor):
                local = DTensor.from_local(local, each.device_mesh, each.placements, run_check=False).full_tensor()
            found.append(local.tolist())
    return found


@pytest.mark.parametrize("kind", KINDS)
@on_two_ranks
def test_sharded_states_of_known_classes_continue_bit_for_bit(rank: int, tmp_path: Path, kind: type[EightBits]) -> None:
    straight = bits(*sharded(6, tmp_path / "a", kind, 0, 2))
    sharded(3, tmp_path / "b", kind, 0, 2)
    assert bits(*sharded(6, tmp_path / "b", kind, 1, 2)) == straight


@pytest.mark.parametrize("kind", KINDS)
def test_sharded_states_of_known_classes_are_loaded_on_another_number_of_ranks(
    kind: type[EightBits], two_ranks: Ranks, tmp_path: Path
) -> None:
    there, _ = two_ranks.run(_on_two, folder=tmp_path, kind=kind.__name__, steps=3)
    alone = sharded(3, tmp_path, kind, 1, 1)
    assert dense_states(*alone) == there
    sharded(4, tmp_path, kind, 1, 1)
    back, _ = two_ranks.run(_on_two, folder=tmp_path, kind=kind.__name__, steps=4)
    assert back == dense_states(*sharded(4, tmp_path, kind, 1, 1))


def _on_two(rank: int, folder: Path, kind: str, steps: int) -> list[Any]:
    return dense_states(*sharded(steps, folder, {each.__name__: each for each in [*KINDS, EightBits]}[kind], 0, 2))

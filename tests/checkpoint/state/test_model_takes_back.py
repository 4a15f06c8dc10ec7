"""A module's load_state_dict gets whatever its state_dict returned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.checkpoint.only_once import load_and_close, save_and_close
from tests.checkpoint.reading.memory import peak_above_before
from tests.checkpoint.savers import Lent
from tests.checkpoint.small_run import job_config, same
from tests.checkpoint.state.odd_objects import FusedQkv, ScaledLinear
from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.checkpoint.saving.savers import ProcessSaver
from torchtitan_lite.checkpoint.seams import Seams
from torchtitan_lite.checkpoint.state.stateful import ModelWrapper
from torchtitan_lite.errors import CheckpointMismatch, ConfigError


class Versioned(nn.Linear):
    """Has a load hook that changes state without a version, as hooks that upgrade old checkpoints do."""

    _version = 2

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.calls: list[str] = []
        self.register_load_state_dict_pre_hook(self._upgrade)
        self.register_load_state_dict_post_hook(lambda *_: self.calls.append("after"))

    def _upgrade(self, _: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *__: Any) -> None:
        self.calls.append("before")
        if metadata.get("version", 1) < 2:
            state[prefix + "weight"] = state[prefix + "weight"] * 100


def wrapped(build: Callable[[], nn.Module]) -> nn.Module:
    return nn.ModuleDict({"layer": build(), "other": nn.Linear(2, 2)})


def managed(folder: Path, model: nn.Module, **options: Any) -> CheckpointManager:
    seams = {"saver": options.pop("saver")} if "saver" in options else {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return CheckpointManager(None, [model], [optimizer], [], {}, job_config(folder, **options), seams=Seams(**seams))


def saved(folder: Path, model: nn.Module, **options: Any) -> Path:
    """Save `model` as step 1 and return its folder."""
    save_and_close(managed(folder, model, **options))
    return folder / "checkpoint" / "step-1"


@pytest.mark.parametrize("form", ["tensor", "dict", "number"])
def test_extra_state_comes_back_at_the_size_it_was_saved_with(
    tmp_path: Path, form: str, mode: str, process_saver: ProcessSaver
) -> None:
    model = wrapped(lambda: ScaledLinear(form))
    model["layer"].scales = torch.ones(5)
    lent = {"saver": Lent(process_saver)} if mode == "async_with_pinned_mem" else {}
    with managed(tmp_path, model, interval=1, async_mode=mode, **lent) as manager:
        manager.save(1)
    again = wrapped(lambda: ScaledLinear(form))
    load_and_close(managed(tmp_path, again, digest_tensors=("load",)))
    assert torch.equal(again["layer"].scales, torch.ones(5))
    assert same(dict(again.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("copies", [True, False])
def test_a_fused_weight_that_hooks_split_comes_back(tmp_path: Path, copies: bool) -> None:
    model = wrapped(lambda: FusedQkv(copies=copies))
    step = saved(tmp_path, model, digest_tensors=("save",))
    again = wrapped(lambda: FusedQkv(copies=copies))
    load_and_close(managed(tmp_path, again, digest_tensors=("load",)))
    assert torch.equal(again["layer"].weight, model["layer"].weight)
    assert again["layer"].loads == 1
    other = wrapped(lambda: FusedQkv(copies=copies))
    load_and_close(managed(tmp_path / "other", other, initial_load_path=str(step), initial_load_model_only=True))
    assert torch.equal(other["layer"].weight, model["layer"].weight)


def test_a_weights_only_checkpoint_has_what_hooks_return_and_extra_state(tmp_path: Path) -> None:
    model = nn.ModuleDict({"qkv": FusedQkv(), "scaled": ScaledLinear("dict")})
    model["scaled"].scales = torch.ones(2)
    step = saved(tmp_path, model, model_weights_only=True, export_dtype="bfloat16")
    again = nn.ModuleDict({"qkv": FusedQkv(), "scaled": ScaledLinear("dict")})
    load_and_close(managed(tmp_path / "new", again, initial_load_path=str(step), initial_load_model_only=True))
    assert torch.equal(again["qkv"].weight, model["qkv"].weight.bfloat16().float())
    assert same(again["scaled"].get_extra_state(), model["scaled"].get_extra_state())


def test_load_hooks_run_once_and_see_the_version_of_the_module(tmp_path: Path) -> None:
    model = wrapped(Versioned)
    saved(tmp_path, model)
    again = wrapped(Versioned)
    load_and_close(managed(tmp_path, again))
    assert torch.equal(again["layer"].weight, model["layer"].weight)
    assert again["layer"].calls == ["before", "after"]


def test_a_hook_that_exchanges_two_tensors_does_not_mix_them(tmp_path: Path) -> None:
    class Exchanging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
            self.register_load_state_dict_pre_hook(self._exchange)

        def _exchange(self, _: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
            a, b = f"{prefix}a.weight", f"{prefix}b.weight"
            state[a], state[b] = state[b], state[a]

    model = Exchanging()
    saved(tmp_path, model)
    again = Exchanging()
    load_and_close(managed(tmp_path, again))
    assert torch.equal(again.a.weight, model.b.weight)
    assert torch.equal(again.b.weight, model.a.weight)


def test_the_model_is_compared_with_its_digests_and_not_the_tensors_that_were_read(tmp_path: Path) -> None:
    class Forgetful(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.register_load_state_dict_post_hook(self._forget)

        def _forget(self, *_: Any) -> None:
            nn.init.zeros_(self.weight)

    saved(tmp_path, Forgetful(), digest_tensors=("save",))
    with (
        managed(tmp_path, Forgetful(), digest_tensors=("load",)) as manager,
        pytest.raises(CheckpointMismatch, match="weight"),
    ):
        manager.load()


def test_a_hook_that_raises_is_the_error_of_the_load(tmp_path: Path) -> None:
    class Refusing(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.register_load_state_dict_pre_hook(self._refuse)

        def _refuse(self, *_: Any) -> None:
            raise ValueError("not these weights")

    saved(tmp_path, Refusing())
    with managed(tmp_path, Refusing()) as manager, pytest.raises(ValueError, match="not these weights"):
        manager.load()


def test_extra_state_that_the_checkpoint_lacks_is_refused_by_name(tmp_path: Path) -> None:
    saved(tmp_path, wrapped(lambda: nn.Linear(3, 3)))
    with (
        managed(tmp_path, wrapped(lambda: ScaledLinear("dict"))) as manager,
        pytest.raises(CheckpointMismatch, match=r"layer\._extra_state"),
    ):
        manager.load()


def test_live_tensors_are_taken_back_without_a_copy() -> None:
    """So that a load holds the model in memory only once."""
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(16)))
    wrapper = ModelWrapper(model)
    state = wrapper.state_dict()
    assert peak_above_before(lambda: wrapper.put_back(state)) < 2 << 20


def test_a_module_under_two_names_comes_back(tmp_path: Path) -> None:
    def shared() -> nn.ModuleDict:
        layer = nn.Linear(2, 2)
        return nn.ModuleDict({"encoder": layer, "decoder": layer})

    model = shared()
    saved(tmp_path, model)
    again = shared()
    load_and_close(managed(tmp_path, again))
    assert again["encoder"] is again["decoder"]
    assert same(dict(again.state_dict()), dict(model.state_dict()))


def test_a_lazy_module_before_its_first_batch_is_named(tmp_path: Path) -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.ReLU())
    with managed(tmp_path, model) as manager:
        with pytest.raises(ConfigError, match=r"'0\.weight' belongs to a lazy module .* Run one batch"):
            manager.save(1, force=True)
        model(torch.ones(1, 2))
        assert manager.save(1, force=True)


def test_names_made_by_hooks_need_no_module_of_that_name() -> None:
    """Also under compilation and activation checkpointing."""
    model = wrapped(FusedQkv)
    names = {"layer.q.weight", "layer.k.weight", "layer.v.weight", "other.weight", "other.bias"}
    assert ModelWrapper(model).state_dict().keys() == names
    compiled = torch.compile(model, backend="eager")
    assert isinstance(compiled, nn.Module)
    state = ModelWrapper(compiled).state_dict()
    assert state.keys() == names
    doubled: dict[str, Tensor] = {name: tensor * 2 for name, tensor in state.items()}
    ModelWrapper(compiled).load_state_dict(doubled)
    assert same(ModelWrapper(model).state_dict(), doubled)

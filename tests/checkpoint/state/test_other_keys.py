"""A model that would not load what it saves is refused by name, before the first save, on all ranks."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.checkpoint.only_once import load_and_close
from tests.checkpoint.state.odd_objects import FusedQkv, PackedLinear, QuantizedLinear, ScaledBeside
from tests.ranks import on_two_ranks
from torchtitan_lite.checkpoint import CheckpointManager
from torchtitan_lite.errors import ConfigError


class Lacking(nn.Linear):
    """A hook takes out a key that load_state_dict expects."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_state_dict_post_hook(lambda _, state, prefix, __: state.__delitem__(prefix + "bias"))


class Refusing(nn.Linear):
    """Adds a key, and refuses to load."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_state_dict_post_hook(
            lambda module, state, prefix, _: state.update({prefix + "more": torch.ones(1)})
        )
        self.register_load_state_dict_pre_hook(self._refuse)

    def _refuse(self, *_: Any) -> None:
        raise ValueError("not these weights")


class Halving(FusedQkv):
    """Loads another weight than it saved."""

    def _fuse(self, module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        super()._fuse(module, state, prefix, *rest)
        state[prefix + "weight"] /= 2


class Drawing(FusedQkv):
    """Draws random numbers when it loads."""

    def _fuse(self, *given: Any) -> None:
        super()._fuse(*given)
        torch.rand(1), np.random.rand(), random.random()


def run(folder: Path, model: nn.Module, **settings: Any) -> CheckpointManager:
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    return CheckpointManager.for_loop(
        model=model, optimizer=optimizer, folder=folder, preemption_signals=(), **settings
    )


def with_head(module: nn.Module) -> nn.Sequential:
    return nn.Sequential(module, nn.Linear(4, 4))


@pytest.mark.promise(
    "A model that refuses or changes its own state when it loads it is refused before the first save.",
    section="state",
)
@pytest.mark.parametrize(
    ("build", "cause"),
    [
        (QuantizedLinear, r"\(0\.weight\.absmax\): RuntimeError: Unexpected key.*0\.weight\.absmax"),
        (Lacking, r"\(0\.bias\): RuntimeError: Missing key.*0\.bias"),
        (Refusing, r"\(0\.more\): ValueError: not these weights\. No start could load"),
        (Halving, r"changes 0\.weight when it gets what state_dict returned \(0\.k\.weight, 0\.q\.weight"),
    ],
)
@pytest.mark.parametrize("force", [True, False])
def test_a_model_that_does_not_load_its_own_state_is_refused_before_the_first_save(
    build: Callable[[], nn.Module], cause: str, force: bool, tmp_path: Path
) -> None:
    refused = pytest.raises(ConfigError, match=f"^model: load_state_dict .*{cause}")
    with run(tmp_path, with_head(build()), interval=1) as manager, refused:
        manager.save(1, force=force)
    assert not list(tmp_path.glob("step-*"))


def test_it_is_refused_before_the_first_image_in_memory(memory_tier: Path, tmp_path: Path) -> None:
    refused = pytest.raises(ConfigError, match=r"^model: load_state_dict refuses .*\(0\.weight\.absmax\)")
    in_memory = {"interval": 1000, "memory_interval": 1, "async_mode": "async"}
    with run(tmp_path, with_head(QuantizedLinear()), **in_memory) as manager, refused:
        manager.load()
        manager.save(1)


def test_a_module_among_the_states_is_refused_by_the_name_of_its_state(tmp_path: Path) -> None:
    refused = pytest.raises(ConfigError, match=r"^teacher: .*weight\.absmax")
    with run(tmp_path, nn.Linear(2, 2), states={"teacher": QuantizedLinear()}) as manager, refused:
        manager.save(1, force=True)


def test_the_trial_changes_no_generator_and_no_version_and_comes_once(tmp_path: Path) -> None:
    model = with_head(Drawing())
    saved = [*model.parameters()]
    versions, values = [each._version for each in saved], [each.clone() for each in saved]
    numbers = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    with run(tmp_path, model, interval=1) as manager:
        for step in range(1, 4):
            manager.save(step)
    assert model[0].loads == 1
    assert [each._version for each in saved] == versions
    assert all(map(torch.equal, saved, values))
    assert torch.equal(torch.get_rng_state(), numbers[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == numbers[1:]


def test_a_model_without_other_keys_loads_nothing_before_a_save(tmp_path: Path) -> None:
    model = nn.BatchNorm1d(3)
    loads: list[int] = []
    model.register_load_state_dict_pre_hook(lambda *_: loads.append(1))
    with run(tmp_path, model, interval=1) as manager:
        manager.save(1)
    assert not loads


@pytest.mark.parametrize("build", [QuantizedLinear, ScaledBeside, PackedLinear])
def test_over_a_quantized_base_what_is_trained_is_saved_and_resumed(
    build: Callable[[], nn.Module], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, again = with_head(build()), with_head(build())
    with run(tmp_path, model, interval=1, save_trained_only=True) as manager:
        for step in (1, 2):
            manager.save(step)
    keys = dcp.FileSystemReader(tmp_path / "step-2").read_metadata().state_dict_metadata
    assert {key for key in keys if key.startswith("model.")} == {"model.1.weight", "model.1.bias"}
    base = again[0].dense()
    load_and_close(run(tmp_path, again, save_trained_only=True))
    assert torch.equal(again[1].weight, model[1].weight)
    assert torch.equal(again[0].dense(), base)


def test_a_quantized_base_with_optimizer_state_is_saved_and_so_refused(tmp_path: Path) -> None:
    model = with_head(QuantizedLinear())
    model[0].weight.data = model[0].weight.data.float()
    optimizer = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.5)  # Has state from the start.
    manager = CheckpointManager.for_loop(model=model, optimizer=optimizer, folder=tmp_path, save_trained_only=True)
    with manager, pytest.raises(ConfigError, match=r"0\.weight\.absmax"):
        manager.save(1, force=True)


def test_a_frozen_weight_that_hooks_split_stays_with_what_is_trained(tmp_path: Path) -> None:
    """Its keys are the weight, not something next to it, and its hook counts on them."""
    model, again = (with_head(FusedQkv().requires_grad_(False)) for _ in range(2))
    with run(tmp_path, model, interval=1, save_trained_only=True) as manager:
        manager.save(1)
    load_and_close(run(tmp_path, again, save_trained_only=True))
    assert torch.equal(again[0].weight, model[0].weight)


@pytest.mark.parametrize(("build", "name"), [(QuantizedLinear, "weight.absmax"), (PackedLinear, "weight.scale")])
def test_a_scale_that_is_left_out_and_changes_is_named(
    build: Callable[[], Any], name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = with_head(build())
    with run(tmp_path, model, interval=1, save_trained_only=True) as manager:
        for step in (1, 2):
            manager.save(step)
            model[0].rescale()
    (warning,) = [each.getMessage() for each in caplog.records if "Training changes" in each.getMessage()]
    assert f"model.0.{name}, which no checkpoint has" in warning


def sharded(model: nn.Module) -> nn.Module:
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model


def flat(model: nn.Module, *, original: bool) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    return FullyShardedDataParallel(model, device_mesh=mesh, use_orig_params=original, device_id=torch.device("cpu"))


class Adding(nn.Linear):
    """Has one more key, and takes it back."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.loads = 0
        self.register_state_dict_post_hook(lambda _, state, prefix, __: state.update({f"{prefix}more": torch.ones(1)}))
        self.register_load_state_dict_pre_hook(self._take)

    def _take(self, _: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        del state[f"{prefix}more"]
        self.loads += 1


class Nested(nn.Linear):
    """Has a dict of tensors more, and takes it back."""

    def __init__(self, value: float) -> None:
        super().__init__(4, 4)
        self.more: dict[str, Any] = {"deep": {"a": torch.full((2,), value)}, "b": value}
        self.register_state_dict_post_hook(lambda _, state, prefix, __: state.update({f"{prefix}more": self.more}))
        self.register_load_state_dict_pre_hook(self._take)

    def _take(self, _: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        self.more = state.pop(f"{prefix}more")


def test_tensors_in_a_dict_that_a_hook_adds_come_back(tmp_path: Path) -> None:
    with run(tmp_path, Nested(1.0)) as manager:
        manager.save(1, force=True)
    other = Nested(2.0)
    with run(tmp_path, other) as manager:
        manager.load()
    assert other.more["b"] == 1.0 and other.more["deep"]["a"].tolist() == [1.0, 1.0]


class OnOneRank(nn.Linear):
    """Has one more key on rank 1, which its load refuses after a collective."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.loads = 0
        self.register_load_state_dict_pre_hook(self._count)
        if dist.get_rank() == 1:
            self.register_state_dict_post_hook(
                lambda module, state, prefix, _: state.update({prefix + "more": torch.ones(1)})
            )

    def _count(self, *_: Any) -> None:
        dist.barrier()
        self.loads += 1


@on_two_ranks
def test_all_ranks_try_alike(rank: int, tmp_path: Path) -> None:
    for number, wrap in enumerate((DistributedDataParallel, sharded, partial(flat, original=True))):
        inner = OnOneRank()
        refused = pytest.raises(ConfigError, match=r"load_state_dict .*0\.more")
        with run(tmp_path / f"{number}", wrap(with_head(inner))) as manager, refused:
            manager.save(1, force=True)
        assert inner.loads == 1


@on_two_ranks
def test_sharded_models_with_keys_of_their_own_are_tried_and_saved(rank: int, tmp_path: Path) -> None:
    wraps = DistributedDataParallel, sharded, partial(flat, original=True), partial(flat, original=False)
    for number, wrap in enumerate(wraps):
        torch.manual_seed(0)
        inner = FusedQkv() if number < 2 else Adding()  # FSDP1 refuses a hook that takes a key out.
        model = wrap(with_head(inner))
        tensors = [*model.parameters()]
        versions = [each._version for each in tensors]
        with run(tmp_path / f"{number}", model, interval=1) as manager:
            manager.save(1)
        assert inner.loads == 1
        assert [each._version for each in tensors] == versions
        assert all(a is b for a, b in zip(tensors, model.parameters(), strict=True))


@on_two_ranks
def test_flat_parameters_are_no_keys_of_their_own(rank: int, tmp_path: Path) -> None:
    inner = nn.Linear(4, 4)
    loads: list[int] = []
    inner.register_load_state_dict_pre_hook(lambda *_: loads.append(1))
    with run(tmp_path, flat(with_head(inner), original=False), interval=1) as manager:
        manager.save(1)
    assert not loads

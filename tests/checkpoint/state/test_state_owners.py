"""Optimizer states that some ranks keep and others lack: back to the ranks that had them, or where a hook says."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.checkpoint.conftest import MODES
from tests.checkpoint.state.low_bits import EightBits
from tests.logged import logged_warnings
from tests.ranks import Ranks, on_two_ranks
from torchtitan_lite.checkpoint import CheckpointManager
from torchtitan_lite.checkpoint.format.shards import local_of
from torchtitan_lite.checkpoint.state.optimizer_state import OwnerRanks
from torchtitan_lite.cli.app import main
from torchtitan_lite.errors import CheckpointMismatch, ConfigError, RanksDiffer

NAMES = ("0.weight", "0.bias", "1.weight", "1.bias")


def owner_of(name: str, num_ranks: int) -> int:
    return NAMES.index(name) % num_ranks


class OfOwners(torch.optim.Optimizer):
    """Keeps the momentum of parameter i on rank i modulo the number of ranks, which sends the others the result."""

    fills_others = False
    """Whether the other ranks keep one, too, which they never use."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # without a closure
        num_ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        for at, parameter in enumerate(self.param_groups[0]["params"]):
            if rank == at % num_ranks or self.fills_others:
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
            if rank == at % num_ranks:
                parameter.sub_(momentum.lerp_(parameter.grad, 0.1))
            if num_ranks > 1:
                dist.broadcast(parameter.detach(), at % num_ranks)


class OfOwnersWithRest(OfOwners):
    fills_others = True


class Listed(OfOwners):
    """Keeps a list that is longer on higher ranks."""

    def step(self) -> None:  # type: ignore[override]  # as above
        super().step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["seen"] = [torch.zeros(())] * (1 + dist.get_rank())


def continued(
    folder: Path, steps: int, kind: type[OfOwners] = OfOwners, settings: Any = None, **options: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Continue the run in `folder` up to `steps`, each of which is saved; return weights and momenta, by parameter."""
    is_alone = not dist.is_initialized()
    torch.manual_seed(len([*folder.glob("step-*")]))
    inner = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 3))
    model = inner if is_alone else DistributedDataParallel(inner)
    optimizer = kind(model.parameters(), {"lr": 1.0} if settings is None else settings)
    held = {"step": 0}
    with CheckpointManager.for_loop(
        model=model, optimizer=optimizer, states={"s": held}, folder=folder, interval=1, **options
    ) as manager:
        manager.load()
        manager.reset()
        while held["step"] < steps:
            manager.maybe_wait_for_staging()
            # Equal on all ranks: DDP sums the first step in an order of its own.
            batch = torch.randn(5, 8, generator=torch.Generator().manual_seed(held["step"]))
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            held["step"] += 1
            manager.save(held["step"])
    names = {each: name for name, each in inner.named_parameters()}
    momenta = {names[each]: state["momentum"] for each, state in optimizer.state.items() if "momentum" in state}
    return {name: each.detach().clone() for name, each in inner.named_parameters()}, momenta


def on_ranks(rank: int, folder: Path, steps: int, **options: Any) -> Any:
    weights, momenta = continued(folder, steps, **options)
    return [{name: each.tolist() for name, each in found.items()} for found in (weights, momenta)]


def in_lists(found: tuple[dict[str, Tensor], ...]) -> list[Any]:
    return [{name: each.tolist() for name, each in of_one.items()} for of_one in found]


@pytest.mark.parametrize("settings", [{"lr": 1.0}, pytest.param({}, marks=pytest.mark.slow)], ids=["settings", "none"])
@on_two_ranks
def test_a_state_that_only_its_owner_keeps_comes_back_to_it(rank: int, tmp_path: Path, settings: Any) -> None:
    straight = on_ranks(rank, tmp_path / "a", 6, settings=settings)
    for number, mode in enumerate(MODES):
        with logged_warnings() as warned:
            for steps in (2, 4, 6):  # Each in a start of its own.
                found = on_ranks(rank, tmp_path / f"b{number}", steps, settings=settings, async_mode=mode)
        assert found == straight and not warned
    assert [*found[1]] == [*NAMES[rank::2]]


def test_one_rank_gets_all_and_others_only_where_the_hook_says(
    two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path
) -> None:
    of_two = two_ranks.run(on_ranks, folder=tmp_path, steps=2)
    refusal = r"0.weight.momentum: only ranks 0 of 2 had it, and this run has 4: .* state_owner"
    reports = four_ranks.reports(refused, folder=tmp_path, match=refusal)
    assert not [each.failure for each in reports if each.failure]
    on_four = four_ranks.run(on_ranks, folder=tmp_path, steps=2, state_owner=owner_of)
    assert [[*momenta] for _, momenta in on_four] == [[name] for name in NAMES]

    weights, momenta = in_lists(continued(tmp_path, 2))
    held = [found for _, found in of_two]
    assert momenta == {**held[0], **held[1]} == {name: of[name] for of, name in zip(held * 2, NAMES, strict=True)}
    assert all(weights == of_rank for of_rank, _ in [*of_two, *on_four])
    # One rank alone knows it from the checkpoint, and its checkpoint says so again.
    _, momenta = in_lists(continued(tmp_path, 3))
    refusal = "only ranks 0 of 1 had it, and this run has 2: resume on one, or give"
    reports = two_ranks.reports(refused, folder=tmp_path, match=refusal)
    assert not [each.failure for each in reports if each.failure]
    again = two_ranks.run(on_ranks, folder=tmp_path, steps=3, state_owner=owner_of)
    assert [found for _, found in again] == [{name: momenta[name] for name in NAMES[at::2]} for at in (0, 1)]


def refused(rank: int, folder: Path, match: str) -> None:
    with pytest.raises(CheckpointMismatch, match=match):
        continued(folder, 2)


def test_a_run_that_began_on_one_rank_continues_on_two_with_the_hook(two_ranks: Ranks, tmp_path: Path) -> None:
    straight, of_all = continued(tmp_path / "a", 4, state_owner=owner_of)
    continued(tmp_path / "b", 2, state_owner=owner_of)
    reports = two_ranks.reports(refused, folder=tmp_path / "b", match="only ranks 0 of 1 had it")
    assert not [each.failure for each in reports if each.failure]
    for at, found in enumerate(two_ranks.run(on_ranks, folder=tmp_path / "b", steps=4, state_owner=owner_of)):
        expected = in_lists((straight, {name: of_all[name] for name in NAMES[at::2]}))
        assert found == expected, "both ranks have the batch of one, whose gradients have equal sums"


@on_two_ranks
def test_with_the_hook_only_its_owner_s_state_counts(rank: int, tmp_path: Path) -> None:
    straight = on_ranks(rank, tmp_path / "a", 4, kind=OfOwnersWithRest, state_owner=owner_of)
    with logged_warnings() as warned:
        on_ranks(rank, tmp_path / "b", 2, kind=OfOwnersWithRest, state_owner=owner_of)
        found = on_ranks(rank, tmp_path / "b", 4, kind=OfOwnersWithRest, state_owner=owner_of)
    assert found == straight and not warned
    with pytest.raises(RanksDiffer, match="state_owner"):
        continued(tmp_path / "c", 1, OfOwnersWithRest)


@on_two_ranks
def test_a_hook_that_names_a_rank_without_the_state_is_refused(rank: int, tmp_path: Path) -> None:
    where = r"optimizer\.state\.0\.weight\.momentum is on rank 0 and not on rank 1, its state_owner"
    with pytest.raises(RanksDiffer, match=where):
        continued(tmp_path / "a", 1, state_owner=lambda name, num_ranks: 1)
    assert not [*(tmp_path / "a").glob("step-*")]
    for wrong in (2, -1, True, "0"):
        with pytest.raises(ConfigError, match=r"state_owner\('0.weight', 2\) returned .* below 2"):
            continued(tmp_path / "b", 1, state_owner=lambda *_, wrong=wrong: wrong)
    with pytest.raises(ConfigError, match="state_owner: expected a function, found an int"):
        continued(tmp_path / "b", 1, state_owner=1)


@on_two_ranks
def test_a_list_with_other_entries_on_another_rank_is_still_refused(rank: int, tmp_path: Path) -> None:
    with pytest.raises(RanksDiffer, match=r"state\.0\.weight\.seen has other entries on rank 1 than on rank 0"):
        continued(tmp_path, 1, Listed)


@pytest.mark.parametrize("text", ["", "1", "x of 2", "1 of", "1,,2 of 3", "-1 of 2", None, 3])
def test_a_text_that_names_no_ranks_is_not_taken_for_some(text: object) -> None:
    owners = OwnerRanks.parse(text)
    assert owners == OwnerRanks((), 0) and owners.include(0, 2, None, "") is None
    for known in (OwnerRanks((0, 3), 4), OwnerRanks((1,), 2, "shard0 on 2")):
        assert OwnerRanks.parse(str(known)) == known


@on_two_ranks
def test_the_hook_leaves_a_sharded_state_and_all_next_to_it_on_each_rank(rank: int, tmp_path: Path) -> None:
    def trained(folder: Path, steps: int) -> list[Any]:
        torch.manual_seed(0)
        model = fully_shard(nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 3)), mesh=init_device_mesh("cpu", (2,)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        held = {"step": 0}
        with CheckpointManager.for_loop(
            model=model, optimizer=optimizer, states={"s": held}, folder=folder, interval=1, state_owner=owner_of
        ) as manager:
            manager.load()
            manager.reset()
            while held["step"] < steps:
                model(torch.ones(4, 8)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                held["step"] += 1
                manager.save(held["step"])
        states = [optimizer.state[each] for each in model.parameters()]
        return [[local_of(each).tolist() for each in state.values()] for state in states]

    straight = trained(tmp_path / "a", 4)
    trained(tmp_path / "b", 2)
    assert trained(tmp_path / "b", 4) == straight


class OfReplicas(torch.optim.Optimizer):
    """Keeps the momentum of parameter i on the i-th of the replicas, each of which has its shards."""

    def __init__(self, parameters: Any, mesh: DeviceMesh) -> None:
        super().__init__(parameters, {"lr": 1.0})
        self.mesh = mesh

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # as above
        replica, num_replicas = self.mesh.get_local_rank("dp"), self.mesh["dp"].size()
        for at, parameter in enumerate(self.param_groups[0]["params"]):
            if replica == at % num_replicas:
                self.state[parameter].setdefault("momentum", torch.zeros_like(parameter)).add_(1)


def in_shards(rank: int, folder: Path, steps: int, tp: int, match: str = "") -> list[str]:
    """Continue on `tp` shards, and replicas of these, up to `steps`; or be refused with `match`."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    for part in model:
        part.weight = nn.Parameter(distribute_tensor(part.weight.detach(), mesh["tp"], [Shard(0)]))
    optimizer = OfReplicas(model.parameters(), mesh)
    held = {"step": 0}
    options = {"states": {"s": held}, "folder": folder, "interval": 1, "state_owner": lambda *_: 0}
    with CheckpointManager.for_loop(model=model, optimizer=optimizer, **options) as manager:
        with pytest.raises(CheckpointMismatch, match=match) if match else nullcontext():
            manager.load()
        if match:
            return []
        manager.reset()
        while held["step"] < steps:
            optimizer.step()
            held["step"] += 1
            manager.save(held["step"])
    names = {each: name for name, each in model.named_parameters()}
    return [names[each] for each, state in optimizer.state.items() for _ in range(int(state["momentum"].max()))]


def test_owners_that_have_shards_resume_with_the_same_shards_only(
    four_ranks: Ranks, two_ranks: Ranks, tmp_path: Path
) -> None:
    four_ranks.run(in_shards, folder=tmp_path, steps=2, tp=2)
    refusal = r"0.weight.momentum: only ranks 0,1 of 4 as shard0 on 2 had it, .*: resume on 4 in the same shards"
    for ranks, tp in ((four_ranks, 4), (two_ranks, 2)):
        reports = ranks.reports(in_shards, folder=tmp_path, steps=2, tp=tp, match=refusal)
        assert not [each.failure for each in reports if each.failure]
    again = four_ranks.run(in_shards, folder=tmp_path, steps=3, tp=2)
    assert again == [["0.weight"] * 3] * 2 + [["1.weight"] * 3] * 2


def in_shards_of_low_bits(rank: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Linear(8, 8, bias=False)
    whole = DTensor.from_local(EightBits.of(torch.ones(4, 8)), mesh["tp"], [Shard(0)], run_check=False)
    model.weight = nn.Parameter(whole, requires_grad=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if mesh.get_local_rank("dp") == 0:
        optimizer.state[model.weight]["momentum"] = distribute_tensor(torch.ones(8, 8), mesh["tp"], [Shard(0)])
    with CheckpointManager.for_loop(model=model, optimizer=optimizer, folder=folder, interval=1) as manager:
        manager.load()
        where = r"weight\.momentum is in shards on some ranks, and its parameter is made of other"
        with pytest.raises(RanksDiffer, match=where):
            manager.save(1)


def test_owners_that_have_shards_of_a_low_bit_parameter_are_refused_at_the_first_save(
    four_ranks: Ranks, tmp_path: Path
) -> None:
    four_ranks.run(in_shards_of_low_bits, folder=tmp_path)


@on_two_ranks
def test_a_state_of_a_low_bit_parameter_comes_back_to_its_owner(rank: int, tmp_path: Path) -> None:
    def start() -> tuple[torch.optim.Optimizer, nn.Parameter, CheckpointManager]:
        model = nn.Linear(8, 8, bias=False)
        model.weight = nn.Parameter(EightBits.of(torch.ones(8, 8)), requires_grad=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        manager = CheckpointManager.for_loop(model=model, optimizer=optimizer, folder=tmp_path, interval=1)
        manager.load()
        return optimizer, model.weight, manager

    optimizer, weight, manager = start()
    with manager:
        if rank == 1:
            optimizer.state[weight]["momentum"] = torch.ones(3)
        manager.save(1)
    optimizer, weight, manager = start()
    with manager:
        assert [*optimizer.state.get(weight, {})] == ["momentum"] * rank


class Dotted(OfOwners):
    """Keeps it under a name with a dot."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # as above
        super().step()
        for state in self.state.values():
            state["its.momentum"] = state.pop("momentum")

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.register_step_pre_hook(self._rename)

    def _rename(self, *_: Any) -> None:
        for state in self.state.values():
            if "its.momentum" in state:
                state["momentum"] = state.pop("its.momentum")


@pytest.mark.parametrize(
    "options", [pytest.param({}, marks=pytest.mark.slow), {"state_owner": owner_of}], ids=["by absence", "by the hook"]
)
@on_two_ranks
def test_a_state_with_a_dot_in_its_name_comes_back_to_its_owner(
    rank: int, tmp_path: Path, options: dict[str, Any]
) -> None:
    straight = on_ranks(rank, tmp_path / "a", 4, kind=Dotted, **options)
    on_ranks(rank, tmp_path / "b", 2, kind=Dotted, **options)
    found = on_ranks(rank, tmp_path / "b", 4, kind=Dotted, **options)
    assert found == straight


def test_owners_are_known_from_plain_dcp_too(two_ranks: Ranks, tmp_path: Path) -> None:
    there = two_ranks.run(on_ranks, folder=tmp_path / "run", steps=2)
    main(["convert", str(tmp_path / "run" / "step-2"), str(tmp_path / "dcp"), "--layout", "dcp"])
    loads = {"initial_load_path": str(tmp_path / "dcp"), "initial_load_model_only": False}
    again = two_ranks.run(on_ranks, folder=tmp_path / "other", steps=2, **loads)
    assert again == there

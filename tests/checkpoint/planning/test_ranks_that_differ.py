"""Values that differ between ranks under one name: one rank's is saved with a warning; PerRank saves all of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from tests.checkpoint.only_once import load_and_close, save_and_close
from tests.checkpoint.sharded_run import sharded_run
from tests.checkpoint.small_run import job_config
from tests.held import Held
from tests.logged import logged_warnings
from tests.ranks import Ranks, on_two_ranks
from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.checkpoint.planning.replicated import _value_digest
from torchtitan_lite.checkpoint.state.per_rank import PerRank
from torchtitan_lite.checkpoint.state.stateful import ModelWrapper, Stateful
from torchtitan_lite.checkpoint.state.train_state import TrainState
from torchtitan_lite.errors import CheckpointMismatch, ConfigError, RanksDiffer


class Picky(Held):
    """Refuses a state with another `of`."""

    def check_state(self, state_dict: dict[str, Any]) -> None:
        if state_dict["of"] != self.values["of"]:
            raise ConfigError("not mine")


def manager_of(
    folder: Path, states: dict[str, Stateful], model: nn.Module | None = None, **checkpoint: Any
) -> CheckpointManager:
    torch.manual_seed(0)
    model = model or nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return CheckpointManager(None, [model], [optimizer], [], states, job_config(folder, **checkpoint))


def differing(warned: Sequence[str]) -> list[str]:
    return [message for message in warned if "Ranks hold different values" in message]


@on_two_ranks
def test_all_of_a_plain_state_comes_from_the_lowest_rank(rank: int, tmp_path: Path) -> None:
    def counts() -> Held:
        return Held(count=100 + rank, average=torch.tensor([10.0 + rank] * 5), total=torch.tensor(7 + rank))

    with manager_of(tmp_path, {"counts": counts()}) as manager, logged_warnings() as warned:
        manager.save(1, force=True)
    [warning] = differing(warned) or [""]
    assert (rank == 0) == ("counts.count (rank 0's is saved), counts.average (rank 0's is saved)" in warning)
    assert ("PerRank" in warning) == (rank == 0)
    loaded = counts()
    with manager_of(tmp_path, {"counts": loaded}) as manager:
        manager.load()
    assert loaded.values["count"] == 100
    assert loaded.values["average"].tolist() == [10.0] * 5
    assert loaded.values["total"].item() == 7


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.before(x))
        return y


@on_two_ranks
def test_a_model_under_ddp_saves_the_running_statistics_of_the_first_rank(rank: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(Normed())
    with manager_of(tmp_path, {"train_state": TrainState()}, model) as manager, logged_warnings() as warned:
        model(torch.full((8, 3), float(rank)) + torch.randn(8, 3)).sum().backward()
        mine = model.module.norm.running_mean.clone()
        of_all: list[Any] = [None, None]
        dist.all_gather_object(of_all, mine)
        assert not torch.equal(*of_all)
        manager.save(1, force=True)
        model.module.norm.running_mean.zero_()
        manager.load()
    assert torch.equal(model.module.norm.running_mean, of_all[0])
    assert ("model.norm.running_mean" in " ".join(differing(warned))) == (rank == 0)


@on_two_ranks
def test_parameters_are_still_spread_over_the_ranks_that_have_them(rank: int, tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(200, 200) for _ in range(8)))
    model.register_buffer("table", torch.ones(500_000))
    with manager_of(tmp_path, {"train_state": TrainState()}, model, interval=1) as manager:
        manager.save(1)
    dist.barrier()
    sizes = [(tmp_path / "checkpoint" / "step-1" / f"__{r}_0.distcp").stat().st_size for r in (0, 1)]
    parameters = 4 * sum(p.numel() for p in model.parameters())
    # The buffer has more bytes than all parameters, so the parameters go to the other rank.
    assert sizes[0] < 2_000_000 + parameters / 2
    assert sizes[1] > parameters


def test_the_names_of_parameters_are_those_of_the_state_dict() -> None:
    model = nn.Sequential(Normed(), torch.compile(Normed(), backend="eager"))
    model[0].before.weight = model[1].before.weight
    wrapper = ModelWrapper(model)
    buffers = {f"{i}.norm.{name}" for i in (0, 1) for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert wrapper.state_dict().keys() - wrapper.parameter_names() == buffers


@on_two_ranks
def test_equal_states_and_names_of_only_one_rank_are_no_difference(rank: int, tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    sharded = DTensor.from_local(torch.full((2, 2), float(rank)), mesh, [Shard(0)])
    names = {"one", "two", "three", "four", "five"}
    progress = TrainState(step=3, run_seconds=1.5 * rank, productive_seconds=float(rank))
    states: dict[str, Stateful] = {
        "train_state": progress,
        "counts": Held(a=float("nan"), b=[1, {"c": (2, "x")}], d=torch.arange(3)),
        "per_rank": PerRank(Held(rank=rank)),
        "cut": Held(values=sharded),
        # Equal entries, in another order on each rank.
        "order": Held(**{name: len(name) for name in sorted(names, reverse=rank == 1)}),
    }
    with manager_of(tmp_path, states) as manager, logged_warnings() as warned:
        manager.save(1, force=True)
    assert not warned
    run = sharded_run(tmp_path / "fsdp", interval=1)
    with run.manager, logged_warnings() as warned:
        run.train(2)
    assert not differing(warned)


@on_two_ranks
def test_ranks_are_compared_at_the_first_save_and_once(rank: int, tmp_path: Path, mode: str) -> None:
    held = Held(value=0)
    with manager_of(tmp_path, {"held": held}, interval=2, async_mode=mode) as manager, logged_warnings() as warned:
        manager.reset()
        held.values["value"] = rank
        assert not manager.save(1)
        assert not differing(warned), "step 1 is not saved"
        for step in range(2, 7):
            manager.save(step, force=step == 6)
    assert len(differing(warned)) == (rank == 0)


@on_two_ranks
def test_a_long_list_of_keys_is_shortened(rank: int, tmp_path: Path) -> None:
    with (
        manager_of(tmp_path, {"held": Held(**{f"v{i}": i + rank for i in range(9)})}) as manager,
        logged_warnings() as warned,
    ):
        manager.save(1, force=True)
    assert rank == 1 or "held.v3 (rank 0's is saved) and 5 more." in differing(warned)[0]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"b": 1, "a": 2}, {"a": 2, "b": 1}),
        ({3, 1, 2}, {1, 2, 3}),
        ([float("nan")], [float("nan")]),
        (torch.arange(4)[::2], torch.tensor([0, 2])),
        (torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)),
    ],
    ids=["order", "set", "nan", "strides", "bfloat16"],
)
def test_equal_values_have_equal_digests(one: Any, other: Any) -> None:
    assert _value_digest(one) == _value_digest(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, 1.0), ([1], (1,)), ("1", 1), (b"1", "1"), ([[1], 2], [[1, 2]]), (torch.ones(2), torch.ones(1, 2)), (True, 1)],
    ids=str,
)
def test_different_values_have_different_digests(one: Any, other: Any) -> None:
    assert _value_digest(one) != _value_digest(other)


def test_values_that_cannot_become_bytes_are_no_difference() -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert _value_digest(endless) == _value_digest(endless)
    assert _value_digest(lambda: 1) == _value_digest(lambda: 2)


def save_per_rank(rank: int, folder: Path, **held: Any) -> None:
    own = Held(position=10 + rank, seen=torch.arange(rank + 3), **held)
    save_and_close(manager_of(folder, {"sampler": PerRank(own)}, digest_tensors=("save",)))


def load_per_rank(rank: int, folder: Path) -> tuple[int, list[int], list[str]]:
    own = Held(position=0, seen=torch.zeros(1))
    with (
        manager_of(folder, {"sampler": PerRank(own)}, load_only=True, digest_tensors=("load",)) as manager,
        logged_warnings() as warned,
    ):
        assert manager.load()
    return own.values["position"], own.values["seen"].tolist(), warned


def test_each_rank_gets_back_what_it_saved(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(save_per_rank, folder=tmp_path)
    assert two_ranks.run(load_per_rank, folder=tmp_path) == [(10, [0, 1, 2], []), (11, [0, 1, 2, 3], [])]
    position, seen, warned = load_per_rank(0, tmp_path)
    assert (position, seen) == (10, [0, 1, 2])
    assert warned == ["Held of 2 ranks is loaded by 1: those of ranks from 1 on are not loaded"]


def dict_per_rank(rank: int, folder: Path) -> tuple[dict[str, int], bool]:
    """Return what came back in a plain dict, and whether it is the same dict."""
    save_and_close(manager_of(folder, {"cursor": PerRank({"position": 10 + rank})}))
    held = {"position": 0, "of another run": 1}
    own = PerRank(held)
    load_and_close(manager_of(folder, {"cursor": own}, load_only=True))
    return held, held == own.state_dict()[f"rank{rank}"]


def test_each_rank_gets_back_a_plain_dict_in_place(two_ranks: Ranks, tmp_path: Path) -> None:
    found = two_ranks.run(dict_per_rank, folder=tmp_path)
    assert found == [({"position": 10}, True), ({"position": 11}, True)]


def refused_then_fresh(rank: int, folder: Path) -> tuple[str, int, list[str]]:
    """Return the refusal of a load, and the position and the warnings of a load that may begin from scratch."""
    own = Held(position=5)
    with (
        manager_of(folder, {"sampler": PerRank(own)}, load_only=True) as manager,
        pytest.raises(
            ConfigError, match=r"PerRank\(Held\): .* of 1 rank, and none for rank 1 of 2\. Resume on 1 rank,"
        ) as refusal,
        logged_warnings() as warned,
    ):
        manager.load()
    assert not warned
    fresh = PerRank(own, on_missing="fresh")
    with manager_of(folder, {"sampler": fresh}, load_only=True) as manager, logged_warnings() as warned:
        report = manager.dry_run()
        assert report is not None and not report.refusals
        assert manager.load()
    return type(refusal.value).__name__, own.values["position"], warned


def test_a_rank_that_saved_none_refuses_together_with_the_others(two_ranks: Ranks, tmp_path: Path) -> None:
    save_per_rank(0, tmp_path)
    assert two_ranks.run(refused_then_fresh, folder=tmp_path) == [
        ("ConfigError", 10, ["Held of 1 rank is loaded by 2: those of ranks from 1 on begin from scratch"]),
        ("ConfigError", 5, []),
    ]


def test_a_state_that_was_saved_for_all_is_refused_or_begun_from_scratch(tmp_path: Path) -> None:
    save_and_close(manager_of(tmp_path, {"sampler": Held(position=3)}))
    own = Held(position=0)
    with (
        manager_of(tmp_path, {"sampler": PerRank(own)}, load_only=True) as manager,
        pytest.raises(ConfigError, match="once for all ranks, not by PerRank"),
    ):
        manager.load()
    load_and_close(manager_of(tmp_path, {"sampler": PerRank(own, on_missing="fresh")}, load_only=True))
    assert own.values == {"position": 0}


def test_a_state_without_entries_comes_back(tmp_path: Path) -> None:
    save_and_close(manager_of(tmp_path, {"sampler": PerRank(Held())}))
    own = Held(position=0)
    load_and_close(manager_of(tmp_path, {"sampler": PerRank(own)}, load_only=True))
    assert own.values == {}


def test_a_refusal_of_the_wrapped_state_is_in_the_report(tmp_path: Path) -> None:
    save_and_close(manager_of(tmp_path, {"sampler": PerRank(Picky(of="a"))}))
    with manager_of(tmp_path, {"sampler": PerRank(Picky(of="b"))}, load_only=True) as manager:
        report = manager.dry_run()
    assert report is not None and "not mine" in str(report)


def test_a_checkpoint_without_such_a_state_is_refused(tmp_path: Path) -> None:
    save_and_close(manager_of(tmp_path, {}))
    with (
        manager_of(tmp_path, {"sampler": PerRank(Held(a=1))}, load_only=True) as manager,
        pytest.raises(CheckpointMismatch, match="sampler"),
    ):
        manager.load()


def test_an_unknown_on_missing_is_refused_at_construction() -> None:
    with pytest.raises(ConfigError, match="'refuse' or 'fresh'"):
        PerRank(Held(), on_missing="ignore")  # type: ignore[arg-type]  # that is the point


@pytest.mark.parametrize("given", [[1], torch.Generator(), Held], ids=["list", "Generator", "class"])
def test_an_object_without_a_state_is_refused_at_construction(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"PerRank: (a list|a Generator|the class Held) has no state_dict and load"):
        PerRank(given)


@on_two_ranks
def test_a_list_comes_from_one_rank_and_never_from_two(rank: int, tmp_path: Path) -> None:
    for lengths in ((2, 3), (3, 2), (1, 4)):
        folder = tmp_path / f"{lengths}"
        held = Held(seen=[torch.tensor([10.0 * rank + at]) for at in range(lengths[rank])])
        with manager_of(folder, {"held": held}, interval=1) as manager, logged_warnings() as warned:
            manager.save(1)
        assert [("held.seen (rank 0's is saved)" in each) for each in differing(warned)] == [True] * (rank == 0)
        loaded = Held(seen=[])
        with manager_of(folder, {"held": loaded}, load_only=True) as manager:
            manager.load()
        assert [float(each) for each in loaded.values["seen"]] == [float(at) for at in range(lengths[0])]


@on_two_ranks
def test_a_list_that_grows_apart_later_is_warned_of_once(rank: int, tmp_path: Path) -> None:
    held = Held(seen=[torch.tensor(0.0)])
    with manager_of(tmp_path, {"held": held}, interval=1) as manager, logged_warnings() as warned:
        for step in (1, 2, 3):
            manager.save(step)
            held.values["seen"] += [torch.tensor(float(step))] * rank
    assert len(differing(warned)) == (rank == 0)


def settings_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {key: value for key, value in optimizer.param_groups[0].items() if key in ("lr", "scales", "mine")}


@on_two_ranks
def test_a_learning_rate_that_differs_is_named_though_a_rank_has_a_setting_more(rank: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    group: dict[str, Any] = {"params": model.parameters()} | ({"more": 1} if rank else {})
    optimizer = torch.optim.SGD([group], lr=0.1 + rank)
    config = job_config(tmp_path, interval=1)
    with CheckpointManager(None, [model], [optimizer], [], {}, config) as manager, logged_warnings() as warned:
        manager.save(1)
    assert rank == 1 or "optimizer.param_groups.bias.lr (rank 0's is saved)" in differing(warned)[0]


@pytest.mark.parametrize("more_on", [0, 1])
@on_two_ranks
def test_settings_come_from_one_rank_and_are_compared_whatever_else_a_rank_has(
    rank: int, tmp_path: Path, more_on: int
) -> None:
    def manager_with(lr: float, **more: Any) -> CheckpointManager:
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        nonlocal optimizer
        optimizer = torch.optim.SGD([{"params": model.parameters(), **more}], lr=lr)
        return CheckpointManager(None, [model], [optimizer], [], {}, job_config(tmp_path, interval=1))

    optimizer: Any = None
    scales = [torch.tensor(10.0 * rank + at) for at in range(2 + rank)]
    more = {"mine": 7} if rank == more_on else {}
    with manager_with(0.1, scales=scales, **more) as manager, logged_warnings() as warned:
        manager.save(1)
    [warning] = differing(warned) if rank == 0 else [""]
    for part in ("bias.mine", "bias.scales"):
        assert rank == 1 or f"optimizer.param_groups.{part} (rank 0's is saved)" in warning
    with manager_with(0.5, scales=[], **more) as manager:
        manager.load()
    assert settings_of(optimizer) == {"lr": 0.1, "scales": [0.0, 1.0]} | ({"mine": 7} if more_on == 0 else more)


def copies_of(model: nn.Module, form: str) -> dict[str, Any]:
    """Return an average by hand of this rank's shards."""
    shards = {name: each.detach().to_local().clone() for name, each in model.named_parameters()}  # type: ignore[operator]
    if form == "in a list":
        return {"shadow": [*shards.values()]}
    return {name.replace(".", "_") if form == "as buffers" else name: shard for name, shard in shards.items()}


@pytest.mark.parametrize("form", ["by name", "as buffers", "in a list"])
@on_two_ranks
def test_a_copy_of_each_ranks_shards_is_refused_unless_each_gets_its_own_back(
    rank: int, tmp_path: Path, form: str
) -> None:
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)), mesh=init_device_mesh("cpu", (2,)))
    for is_last in (False, True):
        average = Held(**copies_of(model, form))
        with pytest.raises(RanksDiffer) as refused, manager_of(tmp_path / "a", {"average": average}, model) as manager:
            manager.save(1, force=is_last, now=True)
        assert "average." in str(refused.value) and "of one rank's shard of model." in str(refused.value)
        assert "PerRank" in str(refused.value)
        assert not [*(tmp_path / "a" / "checkpoint").glob("step-*")]
    own = Held(**copies_of(model, form))
    save_and_close(manager_of(tmp_path / "b", {"average": PerRank(own)}, model))
    again = Held()
    load_and_close(manager_of(tmp_path / "b", {"average": PerRank(again)}, model, load_only=True))
    assert str(again.values) == str(own.values)


@on_two_ranks
def test_a_copy_of_shards_that_comes_later_is_refused_and_other_tensors_of_a_shape_are_not(
    rank: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(4, 6), mesh=init_device_mesh("cpu", (2,)))
    held = Held(losses=torch.full((3,), float(rank)), same=[torch.zeros(3)])
    with manager_of(tmp_path, {"held": held}, model, interval=1) as manager, logged_warnings() as warned:
        manager.reset()
        manager.save(1)
        assert len(differing(warned)) == (rank == 0)
        held.values |= copies_of(model, "by name")
        with pytest.raises(
            RanksDiffer, match=r"held\.weight has the shape \[3, 4\] of one rank's shard of model\.weight"
        ):
            manager.save(2)
    assert len(differing(warned)) == (rank == 0)

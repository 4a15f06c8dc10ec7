"""Parameters that ranks hold under one name: equal, saved from one rank with a warning, or refused by name."""

from __future__ import annotations

import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.checkpoint.images.image_runs import tier_on
from tests.checkpoint.small_run import Events
from tests.logged import logged_warnings
from tests.ranks import Ranks, on_two_ranks
from torchtitan_lite.checkpoint.format.flattening import State
from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.checkpoint.planning import rank_comparison
from torchtitan_lite.checkpoint.planning.plan_cache import PlanCache
from torchtitan_lite.checkpoint.planning.rank_comparison import RankComparison
from torchtitan_lite.checkpoint.planning.replicated import Replicated
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import RanksDiffer

SLOW_MODES = [pytest.param(mode, marks=pytest.mark.slow) for mode in ("async", "disabled")]
"""Ranks are compared before a save takes its way: one way is enough in the fast tier."""


@pytest.fixture(params=["async_with_pinned_mem", *SLOW_MODES])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Loop:
    """A loop on one rank: `model`, AdamW, and the manager of both."""

    def __init__(self, folder: Path, model: nn.Module, **options: Any) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        self.events = Events()
        self.manager = CheckpointManager.for_loop(
            model=model,
            optimizer=self.optimizer,
            folder=folder / "checkpoint",
            on_event=self.events,
            **({"interval": 3, "memory_ttl_seconds": 0} | options),
        )

    def train(self, loss_of: Callable[[nn.Module], Tensor]) -> None:
        """Train one step on the gradients that this rank computes."""
        self.optimizer.zero_grad()
        loss_of(self.model).backward()
        self.optimizer.step()

    def values(self) -> dict[str, Tensor]:
        """Return all that a checkpoint has of model and optimizer, copied, by name."""
        named = {id(each): name for name, each in self.model.named_parameters()}
        found = {f"model.{name}": each.detach().clone() for name, each in self.model.named_parameters()}
        for parameter, state in self.optimizer.state.items():
            found |= {f"{named[id(parameter)]}.{name}": torch.as_tensor(value).clone() for name, value in state.items()}
        return found


def stack(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(40, 40) for _ in range(6)))


def loss_on(rank: int, step: int) -> Callable[[nn.Module], Tensor]:
    batch = torch.randn(8, 40, generator=torch.Generator().manual_seed(100 * step + rank))
    return lambda model: model(batch).square().mean()


def same_loss(step: int) -> Callable[[nn.Module], Tensor]:
    return loss_on(0, step)


def loaded(folder: Path, model: nn.Module, step: int = -1, **options: Any) -> dict[str, Tensor]:
    """Return what all ranks get of model and optimizer from a checkpoint. **Collective**."""
    again = Loop(folder, model, load_only=True, **options)
    with again.manager as manager:
        assert manager.load(step)
    return again.values()


def of_rank(rank: int, value: Any) -> Any:
    """Return `value` of another rank. **Collective**."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values[rank]


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())


def warnings_of_ranks(warned: list[str]) -> list[str]:
    return [message for message in warned if "Ranks hold slightly" in message]


@on_two_ranks
def test_a_forgotten_ddp_is_refused_by_name_at_the_first_save(rank: int, tmp_path: Path, mode: str) -> None:
    loop = Loop(tmp_path, stack(), async_mode=mode)
    loop.manager.reset()
    with pytest.raises(RanksDiffer) as refused:
        for step in range(1, 4):
            loop.train(loss_on(rank, step))
            loop.manager.save(step)
    loop.manager.close()
    message = str(refused.value)
    assert step == 3
    assert "rank 1 and rank 0, relative difference" in message
    assert "and 32 more" in message, "of 12 parameters and their two averages"
    assert "ranks_may_differ=True" in message and "nn.ModuleDict" in message
    assert not (tmp_path / "checkpoint" / "step-3").exists()
    assert loop.events.steps("save_failed") == [3]


@on_two_ranks
def test_equal_ranks_share_the_work_without_a_warning(rank: int, tmp_path: Path, mode: str) -> None:
    loop = Loop(tmp_path, stack(), async_mode=mode)
    with loop.manager as manager, logged_warnings() as warned:
        manager.reset()
        for step in range(1, 7):
            loop.train(same_loss(step))
            manager.save(step)
        loop.train(same_loss(7))
        manager.save(7, force=True)
    assert not warned
    dist.barrier()
    sizes = [(tmp_path / "checkpoint" / "step-6" / f"__{r}_0.distcp").stat().st_size for r in (0, 1)]
    num_bytes = 3 * sum(each.nbytes for each in loop.model.parameters())
    assert min(sizes) > 0.4 * num_bytes, "rank 0 has all objects, and half of the tensors"
    assert equal(loaded(tmp_path, stack(1), 7), loop.values())


@pytest.mark.slow
@on_two_ranks
def test_last_bits_that_differ_are_one_warning_and_all_comes_from_the_lowest_rank(
    rank: int, tmp_path: Path, mode: str
) -> None:
    loop = Loop(tmp_path, stack(), async_mode=mode)
    held = {}
    with loop.manager as manager, logged_warnings() as warned:
        manager.reset()
        for step in range(1, 10):
            loop.train(same_loss(step))
            with torch.no_grad():
                loop.model[3].weight.mul_(1 + 1e-6 * rank)
            manager.save(step)
            held[step] = loop.values()
            manager.maybe_wait_for_staging()
    found = warnings_of_ranks(warned)
    assert len(found) == (rank == 0)
    assert rank == 1 or "(rank 1 and rank 0, relative difference" in found[0]
    for step in (3, 6, 9):
        assert equal(loaded(tmp_path, stack(1), step), of_rank(0, held[step])), "a state that rank 0 had"


@on_two_ranks
def test_the_last_save_is_written_from_the_lowest_rank_before_the_error(rank: int, tmp_path: Path, mode: str) -> None:
    loop = Loop(tmp_path, stack(), async_mode=mode, interval=100)
    with pytest.raises(RanksDiffer), loop.manager as manager:
        for step in range(1, 3):
            loop.train(loss_on(rank, step))
            manager.save(step, force=step == 2)
    assert loop.events.steps("committed") == ([2] if rank == 0 else [])
    assert equal(loaded(tmp_path, stack(1)), of_rank(0, loop.values()))


@on_two_ranks
def test_a_save_for_a_signal_is_written_from_the_lowest_rank_before_the_error(rank: int, tmp_path: Path) -> None:
    loop = Loop(tmp_path, stack(), async_mode="async", interval=100)
    with pytest.raises(RanksDiffer), loop.manager as manager:
        manager.reset()
        for step in range(1, 4):
            loop.train(loss_on(rank, step))
            if rank == 1 and step == 1:
                signal.raise_signal(signal.SIGTERM)
            manager.save(step)
    assert step == 2
    assert equal(loaded(tmp_path, stack(1)), of_rank(0, loop.values()))


@on_two_ranks
def test_an_image_of_ranks_that_differ_is_not_kept(rank: int, tmp_path: Path) -> None:
    options = {"async_mode": "async", "memory_interval": 1, "interval": 4, "memory_ttl_seconds": 60}
    with tier_on(tmp_path), logged_warnings() as warned:
        loop = Loop(tmp_path, stack(), **options)
        with pytest.raises(RanksDiffer), loop.manager as manager:
            manager.reset()
            for step in range(1, 5):
                loop.train(loss_on(rank, step))
                manager.save(step)
                manager.maybe_wait_for_staging()
    assert step == 4, "an image ends no run, a save does"
    ended = [message for message in warned if "No more in-memory snapshots in this start: ranks hold" in message]
    assert len(ended) == (rank == 0), warned
    assert not loop.events.steps("image_ready")


@on_two_ranks
def test_averages_that_are_due_are_found_after_a_first_save_on_an_average(rank: int, tmp_path: Path, mode: str) -> None:
    """Local SGD whose first save falls on an average; the next one does not."""
    model = stack()
    loop = Loop(tmp_path, model, async_mode=mode)
    loop.optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
    loop.manager = CheckpointManager.for_loop(
        model=model, optimizer=loop.optimizer, folder=tmp_path / "checkpoint", interval=3, async_mode=mode
    )
    with pytest.raises(RanksDiffer), loop.manager as manager, logged_warnings() as warned:
        for step in range(1, 8):
            loop.train(loss_on(rank, step))
            if step in (3, 6):
                average(model)
            manager.save(step, now=step == 7)
    assert step == 7
    assert not warnings_of_ranks(warned)
    assert loop.events is not None and (tmp_path / "checkpoint" / "step-6").exists()


def average(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.detach(), op=dist.ReduceOp.SUM)
        parameter.detach().div_(dist.get_world_size())


@on_two_ranks
def test_with_ranks_may_differ_the_lowest_ranks_state_is_saved_and_loaded(rank: int, tmp_path: Path, mode: str) -> None:
    loop = Loop(tmp_path, stack(), async_mode=mode, ranks_may_differ=True)
    with loop.manager as manager, logged_warnings() as warned:
        for step in range(1, 4):
            loop.train(loss_on(rank, step))
            manager.save(step)
            manager.wait()
    assert not warned
    assert equal(loaded(tmp_path, stack(1)), of_rank(0, loop.values()))


@on_two_ranks
def test_experts_under_names_of_their_own_resume_on_each_rank(rank: int, tmp_path: Path, mode: str) -> None:
    def own(seed: int) -> nn.ModuleDict:
        return nn.ModuleDict({f"rank{rank}": stack(seed + rank), "shared": nn.Linear(40, 40)})

    def loss_of(step: int) -> Callable[[nn.Module], Tensor]:
        own_loss = loss_on(rank, step)
        return lambda model: own_loss(model[f"rank{rank}"]) + model["shared"].weight.square().sum()  # type: ignore[index]

    torch.manual_seed(0)
    loop = Loop(tmp_path, own(0), async_mode=mode)
    with loop.manager as manager, logged_warnings() as warned:
        torch.manual_seed(0)
        with torch.no_grad():
            loop.model["shared"].weight.fill_(0.5)  # type: ignore[index]
            loop.model["shared"].bias.fill_(0.5)  # type: ignore[index]
        manager.reset()
        for step in range(1, 4):
            loop.train(loss_of(step))
            manager.save(step)
    assert not warned
    assert equal(loaded(tmp_path, own(7)), loop.values())


class StageByHand(nn.Module):
    """A stage of a pipeline by hand, whose layers have the same names on each rank."""

    def __init__(self, rank: int, *, equal_shapes: bool) -> None:
        super().__init__()
        torch.manual_seed(rank)
        width = 40 if equal_shapes or rank == 0 else 20
        self.layers = nn.Sequential(nn.Linear(40, width), nn.Linear(width, 40))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


@pytest.mark.parametrize("equal_shapes", [True, False])
@on_two_ranks
def test_stages_by_hand_under_equal_names_are_refused(rank: int, tmp_path: Path, equal_shapes: bool) -> None:
    loop = Loop(tmp_path, StageByHand(rank, equal_shapes=equal_shapes), interval=1)
    loop.train(loss_on(rank, 1))
    with pytest.raises(RanksDiffer) as refused, loop.manager as manager:
        manager.save(1)
    message = str(refused.value)
    assert "layers.0.weight" in message and "nn.ModuleDict" in message
    assert ("ranks_may_differ" in message) == equal_shapes, "another shape could not be loaded"
    assert equal_shapes or "([40, 40] of torch.float32 on rank 0, [20, 40] of torch.float32 on rank 1)" in message


@on_two_ranks
def test_stages_by_hand_of_other_shapes_are_saved_at_the_last_step(rank: int, tmp_path: Path) -> None:
    loop = Loop(tmp_path, StageByHand(rank, equal_shapes=False))
    loop.train(loss_on(rank, 1))
    with pytest.raises(RanksDiffer), loop.manager as manager:
        manager.save(1, force=True)
    assert equal(loaded(tmp_path, StageByHand(0, equal_shapes=False)), of_rank(0, loop.values()))


@on_two_ranks
def test_stages_by_hand_under_names_of_their_own_resume(rank: int, tmp_path: Path) -> None:
    def stage(at: int) -> nn.ModuleDict:
        return nn.ModuleDict({f"stage{at}": StageByHand(at, equal_shapes=False)})

    model = stage(rank)
    loop = Loop(tmp_path, model, interval=1)
    loop.train(lambda model: loss_on(rank, 1)(model[f"stage{rank}"]))  # type: ignore[index]
    with loop.manager as manager, logged_warnings() as warned:
        manager.save(1)
    assert not warned
    assert equal(loaded(tmp_path, stage(rank)), loop.values())


@on_two_ranks
def test_ignored_parameters_of_fully_shard_are_compared(rank: int, tmp_path: Path) -> None:
    model = stack()
    ignored = set(model[0].parameters())
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)), ignored_params=ignored)
    loop = Loop(tmp_path, model, interval=1)
    loop.train(loss_on(rank, 1))  # Nothing reduces the gradients of what is ignored.
    with pytest.raises(RanksDiffer) as refused, loop.manager as manager:
        manager.save(1)
    assert "0.weight" in str(refused.value)
    assert "1.weight" not in str(refused.value)


def hsdp_case(rank: int, folder: Path, apart: float) -> tuple[list[str], str]:
    model = stack()
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    loop = Loop(folder, model, interval=1)
    loop.train(loss_on(rank, 1))
    if rank == 3:
        with torch.no_grad():
            model[2].weight.to_local().mul_(1 + apart)  # type: ignore[operator]
    with logged_warnings() as warned:
        try:
            with loop.manager as manager:
                manager.save(1)
        except RanksDiffer as error:
            return warned, str(error)
    return warned, ""


@pytest.mark.slow
@pytest.mark.parametrize("apart", [0.0, 1e-5, 0.1])
def test_replicas_of_a_shard_are_compared(four_ranks: Ranks, tmp_path: Path, apart: float) -> None:
    reports = four_ranks.run(hsdp_case, folder=tmp_path, apart=apart)
    named = "model.2.weight (rank 3 and rank 1, relative difference"
    assert all((named in refusal) == (apart == 0.1) for _, refusal in reports)
    warned = warnings_of_ranks(reports[0][0])
    assert len(warned) == (apart == 1e-5) and all(named in message for message in warned)


@pytest.mark.slow
@on_two_ranks
def test_one_row_that_differs_is_found_during_training(rank: int, tmp_path: Path, mode: str) -> None:
    """In a state that is larger than a sample: every element is digested once a start."""
    torch.manual_seed(0)
    loop = Loop(tmp_path, nn.Embedding(40_000, 40), async_mode=mode, interval=2)
    with loop.manager as manager, logged_warnings() as warned:
        manager.reset()
        for step in range(1, 3):
            loop.train(lambda model: model.weight.square().mean())  # type: ignore[operator, union-attr]
            if rank == 1 and step == 1:
                with torch.no_grad():
                    loop.model.weight[777, 3] += 1e-3  # type: ignore[operator, index]
            manager.save(step)
    assert len(warnings_of_ranks(warned)) == (rank == 0)


@on_two_ranks
def test_buffers_under_ddp_that_differ_are_still_only_a_warning(rank: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(40, 40), nn.BatchNorm1d(40)))
    loop = Loop(tmp_path, model, interval=1)
    loop.train(loss_on(rank, 1))
    with loop.manager as manager, logged_warnings() as warned:
        manager.save(1)
    assert not warnings_of_ranks(warned)
    assert rank == 1 or ["running_mean" in message for message in warned] == [True]


def run_of(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> CheckpointManager:
    given = {"interval": 1, "memory_ttl_seconds": 0} | options
    return CheckpointManager.for_loop(model=model, optimizer=optimizer, folder=folder / "checkpoint", **given)


@on_two_ranks
def test_owners_whose_optimizers_have_only_their_parameters_resume(rank: int, tmp_path: Path) -> None:
    def owned(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = DistributedDataParallel(stack(seed))
        return model, torch.optim.AdamW([*model.parameters()][rank::2], lr=0.1)

    model, optimizer = owned(0)
    with run_of(tmp_path, model, optimizer) as manager, logged_warnings() as warned:
        manager.reset()
        loss_on(rank, 1)(model).backward()
        optimizer.step()
        for at, parameter in enumerate(model.parameters()):
            dist.broadcast(parameter.detach(), at % 2)
        manager.save(1)
    again, same = owned(1)
    with run_of(tmp_path, again, same, load_only=True) as manager:
        assert manager.load()
    assert not warned
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), again.parameters(), strict=True))
    states = [[each["exp_avg"] for each in of.state.values()] for of in (optimizer, same)]
    assert len(states[0]) == 6 and all(torch.equal(*pair) for pair in zip(*states, strict=True))


class SkipsEmpty(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # without a closure
        for parameter in self.param_groups[0]["params"]:
            if parameter.to_local().numel():
                self.state[parameter].setdefault("step", torch.tensor(0.0)).add_(1)


@on_two_ranks
def test_a_rank_without_elements_of_a_parameter_needs_no_state_of_it(rank: int, tmp_path: Path) -> None:
    model = fully_shard(nn.Linear(3, 1), mesh=init_device_mesh("cpu", (2,)))
    optimizer = SkipsEmpty(model.parameters(), {"lr": 0.1})
    with run_of(tmp_path, model, optimizer) as manager:
        manager.reset()
        optimizer.step()
        manager.save(1)
    assert len(optimizer.state) == 2 * (rank == 0)
    assert (tmp_path / "checkpoint" / "step-1").exists()


def found_late(peers: Peers, tensors: dict[str, Tensor], name: str, rank: int) -> str:
    """Return what is found at step 2, if only then an element of `name` differs on rank 1. **Collective**."""
    plans = PlanCache(peers, Replicated(lambda: tensors), RankComparison(peers))
    assert plans.plan({"model": tensors}, compares=True, step=1).differs is None
    changed = tensors | ({name: tensors[name] + 1} if rank == 1 else {})
    return str(plans.plan({"model": changed}, compares=True, step=2).differs)


ONE_OF_EACH_SAMPLE = [0, 7, 63, 64, 65, 199]


@pytest.mark.parametrize(
    "positions",
    [
        ONE_OF_EACH_SAMPLE,
        pytest.param([*range(0, 200, 3)], marks=pytest.mark.slow, id="every third"),
        pytest.param([*range(200)], marks=pytest.mark.exhaustive, id="every one"),
    ],
)
@on_two_ranks
def test_a_small_tensor_that_differs_later_is_found_at_the_next_save(rank: int, positions: list[int]) -> None:
    peers = Peers(timedelta(seconds=30))
    tensors = {f"t{number}": torch.zeros([8, 8] if number % 2 else []) for number in range(200)}
    for position in positions:
        found = found_late(peers, tensors, f"t{position}", rank)
        assert f"model.t{position} (rank 1 and rank 0, relative difference 1), equal at step 1. Expected" in found
    peers.close()


@on_two_ranks
def test_of_a_large_tensor_that_differs_later_the_error_says_since_when_it_may(rank: int) -> None:
    peers = Peers(timedelta(seconds=30))
    found = found_late(peers, {"large": torch.zeros(1000), "small": torch.zeros(2)}, "large", rank)
    assert "equal at step 1; of large tensors later saves compare samples, so a checkpoint since then may" in found
    peers.close()


@on_two_ranks
def test_a_large_tensor_of_the_widest_elements_in_another_memory_order_is_compared(rank: int) -> None:
    peers = Peers(timedelta(seconds=30))
    found = found_late(peers, {"wide": torch.zeros(30, 40, dtype=torch.complex128).T}, "wide", rank)
    assert "model.wide (rank 1 and rank 0, relative difference 1)" in found
    peers.close()


class AskedOnce:
    """A state that returns its dict once, and raises after that; `asked` counts the calls."""

    def __init__(self) -> None:
        self.asked = 0

    def state_dict(self) -> dict[str, int]:
        self.asked += 1
        if self.asked > 1:
            raise OSError("not now")
        return {"number": 1}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


@on_two_ranks
def test_a_start_tries_once_to_compare_its_ranks_alongside_training(rank: int, tmp_path: Path) -> None:
    state = AskedOnce()
    loop = Loop(tmp_path, nn.Linear(4, 4), interval=100, async_mode="async", states={"state": state})
    asked = []
    with loop.manager as manager:
        for step in (1, 2, 3, 4):
            loop.train(lambda model: model(torch.ones(2, 4)).sum())
            manager.save(step)
            asked.append(state.asked)
    assert asked == [2] * 4


def test_what_is_digested_alongside_training_waits_for_the_devices_that_compute_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []

    class OnDevice:
        def synchronize(self) -> None:
            order.append("computed")

    class Noting(RankComparison):
        def _complete_digests(self, flat: State) -> list[int]:
            order.append("digested")
            return super()._complete_digests(flat)

    monkeypatch.setattr(rank_comparison, "_events", lambda flat: [OnDevice(), OnDevice()])
    comparison = Noting(Peers(timedelta(seconds=60)))
    comparison.digest_alongside({"weight": torch.ones(3)})
    comparison.wait()
    assert order == ["computed", "computed", "digested"]

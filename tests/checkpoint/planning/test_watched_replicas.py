"""A run that watches its replicas names the rank, the host and the tensor where one bit has changed."""

from __future__ import annotations

import json
import platform
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.checkpoint.small_run import SmallRun, Tiny
from tests.examples import mostly_exhaustive
from tests.ranks import Ranks, on_two_ranks
from torchtitan_lite.checkpoint.planning.rank_comparison import RankComparison
from torchtitan_lite.errors import RanksDiffer

WATCHES: dict[str, Any] = {"digest_tensors": ("ranks",), "interval": 1, "preemption_signals": ()}
SEEDS = 20


def flip_a_bit(run: SmallRun, number: random.Random) -> str:
    """Change one bit of one element of a parameter, or of its optimizer's state; return the name of the tensor."""
    names = {parameter: name for name, parameter in run.model.named_parameters()}
    states = {
        f"optimizer.state.{names[parameter]}.{key}": value
        for parameter, state in run.optimizer.state.items()
        for key, value in state.items()
        if value.dim()
    }
    tensors = {f"model.{name}": parameter.detach() for parameter, name in names.items()} | states
    name = number.choice(sorted(tensors))
    words = tensors[name].reshape(-1).view(torch.int32)
    words[number.randrange(len(words))] ^= 1 << number.randrange(31)
    return name


@pytest.mark.promise(
    'With "ranks" in `checkpoint.digest_tensors`, the next save names rank and host of a flipped bit in a '
    "tensor that several ranks hold, and no run resumes from that state.",
    section="loaded",
)
@on_two_ranks
@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", mostly_exhaustive(["disabled", "async", "async_with_pinned_mem"], kept=["async_with_pinned_mem"])
)
def test_one_bit_is_named_at_the_next_save(rank: int, tmp_path: Path, mode: str) -> None:
    host = platform.node()
    for seed in range(SEEDS if mode == "disabled" else 3):
        with SmallRun(tmp_path / str(seed), async_mode=mode, **WATCHES).loaded() as run:
            run.train(3, last=False)
            number = random.Random(seed)
            odd, name = number.randrange(2), ""
            other = random.Random(number.random())
            if rank == odd:
                name = flip_a_bit(run, other)
            with pytest.raises(RanksDiffer) as caught:
                run.manager.save(4)
            assert f"rank 0 on {host}, rank 1 on {host} hold different values of " in str(caught.value)
            assert rank != odd or name in str(caught.value)
        # Nothing of that state is saved, so the next start continues from the step before.
        with SmallRun(tmp_path / str(seed), **WATCHES).resumed() as again:
            assert again.train_state.step == 3


def saved_at_last(rank: int, folder: Path) -> str:
    with SmallRun(folder, **WATCHES).loaded() as run:
        run.train(3, last=False)
        name = flip_a_bit(run, random.Random(7)) if rank == 2 else ""
        with pytest.raises(RanksDiffer) as caught:
            run.manager.save(4, force=True)
        assert run.manager.latest_step() == 3
        run.manager.load()
        assert run.train_state.step == 3
        assert run.manager.roll_back(5, "loss is nan") == 3
    return f"{name}|{caught.value.finding}"


@pytest.mark.promise(
    'With "ranks" in `checkpoint.digest_tensors`, the next save names rank and host of a flipped bit in a '
    "tensor that several ranks hold, and no run resumes from that state.",
    section="loaded",
)
@pytest.mark.slow
def test_of_four_ranks_one_is_outvoted_and_what_was_saved_at_last_is_marked(four_ranks: Ranks, tmp_path: Path) -> None:
    found = four_ranks.run(saved_at_last, folder=tmp_path)
    name = found[2].partition("|")[0]
    finding = f"rank 2 on {platform.node()} holds another {name} than 3 other ranks"
    assert {each.partition("|")[2] for each in found} == {finding}
    manifest = json.loads((tmp_path / "checkpoint" / "step-4" / "manifest.json").read_text())
    assert manifest["extra"]["ranks_differ"] == [finding]


def loss_of_ones(run: SmallRun) -> torch.Tensor:
    return run.model(torch.ones(2, 8)).square().mean()


def of_shards(rank: int, folder: Path) -> str:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    with SmallRun(folder, model=model, loss=loss_of_ones, **WATCHES).loaded() as run:
        run.train(3, last=False)
        if rank == 3:
            model.weight.to_local().view(torch.int32)[0, 0] ^= 1
        with pytest.raises(RanksDiffer) as caught:
            run.manager.save(4)
    return caught.value.finding


@pytest.mark.slow
def test_under_hsdp_the_two_holders_of_the_shard_are_named(four_ranks: Ranks, tmp_path: Path) -> None:
    host = platform.node()
    finding = f"rank 1 on {host}, rank 3 on {host} hold different values of model.weight, and none has the majority"
    assert set(four_ranks.run(of_shards, folder=tmp_path)) == {finding}


@on_two_ranks
def test_under_ddp_with_data_of_their_own_ranks_stay_equal_and_one_bit_is_named(rank: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1)))
    data = torch.Generator().manual_seed(rank)

    def loss(run: SmallRun) -> torch.Tensor:
        return model(torch.randn(8, 64, generator=data)).square().mean()

    with SmallRun(tmp_path, model=model, loss=loss, **WATCHES).loaded() as run:
        assert run.train(10, last=False) == list(range(1, 11))
        if rank == 1:
            next(model.parameters()).detach().view(torch.int32)[0, 0] ^= 1
        with pytest.raises(RanksDiffer, match=r"hold different values of model\.0\.weight, and none has the majority"):
            run.manager.save(11)


@on_two_ranks
def test_values_that_no_rank_can_compare_are_equal_if_their_bits_are(rank: int, tmp_path: Path) -> None:
    with SmallRun(tmp_path, **WATCHES).loaded() as run:
        run.train(2, last=False)
        with torch.no_grad():
            run.model.get_parameter("first.weight")[0, 0] = float("nan")
        assert run.manager.save(3)


@on_two_ranks
def test_without_the_key_a_save_digests_no_more_than_a_sample(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[int] = []
    complete = RankComparison._complete_digests
    monkeypatch.setattr(RankComparison, "_complete_digests", lambda *given: passes.append(1) or complete(*given))
    counted = {}
    for name, options in (("off", {}), ("on", {"digest_tensors": ("ranks",)})):
        passes.clear()
        SmallRun(tmp_path / name, interval=1, preemption_signals=(), **options).loaded().finished(5, last=False)
        counted[name] = len(passes)
    assert counted == {"off": 1, "on": 5}


@on_two_ranks
def test_of_what_is_sharded_only_the_counters_of_the_optimizer_are_digested(rank: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    fully_shard(model)
    with SmallRun(tmp_path, model=model, loss=loss_of_ones, **WATCHES).loaded() as run:
        assert run.step()
        shared = [key for group in run.manager._comparison._groups for key in group.keys]
        assert shared == ["optimizer.state.bias.step", "optimizer.state.weight.step"]


def test_one_process_has_no_replicas(tmp_path: Path) -> None:
    with SmallRun(tmp_path, **WATCHES).loaded() as run:
        run.train(2)
        assert isinstance(run.model, Tiny) and run.committed() == [1, 2]

"""Two ranks, one of which finds damage: both skip the checkpoint and load the same older one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.checkpoint.sharded_run import at_steps, same_everywhere, sharded_run
from tests.checkpoint.small_run import SmallRun, same
from tests.ranks import on_two_ranks
from tests.store.filled import flip
from torchtitan_lite import faults
from torchtitan_lite.errors import AllCheckpointsDamaged, CheckpointUnreadable


def trained(folder: Path) -> SmallRun:
    """Save steps 2 and 4."""
    run = sharded_run(folder, width=3001, seams={"save_policy": at_steps(2, 4)})
    with run.manager:
        run.train(4, last=False)
    return run


def damage(folder: Path, step: int, rank: int) -> None:
    """Flip a bit in the file that one rank wrote of a step. Coordinator."""
    if dist.get_rank() == 0:
        flip(folder / f"checkpoint/step-{step}/__{rank}_0.distcp", 4000)
    dist.barrier()


@pytest.mark.parametrize("damaged_rank", [pytest.param(0, marks=pytest.mark.slow), 1])
@on_two_ranks
def test_damage_in_one_ranks_file_is_every_ranks(rank: int, tmp_path: Path, damaged_rank: int) -> None:
    trained(tmp_path)
    damage(tmp_path, 4, damaged_rank)
    run = sharded_run(tmp_path, width=3001)
    with run.manager:
        assert run.manager.load()
        assert run.train_state.step == 2
        assert run.names() == ["step-2", "step-4.corrupt"]
        asked_for = sharded_run(tmp_path, width=3001, load_only=True, load_step=2)
        with asked_for.manager:
            assert asked_for.manager.load()
            assert same(run.contents(), asked_for.contents())
    [(step, _, figures)] = run.events.happened("fallback")
    assert (step, figures["damaged_step"]) == (2, 4)
    assert f"__{damaged_rank}_0.distcp" in figures["finding"]
    assert same_everywhere(figures["finding"])


@on_two_ranks
def test_if_all_are_damaged_all_ranks_raise_it(rank: int, tmp_path: Path) -> None:
    trained(tmp_path)
    damage(tmp_path, 4, 1)
    damage(tmp_path, 2, 0)
    run = sharded_run(tmp_path, width=3001)
    with pytest.raises(AllCheckpointsDamaged) as raised, run.manager:
        run.manager.load()
    assert sorted(raised.value.findings) == [2, 4]
    assert run.names() == ["step-2", "step-4"]


@on_two_ranks
def test_an_error_of_one_ranks_machine_is_no_damage(rank: int, tmp_path: Path) -> None:
    trained(tmp_path)
    run = sharded_run(tmp_path, width=3001)
    faults.install("EIO@read:rank=1,times=always", rank=rank)
    with pytest.raises(CheckpointUnreadable, match="Input/output error"), run.manager:
        run.manager.load()
    faults.install("", rank=rank)
    assert run.names() == ["step-2", "step-4"]

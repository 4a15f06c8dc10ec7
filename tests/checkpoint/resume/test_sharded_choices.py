"""What two ranks find and refuse together: a run that was not loaded, NaN on one rank, a folder of torchtitan."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.checkpoint.reading.foreign_folders import of_0_3
from tests.checkpoint.sharded_run import sharded_run
from tests.checkpoint.small_run import SmallRun, same
from tests.ranks import on_two_ranks
from torchtitan_lite.errors import RunNotLoaded
from torchtitan_lite.store.manifest import Manifest


@on_two_ranks
def test_a_forgotten_load_is_refused_on_both_ranks(rank: int, tmp_path: Path) -> None:
    with (run := sharded_run(tmp_path, interval=1)).manager:
        run.train(1, last=False)
    for call in (lambda run: run.manager.reset(), lambda run: run.manager.save(1)):
        with (again := sharded_run(tmp_path, interval=1)).manager, pytest.raises(RunNotLoaded):
            call(again)


@on_two_ranks
def test_nan_in_the_shard_of_one_rank_is_in_the_manifest(rank: int, tmp_path: Path) -> None:
    with (run := sharded_run(tmp_path, interval=1)).manager:
        run.take_step()
        if rank == 1:
            with torch.no_grad():
                run.model[0].weight.to_local().fill_(math.nan)
        assert run.manager.save(1)
    dist.barrier()
    manifest = Manifest.of_folder(run.root / "step-1")
    assert manifest is not None and manifest.extra["nan_in"] == ["model.0.weight"]


@on_two_ranks
def test_a_folder_of_torchtitan_is_taken_over_by_both_ranks(rank: int, tmp_path: Path) -> None:
    trained = SmallRun(tmp_path / "elsewhere")
    trained.train(2, last=False)
    if rank == 0:
        of_0_3(trained, tmp_path / "step-2")
    dist.barrier()
    options = {"initial_load_path": str(tmp_path / "step-2"), "initial_load_model_only": False}
    with (run := SmallRun(tmp_path / "ours", seed=1, **options)).manager:
        assert run.manager.load()
        for part in ("model", "moments", "lr", "schedule", "step"):
            assert same(run.contents()[part], trained.contents()[part]), part
    trained.manager.close()

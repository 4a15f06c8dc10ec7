"""A loop with accelerate and our manager: killed and resumed runs are straight ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.integrations.served import Served, continues, served
from torchtitan_lite.errors import ConfigError

pytest.importorskip("accelerate")

from accelerate.data_loader import DataLoaderShard
from accelerate.utils import DistributedType

from torchtitan_lite.integrations.accelerate import Batches, refuse_untried


@pytest.fixture(scope="module")
def loop() -> Iterator[Served]:
    with served("accelerate_run") as server:
        yield server


@pytest.mark.slow  # each starts three times
@pytest.mark.parametrize("ranks", [1, 2], ids=["one process", "DDP"])
@pytest.mark.parametrize(("accumulated", "kill_at"), [(1, 8), (1, 17), (3, 11)])
def test_a_killed_run_has_the_losses_and_the_state_of_one_that_was_not(
    accumulated: int, kill_at: int, ranks: int, loop: Served, tmp_path: Path
) -> None:
    options = {"accumulated": accumulated, "interval": 3, "async_mode": "async"}
    straight = loop.run(tmp_path / "straight.log", ranks, folder=tmp_path / "straight", **options)
    killed = loop.run(tmp_path / "killed.log", ranks, folder=tmp_path / "run", kill_at=kill_at, **options)
    resumed = loop.run(tmp_path / "resumed.log", ranks, folder=tmp_path / "run", **options)
    assert (straight.codes, killed.codes, resumed.codes) == ([0] * ranks, [-9] * ranks, [0] * ranks), resumed.output
    assert continues(resumed, straight)


def test_what_was_not_tried_is_refused_by_name() -> None:
    for kind in set(DistributedType) - {DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU}:
        with pytest.raises(ConfigError, match=f"expected one process or DDP, found {kind.value}"):
            refuse_untried(SimpleNamespace(distributed_type=kind))


def test_batches_are_those_of_a_prepared_loader_and_continue_where_they_were_saved() -> None:
    with pytest.raises(ConfigError, match=r"expected what Accelerator\.prepare returned, found list"):
        Batches([1, 2])
    stateful = DataLoaderShard(list(range(6)))
    stateful.use_stateful_dataloader = True
    with pytest.raises(ConfigError, match="use_stateful_dataloader=True"):
        Batches(stateful)
    batches = Batches(DataLoaderShard(list(range(6)), batch_size=2))
    first = iter(batches)
    assert next(first).tolist() == [0, 1]
    resumed = Batches(DataLoaderShard(list(range(6)), batch_size=2))
    resumed.load_state_dict(batches.state_dict())
    assert [each.tolist() for each in resumed] == [[2, 3], [4, 5]]
    assert (resumed.epoch, resumed.batch) == (1, 0)
    with pytest.raises(ConfigError, match="expected 3 batches an epoch, as saved, found 2"):
        Batches(DataLoaderShard(list(range(4)), batch_size=2)).load_state_dict(batches.state_dict())

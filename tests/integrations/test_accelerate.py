"""A loop with accelerate and our manager: killed and resumed runs are straight ones."""

from __future__ import annotations

import random
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.integrations.killed import all_losses, run_until_it_ends, twice
from tests.integrations.served import Served, continues, served
from torchtitan_lite.errors import ConfigError

pytestmark = [
    pytest.mark.skipif(not find_spec("accelerate"), reason="accelerate is not installed"),
    pytest.mark.slow,  # the import of accelerate takes seconds
]

CALLS = ("backward", "step", "save")
INTERVAL = 3


@pytest.fixture(scope="module")
def loop() -> Iterator[Served]:
    with served("accelerate_run") as server:
        yield server


# A process has eleven batches an epoch, and a rank of two has six.
@pytest.mark.parametrize(
    ("ranks", "accumulated", "also_at"),
    [
        pytest.param(1, 1, [11], marks=pytest.mark.exhaustive),
        pytest.param(1, 3, [7, 14], marks=pytest.mark.exhaustive),
        pytest.param(2, 1, [6, 12, 18], marks=pytest.mark.exhaustive),
        (1, 1, []),
        (2, 3, []),
    ],
)
def test_a_killed_run_has_the_losses_and_the_state_of_one_that_was_not(
    ranks: int, accumulated: int, also_at: list[int], loop: Served, tmp_path: Path, draw: random.Random
) -> None:
    options = {"accumulated": accumulated, "interval": INTERVAL, "async_mode": "async"}
    straight = loop.run(tmp_path / "straight.log", ranks, folder=tmp_path / "straight", **options)
    assert straight.codes == [0] * ranks, straight.output
    assert max(step for _, step, _ in straight.losses) == 20
    # The second save has begun then, so the first one is committed.
    drawn = [{"kill_at": step, "kill_in": draw.choice(CALLS)} for step in twice(draw, 2 * INTERVAL + 1, 19)]
    for kills in [drawn, *([{"kill_at": step, "kill_in": "save"}] for step in also_at)]:
        runs = run_until_it_ends(kills, loop.run, tmp_path / f"run-{len(list(tmp_path.iterdir()))}", ranks, **options)
        saved = range(INTERVAL, kills[-1]["kill_at"] + 1, INTERVAL)
        assert runs[-1].first_step - 1 in saved[-3:], "at most the save that was under way is lost"
        assert continues(runs[-1], straight), f"{kills}: {runs[-1].output}"
        assert all_losses(runs) == straight.losses, f"{kills}"


def test_what_was_not_tried_is_refused_by_name() -> None:
    from accelerate.utils import DistributedType

    from torchtitan_lite.integrations.accelerate import refuse_untried

    for kind in set(DistributedType) - {DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU}:
        with pytest.raises(ConfigError, match=f"expected one process or DDP, found {kind.value}"):
            refuse_untried(SimpleNamespace(distributed_type=kind))


def test_fsdp2_could_not_be_tried_because_accelerate_makes_ddp_of_it_without_a_device(
    loop: Served, tmp_path: Path
) -> None:
    asked = loop.call("ask_for_fsdp2", tmp_path / "asked.log", 2)
    assert asked.end == [{"type": "MULTI_CPU", "model": "DistributedDataParallel", "sharded": 0}] * 2, asked.output


def test_batches_are_those_of_a_prepared_loader_and_continue_where_they_were_saved() -> None:
    from accelerate.data_loader import DataLoaderShard

    from torchtitan_lite.integrations.accelerate import Batches

    with pytest.raises(ConfigError, match=r"expected what Accelerator\.prepare returned, found list"):
        Batches([1, 2])
    stateful = DataLoaderShard(list(range(6)))
    stateful.use_stateful_dataloader = True
    with pytest.raises(ConfigError, match="use_stateful_dataloader=True"):
        Batches(stateful)
    drawn = DataLoaderShard(list(range(6)))
    drawn.batch_sampler.generator = np.random.default_rng(0)
    with pytest.raises(ConfigError, match="expected generators of torch in its samplers, found a Generator"):
        Batches(drawn)
    batches = Batches(DataLoaderShard(list(range(6)), batch_size=2))
    first = iter(batches)
    assert next(first).tolist() == [0, 1]
    resumed = Batches(DataLoaderShard(list(range(6)), batch_size=2))
    resumed.load_state_dict(batches.state_dict())
    assert [each.tolist() for each in resumed] == [[2, 3], [4, 5]]
    assert (resumed.epoch, resumed.batch) == (1, 0)
    with pytest.raises(ConfigError, match="expected 3 batches an epoch, as saved, found 2"):
        Batches(DataLoaderShard(list(range(4)), batch_size=2)).load_state_dict(batches.state_dict())

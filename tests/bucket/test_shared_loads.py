"""What several ranks of a host need of an object store is fetched once."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from tests.bucket.proxy import Proxy, answers, where
from tests.ranks import Ranks
from torchtitan_lite import faults
from torchtitan_lite.bucket.bucket_store import open_bucket
from torchtitan_lite.bucket.object_reader import REQUEST_BYTES
from torchtitan_lite.checkpoint import CheckpointManager
from torchtitan_lite.checkpoint.reading.shared_reads import SHARED_BYTES
from torchtitan_lite.checkpoint.reading.stored_checkpoint import StoredCheckpoint
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import CheckpointUnreadable
from torchtitan_lite.store.place import ObjectPlace

ROWS, COLUMNS = 20, 1 << 20
NUM_BYTES = 4 * ROWS * COLUMNS
assert NUM_BYTES > SHARED_BYTES


def weight() -> torch.Tensor:
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)


def load(rank: int, place: ObjectPlace, environment: dict[str, str], fault: str = "") -> str:
    """Load and compare; return the error."""
    os.environ.update(environment)
    target, peers = torch.zeros(ROWS, COLUMNS), Peers(timedelta(seconds=60))
    stored = StoredCheckpoint(place, peers)
    stored.report({"weight": target}, {})
    if rank == 1:
        faults.install(fault, rank=rank)
    try:
        stored.read_model({"weight": target})
    except CheckpointUnreadable as error:
        return str(error)
    finally:
        faults.install("", rank=rank)
    assert torch.equal(target, weight())
    return ""


@pytest.fixture
def place(proxy: Proxy, folder: str, tmp_path: Path) -> ObjectPlace:
    """A checkpoint in the store; the proxy has noted nothing."""
    model = torch.nn.ParameterDict({"weight": torch.nn.Parameter(weight())})
    with CheckpointManager.for_loop(model=model, folder=folder) as manager:
        manager.load()
        manager.save(1, now=True)
    proxy.again()
    found = open_bucket(folder).get(1).path
    assert isinstance(found, ObjectPlace)
    return found


def fetched(proxy: Proxy) -> int:
    """Return how many parts of files were fetched."""
    return sum(entry.method == "GET" and ".distcp" in entry.path for entry in proxy.log)


@pytest.mark.slow
def test_each_part_is_fetched_by_one_rank(two_ranks: Ranks, proxy: Proxy, place: ObjectPlace) -> None:
    assert two_ranks.run(load, place=place, environment=proxy.environment) == ["", ""]
    parts = -(-NUM_BYTES // REQUEST_BYTES)
    assert parts <= fetched(proxy) <= parts + 2


@pytest.mark.slow
def test_a_rank_that_may_not_read_fails_the_load_on_all(two_ranks: Ranks, proxy: Proxy, place: ObjectPlace) -> None:
    proxy.again(where(answers(403, "AccessDenied"), method="GET", path="*.distcp"))
    errors = two_ranks.run(load, place=place, environment=proxy.environment)
    assert all("the store refuses it" in error for error in errors), errors


@pytest.mark.slow
def test_a_rank_whose_reads_fail_delays_no_other_one(two_ranks: Ranks, proxy: Proxy, place: ObjectPlace) -> None:
    errors = two_ranks.run(load, place=place, environment=proxy.environment, fault="EIO@read:times=always")
    assert all("EIO" in error or "Input/output error" in error for error in errors), errors

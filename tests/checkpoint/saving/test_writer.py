"""What a save writes to disk; plain DCP reads it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from tests.checkpoint.one_file import as_one_file
from tests.checkpoint.small_run import same, target
from tests.disks import FailingDisk
from torchtitan_lite.checkpoint.saving.savers import SyncSaver
from torchtitan_lite.checkpoint.saving.writer import commit
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.distributed.exchange import Exchange, RanksFailed
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import LeaseLost, SaveFailed
from torchtitan_lite.store.manifest import CheckpointKind, Manifest
from torchtitan_lite.store.store import CheckpointStore

PEERS = Peers(timedelta(seconds=60))


def state() -> dict[str, Any]:
    return {
        "model": {"weight": torch.arange(6.0).view(2, 3), "scalar": torch.tensor(2), "empty": torch.zeros(0)},
        "loader": {"position": 4, "names": ["a", "b"]},
    }


def save(store: CheckpointStore, step: int = 3, kind: CheckpointKind = CheckpointKind.FULL, **data: Any) -> Path:
    saver = SyncSaver(PEERS)
    saver.save(data or state(), target(store, step, kind)).durable.result()
    return store.get(step).path


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoint")


def test_a_checkpoint_is_a_data_file_the_metadata_and_a_manifest_of_both(store: CheckpointStore) -> None:
    path = save(store)
    names = {".metadata", "__0_0.distcp", "manifest.json"}
    assert {file.name for file in path.iterdir()} == names
    assert [file.name for file in store.root.iterdir()] == ["step-3"]
    manifest = json.loads((path / "manifest.json").read_text())
    assert (manifest["step"], manifest["kind"], manifest["world_size"]) == (3, "full", 1)
    of_dcp, of_rank = (FileRecord.of((path / name).read_bytes()) for name in (".metadata", "__0_0.distcp"))
    assert manifest["files"] == {".metadata": {"size": of_dcp.size, "blocks": of_dcp.blocks.hex()}}
    columns = {"sizes": [of_rank.size], "record_sizes": [], "digests": of_rank.blocks.hex()}
    assert manifest["files_of_ranks"] == columns
    assert manifest["versions"].keys() == {"torchtitan_lite", "torch", "python"}


@pytest.mark.promise("PyTorch's own tools read a checkpoint: `dcp.load` and `dcp_to_torch`.", section="state")
def test_plain_dcp_loads_it(store: CheckpointStore) -> None:
    path = save(store)
    found: dict[str, Any] = {"model": {name: torch.zeros_like(t) for name, t in state()["model"].items()}}
    dcp_load(found, checkpoint_id=path, no_dist=True)
    assert same(found["model"], state()["model"])


@pytest.mark.promise("PyTorch's own tools read a checkpoint: `dcp.load` and `dcp_to_torch`.", section="state")
def test_format_utils_turns_it_into_one_file_for_torch_load(store: CheckpointStore) -> None:
    assert same(as_one_file(save(store)), state())


def test_a_view_is_written_without_what_lies_around_it(store: CheckpointStore) -> None:
    path = save(store, weight=torch.zeros(100_000)[10:20])
    assert (path / "__0_0.distcp").stat().st_size < 10_000


def test_the_manifest_says_where_each_tensor_lies_and_what_each_object_is(store: CheckpointStore) -> None:
    path = save(store)
    manifest = Manifest.of_folder(path)
    assert manifest is not None
    weight = manifest.tensors["model.weight"]
    assert (weight["dtype"], weight["shape"]) == ("float32", [2, 3])
    [[file, at, offsets, sizes]] = weight["chunks"]
    assert (offsets, sizes, at % 64) == ([0, 0], [2, 3], 0)
    data = (path / file).read_bytes()[at : at + 24]
    assert torch.equal(torch.frombuffer(bytearray(data), dtype=torch.float32).view(2, 3), state()["model"]["weight"])
    assert dict(manifest.objects) == {
        "loader.position": {"value": 4},
        "loader.names": {"value": ["a", "b"]},
    }
    root = manifest.structure["root"]
    assert (root["kind"], root["keys"]) == ("dict", ["model", "loader"])
    assert root["children"][1] == {"kind": "dict", "keys": ["position", "names"]}


def test_a_step_saved_again_is_the_new_one(store: CheckpointStore) -> None:
    save(store, weight=torch.zeros(2))
    path = save(store, weight=torch.ones(2))
    found = {"weight": torch.zeros(2)}
    dcp_load(found, checkpoint_id=path, no_dist=True)
    assert found["weight"].tolist() == [1, 1]
    assert [file.name for file in store.root.iterdir()] == ["step-3"]


def test_a_full_checkpoint_that_takes_the_name_of_exported_weights_is_logged(
    store: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    save(store, kind=CheckpointKind.WEIGHTS_ONLY)
    with caplog.at_level(logging.INFO, "torchtitan_lite"):
        save(store)
        save(store)
    assert [r.message for r in caplog.records if r.name == "torchtitan_lite"] == [
        "The weights-only step 3 is now step-3.weights: a full checkpoint takes its name"
    ]
    assert store.get(3).kind is CheckpointKind.FULL


@pytest.mark.parametrize("operation", ["make_dir", "write_file", "rename"])
def test_a_disk_that_refuses_leaves_no_checkpoint_and_says_so(tmp_path: Path, operation: str) -> None:
    store = CheckpointStore(tmp_path / "checkpoint", durable=FailingDisk(operation))
    with pytest.raises(SaveFailed, match="No space left on device") as failure:
        save(store)
    assert failure.value.step == 3
    assert store.committed() == []


class Failing(Exchange):
    """Ranks that do not get to a decision, because of `error`."""

    def __init__(self, error: Exception) -> None:
        super().__init__(None)
        self._error = error

    def decide(self, make: Callable[[], Any], choose: Callable[[list[Any]], Any]) -> Any:
        raise self._error


def failure_of(store: CheckpointStore, error: Exception) -> tuple[BaseException, bool]:
    """Return what a save raises whose exchange fails with `error`, and whether its group is in doubt then."""
    peers = Peers(timedelta(seconds=60))
    with pytest.raises((SaveFailed, LeaseLost)) as caught:
        commit(None, None, target(store, 4), peers, Failing(error))
    return caught.value, peers.is_group_in_doubt


def test_a_lost_folder_goes_before_any_other_failure(store: CheckpointStore) -> None:
    lost = LeaseLost("checkpoint", "run theirs")
    assert failure_of(store, RanksFailed({0: OSError("no space"), 1: lost})) == (lost, False)


def test_what_ranks_agreed_on_leaves_their_group_as_it_was_and_what_broke_it_does_not(store: CheckpointStore) -> None:
    agreed, in_doubt = failure_of(store, RanksFailed({0: OSError("no space"), 2: OSError("full")}))
    assert (str(agreed), in_doubt) == (
        str(SaveFailed(4, "rank 0: OSError: no space; rank 2: OSError: full")),
        False,
    )
    broken, in_doubt = failure_of(store, RuntimeError("Connection reset by peer"))
    assert "RuntimeError: Connection reset by peer" in str(broken) and in_doubt

"""What a checkpoint holds, what is refused before any data is read, and what a load restores."""

from __future__ import annotations

import collections
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from tests.checkpoint.small_run import same
from tests.checkpoint.with_manifest import add_manifest
from tests.disks import injected
from tests.store.filled import flip
from torchtitan_lite.checkpoint.reading.folder import Verify
from torchtitan_lite.checkpoint.reading.reader import CheckpointReader
from torchtitan_lite.checkpoint.reading.stored_checkpoint import StoredCheckpoint
from torchtitan_lite.checkpoint.state.optimizer_state import ParameterSlot
from torchtitan_lite.checkpoint.state.stateful import OptimizerWrapper
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import CheckpointDamaged, CheckpointMismatch, CheckpointUnreadable, CheckpointUnsafe

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
PEERS = Peers(timedelta(seconds=60))


def stored(folder: Path, **state: Any) -> StoredCheckpoint:
    dcp_save(state, checkpoint_id=folder / "c", no_dist=True)
    return StoredCheckpoint(folder / "c", PEERS)


def model(value: float = 0.0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {"a.weight": torch.full((2, 2), value, dtype=dtype), "count": torch.tensor(int(value))}


def test_a_model_is_read_into_its_live_tensors(tmp_path: Path) -> None:
    live = model()
    weight = live["a.weight"]
    stored(tmp_path, model=model(3), other={"x": 1}).read_model(live, cast=False)
    assert same(live, model(3))
    assert live["a.weight"] is weight


def test_weights_under_bare_names_are_read_whatever_else_the_checkpoint_has(tmp_path: Path) -> None:
    live = model()
    stored(tmp_path, **model(3), more=torch.ones(1)).read_model(live, cast=False)
    assert same(live, model(3))


@pytest.mark.parametrize("bare", [False, True])
def test_a_model_whose_own_names_begin_with_model_is_found(tmp_path: Path, bare: bool) -> None:
    saved = {"model.layer.weight": torch.ones(2), "head.weight": torch.full((2,), 2.0)}
    checkpoint = stored(tmp_path, **saved) if bare else stored(tmp_path, model=saved)
    live = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    checkpoint.read_model(live, cast=False)
    assert same(live, saved)


@pytest.mark.parametrize(
    ("live", "named"),
    [
        (model() | {"b": torch.ones(1)}, r"missing in the checkpoint \(1\):\n    b"),
        ({"count": torch.tensor(0)}, r"unexpected in the checkpoint \(1\):\n    a.weight"),
        (model() | {"a.weight": torch.ones(4)}, r"a.weight: shape \[2, 2\] in the checkpoint, \[4\] expected"),
        (model(dtype=torch.bfloat16), r"a.weight: dtype torch.float32 in the checkpoint, torch.bfloat16 expected"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_before_a_byte_is_read(
    tmp_path: Path, live: dict[str, torch.Tensor], named: str
) -> None:
    checkpoint = stored(tmp_path, model=model(3))
    before = {name: tensor.clone() for name, tensor in live.items()}
    with pytest.raises(CheckpointMismatch, match=named):
        checkpoint.read_model(live, cast=False)
    assert re.search(named, str(checkpoint.report(live, {}, [])))
    assert same(live, before)


def test_cast_converts_weights_of_another_floating_dtype(tmp_path: Path) -> None:
    live = model()
    stored(tmp_path, **model(1.5, torch.bfloat16)).read_model(live, cast=True)
    assert same(live, model(1.5))


def test_all_differences_are_in_one_report(tmp_path: Path) -> None:
    optimizer = {"a.weight": ParameterSlot(("a.weight",), (0, 0), torch.zeros(2, 2), {"lr": 0.1}, {})}
    checkpoint = stored(tmp_path, model=model(), optimizer={}, there={"n": 1})
    report = checkpoint.report(model() | {"b": torch.ones(1)}, optimizer, ["there", "loader"])
    first, *names = str(report).splitlines()
    assert first == "  missing in the checkpoint (3):"
    assert set(names) == {"    b", "    optimizer.param_groups.a.weight", "    loader"}


def test_an_optimizer_is_restored_and_keeps_settings_that_the_checkpoint_does_not_have(tmp_path: Path) -> None:
    state = {"step": torch.tensor(3.0), "exp_avg": torch.ones(2), "exp_avg_sq": torch.full((2,), 2.0)}
    saved: dict[str, Any] = {f"state.w.{key}": value for key, value in state.items()}
    saved |= {"param_groups.w.lr": 0.5, "param_groups.w.betas": (0.9, 0.95)}
    parameter = nn.Parameter(torch.zeros(2))
    module, optimizer = nn.ParameterDict({"w": parameter}), torch.optim.Adam([parameter], lr=0.1)
    wrapper = OptimizerWrapper([module], [optimizer])
    wrapper.load_state_dict(stored(tmp_path, optimizer=saved).read_optimizer(wrapper.slots()))
    assert same(dict(optimizer.state[parameter]), state)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"]) == (0.5, (0.9, 0.95), 1e-8)


def test_a_state_is_read_as_it_was_saved_whatever_the_run_has_now(tmp_path: Path) -> None:
    state = {
        "text": "a",
        "none": None,
        "float": 0.1 + 0.2,
        "history": torch.arange(5),
        "nested": {"list": [1, (2, 3)], "tensors": [torch.ones(2), torch.zeros(1)]},
        "a.dotted": {"name.too": 1},
    }
    read = stored(tmp_path, loader=state).read_state("loader", {"history": torch.zeros(0, dtype=torch.int64)})
    assert same(read, state)


def test_a_mapping_that_was_empty_at_the_save_is_read_as_empty(tmp_path: Path) -> None:
    """DCP stores leaves only."""
    own = {"n": 0, "workers": {"0": 5}}
    assert stored(tmp_path, loader={"n": 1, "workers": {}}).read_state("loader", own) == {"n": 1, "workers": {}}
    assert own["workers"] == {"0": 5}


def test_a_state_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    checkpoint = stored(tmp_path, loader={"n": 1})
    with pytest.raises(CheckpointMismatch, match=r"missing in the checkpoint \(1\):\n    other"):
        checkpoint.read_state("other", {"n": 1})
    assert checkpoint.read_state("other", {}) == {}


def test_a_name_is_not_taken_for_the_beginning_of_another(tmp_path: Path) -> None:
    checkpoint = stored(tmp_path, loader={"n": 1}, loader2={"n": 2})
    assert checkpoint.read_state("loader", {"n": 0}) == {"n": 1}


def test_nothing_is_unpickled_freely(tmp_path: Path) -> None:
    checkpoint = stored(tmp_path, loader={"queue": collections.deque([1])})
    with pytest.raises(CheckpointUnsafe, match=r"loader.queue in __0_0.distcp: .*deque"):
        checkpoint.read_state("loader", {"queue": None})


@pytest.mark.parametrize("damage", ["nothing there", "no metadata"])
def test_metadata_that_cannot_be_read_is_an_error_with_the_path(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "c"
    if damage != "nothing there":
        folder.mkdir()
    with pytest.raises(CheckpointUnreadable, match=str(folder)):
        StoredCheckpoint(folder, PEERS).read_model(model(), cast=False)


def test_a_missing_data_file_is_an_error_with_the_path(tmp_path: Path) -> None:
    checkpoint = stored(tmp_path, model=model())
    (checkpoint.path / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointDamaged, match=f"{checkpoint.path} .*__0_0.distcp is missing"):
        checkpoint.read_model(model(), cast=False)


@pytest.mark.parametrize("ours", [False, True])
def test_dcp_loads_with_the_reader_whatever_wrote_the_checkpoint(tmp_path: Path, ours: bool) -> None:
    state = {"model": model(3), "other": {"x": [1, (2.5, "a")], "y": None}}
    folder = stored(tmp_path, **state).path
    if ours:
        add_manifest(folder)
    read: dict[str, Any] = {"model": model(), "other": {"x": [0, (0, "")], "y": 1}}
    dcp_load(read, storage_reader=CheckpointReader(folder), no_dist=True)
    assert same(read, state)


@pytest.mark.parametrize(("verify", "is_found"), [("off", False), ("size", False), ("full", True)])
def test_damage_is_found_only_with_full_verification(tmp_path: Path, verify: Verify, is_found: bool) -> None:
    folder = stored(tmp_path, model=model(3)).path
    manifest = add_manifest(folder)
    [name, at, *_] = manifest.tensors["model.a.weight"]["chunks"][0]
    flip(folder / name, at + 5)
    checkpoint = StoredCheckpoint(folder, PEERS, verify=verify)
    if not is_found:
        checkpoint.read_model(model(), cast=False)
        return
    with pytest.raises(
        CheckpointDamaged, match=rf"bytes 0 to \d+ of {name}: .*, twice \(in it: model.a.weight"
    ) as caught:
        checkpoint.read_model(model(), cast=False)
    assert set(caught.value.keys) == {"model.a.weight", "model.count"}


@pytest.mark.parametrize(("verify", "is_found"), [("off", False), ("size", True), ("full", True)])
def test_a_file_of_another_size_is_found_before_it_is_read(tmp_path: Path, verify: Verify, is_found: bool) -> None:
    folder = stored(tmp_path, model=model(3)).path
    add_manifest(folder)
    with (folder / "__0_0.distcp").open("ab") as file:
        file.write(b"more")
    checkpoint = StoredCheckpoint(folder, PEERS, verify=verify)
    if is_found:
        with pytest.raises(CheckpointDamaged, match=r"__0_0\.distcp: expected \d+ bytes, found"):
            _ = checkpoint.contents
    else:
        checkpoint.read_model(model(), cast=False)


def test_an_error_of_the_machine_is_not_reported_as_damage(tmp_path: Path) -> None:
    folder = stored(tmp_path, model=model(3)).path
    add_manifest(folder)
    with injected("EIO@read:times=always"), pytest.raises(CheckpointUnreadable, match="EIO"):
        StoredCheckpoint(folder, PEERS).read_model(model(), cast=False)

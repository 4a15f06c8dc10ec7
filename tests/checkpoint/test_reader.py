"""What a checkpoint holds, what is refused before a byte is read, what comes back."""

from __future__ import annotations

import collections
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from tests.checkpoint.small_run import same
from torchtitan_lite.checkpoint.reader import StoredCheckpoint
from torchtitan_lite.distributed.consensus import Peers
from torchtitan_lite.errors import CheckpointMismatch, CheckpointUnreadable

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


def test_weights_under_bare_names_are_read_too_whatever_is_beside_them(tmp_path: Path) -> None:
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
    with pytest.raises(CheckpointMismatch, match=named):
        checkpoint.check(live, {}, [])
    assert same(live, before)


def test_weights_of_another_floating_dtype_are_cast_when_asked_for(tmp_path: Path) -> None:
    live = model()
    stored(tmp_path, **model(1.5, torch.bfloat16)).read_model(live, cast=True)
    assert same(live, model(1.5))


def test_all_that_does_not_fit_is_one_report(tmp_path: Path) -> None:
    optimizer = {"state.a.weight.exp_avg": torch.zeros(2, 2), "param_groups.a.weight.lr": 0.1}
    checkpoint = stored(tmp_path, model=model(), optimizer={}, there={"n": 1})
    with pytest.raises(CheckpointMismatch) as refusal:
        checkpoint.check(model() | {"b": torch.ones(1)}, optimizer, ["there", "loader"])
    first, *names = refusal.value.report.splitlines()
    assert first == "  missing in the checkpoint (3):"
    assert set(names) == {"    b", "    optimizer.state.a.weight.exp_avg", "    loader"}


def test_an_optimizer_comes_back_and_settings_that_the_checkpoint_has_not_stay(tmp_path: Path) -> None:
    saved = {"state.w.exp_avg": torch.ones(2), "param_groups.w.lr": 0.5, "param_groups.w.betas": (0.9, 0.95)}
    own = {"state.w.exp_avg": torch.zeros(2), "param_groups.w.lr": 0.1, "param_groups.w.new": "own"}
    read = stored(tmp_path, optimizer=saved).read_optimizer(own)
    assert same(read, {"state.w.exp_avg": torch.ones(2), "param_groups.w.lr": 0.5, "param_groups.w.new": "own"})


def test_a_state_comes_back_as_it_was_saved_whatever_the_run_has_now(tmp_path: Path) -> None:
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


def test_a_mapping_of_the_run_that_was_empty_comes_back_empty(tmp_path: Path) -> None:
    """DCP keeps leaves only."""
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
    with pytest.raises(CheckpointUnreadable, match=r"deque"):
        checkpoint.read_state("loader", {"queue": None})


@pytest.mark.parametrize("damage", ["nothing there", "no metadata", "other bytes"])
def test_metadata_that_cannot_be_read_is_told_with_the_path(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "c"
    if damage != "nothing there":
        folder.mkdir()
    if damage == "other bytes":
        (folder / ".metadata").write_bytes(b"not a pickle")
    with pytest.raises(CheckpointUnreadable, match=str(folder)):
        StoredCheckpoint(folder, PEERS).read_model(model(), cast=False)


def test_a_data_file_that_is_gone_is_told_with_the_path(tmp_path: Path) -> None:
    checkpoint = stored(tmp_path, model=model())
    (checkpoint.path / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointUnreadable, match="__0_0"):
        checkpoint.read_model(model(), cast=False)

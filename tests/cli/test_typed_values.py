"""Values of NumPy, pathlib, datetime and deques come back as they were: from a save, an image, a reshard, an export."""

from __future__ import annotations

import json
from collections import deque
from datetime import datetime, timedelta, timezone
from pathlib import Path, PureWindowsPath
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoint.conftest import MODES
from tests.checkpoint.one_file import as_one_file
from tests.cli.conftest import Said
from torchtitan_lite.checkpoint import CheckpointManager
from torchtitan_lite.checkpoint.format.plain_value import decode_value, encode_value
from torchtitan_lite.cli.exit_codes import ExitCode

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def of_each_type() -> dict[str, Any]:
    return {
        "small": [np.float32(1.5), np.array([[1, 2]], ">i2"), np.array(["a", "ä"]), np.bool_(True)],
        "large": np.arange(20_000.0),
        "last": deque([1, (2, deque())], maxlen=3),
        "began": datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=timezone(timedelta(hours=2), "X"), fold=1),
        "took": timedelta(seconds=1.5),
        "places": (Path("a/b"), PureWindowsPath("c:\\d")),
        np.int64(3): {"$numpy": "a dict of the user's own"},
    }


def saved(folder: Path, state: dict[Any, Any], mode: str = "disabled") -> Path:
    """Save step 1 of a run with `state`; return its folder."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    with CheckpointManager.for_loop(model=model, states={"s": state}, folder=folder, async_mode=mode) as manager:
        manager.load()
        manager.save(1, now=True)
    return folder / "step-1"


def loaded(folder: Path) -> dict[Any, Any]:
    state: dict[Any, Any] = {}
    with CheckpointManager.for_loop(model=torch.nn.Linear(2, 2), states={"s": state}, folder=folder) as manager:
        assert manager.load()
    return state


def text(state: dict[Any, Any]) -> str:
    """Return a text that is the same for states of equal values, types, dtypes and zones."""
    return json.dumps(encode_value(state))


@pytest.mark.parametrize("mode", MODES)
def test_a_load_returns_what_was_saved(mode: str, tmp_path: Path) -> None:
    saved(tmp_path, of_each_type(), mode)
    assert text(loaded(tmp_path)) == text(of_each_type())
    assert repr(loaded(tmp_path)) == repr(of_each_type())


def test_plain_dcp_and_torch_alone_read_the_items(tmp_path: Path) -> None:
    whole = as_one_file(saved(tmp_path, of_each_type()), weights_only=True)["s"]
    assert whole["took"] == {"$time": ["timedelta", 0, 1, 500_000]}
    assert np.array_equal(decode_value(whole["large"]), np.arange(20_000.0))


def test_a_resharded_checkpoint_has_the_same_values(tmp_path: Path, said: Said) -> None:
    step = saved(tmp_path / "a", of_each_type())
    assert said("reshard", step, tmp_path / "b" / "step-1", "--files", 2)[0] == 0
    assert text(loaded(tmp_path / "b")) == text(of_each_type())
    assert said("diff", step, tmp_path / "b" / "step-1")[0] == 0


def test_what_differs_is_named(tmp_path: Path, said: Said) -> None:
    other = of_each_type()
    other["large"][7] = -1
    other["last"].append(4)
    a, b = saved(tmp_path / "a", of_each_type()), saved(tmp_path / "b", other)
    code, out, _ = said("diff", a, b)
    assert code == ExitCode.DIFFERENT and "s.large   array([" in out and "s.last    deque([1, " in out
    assert "s.small" not in out and said("verify", a)[0] == 0

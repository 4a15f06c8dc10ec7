"""The state of a weights-only checkpoint."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from tests.checkpoint.small_run import Tiny, same
from torchtitan_lite.checkpoint.state.model_wrapper import EXPORT_DTYPES, weights_only
from torchtitan_lite.checkpoint.state.stateful import ModelWrapper
from torchtitan_lite.config.sections.training import DtypeName


@pytest.mark.parametrize("dtype", EXPORT_DTYPES.values(), ids=EXPORT_DTYPES)
def test_floating_point_tensors_are_cast_and_no_others(dtype: torch.dtype) -> None:
    state = {"f": torch.rand(3), "d": torch.rand(2, dtype=torch.float64), "i": torch.arange(3), "b": torch.ones(1) > 0}
    exported = weights_only(state, dtype)
    assert {name: tensor.dtype for name, tensor in exported.items()} == {
        "f": dtype,
        "d": dtype,
        "i": torch.int64,
        "b": torch.bool,
    }
    assert same(exported, {name: t.to(dtype) if name in "fd" else t for name, t in state.items()})


def test_the_live_model_does_not_change() -> None:
    model = Tiny()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    exported = weights_only(ModelWrapper(model).state_dict(), torch.bfloat16)
    assert same(before, dict(model.state_dict()))
    assert all(parameter.dtype == torch.float32 and parameter.requires_grad for parameter in model.parameters())
    assert not any(tensor.requires_grad for tensor in exported.values())


def test_every_dtype_of_the_config_is_known() -> None:
    assert set(EXPORT_DTYPES) == set(get_args(DtypeName))

"""The rotary embedding that Llama 3.1 and later stretch for longer sequences."""

from __future__ import annotations

import math

import pytest
import torch

from torchtitan_lite.errors import ConfigError
from torchtitan_lite.models.llama.args import ModelArgs, RopeScaling
from torchtitan_lite.models.llama.model import Transformer, rotary_table

SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=8192)


def angles(scaling: RopeScaling | None) -> torch.Tensor:
    """Return the angle of each pair of a head of 64 at position 1: its frequency."""
    return rotary_table(64, 2, 500000.0, scaling)[1].angle()


def test_high_frequencies_stay_low_ones_are_divided_and_those_between_are_in_order() -> None:
    before, after = angles(None), angles(SCALING)
    wavelengths = 2 * math.pi / before
    short, long = wavelengths < 8192 / 4, wavelengths > 8192 / 1
    assert torch.equal(after[short], before[short])
    assert torch.allclose(after[long], before[long] / 8, rtol=1e-6)
    between = ~short & ~long
    assert short.any()
    assert long.any()
    assert between.any()
    assert bool(((after < before) & (after > before / 8))[between].all())
    assert bool((after.diff() < 0).all())


def test_a_model_has_the_scaling_of_its_arguments() -> None:
    sizes = {"dim": 128, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "vocab_size": 8, "ffn_dim": 96}
    model = Transformer(ModelArgs(**sizes, max_seq_len=2, rope_scaling=SCALING))
    model.init_weights(0)
    assert torch.equal(model.freqs_cis, rotary_table(64, 2, 500000.0, SCALING))
    assert model.layers["0"].feed_forward.w1.weight.shape == (96, 128)


def test_factors_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(ConfigError, match="low_freq_factor < high_freq_factor"):
        RopeScaling(factor=8.0, low_freq_factor=4.0, high_freq_factor=4.0)

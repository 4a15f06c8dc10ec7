"""The published sizes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from torchtitan_lite.config.job_config import Model
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.models.llama.args import FLAVORS
from torchtitan_lite.models.llama.config_file import build_model_args
from torchtitan_lite.models.llama.model import Transformer, flops_per_token, num_params


@pytest.mark.parametrize(
    ("flavor", "ffn_dim", "published"),
    [
        ("1B", 8192, 1_235_814_400 + 128256 * 2048),  # published with tied embeddings
        ("8B", 14336, 8_030_261_248),
        ("70B", 28672, 70_553_706_496),
        ("405B", 53248, 405_853_388_800),
    ],
)
def test_a_flavor_has_the_published_number_of_parameters(flavor: str, ffn_dim: int, published: int) -> None:
    assert FLAVORS[flavor].ffn_dim == ffn_dim
    with torch.device("meta"):
        assert num_params(Transformer(FLAVORS[flavor])) == published


def test_vocabulary_length_and_dropout_are_those_of_the_arguments() -> None:
    args = build_model_args(Model(flavor="8B", dropout=0.25), vocab_size=258, seq_len=512)
    assert (args.vocab_size, args.max_seq_len, args.dropout) == (258, 512, 0.25)
    assert args.n_layers == 32


def test_an_unknown_flavor_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"model\.flavor: expected one of debugmodel, 1B, 8B, 70B, 405B, found '9B'"):
        build_model_args(Model(flavor="9B"), vocab_size=258, seq_len=8)


def test_flops_leave_an_embedding_out_that_is_no_output_and_grow_with_the_sequence() -> None:
    args = FLAVORS["8B"]
    flops = flops_per_token(args, 8_030_261_248, 8192)
    tied = dataclasses.replace(args, tie_word_embeddings=True)
    assert flops_per_token(tied, 8_030_261_248 - 128256 * 4096, 8192) == flops
    assert flops == 6 * (8_030_261_248 - 128256 * 4096) + 12 * 32 * 4096 * 8192

"""The sizes of Llama 3.

A `ModelArgs` determines every parameter's name and shape. `FLAVORS` holds the published sizes and `debugmodel`, which
two CPU cores can train. Vocabulary and sequence length depend on the data, so config_file.py adds them. No flavor ties
its embeddings, also not the 1B, where the published model does; a model from a file ties them if the file says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan_lite.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How Llama 3.1 and later stretch the rotary embedding for longer sequences; Hugging Face's rope type "llama3"."""

    factor: float
    """Wavelengths beyond `original_length / low_freq_factor` become that many times as long."""

    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    """Wavelengths below `original_length / high_freq_factor` stay as they are; those between are interpolated."""

    original_length: int = 8192
    """The longest sequence before the stretch."""

    def __post_init__(self) -> None:
        if not (self.factor >= 1 and 0 < self.low_freq_factor < self.high_freq_factor and self.original_length > 0):
            raise ConfigError(
                "rope scaling: expected a factor of at least 1, 0 < low_freq_factor < high_freq_factor and an original "
                f"length above 0, found {self}."
            )


@dataclass(frozen=True, kw_only=True)
class ModelArgs:
    """Sizes and settings of a `Transformer`."""

    dim: int = 4096
    n_layers: int = 32
    n_heads: int = 32
    n_kv_heads: int = 8
    """Heads of keys and values; n_heads / n_kv_heads query heads share each of them."""

    vocab_size: int = 128256
    ffn_dim: int = 14336
    """Width of the feed-forward."""

    norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    rope_scaling: RopeScaling | None = None
    """None in Llama 3; Llama 3.1 and later have one."""

    tie_word_embeddings: bool = False
    """The output projection is the embedding: one parameter, `tok_embeddings.weight`."""

    max_seq_len: int = 2048
    """Rows of the rotary table: the longest sequence that forward accepts."""

    dropout: float = 0.0

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.n_heads


FLAVORS: dict[str, ModelArgs] = {
    "debugmodel": ModelArgs(dim=128, n_layers=4, n_heads=4, n_kv_heads=2, ffn_dim=352),
    "1B": ModelArgs(dim=2048, n_layers=16, n_heads=32, ffn_dim=8192),
    "8B": ModelArgs(dim=4096, n_layers=32, n_heads=32, ffn_dim=14336),
    "70B": ModelArgs(dim=8192, n_layers=80, n_heads=64, ffn_dim=28672),
    "405B": ModelArgs(dim=16384, n_layers=126, n_heads=128, ffn_dim=53248),
}


SETTINGS = ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size", "norm_eps", "rope_theta")
"""What determines the function that a model computes, but for the scaling of its rotary embedding and its tying."""
_TIED = "tie_word_embeddings"
_SCALING = tuple(field.name for field in dataclasses.fields(RopeScaling))


def settings_of(args: ModelArgs) -> dict[str, Any]:
    """Return what determines the function that the model computes, as numbers or None: for a checkpoint to record."""
    of_scaling = {f"rope_{name}": getattr(args.rope_scaling, name, None) for name in _SCALING}
    tied = {_TIED: True} if args.tie_word_embeddings else {}  # Checkpoints of earlier versions have no such entry.
    return {name: getattr(args, name) for name in SETTINGS} | of_scaling | tied


def args_of_settings(settings: Mapping[str, Any]) -> ModelArgs:
    """Return the sizes that `settings_of` gave. Raises KeyError or TypeError for anything else."""
    of_scaling = {name: settings[f"rope_{name}"] for name in _SCALING}
    return ModelArgs(
        **{name: settings[name] for name in SETTINGS},
        rope_scaling=None if of_scaling["factor"] is None else RopeScaling(**of_scaling),
        tie_word_embeddings=bool(settings.get(_TIED)),
    )

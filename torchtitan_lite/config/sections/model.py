"""The section [model]: which model to train, and its size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torchtitan_lite.config.field_types import check_types
from torchtitan_lite.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Model:
    """Which model to train."""

    name: Literal["llama3"] = "llama3"
    """Model family; "llama" is accepted as another name of it."""

    flavor: str = "debugmodel"
    """Size: debugmodel, 1B, 8B, 70B or 405B."""

    config_path: str = ""
    """A config.json of a Llama, Meta's params.json, or the folder with one: sizes and rotary settings in place of the
    flavor's. "" takes the flavor's."""

    tokenizer_path: str = "bytes"
    """Tokenizer. The only one is "bytes": UTF-8 bytes, plus BOS and EOS."""

    dropout: float = 0.0
    """Probability of dropping an activation after attention and after feed-forward."""

    def __post_init__(self) -> None:
        check_types(self, "model")
        if self.tokenizer_path != "bytes":
            raise ConfigError(
                f"model.tokenizer_path: expected 'bytes', the only tokenizer there is, found {self.tokenizer_path!r}. "
                "Set --model.tokenizer_path=bytes."
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"model.dropout: expected a probability in [0, 1), found {self.dropout}.")

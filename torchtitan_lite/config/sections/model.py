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
    """Tokenizer: "bytes", which are UTF-8 bytes plus BOS and EOS; or a tokenizer.json, or the folder that holds one."""

    dropout: float = 0.0
    """Probability of dropping an activation after attention and after feed-forward."""

    def __post_init__(self) -> None:
        check_types(self, "model")
        if not self.tokenizer_path or self.tokenizer_path.endswith(".model"):
            raise ConfigError(
                "model.tokenizer_path: expected 'bytes', a tokenizer.json or the folder that holds one, found "
                f"{self.tokenizer_path!r}. Set --model.tokenizer_path=bytes, or save the same tokenizer with "
                "transformers (save_pretrained), which writes a tokenizer.json."
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"model.dropout: expected a probability in [0, 1), found {self.dropout}.")

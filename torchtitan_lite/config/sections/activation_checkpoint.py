"""The section [activation_checkpoint]: which activations backward recomputes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torchtitan_lite.config.checks import choice
from torchtitan_lite.config.field_types import check_types
from torchtitan_lite.errors import ConfigError

ActivationCheckpointMode = Literal["none", "selective", "full"]


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpoint:
    """Which activations backward recomputes instead of keeping."""

    mode: ActivationCheckpointMode = "selective"
    """Blocks to recompute: "none"; "full", every block; or "selective", those of selective_ac_option."""

    selective_ac_option: str = "2"
    """A number n: every n-th block. "op": every block, except the results of its expensive operators."""

    def __post_init__(self) -> None:
        check_types(self, "activation_checkpoint")
        choice("activation_checkpoint.mode", self.mode, get_args(ActivationCheckpointMode))
        option = self.selective_ac_option
        if option != "op" and not (option.isdigit() and int(option) >= 1):
            raise ConfigError(
                f"activation_checkpoint.selective_ac_option: expected 'op' or a number >= 1, found {option!r}."
            )

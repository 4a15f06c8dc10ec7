"""A state that is another one on each rank, saved for each of them.

A checkpoint has one entry under each name, and one rank's is saved (replicas.py). `PerRank` gives each
rank's a name of its own, with the rank's number in it. The number is all that says whose it is: a rank
takes what the rank of its number saved, whatever part of the work that was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist

from torchtitan_lite.errors import ConfigError
from torchtitan_lite.log import logger

if TYPE_CHECKING:
    from torchtitan_lite.checkpoint.state.stateful import Stateful

OnMissing = Literal["refuse", "fresh"]
_RANKS = "ranks"


class PerRank:
    """`state` as each rank has it: a `Stateful` that saves every rank's, and gives each rank its own back.

    On fewer ranks than saved, those that there are take theirs, and one warning says how many are left. On more ranks,
    those that have none refuse the checkpoint, all ranks together, or with `on_missing="fresh"` keep `state` as it is,
    with one warning.
    """

    def __init__(self, state: Stateful, *, on_missing: OnMissing = "refuse") -> None:
        if on_missing not in ("refuse", "fresh"):
            raise ConfigError(f"PerRank: on_missing is {on_missing!r}. Expected 'refuse' or 'fresh'.")
        self._state = state
        self._is_fresh_allowed = on_missing == "fresh"

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of what is saved, under the rank's number."""
        rank, num_ranks = _place()
        return {_RANKS: num_ranks, _name(rank): self._state.state_dict()}

    def is_of_another_rank(self, key: str) -> bool:
        """Whether the entry `key` of what is saved need not be read on this rank."""
        return key.partition(".")[0] not in (_RANKS, _name(_place()[0]))

    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        """Change nothing. Raise ConfigError if this rank refuses `state_dict`, and what `state` refuses it with."""
        if self._has_own(state_dict):
            check = getattr(self._state, "check_state", None)
            if check is not None:
                check(_own(state_dict))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Give `state` what this rank saved. Raise as `check_state`."""
        if self._has_own(state_dict):
            self._state.load_state_dict(_own(state_dict))
        self._tell(int(state_dict.get(_RANKS, 0)))

    def _has_own(self, state_dict: Mapping[str, Any]) -> bool:
        """Whether this rank saved one. Raises ConfigError if it has to have one."""
        rank, num_ranks = _place()
        saved = int(state_dict.get(_RANKS, 0))
        if rank < saved:
            return True
        if not self._is_fresh_allowed:
            found = f"of {_count(saved)}" if saved else "once for all ranks, not by PerRank"
            do = f"Resume on {_count(saved)}" if saved else "Load it with the state itself"
            raise ConfigError(
                f"PerRank({type(self._state).__name__}): the checkpoint has this state {found}, and none for rank "
                f"{rank} of {num_ranks}. {do}, give PerRank on_missing='fresh' to begin such ranks from scratch, or "
                "exclude the state with --checkpoint.exclude_from_loading."
            )
        return False

    def _tell(self, saved: int) -> None:
        rank, num_ranks = _place()
        if rank > 0 or saved == num_ranks:
            return
        what = f"{type(self._state).__name__} of {_count(saved)} is loaded by {num_ranks}"
        if saved > num_ranks:
            logger.warning("%s: %s not taken.", what, _those_from(num_ranks, saved, "is", "are"))
        elif self._is_fresh_allowed:
            logger.warning("%s: %s from scratch.", what, _those_from(saved, num_ranks, "begins", "begin"))


def _own(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    # Of a mapping without entries nothing is stored.
    return dict(state_dict.get(_name(_place()[0]), {}))


def _count(num_ranks: int) -> str:
    return "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"


def _those_from(first: int, end: int, does: str, do: str) -> str:
    return f"rank {first} {does}" if end - first == 1 else f"ranks {first} to {end - 1} {do}"


def _name(rank: int) -> str:
    return f"rank{rank}"


def _place() -> tuple[int, int]:
    """This rank, and how many there are."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1

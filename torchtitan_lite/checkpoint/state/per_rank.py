"""A state that differs between ranks, saved for each rank.

A checkpoint has one entry for each name, and one rank writes it (replicated.py). `PerRank` gives the
state of each rank its own name, with the rank's number in it. Only the number says whose state it is: a
rank loads what the rank of the same number saved, whatever part of the work that rank had.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch.distributed as dist

from torchtitan_lite.checkpoint.state import arguments
from torchtitan_lite.checkpoint.state.stateful import Stateful, as_stateful
from torchtitan_lite.distributed.groups import world_size
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.log import counted, logger

OnMissing = Literal["refuse", "fresh"]
_RANKS = "ranks"


class PerRank:
    """A `Stateful` that saves `state`, a plain dict too, of every rank, and loads each rank's own.

    On fewer ranks than saved, each rank loads its own, and one warning names the ranks whose state is not loaded. On
    more ranks, those without a saved state refuse the checkpoint, on every rank, or with `on_missing="fresh"` leave
    `state` unchanged, with one warning. Raises ConfigError for an object without a state.
    """

    def __init__(self, state: Stateful | dict[Any, Any], *, on_missing: OnMissing = "refuse") -> None:
        if on_missing not in ("refuse", "fresh"):
            raise ConfigError(f"PerRank: on_missing is {on_missing!r}. Expected 'refuse' or 'fresh'.")
        arguments.refuse_without_state(state)
        self._state = as_stateful(state)
        self._kind = type(state).__name__
        self._is_fresh_allowed = on_missing == "fresh"

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state under the rank's number."""
        rank, num_ranks = _rank_and_world_size()
        return {_RANKS: num_ranks, f"rank{rank}": self._state.state_dict()}

    def is_of_another_rank(self, key: str) -> bool:
        """Return whether this rank need not read the saved entry `key`."""
        return key.partition(".")[0] not in (_RANKS, f"rank{_rank_and_world_size()[0]}")

    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        """Raise what `load_state_dict` would raise: ConfigError, or the refusal of `state`. Changes nothing."""
        if self._has_own(state_dict) and (check := getattr(self._state, "check_state", None)) is not None:
            check(_own_state(state_dict))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load into `state` what this rank saved. Raises as `check_state` does."""
        if self._has_own(state_dict):
            forget_iterator(self._state)
            self._state.load_state_dict(_own_state(state_dict))
        self._warn_of_other_ranks(int(state_dict.get(_RANKS, 0)))

    def _has_own(self, state_dict: Mapping[str, Any]) -> bool:
        """Return whether this rank saved a state. Raises ConfigError if it did not and must have."""
        rank, num_ranks = _rank_and_world_size()
        saved = int(state_dict.get(_RANKS, 0))
        if rank < saved:
            return True
        if not self._is_fresh_allowed:
            found = f"of {counted(saved, 'rank')}" if saved else "once for all ranks, not by PerRank"
            do = f"Resume on {counted(saved, 'rank')}" if saved else "Load it with the state itself"
            raise ConfigError(
                f"PerRank({self._kind}): the checkpoint has this state {found}, and none for rank "
                f"{rank} of {num_ranks}. {do}, give PerRank on_missing='fresh' to begin such ranks from scratch, or "
                "exclude the state with --checkpoint.exclude_from_loading."
            )
        return False

    def _warn_of_other_ranks(self, saved: int) -> None:
        rank, num_ranks = _rank_and_world_size()
        if rank == 0 and (saved > num_ranks or (saved < num_ranks and self._is_fresh_allowed)):
            logger.warning(
                "%s of %s is loaded by %d: those of ranks from %d on %s",
                self._kind,
                counted(saved, "rank"),
                num_ranks,
                min(saved, num_ranks),
                "are not loaded" if saved > num_ranks else "begin from scratch",
            )


def _own_state(state_dict: Mapping[str, Any]) -> Any:
    # A checkpoint stores nothing of an empty mapping.
    return state_dict.get(f"rank{_rank_and_world_size()[0]}", {})


def _rank_and_world_size() -> tuple[int, int]:
    """Return this rank and the number of ranks."""
    return (dist.get_rank() if world_size() > 1 else 0), world_size()


# A `Loader` of torchdata.nodes whose state was read before a load.
#
# To read its state makes an iterator, which its next iteration returns, also after a `load_state_dict` in between. A
# load has to read the state of a run first, to know its form.


def forget_iterator(loader: Any) -> None:
    """Have a `Loader` of torchdata.nodes take its next `load_state_dict`; do nothing to other objects."""
    if any(kind.__module__ == "torchdata.nodes.loader" for kind in type(loader).__mro__):
        loader._it, loader._iter_for_state_dict = None, False

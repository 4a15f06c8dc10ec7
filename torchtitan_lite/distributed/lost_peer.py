"""The end of another rank, as this rank notices it.

gloo and NCCL report it as a RuntimeError with the address of a socket in it, or the line of a source file. What they
report stays as the cause.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from torchtitan_lite.distributed.environment import launched
from torchtitan_lite.errors import PeerLost
from torchtitan_lite.log import logger

_GLOO = "gloo/transport"
_CLOSED = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
_NCCL = "ncclRemoteError"
_TIMED_OUT = "Timed out waiting"
_GAVE_UP = "Application timeout caused pair closure"
"""Of a connection on which gloo has waited until a time-out before."""


def as_peer_lost(error: BaseException) -> PeerLost | None:
    """Return in words that another rank has ended, or did not answer, if `error` says so; else None."""
    if isinstance(error, PeerLost):
        return error
    if not isinstance(error, RuntimeError):
        return None
    text = str(error)
    # After an error the group may be destroyed already.
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else launched().rank
    if _NCCL in text or (_GLOO in text and any(closed in text for closed in _CLOSED)):
        return PeerLost(rank, "lost its connection to another rank, which was killed or has failed")
    if (_GLOO in text and _TIMED_OUT in text) or _GAVE_UP in text:
        other = "hangs, is stopped, or does not make the same call, as under `if rank == 0`"
        return PeerLost(rank, f"waited until the time-out for another rank, which {other}")
    return None


@contextmanager
def naming_lost_peers(*, time_outs: bool = True) -> Iterator[None]:
    """Raise PeerLost in place of what gloo or NCCL raise in the block if another rank has ended.

    With `time_outs`, also if one does not answer; a time-out of training keeps its traceback, which says where.
    """
    try:
        yield
    except RuntimeError as error:
        lost = as_peer_lost(error)
        if lost is None or lost is error or (_TIMED_OUT in str(error) and not time_outs):
            raise
        logger.debug("%s", error)
        raise lost from error

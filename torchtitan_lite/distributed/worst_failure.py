"""The worst failure of any rank, raised on all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar, cast

from torchtitan_lite.distributed.exchange import failures_text
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import CheckpointError, CheckpointUnreadable

T = TypeVar("T")


def together_or_worst(make: Callable[[], T], peers: Peers, path: str) -> T:
    """Return the result of `make` on this rank. **Collective**, by one number if all goes well.

    Raises as `raise_worst`; an interrupt, too, is a failure of the rank, except where there are no others.
    """
    made: T | None = None
    failure: Exception | None = None
    try:
        made = make()
    except Exception as error:
        failure = error
    except BaseException as error:
        if peers.world_size == 1:
            raise
        failure = RuntimeError(f"{type(error).__name__}: {error}")
    raise_worst(failure, peers, path)
    return cast(T, made)


def raise_worst(failure: Exception | None, peers: Peers, path: str) -> None:
    """Raise the worst failure of any rank, on every rank; return if there is none. **Collective**.

    That is `CheckpointUnreadable` for an I/O error, because nothing else is proven then; else the error of the lowest
    rank. Any error that is not of this package counts as an I/O error.
    """
    if not peers.max_over_ranks(failure is not None)[0]:
        return
    failures = {rank: found for rank, found in enumerate(peers.gather_errors(failure)) if found is not None}
    if failure is not None:
        failures[peers.rank] = failure  # With its traceback.
    worst = _worst(failures, path)
    raise worst from (None if worst is failure else failure)


def _worst(failures: Mapping[int, BaseException], path: str) -> CheckpointError:
    """Return the one of the ranks' errors to raise on all of them."""
    found = [cause for cause in failures.values() if isinstance(cause, CheckpointError)]
    if len(found) < len(failures):
        return CheckpointUnreadable(path, failures_text(failures))
    # Damage on one rank and an I/O error on another may be symptoms of the same failure.
    return next((cause for cause in found if isinstance(cause, CheckpointUnreadable)), found[0])

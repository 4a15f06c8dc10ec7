"""The call of DCP that loads, with errors that `except Exception` catches.

DCP raises `CheckpointException`, which is a `BaseException`. Only this module translates it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.storage import StorageReader

from torchtitan_lite.distributed.exchange import summary
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import CheckpointError, CheckpointUnreadable


def load(state: dict[str, Any], reader: StorageReader, planner: LoadPlanner, peers: Peers, path: str) -> None:
    """Read into the tensors of `state`. **Collective**, by one number if all goes well.

    Each rank reads by a plan of its own: in DCP's exchange of plans, keys and outcomes nothing would travel, and it
    takes longer than the read of a small state. Raises as `raise_worst`.
    """
    failure: Exception | None = None
    _do_not_warn_of_one_process()
    try:
        dcp_load(state, storage_reader=reader, planner=planner, no_dist=True)
    except CheckpointException as error:
        [(cause, _)] = error.failures.values()
        if isinstance(cause, KeyboardInterrupt) and peers.world_size == 1:
            raise cause from error
        failure = cause if isinstance(cause, Exception) else RuntimeError(f"{type(cause).__name__}: {cause}")
    except Exception as error:
        failure = error
    raise_worst(failure, peers, path)


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
        return CheckpointUnreadable(path, summary(failures))
    # Damage on one rank and an I/O error on another may be symptoms of the same failure.
    return next((cause for cause in found if isinstance(cause, CheckpointUnreadable)), found[0])


def _do_not_warn_of_one_process() -> None:
    # One process without a process group is supported. The filter is for the whole process, because
    # warnings.catch_warnings is not thread-safe and saves run in threads. It is set at each call, because test runners
    # reset the filters and turn warnings into errors, and then every save would fail.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

"""DCP's two calls, with errors that `except Exception` sees.

DCP raises `CheckpointException`, a `BaseException`: it is translated here and nowhere else.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from torchtitan_lite.errors import CheckpointError, CheckpointUnreadable, LeaseLost, SaveFailed


def save(
    state: dict[str, Any], writer: StorageWriter, planner: SavePlanner, group: dist.ProcessGroup | None, step: int
) -> None:
    """Saves `state` through `writer`; raises `SaveFailed` or `LeaseLost`, on every rank if on one. **Collective**."""
    _do_not_warn_of_one_process()
    try:
        dcp_save(state, storage_writer=writer, planner=planner, process_group=group)
    except CheckpointException as error:
        for cause, _ in error.failures.values():
            if isinstance(cause, LeaseLost):
                raise cause from error
        raise SaveFailed(step, _summary(error)) from error
    except Exception as error:
        raise SaveFailed(step, f"{type(error).__name__}: {error}") from error


def load(
    state: dict[str, Any], reader: StorageReader, planner: LoadPlanner, group: dist.ProcessGroup | None, path: str
) -> None:
    """Reads into the tensors of `state`; raises the worst of what any rank found, on every rank. **Collective**.

    That is `CheckpointUnreadable` where the machine failed, for then nothing else is proven; else what was found.
    """
    _do_not_warn_of_one_process()
    try:
        dcp_load(state, storage_reader=reader, planner=planner, process_group=group)
    except CheckpointException as error:
        raise _worst(error, path) from error
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointUnreadable(path, f"{type(error).__name__}: {error}") from error


def is_group_whole(error: CheckpointError) -> bool:
    """Whether the ranks still understand each other after a save failed with `error`: they agreed that it did."""
    return isinstance(error.__cause__, CheckpointException)


def _worst(error: CheckpointException, path: str) -> CheckpointError:
    """What of the ranks' failures is raised on all of them."""
    failures = [cause for _, (cause, _) in sorted(error.failures.items())]
    found = [cause for cause in failures if isinstance(cause, CheckpointError)]
    if len(found) < len(failures):
        return CheckpointUnreadable(path, _summary(error))
    # Ranks that found damage while another could not read may have seen the same failure from another side.
    return next((cause for cause in found if isinstance(cause, CheckpointUnreadable)), found[0])


def _do_not_warn_of_one_process() -> None:
    # One process without a process group is a supported way to run. A filter for the whole process, because
    # warnings.catch_warnings is not thread-safe and saves run in threads; at each call, because whoever resets the
    # filters and makes warnings errors, as test runners do, would see every save fail.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def _summary(error: CheckpointException) -> str:
    causes = [f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in sorted(error.failures.items())]
    return "; ".join(causes[:3]) + (f"; and {len(causes) - 3} more ranks" if len(causes) > 3 else "")

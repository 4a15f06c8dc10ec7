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

from torchtitan_lite.errors import CheckpointError, CheckpointUnreadable, SaveFailed


def save(
    state: dict[str, Any], writer: StorageWriter, planner: SavePlanner, group: dist.ProcessGroup | None, step: int
) -> None:
    """Saves `state` through `writer`; raises `SaveFailed`, on every rank if on one. **Collective**."""
    _do_not_warn_of_one_process()
    try:
        dcp_save(state, storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        raise SaveFailed(step, _summary(error)) from error
    except Exception as error:
        raise SaveFailed(step, f"{type(error).__name__}: {error}") from error


def load(
    state: dict[str, Any], reader: StorageReader, planner: LoadPlanner, group: dist.ProcessGroup | None, path: str
) -> None:
    """Reads into the tensors of `state`; raises `CheckpointUnreadable`, on every rank if on one. **Collective**."""
    _do_not_warn_of_one_process()
    try:
        dcp_load(state, storage_reader=reader, planner=planner, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        raise CheckpointUnreadable(path, _summary(error)) from error
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointUnreadable(path, f"{type(error).__name__}: {error}") from error


def _do_not_warn_of_one_process() -> None:
    # One process without a process group is a supported way to run. A filter for the whole process, because
    # warnings.catch_warnings is not thread-safe and saves run in threads; at each call, because whoever resets the
    # filters and makes warnings errors, as test runners do, would see every save fail.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def _summary(error: CheckpointException) -> str:
    causes = [f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in sorted(error.failures.items())]
    return "; ".join(causes[:3]) + (f"; and {len(causes) - 3} more ranks" if len(causes) > 3 else "")

"""Groups of all ranks for checkpoint traffic, and which ranks are missing in a call.

They are gloo's, whatever training uses, and nothing else exchanges anything through them: two threads on one group
corrupt it, and checkpoint traffic runs in a thread alongside training. After a failed save the ranks make a new group:
a collective that timed out may still run in the old one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_lite.log import logger
from torchtitan_lite.torch_private import collectives_begun

GROUP_DESC = "checkpoint"
"""Name of these groups in torch's diagnostics, such as the flight recorder."""


def world_size() -> int:
    """Return the number of ranks; 1 without a process group. Any rank."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def gloo_group(timeout: timedelta) -> dist.ProcessGroup:
    """Return a new group of all ranks whose exchanges take at most `timeout`. **Collective**."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout, group_desc=GROUP_DESC)
    return group


def destroy(group: dist.ProcessGroup | None) -> None:
    """Destroy `group`, if it is one that still exists. Any rank; waits for no other."""
    if group is not None:
        # The loop has destroyed the default group, and with it all others.
        with suppress(ValueError):
            dist.destroy_process_group(group)


# Says which call a rank waits in while the others do not come to it.
#
# The usual cause is a call that a loop makes on rank 0 alone: it would wait for `timeout_seconds`, half an hour,
# without a word, and end in an error of gloo that names no call. A rank that is only late is a fact worth a line, too.


@contextmanager
def if_overdue(seconds: float, act: Callable[[], None]) -> Iterator[None]:
    """Call `act` once, in a thread, if the block takes longer than `seconds`, and there is a thread. Any rank."""
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    with suppress(RuntimeError):
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


NOTICE_SECONDS = 60.0
"""Longer than ranks differ by in a step, and short next to the time-outs of training."""


@contextmanager
def naming_missing_ranks(call: str) -> Iterator[None]:
    """Log one warning that names `call` if the exchange in the block takes longer than `NOTICE_SECONDS`. Any rank."""
    if world_size() == 1:
        yield
        return
    with if_overdue(NOTICE_SECONDS, lambda: _warn(call)):
        yield


def _warn(call: str) -> None:
    logger.warning(
        "In %s for %.0f s, probably waiting for other ranks. Every rank has to make this call, at the same step: on "
        "rank 0 alone it ends in an error after checkpoint.timeout_seconds",
        call,
        NOTICE_SECONDS,
    )


# How many collectives this rank has begun: when ranks wait for one another, the one that is behind is waited for.


PIPELINE = "pp"
"""The dimension of the mesh in which ranks send and receive, each as often as its stage needs."""


def counts_of(mesh: DeviceMesh) -> Callable[[], dict[str, int]]:
    """Return a function, for any thread, that counts the collectives of each group of `mesh`, and of all ranks.

    A group has the same name on all of its ranks: its dimension, and its first rank. Not collective.
    """
    groups = {"all ranks": dist.group.WORLD}
    for dimension, group in zip(mesh.mesh_dim_names or (), mesh.get_all_groups(), strict=True):
        if dimension != PIPELINE:
            groups[f"{dimension} from rank {dist.get_process_group_ranks(group)[0]}"] = group

    def count() -> dict[str, int]:
        begun = {name: collectives_begun(group) for name, group in groups.items() if group is not None}
        return {name: number for name, number in begun.items() if number is not None}

    return count

"""Groups of all ranks for checkpoint traffic.

They are gloo's, whatever training uses, and nothing else exchanges anything through them: two threads on one group
corrupt it, and checkpoint traffic runs in a thread alongside training.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

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

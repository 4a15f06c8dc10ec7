"""What a manager does that only saves one step, or only loads."""

from __future__ import annotations

from torchtitan_lite.checkpoint.manager import CheckpointManager


def save_and_close(manager: CheckpointManager, step: int = 1) -> None:
    """Save `step`, due or not, and close `manager`."""
    with manager:
        manager.save(step, force=True)


def load_and_close(manager: CheckpointManager) -> None:
    """Load, fail unless there is a checkpoint, and close `manager`."""
    with manager:
        assert manager.load()

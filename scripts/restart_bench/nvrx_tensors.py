"""Tensors in host memory for the local checkpoints of nvidia-resiliency-ext, whose own class takes those of CUDA alone.

A module of its own, because checkpoints are pickled with the name of the class.
"""

from __future__ import annotations

from typing import Any

from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict


class InHostMemory(BasicTensorAwareStateDict):  # type: ignore[misc]
    """Named tensors of this rank."""

    def __init__(self, state_dict: dict[str, Any]) -> None:
        self.state_dict, self._is_hollow = state_dict, False

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        """Copy them, so that training may change its own."""
        self.insert_tensors([each.clone() for each in self.pop_tensors()])

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """Leave them where they are."""

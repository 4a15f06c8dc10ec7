"""What is wrong with a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    file: str
    """The file, by name; empty if the finding is about no single one."""
    text: str
    """What is wrong."""
    keys: tuple[str, ...] = ()
    """The tensors and objects that it affects."""

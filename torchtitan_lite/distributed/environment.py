"""The process's environment: what the launcher said, and what libraries are told.

The only module that touches environment variables. It does not import torch, so that an entry point
can know its rank before anything slow is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

LOGGED_PREFIXES = ("TORCH", "NCCL", "GLOO", "SLURM", "CUDA", "OMP", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER")


@dataclass(frozen=True)
class Launched:
    """This process's place as torchrun gave it; without a launcher, the only one there is."""

    rank: int
    local_rank: int
    world_size: int
    by_launcher: bool
    attempt: int
    """How often the launcher has started the workers before."""


def launched() -> Launched:
    """Read from RANK, LOCAL_RANK, WORLD_SIZE and TORCHELASTIC_RESTART_COUNT."""
    return Launched(
        rank=int(os.environ.get("RANK", "0")),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        by_launcher="RANK" in os.environ,
        attempt=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
    )


def fault_spec() -> str:
    """Read from TORCHTITAN_LITE_FAULT: what `faults.install` takes; empty where it is not set."""
    return os.environ.get("TORCHTITAN_LITE_FAULT", "")


def set_default(name: str, value: str) -> None:
    """`name` is `value`, unless the user set it."""
    os.environ.setdefault(name, value)


def logged_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables of torch, NCCL and the scheduler: what helps to understand a run, and no secrets."""
    variables = os.environ if environment is None else environment
    return {
        name: value
        for name, value in sorted(variables.items())
        if name.startswith(LOGGED_PREFIXES) and not _is_secret(name)
    }


def _is_secret(name: str) -> bool:
    return any(word in name for word in ("TOKEN", "SECRET", "PASSWORD", "KEY"))

"""Environment variables: those that the launcher sets, and those that libraries read.

The only module that reads them. It does not import torch, so that an entry point knows its rank before anything slow
is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torchtitan_lite.errors import ConfigError

LOGGED_PREFIXES = ("TORCH", "NCCL", "GLOO", "SLURM", "CUDA", "OMP", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER")
OF_TORCHRUN = {f"TORCHELASTIC_{name}" for name in ("ERROR_FILE", "RUN_ID", "SIGNALS_TO_HANDLE", "USE_AGENT_STORE")}
"""Half of the line if they were logged, and the same in every run or random."""
_OF_SECRETS = ("TOKEN", "SECRET", "PASS", "KEY", "JWT", "CRED", "AUTH")


@dataclass(frozen=True)
class Launched:
    """This process's place, from torchrun; without a launcher it is the only process."""

    rank: int
    local_rank: int
    world_size: int
    by_launcher: bool
    attempt: int
    """How many times the launcher has restarted the workers; 0 if they meet in a new store each time."""


def launched() -> Launched:
    """Return the place from the variables that torchrun sets."""
    # A node that joins later counts its restarts from 0, and would wait for the others under another name.
    has_new_store = os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") == "1"
    return Launched(
        rank=int(os.environ.get("RANK", "0")),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        by_launcher="RANK" in os.environ,
        attempt=0 if has_new_store else int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
    )


def cores_of_rank() -> int:
    """Return how many processors each rank of this host has, one at least."""
    return max(1, len(os.sched_getaffinity(0)) // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def fault_spec() -> str:
    """Return TORCHTITAN_LITE_FAULT, the spec for `faults.install`; empty if unset."""
    return os.environ.get("TORCHTITAN_LITE_FAULT", "")


def memory_is_off() -> bool:
    """Return whether TORCHTITAN_LITE_MEMORY is "off": then nothing keeps checkpoints in memory, and no run looks there.

    Raises ConfigError for another value: a typing error would leave it on.
    """
    value = os.environ.get("TORCHTITAN_LITE_MEMORY", "")
    if value not in ("", "on", "off"):
        raise ConfigError(f"TORCHTITAN_LITE_MEMORY is {value!r}: expected on or off")
    return value == "off"


def runtime_folder() -> Path | None:
    """Return XDG_RUNTIME_DIR, this user's folder for sockets; None if unset."""
    value = os.environ.get("XDG_RUNTIME_DIR", "")
    return Path(value) if value else None


def replica_interface() -> str:
    """Return the network interface that replicas arrive by, as the user chose it; empty if unset."""
    own = os.environ.get("TORCHTITAN_LITE_REPLICA_INTERFACE", "")
    return own or os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]


def master_address() -> str:
    """Return MASTER_ADDR, by which ranks find the first one; that of this host if unset."""
    return os.environ.get("MASTER_ADDR", "") or "localhost"


def variable_value(name: str) -> str:
    """Return the value of the variable `name`; the empty string if it is not set."""
    return os.environ.get(name, "")


def set_default(name: str, value: str) -> None:
    """Set the variable `name` to `value`, unless the user set it."""
    os.environ.setdefault(name, value)


def logged_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables of torch, NCCL and the scheduler that help to understand a run, without secrets."""
    variables = os.environ if environment is None else environment
    return {
        name: value
        for name, value in sorted(variables.items())
        if name.startswith(LOGGED_PREFIXES)
        and name not in OF_TORCHRUN
        and not any(word in name.upper() for word in _OF_SECRETS)
    }

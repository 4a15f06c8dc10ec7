"""torchtitan and what it needs, in a folder of their own: some of it is another version than that of the tests.

`./run_tests.sh --all` installs it. Only processes that a test starts with `environment` have it on their path.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = Path(sys.prefix) / "torchtitan"
needs_torchtitan = pytest.mark.skipif(
    not find_spec("torchtitan") and not PACKAGES.is_dir(),
    reason="torchtitan is not installed: ./run_tests.sh --all does, on Python 3.11 or newer",
)
KERNELS = "torchtitan.distributed.minimal_async_ep.kernels"


def with_project(*folders: Path, **variables: object) -> dict[str, str]:
    """Return the environment of a process that finds this project and what is in `folders`, with `variables` too."""
    paths = [str(ROOT), *map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]
    added = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": 1, "HF_HUB_OFFLINE": 1} | variables
    return {**os.environ, **{name: str(value) for name, value in added.items()}}


def environment(**variables: object) -> dict[str, str]:
    """Return the environment of a process that finds this project and torchtitan, with `variables` too."""
    # Each run would compile its mask of attention, which takes longer than the run.
    return with_project(PACKAGES, TORCH_COMPILE_DISABLE=1, **variables)


class Nothing(ModuleType):
    """A module that has everything, as None."""

    def __getattr__(self, name: str) -> Any:
        return None


def leave_kernels_out() -> None:
    """Do without the kernels of expert parallelism, which import triton, 1 GB. Before torchtitan is imported."""
    sys.modules[KERNELS] = Nothing(KERNELS)

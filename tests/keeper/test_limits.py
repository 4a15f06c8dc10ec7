"""A keeper may open as many descriptors as it has to hold, whatever the process that starts it may open."""

from __future__ import annotations

import resource
from pathlib import Path

from torchtitan_lite.keeper.client import Keeper


def test_a_keeper_raises_its_own_limit_and_leaves_that_of_its_starter(runtime: Path, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    keeper = Keeper(tmp_path, 600.0, runtime=runtime)
    # Above every descriptor that is open here: earlier tests of this process have some.
    few = (max(int(fd.name) for fd in Path("/proc/self/fd").iterdir()) + 32, before[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, few)
    try:
        keeper.start()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == few
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    described = keeper.describe()
    assert described is not None
    lines = Path(f"/proc/{described.pid}/limits").read_text().splitlines()
    (soft,) = (line.split()[3] for line in lines if line.startswith("Max open files"))
    assert int(soft) == min(4096, before[1] if before[1] != resource.RLIM_INFINITY else 4096)
    keeper.end()

"""How much memory a process may take: the least of the host and of every cgroup above it, on made-up trees."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from torchtitan_lite.host_memory import available_in, free_memory_bytes, host_id, oom_kills
from torchtitan_lite.memory.images.memory_budget import Room, is_short, num_arenas, reserve_bytes

GIB = 1 << 30
MEMINFO = "MemTotal:       33554432 kB\nMemFree:         1048576 kB\nMemAvailable:   20971520 kB\n"
V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup rw\n"
V1_MOUNT = "33 23 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"


def tree(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v2(folder: str, limit: str, usage: int, files: int = 0) -> dict[str, str]:
    at = f"sys/fs/cgroup/{folder}"
    return {
        f"{at}/memory.max": f"{limit}\n",
        f"{at}/memory.current": f"{usage}\n",
        f"{at}/memory.stat": f"anon 7\nactive_file {files}\ninactive_file 0\n",
    }


def v1(folder: str, limit: int, usage: int, files: int = 0) -> dict[str, str]:
    at = f"sys/fs/cgroup/memory/{folder}"
    return {
        f"{at}/memory.limit_in_bytes": f"{limit}\n",
        f"{at}/memory.usage_in_bytes": f"{usage}\n",
        f"{at}/memory.stat": f"cache 9\ntotal_active_file 0\ntotal_inactive_file {files}\n",
    }


def test_without_a_limit_it_is_what_the_host_has(tmp_path: Path) -> None:
    assert free_memory_bytes(tree(tmp_path, {})) == 20 * GIB


def test_the_tightest_cgroup_above_the_process_counts_and_files_count_as_free(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/job/rank\n", "proc/self/mountinfo": V2_MOUNT}
    files |= v2("job", str(8 * GIB), 6 * GIB, files=GIB) | v2("job/rank", "max", 5 * GIB)
    assert free_memory_bytes(tree(tmp_path, files)) == 3 * GIB


def test_a_cgroup_of_version_1_counts_where_it_has_a_limit(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "4:memory:/job/rank\n0::/\n", "proc/self/mountinfo": V1_MOUNT + V2_MOUNT}
    files |= v1("", 9223372036854771712, 30 * GIB) | v1("job", 10 * GIB, 9 * GIB, files=GIB)
    files |= v1("job/rank", 9223372036854771712, 8 * GIB)
    assert free_memory_bytes(tree(tmp_path, files)) == 2 * GIB


def test_a_container_that_sees_only_its_own_cgroup_has_its_limit(tmp_path: Path) -> None:
    mount = "30 23 0:26 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup rw\n"
    files = {"proc/self/cgroup": "0::/docker/abc\n", "proc/self/mountinfo": mount} | v2(".", str(4 * GIB), GIB)
    assert free_memory_bytes(tree(tmp_path, files)) == 3 * GIB


def test_more_used_than_allowed_is_no_room(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/job\n", "proc/self/mountinfo": V2_MOUNT} | v2("job", str(GIB), 2 * GIB)
    assert free_memory_bytes(tree(tmp_path, files)) == 0


def test_a_system_that_says_nothing_has_room_and_a_name(tmp_path: Path) -> None:
    assert free_memory_bytes(tmp_path) > 1 << 50
    assert available_in("") > 1 << 50
    assert host_id(tmp_path)
    assert host_id() == host_id()


STATUS = "Name:\tpython\nVmHWM:\t 6291456 kB\nVmRSS:\t 4194304 kB\n"


def limited(free: int, kills: str = "") -> dict[str, str]:
    files = {"proc/self/cgroup": "0::/job/rank\n", "proc/self/mountinfo": V2_MOUNT, "proc/self/status": STATUS}
    files |= v2("job", str(8 * GIB), 8 * GIB - free) | v2("job/rank", "max", GIB)
    return files | {"sys/fs/cgroup/job/memory.events": f"low 0\noom 9\n{kills}"}


def test_what_a_process_had_more_at_its_peak_is_reserved_and_a_part_of_that_peak(tmp_path: Path) -> None:
    assert reserve_bytes(tree(tmp_path, limited(GIB))) == 2 * GIB + 6 * GIB // 2
    assert reserve_bytes(tmp_path / "none") == 0


@pytest.mark.parametrize(("free", "short"), [(GIB, True), (2 * GIB - 1, True), (2 * GIB, False)])
def test_memory_is_short_if_the_next_peak_does_not_fit(free: int, short: bool, tmp_path: Path) -> None:
    assert is_short(tree(tmp_path, limited(free))) is short


def test_processes_killed_for_memory_are_those_of_the_innermost_cgroup_with_a_limit(tmp_path: Path) -> None:
    assert oom_kills(tree(tmp_path / "a", limited(GIB, "oom_kill 2\n"))) == 2
    assert oom_kills(tree(tmp_path / "b", limited(GIB))) == 0
    files = {"proc/self/cgroup": "4:memory:/job\n", "proc/self/mountinfo": V1_MOUNT} | v1("job", GIB, 0)
    files["sys/fs/cgroup/memory/job/memory.oom_control"] = "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"
    assert oom_kills(tree(tmp_path / "c", files)) == 3
    assert oom_kills(tmp_path / "none") == 0


@pytest.mark.parametrize(
    ("ranks", "number"),
    [
        ([Room("a", GIB, 0, 4 * GIB)], 3),
        ([Room("a", GIB, 0, 3 * GIB)], 2),
        ([Room("a", GIB, 0, 2 * GIB)], 1),
        ([Room("a", GIB, 0, GIB)], 0),
        ([Room("a", GIB, 3 * GIB, 0)], 3),
        ([Room("a", GIB, 0, 5 * GIB), Room("a", GIB, 0, 5 * GIB)], 2),
        ([Room("a", GIB, 0, 5 * GIB), Room("b", GIB, 0, 3 * GIB)], 2),
        ([Room("a", GIB, 0, 50 * GIB), Room("a", -1, 0, 50 * GIB)], 0),
        ([Room("a", 0, 0, 0)], 3),
        ([Room("a", GIB, 0, 4 * GIB, reserve_bytes=GIB)], 2),
        ([Room("a", GIB, 0, 5 * GIB, GIB), Room("a", GIB, 0, 5 * GIB, GIB)], 1),
        ([Room("a", GIB, 3 * GIB, 0, reserve_bytes=GIB)], 3),
        ([Room("a", GIB, 0, 9 * GIB, oom_kills=1)], 2),
        ([Room("a", GIB, 0, 9 * GIB), Room("b", GIB, 0, 9 * GIB, oom_kills=2)], 1),
        ([Room("a", GIB, 0, 9 * GIB, oom_kills=7)], 0),
    ],
)
def test_the_ranks_of_a_host_share_its_room_and_all_ranks_have_the_same_number(ranks: list[Room], number: int) -> None:
    assert num_arenas(ranks) == number

"""What a container, a cut file or an odd mount shows of its cgroup: the limits that are readable count."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from torchtitan_lite.host_memory import available_in, free_memory_bytes, host_id

GIB = 1 << 30
HOST = {"proc/meminfo": "MemTotal:       33554432 kB\nMemAvailable:   20971520 kB\n"}
MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup rw\n"


def free(root: Path, files: Mapping[str, str]) -> int:
    """Return the free bytes, in GiB, of a system with `files`."""
    for name, text in {**HOST, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return free_memory_bytes(root) // GIB


def limited(folder: str, gib: int, **stat: int) -> dict[str, str]:
    at = f"sys/fs/cgroup/{folder}"
    lines = "".join(f"{name} {value}\n" for name, value in stat.items())
    return {f"{at}/memory.max": f"{gib * GIB}\n", f"{at}/memory.current": f"{GIB}\n", f"{at}/memory.stat": lines}


def of(path: str, mount: str = MOUNT) -> dict[str, str]:
    return {"proc/self/cgroup": f"0::{path}\n", "proc/self/mountinfo": mount}


def test_below_what_a_container_sees_its_own_cgroups_count(tmp_path: Path) -> None:
    mount = "30 23 0:26 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup rw\n"
    files = of("/docker/abc/job", mount) | limited("", 9) | limited("job", 4)
    assert free(tmp_path, files) == 3


def test_below_what_a_container_sees_its_own_cgroups_of_version_1_count_too(tmp_path: Path) -> None:
    mount = "30 23 0:26 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
    files = of("/docker/abc/job", mount) | {"proc/self/cgroup": "4:memory:/docker/abc/job\n"}
    for folder, gib in (("", 9), ("job/", 4)):
        at = f"sys/fs/cgroup/memory/{folder}"
        files |= {f"{at}memory.limit_in_bytes": f"{gib * GIB}\n", f"{at}memory.usage_in_bytes": f"{GIB}\n"}
    assert free(tmp_path, files) == 3


def test_a_cgroup_that_is_not_shown_leaves_the_limit_of_the_mount(tmp_path: Path) -> None:
    assert free(tmp_path, of("/elsewhere/job") | limited("", 5)) == 4
    assert free(tmp_path, of("/../above") | limited("", 5) | limited("above", 2)) == 4, "it is above the mount"


@pytest.mark.parametrize(
    "line",
    [
        "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup rw",
        "30 23 0:26 / /sys/fs/cgroup - cgroup2 cgroup rw",
        "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup rw,nsdelegate",
    ],
)
def test_a_mount_counts_with_any_number_of_options(tmp_path: Path, line: str) -> None:
    assert free(tmp_path, of("/job", line) | limited("job", 3)) == 2


def test_lines_that_are_cut_or_of_other_mounts_are_skipped(tmp_path: Path) -> None:
    lines = "\n30 23\n33 23 0:28 / - cgroup cgroup rw,memory\n33 23 0:28 / /sys - cgroup cgroup\n"
    lines += "34 23 0:29 / /proc rw - proc proc rw\n35 23 0:30 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
    assert free(tmp_path, of("/job", lines) | limited("job", 3)) == 20
    assert free(tmp_path, of("/job", lines + MOUNT) | limited("job", 3)) == 2


@pytest.mark.parametrize("cgroup", ["", "4:memory:/job\n", "1:name=systemd:/job\n", "0\n"])
def test_without_a_cgroup_of_the_mounted_kind_no_limit_counts(tmp_path: Path, cgroup: str) -> None:
    assert free(tmp_path, of("/job") | {"proc/self/cgroup": cgroup} | limited("job", 3)) == 20


def test_active_and_inactive_files_count_as_free_and_nothing_else_does(tmp_path: Path) -> None:
    stat = {"anon": GIB, "file": 9 * GIB, "active_file": GIB, "inactive_file": 2 * GIB, "total_active_file": GIB}
    assert free(tmp_path, of("/job") | limited("job", 6, **stat)) == 8


@pytest.mark.parametrize("broken", ["memory.max", "memory.current"])
@pytest.mark.parametrize("text", ["", "max\n", "some\n"])
def test_a_limit_or_a_use_that_is_no_number_is_no_limit(tmp_path: Path, broken: str, text: str) -> None:
    files = of("/job") | limited("job", 3) | {f"sys/fs/cgroup/job/{broken}": text}
    assert free(tmp_path, files) == 20


def test_statistics_that_are_cut_count_as_far_as_they_go(tmp_path: Path) -> None:
    files = of("/job") | limited("job", 6)
    files["sys/fs/cgroup/job/memory.stat"] = f"inactive_file {GIB}\nactive_file none\nfile\n\nslab 1 2"
    assert free(tmp_path, files) == 6


def test_the_available_memory_is_that_of_its_own_line() -> None:
    assert available_in("MemFree: 7 kB\nMemAvailable:  5 kB\nSwapFree: 9 kB\n") == 5 << 10


def test_a_host_is_its_boot_or_else_its_name(tmp_path: Path) -> None:
    names = [host_id(tmp_path)]
    path = tmp_path / "proc/sys/kernel/random/boot_id"
    path.parent.mkdir(parents=True)
    path.write_text("0d3f\n")
    assert host_id(tmp_path) == "0d3f" != names[0]

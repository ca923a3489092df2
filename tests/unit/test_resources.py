"""CPU time, memory and disk within the limits of control groups."""

import math
import os
import resource
from pathlib import Path

import pytest

from tests.support.each_case import each_case
from w2v.system.resources import (
    cpu_quota,
    format_bytes,
    free_disk_bytes,
    free_host_bytes,
    lockable_bytes,
    same_disk,
)

GROUP_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
GROUP_V2 = ("memory.max", "memory.current", "memory.stat")
AVAILABLE = 1 << 34


def system(root, cgroup="", files=()):
    """Write the files of /proc and /sys of a machine with 16 GiB available."""
    files = dict(files) | {
        "proc/meminfo": f"MemTotal: 99 kB\nMemAvailable: {AVAILABLE >> 10} kB\n",
        "proc/self/cgroup": cgroup,
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def group(folder, names, limit, used, stat):
    """Return the files of a control group."""
    contents = map(str, (limit, used, stat))
    paths = [f"sys/fs/cgroup/{folder}{name}" for name in names]
    return dict(zip(paths, contents, strict=True))


def test_available_memory_counts_without_control_groups(tmp_path):
    assert free_host_bytes(system(tmp_path)) == AVAILABLE


def test_control_group_v2_counts_with_those_above_it(tmp_path):
    unlimited = group("a/", GROUP_V2, "max", 5, "inactive_file 1")
    limited = group("", GROUP_V2, 8000, 5000, "x 1\ninactive_file 700")
    root = system(tmp_path, "0::/a/gone\n", unlimited | limited)
    assert free_host_bytes(root) == 8000 - 5000 + 700


def test_control_group_v1_counts(tmp_path):
    files = group("memory/docker/1/", GROUP_V1, 9000, 9500, "total_inactive_file 600")
    root = system(tmp_path, "5:cpu:/\n4:memory:/docker/1\n", files)
    assert free_host_bytes(root) == 9000 - 9500 + 600


def test_control_group_without_a_limit_does_not_count(tmp_path):
    files = group("memory/", GROUP_V1, 2**63 - 4096, 1, "")
    assert free_host_bytes(system(tmp_path, "4:memory:/\n", files)) == AVAILABLE


@each_case(
    "cgroup, files, cpus",
    [
        ("0::/a/gone\n", {"a/cpu.max": "max 100000", "cpu.max": "250000 100000"}, 2.5),
        ("0::/a\n", {"a/cpu.max": "100000 100000", "cpu.max": "250000 100000"}, 1),
        (
            "5:cpu,cpuacct:/docker/1\n",
            {"cpu/docker/1/cpu.cfs_quota_us": "50000", "cpu/docker/1/cpu.cfs_period_us": "100000"},
            0.5,
        ),
        ("5:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, math.inf),
        ("0::/\n", {"cpu.max": "max 100000"}, math.inf),
        ("5:memory:/\n", {}, math.inf),
    ],
)
def test_cpus_that_control_groups_let_a_process_keep_busy(tmp_path, cgroup, files, cpus):
    files = {f"sys/fs/cgroup/{name}": text + "\n" for name, text in files.items()}
    assert cpu_quota(system(tmp_path, cgroup, files)) == cpus


def test_limit_of_the_process_counts(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1 << 33, 1 << 33))
    assert 0 < free_host_bytes() < 1 << 33
    assert lockable_bytes() == 1 << 33


def test_free_disk_is_that_of_the_nearest_existing_folder(tmp_path):
    there = os.statvfs(tmp_path)
    free = free_disk_bytes(tmp_path / "not" / "yet")
    assert free == pytest.approx(there.f_bavail * there.f_frsize, rel=0.1)


def test_folders_are_on_one_disk_or_on_two(tmp_path):
    assert same_disk(tmp_path, tmp_path / "not" / "yet")
    assert not same_disk(tmp_path / "not" / "yet", Path("/proc/not/yet"))


@each_case(
    "count, text",
    [(672, "672 B"), (5 << 10, "5 KiB"), (60 << 20, "60 MiB"), (3 << 39, "1536.0 GiB")],
)
def test_format_bytes(count, text):
    assert format_bytes(count) == text

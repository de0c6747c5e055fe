"""How many cores we may use: the smaller of affinity and quota, on made-up systems."""

import os

import pytest

from common.cores import cores, quota

V2, V1 = "0::/a/b\n", "5:memory:/m\n4:cpu,cpuacct:/a/b\n0::/\n"


def system(root, groups, limits):
    """A made-up /proc and /sys. groups: of this process, None: it is no Linux. limits: {file of a group: its text}."""
    files = {f"sys/fs/cgroup/{name}": text for name, text in limits.items()}
    if groups is not None:
        files["proc/self/cgroup"] = groups
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize("groups,limits,allowed", [
    (V2, {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "300000 100000\n"}, 3),  # a group above limits us, too
    (V2, {"a/b/cpu.max": "50000 100000\n", "a/cpu.max": "300000 100000\n"}, 0.5),
    (V2, {"cpu.max": "250000 100000\n"}, 2.5),  # a container: its path is of the outside
    (V2, {"c/cpu.max": "50000 100000\n"}, float("inf")),  # a group of others
    ("1:name=systemd:/x:y\n0::/x:y\n", {"unified/x:y/cpu.max": "150000 50000"}, 3),
    (V1, {"cpu,cpuacct/a/b/cpu.cfs_quota_us": "150000\n", "cpu,cpuacct/a/b/cpu.cfs_period_us": "100000\n"}, 1.5),
    (V1, {"cpu/a/b/cpu.cfs_quota_us": "-1\n", "cpu/a/b/cpu.cfs_period_us": "100000\n"}, float("inf")),
    (V1, {"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
    ("0::/../b\n", {}, float("inf")), ("", {}, float("inf")), (None, {}, float("inf")),
])  # fmt: skip
def test_quota(groups, limits, allowed, tmp_path):
    assert quota(system(tmp_path, groups, limits)) == allowed


@pytest.mark.parametrize("affinity,count,allowed,n", [
    (range(8), 64, "50000", 1), (range(8), 64, "250000", 3), (range(2), 64, "800000", 2), (range(8), 64, "max", 8),
    (None, 6, "max", 6), (None, None, "max", 1),
])  # fmt: skip
def test_cores(affinity, count, allowed, n, tmp_path, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: count)
    if affinity is None:
        monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    else:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: affinity, raising=False)
    assert cores(system(tmp_path, "0::/\n", {"cpu.max": f"{allowed} 100000\n"})) == n

"""How many processor cores this process may use. No torch here: prepare.py's worker processes import this file."""

import math
import os
from pathlib import Path


def folders_of_cgroup(root):
    """The folders that may limit this process: those of its control groups, and of all groups above them.

    /proc/self/cgroup has a line for each hierarchy, `0::/path` in version 2, `4:cpu,cpuacct:/path` in version 1. Inside
    a container the path is often the one outside it; then the folders below are missing, and the root is ours.
    """
    file = Path(root, "proc/self/cgroup")
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        _, controllers, path = line.split(":", 2)
        mounts = []
        if controllers == "":
            mounts = [".", "unified"]
        if "cpu" in controllers.split(","):
            mounts = [controllers, "cpu"]
        for mount in mounts:
            group = Path(path.lstrip("/"))
            for part in (group, *group.parents):
                yield Path(root, "sys/fs/cgroup", mount, part)


def quota(root="/"):
    """The processor time that the control groups of Linux allow, in cores, as `docker run --cpus=1.5` sets it; infinite
    without a limit. Source: https://docs.kernel.org/admin-guide/cgroup-v2.html, and sched-bwc there for version 1."""
    least = math.inf
    for folder in folders_of_cgroup(root):
        if (folder / "cpu.max").exists():
            allowed, period = (folder / "cpu.max").read_text().split()
        elif (folder / "cpu.cfs_quota_us").exists():
            allowed, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        else:
            continue
        if allowed != "max" and int(allowed) > 0:  # version 1 says -1
            least = min(least, int(allowed) / int(period))
    return least


def cores(root="/"):
    """How many cores this process may use: the smaller of its affinity and the container's quota, rounded up, so at
    least 1. On macOS and Windows Python tells us neither: then all there are."""
    if hasattr(os, "sched_getaffinity"):
        n = len(os.sched_getaffinity(0))
    else:
        n = os.cpu_count() or 1
    return math.ceil(min(n, quota(root)))

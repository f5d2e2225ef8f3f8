"""CPU cores that this process may use: its affinity, and the CPU quotas of its control groups."""

from __future__ import annotations

import os
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Return how many cores this process can keep busy; at least 1."""
    num_cores = len(os.sched_getaffinity(0))
    quota = read_quota()
    return max(1, num_cores if quota is None else min(num_cores, int(quota)))


def read_quota(root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> float | None:
    """Return the lowest CPU quota of the control group and those above it, in cores; None without a
    limit. In a container, its own group is usually the root."""
    folders = [root, root / "cpu"]
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "cpu" if controllers else root
        place = top / path.lstrip("/")
        folders += [place, *(each for each in place.parents if each.is_relative_to(top))]
    quotas = [quota for each in dict.fromkeys(folders) if (quota := _quota_of(each)) is not None]
    return min(quotas, default=None)


def _quota_of(folder: Path) -> float | None:
    """Return the quota in files of version 2 or 1; None without one."""
    try:
        limit, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            limit = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    if not (limit.isdigit() and period.isdigit() and int(period)):
        return None  # `max`, or -1 in version 1.
    return int(limit) / int(period)

"""Cores and memory node of the workers of an instance group, as Triton's `--host-policy` says.

A policy names cores, or a NUMA node whose cores and memory are meant. A worker applies it to itself
before any code of the model runs; threads that start later inherit it.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

NODES = Path("/sys/devices/system/node")
TASKS = Path("/proc/self/task")
FORM = "NAME,numa-node=N or NAME,cpu-cores=A-B"
RANGE = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", re.ASCII)
MAX_NODE = 1023
# Linux's set_mempolicy: memory of this node while it lasts, of others then.
PREFERRED = 1
SYSCALLS = {"x86_64": 238, "aarch64": 237}
log = logging.getLogger("penstock.worker")


@dataclass(frozen=True, slots=True)
class HostPolicy:
    # Empty: all that the server may use.
    cores: tuple[int, ...] = ()
    numa_node: int | None = None


def read_host_policies(given: Sequence[str]) -> tuple[dict[str, HostPolicy], list[str]]:
    """Return the policies of `--host-policy` by name, and what is wrong with the flags."""
    policies: dict[str, HostPolicy] = {}
    problems: list[str] = []
    for text in given:
        name, _, setting = text.partition(",")
        key, _, value = setting.partition("=")
        policy = policies.get(name, HostPolicy())
        found = RANGE.fullmatch(value)
        if not name or key not in ("numa-node", "cpu-cores") or found is None:
            problems.append(f"--host-policy {text}: expected {FORM}")
        elif key == "numa-node" and not found[2] and int(found[1]) <= MAX_NODE:
            policies[name] = replace(policy, numa_node=int(found[1]))
        elif key == "cpu-cores" and int(found[1]) <= int(found[2] or found[1]):
            cores = tuple(range(int(found[1]), int(found[2] or found[1]) + 1))
            policies[name] = replace(policy, cores=cores)
        else:
            problems.append(f"--host-policy {text}: expected {FORM}")
    for name, policy in policies.items():
        problems += [f"--host-policy {name}: {each}" for each in machine_problems(policy)]
    return policies, problems


def machine_problems(policy: HostPolicy, nodes: Path = NODES) -> list[str]:
    """Return what this machine lacks for a policy."""
    problems: list[str] = []
    node = policy.numa_node
    if node is not None and not (nodes / f"node{node}").is_dir() and (node or nodes.is_dir()):
        problems.append(f"there is no NUMA node {node} on this machine")
    usable = os.sched_getaffinity(0)
    if policy.cores and not usable & set(policy.cores):
        cores = f"{policy.cores[0]}-{policy.cores[-1]}"
        problems.append(f"the server may use none of the cores {cores}; it has {_listed(usable)}")
    return problems


def cores_of(policy: HostPolicy, nodes: Path = NODES) -> tuple[int, ...]:
    """Return the cores of a policy that this process may use, those of its node without others;
    empty for all."""
    cores = policy.cores or _cores_of_node(policy.numa_node, nodes)
    return tuple(sorted(os.sched_getaffinity(0) & set(cores)))


def _cores_of_node(node: int | None, nodes: Path) -> tuple[int, ...]:
    if node is None:
        return ()
    with suppress(OSError):
        text = (nodes / f"node{node}" / "cpulist").read_text()
        found = [RANGE.fullmatch(part.strip()) for part in text.split(",")]
        ranges = [(int(each[1]), int(each[2] or each[1])) for each in found if each is not None]
        return tuple(core for first, last in ranges for core in range(first, last + 1))
    return ()


def apply(policy: HostPolicy) -> None:
    """Pin every thread of this process, and prefer the memory of the node."""
    if policy.cores:
        for task in TASKS.iterdir():
            # A thread may have ended.
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(task.name), policy.cores)
    if policy.numa_node is not None and not _prefer_node(policy.numa_node):
        log.warning("host_policy: the memory of NUMA node %d cannot be chosen", policy.numa_node)


def _prefer_node(node: int) -> bool:
    number = SYSCALLS.get(os.uname().machine)
    if number is None:
        return False
    words = (ctypes.c_ulong * (MAX_NODE // 64 + 1))()
    words[node // 64] = 1 << node % 64
    call = ctypes.CDLL(None, use_errno=True).syscall
    return bool(call(number, PREFERRED, words, MAX_NODE + 1) == 0)


def _listed(cores: set[int]) -> str:
    return ", ".join(map(str, sorted(cores)))

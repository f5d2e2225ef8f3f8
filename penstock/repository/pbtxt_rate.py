"""Reads and writes `rate_limiter` of instance groups: what an instance needs to execute."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.config import CPU, ModelConfig, RateLimit
from penstock.repository.pbtxt_fields import Proto

NOTE = "instance_group.rate_limiter applies if the server has --rate-limit execution_count"
# Without a priority, as in Triton.
DEFAULT_PRIORITY = 1


def read(
    groups: Sequence[Proto],
    devices: Callable[[Proto], list[str]],
    problem: Callable[[str, str], None],
) -> tuple[RateLimit, ...]:
    """Return the limit of each instance in the order of the groups; empty if none needs a
    resource: then nothing waits, and priorities have no effect. `devices` returns those of the
    instances of a group."""
    found: list[RateLimit] = []
    for index, group in enumerate(groups):
        limiter, path = group.rate_limiter, f"instance_group[{index}].rate_limiter"
        resources: list[tuple[str, bool, int]] = []
        for number, each in enumerate(limiter.resources):
            where = f"{path}.resources[{number}]"
            if not each.name:
                problem(f"{where}.name", "missing")
            if not each.count:
                problem(f"{where}.count", "0; expected at least 1")
            resources.append((each.name, bool(getattr(each, "global")), int(each.count)))
        names = [name for name, _, _ in resources]
        if len(set(names)) < len(names):
            problem(f"{path}.resources", f"{names}; expected each name once")
        priority = int(limiter.priority) or DEFAULT_PRIORITY
        found += [RateLimit(each, tuple(resources), priority) for each in devices(group)]
    return tuple(found) if any(each.resources for each in found) else ()


def describe(groups: Proto, config: ModelConfig) -> None:
    """Add a group for each instance."""
    for limit in config.rate_limits:
        group = groups.add()
        group.count = 1
        _, _, number = limit.device.partition(":")
        group.kind = group.KIND_CPU if limit.device == CPU else group.KIND_GPU
        group.gpus[:] = [int(number)] if number else []
        group.rate_limiter.priority = limit.priority
        for name, is_global, count in limit.resources:
            resource = group.rate_limiter.resources.add()
            resource.name, resource.count = name, count
            setattr(resource, "global", is_global)

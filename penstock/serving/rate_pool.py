"""Which instances may execute, if executions need resources (Triton's rate limiter). Pure.

Start-time fair queueing: an instance's executions cost its priority, and of those that want to
execute the one comes first that has spent least. One that has to wait for a resource keeps it from
all behind it, so nobody starves; those that need other resources pass.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

# A resource on a device; of global ones there is one for all.
GLOBAL = "global"


@dataclass(frozen=True, slots=True)
class ResourceKey:
    name: str
    device: str = GLOBAL

    def __str__(self) -> str:
        return f"'{self.name}' ({self.device})"


Needs = Mapping[ResourceKey, int]


@dataclass(slots=True, eq=False)
class Member:
    """One instance. `spent` is the sum of its priorities, from the time at which it last came."""

    needs: Needs
    priority: int
    spent: float = 0.0
    num_held: int = 0
    # When it began to want, as a number; None: it does not.
    wants_since: int | None = None


@dataclass(eq=False)
class RatePool:
    """`given` has the counts that the operator chose, of a resource on one device or, with the
    device "", on each. Other resources have the largest count that one instance needs.

    Invariant: nothing is granted that would take more of a resource than its count."""

    given: Mapping[ResourceKey, int] = field(default_factory=dict)
    _members: dict[Hashable, Member] = field(default_factory=dict)
    _used: dict[ResourceKey, int] = field(default_factory=dict)
    _now: float = 0.0
    _num_wants: int = 0

    def count(self, key: ResourceKey) -> int:
        """Return how much there is of a resource."""
        chosen = self._chosen(key)
        if chosen is not None:
            return chosen
        return max((each.needs.get(key, 0) for each in self._members.values()), default=0)

    def used(self, key: ResourceKey) -> int:
        return self._used.get(key, 0)

    def problems(self, needs: Needs) -> list[str]:
        """Return why an instance with these needs could never execute."""
        found: list[str] = []
        known = {key for each in self._members.values() for key in each.needs}
        for key, count in needs.items():
            chosen = self._chosen(key)
            if chosen is not None and count > chosen:
                found.append(
                    f"needs {count} of {key}, and the server has {chosen}; raise "
                    f"--rate-limit-resource {key.name}, or lower the count"
                )
            if any(
                k.name == key.name and (k.device == GLOBAL) != (key.device == GLOBAL) for k in known
            ):
                other = "per device" if key.device == GLOBAL else "global"
                found.append(f"'{key.name}' is {other} in another model; declare it alike in both")
        return found

    def add(self, instance: Hashable, needs: Needs, priority: int = 1) -> None:
        self._members[instance] = Member(needs, max(1, priority), self._now)

    def remove(self, instance: Hashable) -> None:
        """Forget an instance, with all that it wants and holds."""
        member = self._members.get(instance)
        if member is not None:
            while member.num_held:
                self.release(instance)
            del self._members[instance]

    def want(self, instance: Hashable) -> None:
        """Note that an instance has something to execute."""
        member = self._members[instance]
        if member.wants_since is None:
            self._num_wants += 1
            member.wants_since = self._num_wants
            member.spent = max(member.spent, self._now)

    def withdraw(self, instance: Hashable) -> None:
        self._members[instance].wants_since = None

    def release(self, instance: Hashable, *, was_used: bool = True) -> None:
        """Give back what an execution held; one that was not used costs nothing."""
        member = self._members[instance]
        member.num_held -= 1
        if not was_used:
            member.spent -= member.priority
        for key, count in member.needs.items():
            self._used[key] -= count

    def grant(self) -> list[Hashable]:
        """Return the instances that may execute now; each holds its resources until it releases
        them."""
        waiting = [
            (member.spent, member.wants_since, instance, member)
            for instance, member in self._members.items()
            if member.wants_since is not None
        ]
        waiting.sort(key=lambda each: each[:2])
        kept: set[ResourceKey] = set()
        granted: list[Hashable] = []
        for spent, _, instance, member in waiting:
            if self._fits(member.needs, kept):
                self._take(member)
                self._now = max(self._now, spent)
                granted.append(instance)
            else:
                kept |= member.needs.keys()
        return granted

    def _fits(self, needs: Needs, kept: set[ResourceKey]) -> bool:
        if any(key in kept for key in needs):
            return False
        return all(self.used(key) + count <= self.count(key) for key, count in needs.items())

    def _take(self, member: Member) -> None:
        member.wants_since = None
        member.num_held += 1
        member.spent += member.priority
        for key, count in member.needs.items():
            self._used[key] = self.used(key) + count

    def _chosen(self, key: ResourceKey) -> int | None:
        chosen = self.given.get(key)
        return self.given.get(ResourceKey(key.name, "")) if chosen is None else chosen


def needs_of(resources: Sequence[tuple[str, bool, int]], device: str) -> dict[ResourceKey, int]:
    """Return the needs of an instance on this device: names, whether global, and counts."""
    found: dict[ResourceKey, int] = {}
    for name, is_global, count in resources:
        key = ResourceKey(name, GLOBAL if is_global else device)
        found[key] = max(found.get(key, 0), count)
    return found

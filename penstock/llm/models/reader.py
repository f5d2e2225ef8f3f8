"""Reader of a model's configuration values that collects all problems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.errors import ConfigError

Number = int | float


class Reader:
    def __init__(self, values: Mapping[str, object], label: str) -> None:
        self.values = values
        self.label = label
        self.problems: list[str] = []

    def whole(self, key: str, default: int | None = None) -> int:
        found = self.values.get(key, default)
        if isinstance(found, int) and not isinstance(found, bool) and found > 0:
            return found
        self._missing(key, found, "a positive number")
        return 1

    def real(self, key: str, default: float | None = None) -> float:
        found = self.values.get(key, default)
        if isinstance(found, Number) and not isinstance(found, bool) and found > 0:
            return float(found)
        self._missing(key, found, "a positive number")
        return 1.0

    def flag(self, key: str, default: bool) -> bool:
        found = self.values.get(key, default)
        if not isinstance(found, bool):
            self._missing(key, found, "true or false")
        return bool(found)

    def reals(self, key: str, count: int) -> tuple[float, ...]:
        found = self.values.get(key)
        if (
            isinstance(found, list)
            and len(found) == count
            and all(isinstance(each, Number) and each > 0 for each in found)
        ):
            return tuple(map(float, found))
        self._missing(key, found, f"{count} positive numbers")
        return (1.0,) * count

    def names(self, key: str, count: int, accepted: Sequence[str]) -> list[str]:
        """Read a list of `count` names; empty without one."""
        found = self.values.get(key)
        if found is None:
            return []
        if not isinstance(found, list) or len(found) != count:
            self._missing(key, found, f"a list of {count} names")
            return []
        strange = [each for each in found if each not in accepted]
        if strange:
            self.problems.append(
                f"{self.label}: {key} has {strange[0]!r}; expected {' or '.join(accepted)}"
            )
        return [str(each) for each in found]

    def part(self, key: str) -> Mapping[str, object]:
        found = self.values.get(key) or {}
        if not isinstance(found, Mapping):
            self._missing(key, found, "an object")
            return {}
        return found

    def accept(self, served: Mapping[str, object]) -> None:
        """Refuse settings with values that are not served; missing and null ones are."""
        for key, value in served.items():
            found = self.values.get(key)
            if found is not None and found != value:
                self.problems.append(f"{self.label}: {key} is {found!r}; expected {value!r}")

    def check(self) -> None:
        if self.problems:
            raise ConfigError(self.problems)

    def _missing(self, key: str, found: object, expected: str) -> None:
        got = "is missing" if found is None else f"is {found!r}"
        self.problems.append(f"{self.label}: {key} {got}; expected {expected}")

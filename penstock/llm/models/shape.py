"""Sizes of a decoder, and its RoPE."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from penstock.errors import ConfigError

Number = int | float
ORIGINAL_LENGTH = "original_max_position_embeddings"


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding. `kind` says how it extends beyond the length of training."""

    theta: float = 10_000.0
    # "" (unchanged), "linear" (positions divided by the factor), "llama3" (low frequencies only),
    # "longrope" (each frequency by its divisor, up to the original length).
    kind: str = ""
    factor: float = 1.0
    low_factor: float = 1.0
    high_factor: float = 4.0
    original_length: int = 8192
    # Divisor of each frequency, if the file has them.
    divisors: tuple[float, ...] = ()
    # Factor of rotated queries and keys.
    magnitude: float = 1.0
    # Share of a head that is rotated: the first values of each half.
    share: float = 1.0

    def num_pairs(self, head_size: int) -> int:
        """Return how many pairs of values are rotated."""
        return int(head_size * self.share) // 2

    def frequencies(self, head_size: int) -> list[float]:
        """Return the radians per position of each pair of values."""
        num_pairs = self.num_pairs(head_size)
        rotated = self._rotated([self.theta ** (-i / num_pairs) for i in range(num_pairs)])
        return rotated + [0.0] * (head_size // 2 - num_pairs)

    def magnitudes(self, head_size: int) -> list[float]:
        num_pairs = self.num_pairs(head_size)
        return [self.magnitude] * num_pairs + [1.0] * (head_size // 2 - num_pairs)

    def _rotated(self, plain: list[float]) -> list[float]:
        if self.divisors:
            return [each / divisor for each, divisor in zip(plain, self.divisors, strict=True)]
        if self.kind == "linear":
            return [each / self.factor for each in plain]
        if self.kind == "llama3":
            return [self._slowed(each) for each in plain]
        return plain

    def _slowed(self, frequency: float) -> float:
        """Scale down low frequencies, whose period exceeds the original length; keep high ones, and
        interpolate between them."""
        turns = self.original_length * frequency / (2 * math.pi)
        if turns < self.low_factor:
            return frequency / self.factor
        if turns > self.high_factor:
            return frequency
        share = (turns - self.low_factor) / (self.high_factor - self.low_factor)
        return (1 - share) * frequency / self.factor + share * frequency


@dataclass(frozen=True, slots=True)
class DecoderShape:
    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    inner: int
    vocabulary: int
    max_length: int
    epsilon: float
    rope: Rope
    # The output head shares the embeddings.
    is_tied: bool
    # RMSNorm on each head of queries and keys.
    has_qk_norm: bool = False
    # Biases of the linear layers before attention, and of the one behind it.
    has_qkv_bias: bool = False
    has_out_bias: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                [f"{self.num_heads} heads are not a multiple of {self.num_kv_heads} of keys"]
            )

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_parameters(self) -> int:
        heads = self.head_size * (2 * self.num_heads + 2 * self.num_kv_heads)
        layer = self.width * heads + 3 * self.width * self.inner
        tables = self.vocabulary * self.width * (1 if self.is_tied else 2)
        return self.num_layers * layer + tables


class Reader:
    """Reader of a configuration's values that collects all problems."""

    def __init__(self, values: Mapping[str, object], label: str) -> None:
        self._values = values
        self._label = label
        self.problems: list[str] = []

    def whole(self, key: str, default: int | None = None) -> int:
        found = self._values.get(key, default)
        if isinstance(found, int) and not isinstance(found, bool) and found > 0:
            return found
        self._missing(key, found, "a positive number")
        return 1

    def real(self, key: str, default: float | None = None) -> float:
        found = self._values.get(key, default)
        if isinstance(found, Number) and not isinstance(found, bool) and found > 0:
            return float(found)
        self._missing(key, found, "a positive number")
        return 1.0

    def flag(self, key: str, default: bool) -> bool:
        found = self._values.get(key, default)
        if not isinstance(found, bool):
            self._missing(key, found, "true or false")
        return bool(found)

    def reals(self, key: str, count: int) -> tuple[float, ...]:
        found = self._values.get(key)
        if (
            isinstance(found, list)
            and len(found) == count
            and all(isinstance(each, Number) and each > 0 for each in found)
        ):
            return tuple(map(float, found))
        self._missing(key, found, f"{count} positive numbers")
        return (1.0,) * count

    def part(self, key: str) -> Mapping[str, object]:
        found = self._values.get(key) or {}
        if not isinstance(found, Mapping):
            self._missing(key, found, "an object")
            return {}
        return found

    def check(self) -> None:
        if self.problems:
            raise ConfigError(self.problems)

    def _missing(self, key: str, found: object, expected: str) -> None:
        got = "is missing" if found is None else f"is {found!r}"
        self.problems.append(f"{self._label}: {key} {got}; expected {expected}")


def rope_of_config(values: Mapping[str, object], label: str, head_size: int) -> Rope:
    """Read config.json: the older `rope_theta` with `rope_scaling`, or `rope_parameters`."""
    reader = Reader(values, label)
    told = {**reader.part("rope_scaling"), **reader.part("rope_parameters")}
    inner = Reader(told, f"{label}: rope")
    theta = (inner if "rope_theta" in told else reader).real("rope_theta", 10_000.0)
    key = "partial_rotary_factor"
    share = (inner if key in told else reader).real(key, 1.0)
    if share > 1 or head_size * share % 2:
        reader.problems.append(f"{label}: {key} is {share}; expected a share of {head_size}, even")
    kind = str(told.get("rope_type", told.get("type", "default")))
    found = Rope(theta, share=share)
    if kind == "linear":
        found = replace(found, kind=kind, factor=inner.real("factor"))
    elif kind == "llama3":
        factor, low, high = map(inner.real, ("factor", "low_freq_factor", "high_freq_factor"))
        length = inner.whole(ORIGINAL_LENGTH)
        found = Rope(theta, kind, factor, low, high, length, share=share)
    elif kind in ("longrope", "su"):
        length = (inner if ORIGINAL_LENGTH in told else reader).whole(ORIGINAL_LENGTH)
        longest = reader.whole("max_position_embeddings")
        found = replace(
            found,
            kind="longrope",
            original_length=length,
            divisors=inner.reals("short_factor", found.num_pairs(head_size)),
            magnitude=_longrope_magnitude(told, longest / length, length),
        )
    elif kind != "default":
        known = "linear, llama3 or longrope"
        reader.problems.append(f"{label}: rope of type '{kind}'; expected {known}")
    reader.problems += inner.problems
    reader.check()
    return found


def _longrope_magnitude(told: Mapping[str, object], factor: float, length: int) -> float:
    """Return what LongRoPE multiplies queries and keys with: more, the longer the context can be,
    unless the file says how much."""
    own = told.get("attention_factor")
    if isinstance(own, Number) and not isinstance(own, bool):
        return float(own)
    return math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 and length > 1 else 1.0

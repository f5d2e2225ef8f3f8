"""Rotary position embedding: its settings in files, its table, and its application to heads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.llm.models.reader import Number, Reader

ORIGINAL_LENGTH = "original_max_position_embeddings"
KINDS = "linear, llama3, longrope or yarn"


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding. `kind` says how it extends beyond the length of training."""

    theta: float = 10_000.0
    # "" (unchanged), "linear" (positions divided by the factor), "llama3" (low frequencies only),
    # "longrope" (each frequency by its divisor, up to the original length), "yarn" (likewise).
    kind: str = ""
    factor: float = 1.0
    low_factor: float = 1.0
    high_factor: float = 4.0
    original_length: int = 8192
    # Divisor of each frequency, if there are any.
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

    def table(self, head_size: int, length: int) -> Tensor:
        """Return the RoPE table [positions, 2, half a head]: cosines and sines."""
        frequencies = torch.tensor(self.frequencies(head_size), dtype=torch.float64)
        angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
        table = torch.stack([angles.cos(), angles.sin()], 1)
        return (table * torch.tensor(self.magnitudes(head_size))).float()

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


# Files.


def rope_of_config(
    reader: Reader, head_size: int, theta: float = 10_000.0, layers: str = "full_attention"
) -> Rope:
    """Read config.json: the older `rope_theta` with `rope_scaling`, or `rope_parameters`, which may
    differ between kinds of layers. `theta` is the default."""
    told = {**reader.part("rope_scaling"), **reader.part("rope_parameters")}
    own = told.get(layers)
    inner = Reader(own if isinstance(own, Mapping) else told, f"{reader.label}: rope")
    told = dict(inner.values)
    theta = (inner if "rope_theta" in told else reader).real("rope_theta", theta)
    key = "partial_rotary_factor"
    share = (inner if key in told else reader).real(key, 1.0)
    if share > 1 or head_size * share % 2:
        expected = f"expected a share of {head_size}, even"
        reader.problems.append(f"{reader.label}: {key} is {share}; {expected}")
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
            magnitude=_longrope_magnitude(inner, longest / length, length),
        )
    elif kind == "yarn":
        found = _yarn(found, inner, head_size, reader.whole("max_position_embeddings"))
    elif kind != "default":
        reader.problems.append(f"{reader.label}: rope of type '{kind}'; expected {KINDS}")
    reader.problems += inner.problems
    return found


def rope_of_gguf(reader: Reader, prefix: str, head_size: int, max_length: int) -> Rope:
    """Read the values of a GGUF file whose keys begin with `prefix`."""
    found = Rope(reader.real(f"{prefix}.rope.freq_base", 10_000.0))
    count = reader.values.get(f"{prefix}.rope.dimension_count", head_size)
    if count != head_size:
        reader.problems.append(
            f"{reader.label}: {prefix}.rope.dimension_count is {count!r}; expected {head_size}, "
            "whole heads"
        )
    scaling = f"{prefix}.rope.scaling"
    kind = reader.values.get(f"{scaling}.type", "none")
    if kind == "linear":
        return replace(found, kind="linear", factor=reader.real(f"{scaling}.factor"))
    if kind == "yarn":
        keys = {"factor": "factor", ORIGINAL_LENGTH: "original_context_length"}
        keys |= {f"beta_{each}": f"yarn_beta_{each}" for each in ("fast", "slow")}
        places = {key: f"{scaling}.{name}" for key, name in keys.items()}
        values = {key: reader.values[at] for key, at in places.items() if at in reader.values}
        inner = Reader(values, f"{reader.label}: rope")
        found = _yarn(found, inner, head_size, max_length)
        reader.problems += inner.problems
    elif kind != "none":
        reader.problems.append(
            f"{reader.label}: rope of type {kind!r}; expected none, linear or yarn"
        )
    return found


def _longrope_magnitude(inner: Reader, factor: float, length: int) -> float:
    """Return what LongRoPE multiplies queries and keys with: more, the longer the context can be,
    unless the file says how much."""
    own = inner.values.get("attention_factor")
    if isinstance(own, Number) and not isinstance(own, bool):
        return float(own)
    return math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 and length > 1 else 1.0


def _yarn(rope: Rope, inner: Reader, head_size: int, max_length: int) -> Rope:
    """YaRN (arXiv 2309.00071): divide the frequencies with few turns in the original length by the
    factor, keep those with many turns, and interpolate between them."""
    length = inner.whole(ORIGINAL_LENGTH, max_length)
    factor = inner.real("factor", max_length / length)
    fast, slow = inner.real("beta_fast", 32.0), inner.real("beta_slow", 1.0)
    num_pairs = rope.num_pairs(head_size)

    def place(turns: float) -> float:
        """Return the pair that makes this many turns in the original length."""
        return num_pairs * math.log(length / (turns * 2 * math.pi)) / math.log(rope.theta)

    low, high = place(fast), place(slow)
    if inner.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * num_pairs - 1)
    span = high - low or 0.001
    slowed = [min(max((pair - low) / span, 0.0), 1.0) for pair in range(num_pairs)]
    return replace(
        rope,
        kind="yarn",
        factor=factor,
        original_length=length,
        divisors=tuple(1 / (each / factor + 1 - each) for each in slowed),
        magnitude=_yarn_magnitude(inner, factor),
    )


def _yarn_magnitude(inner: Reader, factor: float) -> float:
    own = inner.values.get("attention_factor")
    if own is not None:
        return inner.real("attention_factor")

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0

    if inner.values.get("mscale") and inner.values.get("mscale_all_dim"):
        return magnitude(inner.real("mscale")) / magnitude(inner.real("mscale_all_dim"))
    return magnitude(1.0)


# Heads.


def widen(rope_table: Tensor) -> Tensor:
    """Expand rows of the RoPE table from half heads to whole heads, once for all layers."""
    cosines, sines = rope_table.unbind(1)
    wide = torch.cat([cosines, cosines, -sines, sines], 1)
    return wide.unflatten(1, (2, -1))


def rotate(heads: Tensor, wide_table: Tensor) -> Tensor:
    """Apply RoPE to [tokens, heads, size]; the two halves of a head form the pairs."""
    wide = heads.float()
    found = wide * wide_table[:, :1] + wide.roll(heads.shape[2] // 2, 2) * wide_table[:, 1:]
    return found.to(heads.dtype)

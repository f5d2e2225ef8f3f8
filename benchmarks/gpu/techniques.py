"""What guides say that each technique gives on a GPU, and which two rows of one run show what it
gives here. Pure, and without torch: a page is made anywhere.

A claim is what its source says in as few words; where no source with a figure was found there is
none. A step is a technique between two rows of a results file, so that its gain is a ratio within
one run. New techniques are a claim and a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Found = Mapping[str, Any]
ALONE = "1"


@dataclass(frozen=True, slots=True)
class Claim:
    """So many times as fast; `low` and `high` are the same where one figure is named, and None
    where there is no figure."""

    name: str
    low: float | None
    high: float | None
    text: str
    source: str = ""


CLAIMS: Mapping[str, Claim] = {
    "tf32": Claim(
        "TF32",
        3.0,
        3.0,
        "about three times FP32, without changes to the code (training)",
        "https://github.com/huggingface/transformers/issues/14450",
    ),
    "half": Claim(
        "FP16 or BF16",
        3.0,
        3.0,
        "up to three times on GPUs with tensor cores (training, mixed precision)",
        "https://docs.nvidia.com/clara/clara-train-archive/3.1/nvmidl/additional_features/"
        "automatic_mixed_precision.html",
    ),
    "channels-last": Claim(
        "channels-last",
        1.08,
        1.35,
        "8 to 35 % for convolutional models on Volta, 22 % for ResNet-50 (training, FP16)",
        "https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html",
    ),
    "compile": Claim(
        "torch.compile",
        1.3,
        2.0,
        "30 % to twice as fast on real models, training and inference",
        "https://android.googlesource.com/platform/external/pytorch/+/d1fedad080/docs/source/"
        "compile/index.rst",
    ),
    "graphs": Claim(
        "CUDA graphs",
        1.2,
        3.0,
        "often 1.2 to 3 times; only what waits for the CPU gains",
        "https://docs.nvidia.com/dl-cuda-graph/torch-cuda-graph/torch-integration.html",
    ),
    "fused": Claim(
        "fused convolutions",
        1.3,
        1.3,
        "30 % are expected of batch norms folded into convolutions; no figure was found for"
        " additions and ReLU in the same kernel",
        "https://github.com/oulu-imeds/pytorch_bn_fusion",
    ),
    "transformer": Claim(
        "fused transformer layers",
        2.0,
        2.0,
        "can exceed twice, with padding skipped where there is any (BetterTransformer)",
        "https://pytorch.org/blog/a-better-transformer-for-fast-transformer-encoder-inference/",
    ),
    "packing": Claim(
        "packing",
        1.76,
        2.26,
        "with half of the tokens padding: 1.8 to 2.3 times, fused kernels included"
        " (BetterTransformer, batches of 8 and 16, 128 and 256 tokens)",
        "https://gist.github.com/fxmarty/8c4de1724c4ab7db736b8dfa7ba438ee",
    ),
    "fp8": Claim(
        "FP8",
        2.0,
        2.0,
        "twice the 16-bit rate of the same H100 (MLPerf)",
        "https://nvidia.github.io/TensorRT-LLM/blogs/H100vsA100.html",
    ),
    "int8": Claim(
        "INT8",
        1.77,
        1.77,
        "BERT-large at 384 tokens, batch 128, A100: 1,460 against 823 sequences/s in FP16"
        " (TensorRT's demo)",
        "https://github.com/NVIDIA/TensorRT/tree/release/10.0/demo/BERT",
    ),
    "batching": Claim(
        "batching",
        3.7,
        3.7,
        "73 to 272 inferences/s with batches of up to 4 and 8 clients (Triton, Inception)",
        "https://github.com/triton-inference-server/server/blob/main/docs/user_guide/"
        "optimization.md",
    ),
    "pinned": Claim(
        "pinned memory",
        1.34,
        1.44,
        "8 MiB batches from pinned instead of pageable memory, end to end",
        "https://facebookresearch.github.io/spdl/main/generated/benchmark_pinned_arena.html",
    ),
    "overlap": Claim(
        "stream overlap",
        1.33,
        3.0,
        "1.33 times where copies out are hidden, up to 3 where all three phases are as long",
        "https://developer.download.nvidia.com/CUDA/training/StreamsAndConcurrencyWebinar.pdf",
    ),
    "instances": Claim(
        "instances",
        1.08,
        1.5,
        "two instead of one: 73 to 110 inferences/s, but 268 to 290 once requests are batched"
        " (Triton, Inception)",
        "https://github.com/triton-inference-server/server/blob/main/docs/user_guide/"
        "optimization.md",
    ),
}

# What is looked at: time of one alone and rate of the largest batch on the device, or host-fed; or
# the rate of a server's clients.
Kind = Literal["device", "host", "served"]
SERVED, SERVED_IN_BATCHES = "served_per_s", "served in batches"


@dataclass(frozen=True, slots=True)
class Step:
    technique: str
    before: str
    after: str
    kind: Kind = "device"
    # Which load, where only one is of interest; empty: one alone and the largest batch.
    load: str = ""


def _fed(base: str) -> tuple[Step, ...]:
    """How the host feeds a row."""
    one = f"{base}, one slot"
    return (
        Step("pinned", f"{base}, pageable", one, "host"),
        Step("overlap", one, base, "host", "last"),
        Step("instances", one, base, "host", ALONE),
        Step("instances", base, f"{base}, two copies", "host"),
    )


def _served(base: str) -> Step:
    return Step("batching", f"{base}, served one by one", f"{base}, {SERVED_IN_BATCHES}", "served")


# The first whose rows are there counts, of those with the same technique and last row.
STEPS: tuple[Step, ...] = (
    Step("tf32", "fp32 without tf32", "fp32 eager"),
    Step("tf32", "fp32 eager", "tf32 eager"),
    Step("half", "fp32 eager", "fp16 eager"),
    Step("half", "fp32 eager", "bf16 eager"),
    Step("channels-last", "fp16 eager", "fp16 channels-last"),
    Step("compile", "fp16 channels-last", "fp16 compile"),
    Step("compile", "fp16 eager", "fp16 compile"),
    Step("graphs", "fp16 eager", "fp16 graphs"),
    Step("graphs", "bf16 eager", "bf16 graphs"),
    Step("graphs", "fp16 channels-last", "fp16 channels-last, graphs"),
    Step("graphs", "fp16 compile", "fp16 compile, graphs"),
    Step("fused", "fp16 channels-last", "fp16 fused"),
    Step("fused", "fp16 channels-last, graphs", "fp16 fused, graphs"),
    Step("transformer", "fp16 eager", "fp16 fused transformer"),
    Step("transformer", "fp16 graphs", "fp16 fused transformer, graphs"),
    Step("graphs", "fp16 fused transformer", "fp16 fused transformer, graphs"),
    Step("graphs", "fp16 fused", "fp16 fused, graphs"),
    Step("compile", "fp16 channels-last, graphs", "fp16 max-autotune, graphs"),
    Step("compile", "fp16 graphs", "fp16 max-autotune, graphs"),
    Step("int8", "fp16 fused, graphs", "int8 fused, graphs"),
    Step("fp8", "fp16 graphs", "fp8 by row, graphs"),
    *_fed("fp16 fused, graphs"),
    *_fed("fp16 graphs"),
    Step("tf32", "padded FP32", "padded TF32"),
    Step("half", "padded FP32", "padded FP16"),
    Step("half", "padded FP32", "padded BF16"),
    Step("compile", "padded BF16, CUDA graphs", "padded BF16, compile, CUDA graphs"),
    Step("graphs", "padded BF16", "padded BF16, CUDA graphs"),
    Step("packing", "padded BF16", "packed BF16"),
    Step("packing", "padded BF16, CUDA graphs", "packed BF16, CUDA graphs"),
    Step("graphs", "packed BF16", "packed BF16, CUDA graphs"),
    Step("fp8", "packed BF16, CUDA graphs", "packed FP8, CUDA graphs"),
    Step("fp8", "packed BF16, CUDA graphs", "packed FP8 by row, CUDA graphs"),
    *_fed("packed BF16, CUDA graphs"),
    _served("fp16 channels-last, graphs"),
    _served("fp16 graphs"),
    _served("packed BF16, CUDA graphs"),
)
# Rows of which each builds on the one before: a waterfall.
CHAINS: tuple[tuple[str, ...], ...] = (
    (
        "fp32 eager",
        "fp16 eager",
        "fp16 channels-last",
        "fp16 channels-last, graphs",
        "fp16 fused, graphs",
        "int8 fused, graphs",
    ),
    ("fp32 eager", "tf32 eager", "fp16 eager", "fp16 graphs", "fp16 fused transformer, graphs"),
    (
        "padded FP32",
        "padded TF32",
        "padded BF16",
        "padded BF16, CUDA graphs",
        "packed BF16, CUDA graphs",
        "packed FP8, CUDA graphs",
    ),
)
# Where more requests at a time are looked at.
BATCHED = ("fp16 fused, graphs", "fp16 graphs", "packed BF16, CUDA graphs")


@dataclass(frozen=True, slots=True)
class Gain:
    """A step as measured; NaN where a figure is missing."""

    technique: str
    label: str
    # Times as fast: one alone, and the largest batch.
    alone: float
    largest: float
    # How busy the GPU was before and after.
    detail: str = ""

    @property
    def best(self) -> float:
        """The larger of both; NaN where neither is known."""
        return max((g for g in (self.alone, self.largest) if not math.isnan(g)), default=math.nan)

    @property
    def is_known(self) -> bool:
        return not (math.isnan(self.alone) and math.isnan(self.largest))


def rows_of(found: Found) -> dict[str, Found]:
    """Techniques that were measured, with their loads."""
    return {
        name: each["batches"]
        for name, each in found["techniques"].items()
        if isinstance(each.get("batches"), dict) and each["batches"]
    }


def is_served(loads: Found) -> bool:
    return SERVED in last(loads)


def gains(found: Found) -> list[Gain]:
    """Of every step whose rows are there, in the order of the claims."""
    rows = rows_of(found)
    taken: dict[tuple[str, str, str], Gain] = {}
    for step in STEPS:
        key = step.technique, step.after, step.load
        if step.before in rows and step.after in rows and key not in taken:
            taken[key] = _gain(step, rows[step.before], rows[step.after])
    listed = [*taken.values(), *_batching(rows)]
    order = list(CLAIMS)
    return sorted(
        (each for each in listed if each.is_known), key=lambda each: order.index(each.technique)
    )


def best_gain(found: Found, technique: str) -> Gain | None:
    """Return the step of a technique that gained most; for dynamic batching that of a server, if it
    was measured."""
    own = [each for each in gains(found) if each.technique == technique]
    served = [each for each in own if SERVED_IN_BATCHES in each.label]
    return max(served or own, key=lambda each: each.best, default=None)


def _gain(step: Step, before: Found, after: Found) -> Gain:
    label = f"{step.before} → {step.after}"
    if step.kind == "served":
        one, other = last(before), last(after)
        label = f"{step.before} → {SERVED_IN_BATCHES}{_in_brackets(busy(one, other))}"
        return Gain(step.technique, label, math.nan, ratio(other, one, SERVED), busy(one, other))
    one, other = before.get(ALONE, {}), after.get(ALONE, {})
    if step.kind == "host":
        alone = ratio(other, one, "host_per_s")
        largest = ratio(last(after), last(before), "host_per_s")
    else:
        alone = _alone(one, other)
        largest = ratio(last(after), last(before), "device_per_s")
        if math.isnan(largest):
            largest = ratio(last(after), last(before), "host_per_s")
    if step.load == ALONE:
        largest = math.nan
    elif step.load:
        alone = math.nan
    return Gain(step.technique, label, alone, largest)


def busy(before: Found, after: Found) -> str:
    """How busy the GPU was, where it told."""
    shares = [each.get("utilization") for each in (before, after)]
    if any(each is None for each in shares):
        return ""
    return "GPU busy {:.0%} → {:.0%}".format(*shares)


def _in_brackets(text: str) -> str:
    return f" ({text})" if text else ""


def _alone(before: Found, after: Found) -> float:
    """Of the time that somebody waits; on the device where it is known of both."""
    found = ratio(before, after, "waited_ms")
    return ratio(before, after, "host_waited_ms") if math.isnan(found) else found


def _batching(rows: Mapping[str, Found]) -> Iterator[Gain]:
    name = next((name for name in BATCHED if name in rows), None)
    if name is None:
        return
    loads = [load for load in rows[name] if load.isdecimal() or load == "full"]
    for smaller, larger in zip(loads, loads[1:], strict=False):
        found = ratio(rows[name][larger], rows[name][smaller], "device_per_s")
        if math.isnan(found):
            found = ratio(rows[name][larger], rows[name][smaller], "host_per_s")
        yield Gain("batching", f"{name}: batch {smaller} → {larger}", math.nan, found)


def ratio(one: Found, other: Found, key: str) -> float:
    """NaN where either has no such figure."""
    if not one.get(key) or not other.get(key):
        return math.nan
    return float(one[key] / other[key])


def last(loads: Found) -> Found:
    """Of the largest batch."""
    found: Found = loads[list(loads)[-1]]
    return found


def chain(found: Found) -> Sequence[str]:
    """The waterfall with the most rows that were measured."""
    rows = rows_of(found)
    return max(([name for name in each if name in rows] for each in CHAINS), key=len)

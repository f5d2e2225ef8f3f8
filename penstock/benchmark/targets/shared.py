"""Shared by targets: samples as tensors, statistics as counters, texts cut short. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from penstock.benchmark.targets import Counters, TargetSpec
from penstock.benchmark.targets.http_messages import shortened
from penstock.data import RequestForm, Sample
from penstock.errors import ConfigError
from penstock.types import DATATYPES, Array, Tensor, TensorSpec, from_array, shape_fits

Json = Mapping[str, Any]
MAX_TEXT = 120
COMPUTE = ("compute_input", "compute_infer", "compute_output")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def in_short(text: str) -> str:
    """Shorten an error to its first line with N for every number: failures are counted by text, so
    the same cause must give the same text."""
    line = next(iter(text.strip().splitlines()), "")
    return shortened(_NUMBER.sub("N", line), MAX_TEXT)


def contradictions(spec: TargetSpec, model: str, version: str) -> list[str]:
    """Say where the address names another model or version than the command line."""
    pairs = {"model": (model, spec.model), "version": (version, spec.version)}
    return [
        f"names the {what} '{named}', but --{what} is '{given}'"
        for what, (named, given) in pairs.items()
        if named and given and named != given
    ]


def tensors_of(form: RequestForm, sample: Sample) -> list[Tensor]:
    """Return the sample's tensors in the order of the signature; ConfigError lists all problems."""
    names = ", ".join(form.names)
    unknown = [name for name in sample.tensors if name not in form.names]
    problems = [f"input '{name}': unknown; the model takes {names}" for name in unknown]
    tensors: list[Tensor] = []
    for spec in form.inputs:
        array = sample.tensors.get(spec.name)
        if array is None:
            if not spec.is_optional:
                problems.append(f"input '{spec.name}': missing; the model takes {names}")
        elif problem := _misfit(spec, np.asarray(array), form.has_batch):
            problems.append(f"input '{spec.name}': {problem}")
        else:
            tensors.append(from_array(spec.name, spec.datatype, np.asarray(array)))
    if form.has_batch and not problems and len({tensor.shape[0] for tensor in tensors}) > 1:
        rows = ", ".join(f"'{tensor.name}' {tensor.shape[0]}" for tensor in tensors)
        problems.append(f"inputs have different numbers of rows: {rows}")
    if problems:
        raise ConfigError(problems)
    return tensors


def _misfit(spec: TensorSpec, array: Array, has_batch: bool) -> str:
    """Describe what is wrong with an array; empty if nothing is."""
    shape = (-1, *spec.shape) if has_batch else spec.shape
    if not shape_fits(array.shape, shape):
        return f"shape {list(array.shape)} does not fit {list(shape)}"
    kind = array.dtype.kind
    if spec.datatype == "BYTES":
        is_right = kind in "OSUT"
    elif spec.datatype == "BF16":
        # As bits: numpy has no BF16.
        is_right = array.dtype == np.uint16
    else:
        is_right = np.can_cast(array.dtype, DATATYPES[spec.datatype].numpy, "same_kind")
    return "" if is_right else f"{array.dtype} values cannot be given as {spec.datatype}"


class V2Tensor(msgspec.Struct):
    name: str
    datatype: str
    shape: list[int]


class V2Metadata(msgspec.Struct):
    """The metadata of a model."""

    name: str
    inputs: list[V2Tensor]
    versions: list[str] | None = None
    platform: str = ""


class _Group(msgspec.Struct):
    count: int = 1
    gpus: list[int] = []


class _InputConfig(msgspec.Struct):
    name: str = ""
    optional: bool = False


class _Step(msgspec.Struct):
    model_name: str
    # Protobuf's JSON writes 64-bit numbers as text.
    model_version: int | str = -1


class _Scheduling(msgspec.Struct):
    step: list[_Step] = []


class Member(msgspec.Struct, frozen=True):
    """A model that a step of an ensemble runs; no version: the one that clients get."""

    name: str
    version: str = ""

    @property
    def label(self) -> str:
        return f"{self.name}/{self.version}" if self.version else self.name


class V2Config(msgspec.Struct):
    """The fields of a model's configuration that matter here."""

    max_batch_size: int = 0
    backend: str = ""
    platform: str = ""
    instance_group: list[_Group] = []
    input: list[_InputConfig] = []
    ensemble_scheduling: _Scheduling | None = None

    @property
    def members(self) -> list[Member]:
        """Return the models of an ensemble's steps, each once; none of other models."""
        steps = [] if self.ensemble_scheduling is None else self.ensemble_scheduling.step
        versions = [
            "" if int(each.model_version) < 0 else str(each.model_version) for each in steps
        ]
        found = map(Member, (each.model_name for each in steps), versions)
        return list(dict.fromkeys(found))

    @property
    def num_instances(self) -> int | None:
        """`count` instances for each GPU that a group names; None: unknown."""
        groups = self.instance_group
        return sum(max(1, group.count) * max(1, len(group.gpus)) for group in groups) or None


def form_of(metadata: V2Metadata, config: V2Config | None) -> RequestForm:
    """Remove the batch dimension from the metadata's shapes. Without a configuration, a first
    dimension that every input leaves variable is taken for the batch."""
    tensors = metadata.inputs
    if config is not None:
        has_batch = config.max_batch_size > 0
        optional = {entry.name for entry in config.input if entry.optional}
    else:
        has_batch = bool(tensors) and all(tensor.shape[:1] == [-1] for tensor in tensors)
        optional = set()
    specs = [
        TensorSpec(each.name, each.datatype, tuple(each.shape[has_batch:]), each.name in optional)
        for each in tensors
    ]
    return RequestForm("tensors", tuple(specs), has_batch)


async def find_members(
    config: V2Config | None, ask: Callable[[Member], Awaitable[V2Config | None]]
) -> list[Member]:
    """Return the models that do an ensemble's work: those of its steps, and of steps that are
    ensembles themselves their members. `ask` returns a model's configuration."""
    found: dict[Member, None] = {}
    seen: set[Member] = set()
    waiting = [] if config is None else config.members[::-1]
    while waiting:
        member = waiting.pop()
        if member in seen:
            continue
        seen.add(member)
        config = await ask(member)
        inner = [] if config is None else config.members
        if not inner:
            found[member] = None
        waiting += inner[::-1]
    return list(found)


async def add_members(
    found: Counters | None,
    members: Sequence[Member],
    count: Callable[[Member], Awaitable[Counters | None]],
) -> Counters | None:
    """Return an ensemble's counters with those of its members, where the server has them."""
    if found is None or not members:
        return found
    counters = {each.label: await count(each) for each in members}
    known = {name: each for name, each in counters.items() if each is not None}
    return msgspec.structs.replace(found, members=known)


def config_digest(config: Mapping[str, object]) -> str:
    """Return SHA-256 of a served configuration, whatever the order of its fields."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def counters_of(statistics: Json) -> Counters:
    """Convert one entry of v2's `model_stats`, from Triton or Penstock."""
    phases: Mapping[str, Json] = statistics.get("inference_stats", {})

    def number(phase: str, field: str = "ns") -> int:
        # Protobuf's JSON writes 64-bit numbers as text, and leaves out zeros.
        return int(phases.get(phase, {}).get(field, 0))

    def own(phase: str) -> int | None:
        return number(phase) if phase in phases else None

    return Counters(
        num_success=number("success", "count"),
        num_fail=number("fail", "count"),
        num_inferences=int(statistics.get("inference_count", 0)),
        num_executions=int(statistics.get("execution_count", 0)),
        success_ns=number("success"),
        queue_ns=number("queue"),
        compute_input_ns=number("compute_input"),
        compute_infer_ns=number("compute_infer"),
        compute_output_ns=number("compute_output"),
        batch_wait_ns=own("queue_batch"),
        instance_wait_ns=own("queue_instance"),
        busy_ns=_busy_ns(statistics),
    )


def _busy_ns(statistics: Json) -> int | None:
    """Return the total execution time: each execution counts once, whatever its batch size."""
    batches: Sequence[Json] = statistics.get("batch_stats", ())
    if not batches and int(statistics.get("execution_count", 0)) > 0:
        return None
    return sum(int(batch.get(phase, {}).get("ns", 0)) for batch in batches for phase in COMPUTE)

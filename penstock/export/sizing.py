"""Size of a pod, from the configurations of its models and the evidence of their versions. Pure.

Everything that an option does not set is worked out here, with a sentence that says how. Figures
of versions without evidence are estimates and are marked as such. `workload` reads the files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from penstock import units
from penstock.errors import ConfigError
from penstock.export.names import MEBIBYTE, memory_quantity

# The server's own processes: the core, and shards.
SERVER_CORES = 1
SERVER_BYTES = 256 * MEBIBYTE
# Memory above what was measured: other requests than those of the measurement may need more.
HEADROOM = 1.25
# A worker without its model, and the weights of a loaded file, if neither was measured.
WORKER_BYTES, WEIGHT_COPIES = 200 * MEBIBYTE, 2
MEMORY_STEP = 64 * MEBIBYTE
# Cores of a model that neither has a number of threads nor was measured.
DEFAULT_CORES = 2
# Share of the SLO's latency that a request may wait before another replica is due.
WAIT_SHARE = 0.5
# Waiting sequences of a language model whose SLO was not measured.
LLM_QUEUE_DEPTH = 8
# Seconds beyond the longest load for the start of the processes and warm-up.
STARTUP_MARGIN_S = 30.0
# A slice in MIG mode: its resource names its memory.
MIG = re.compile(r".*/mig-\d+g\.(\d+)gb(?:\..*)?")


@dataclass(frozen=True, slots=True)
class ModelNeeds:
    """One served version, with what its configuration and its evidence say."""

    name: str
    version: str
    backend: str
    num_workers: int
    # Threads of all workers; None if instances share all cores and none were measured.
    num_cores: int | None
    # Most rows that all instances together compute at a time; 0 for a language model.
    num_rows: int
    load_timeout_s: float
    file_bytes: int
    # KV cache of a language model in main memory.
    cache_bytes: int = 0
    # Measured for all workers together; None without evidence.
    memory_bytes: int | None = None
    # The limit of one worker (`penstock.memory_bytes`).
    memory_limit_bytes: int | None = None
    num_gpus: int = 0
    # All instances together, and one of them, which cannot span slices.
    gpu_memory_bytes: int | None = None
    instance_gpu_bytes: int | None = None
    # Latency limit of the SLO, and the rate at which it was measured.
    slo_latency_s: float | None = None
    rate_per_s: float | None = None

    @property
    def label(self) -> str:
        return f"{self.name}/{self.version}"


@dataclass(frozen=True, slots=True)
class SizeOverrides:
    """Figures that the user sets; None is worked out."""

    cpu: int | None = None
    memory_bytes: int | None = None
    gpus: int | None = None
    gpu_resource: str = "nvidia.com/gpu"
    queue_depth: int | None = None


@dataclass(frozen=True, slots=True)
class Sizing:
    """Figures of a pod. `notes` say where each figure comes from."""

    cpu: int
    memory_bytes: int
    gpus: int
    gpu_resource: str
    # Waiting requests per replica above which KEDA adds one.
    queue_depth: int
    # Longest time until a pod is ready.
    startup_s: int
    notes: tuple[str, ...]

    @property
    def resources(self) -> dict[str, dict[str, str]]:
        """Requests equal limits: the pod is Guaranteed, threads fit the cores, and memory is
        reserved."""
        amounts = {"cpu": str(self.cpu), "memory": memory_quantity(self.memory_bytes)}
        if self.gpus:
            amounts[self.gpu_resource] = str(self.gpus)
        return {"requests": dict(amounts), "limits": dict(amounts)}


def size(models: Sequence[ModelNeeds], given: SizeOverrides) -> Sizing:
    """Work out what a pod with these models needs; ConfigError if a GPU slice is too small.
    Ensembles are not among them: their members do all the work."""
    notes: list[str] = []
    gpus = _gpus(models, given, notes)
    cpu = _cpu(models, given, notes)
    memory = _memory(models, given, notes)
    depth = _queue_depth(models, given, notes)
    startup = math.ceil(max(each.load_timeout_s for each in models) + STARTUP_MARGIN_S)
    notes.append(f"start-up: at most {startup} s, from the models' load time-out")
    return Sizing(cpu, memory, gpus, given.gpu_resource, depth, startup, tuple(notes))


def _cpu(models: Sequence[ModelNeeds], given: SizeOverrides, notes: list[str]) -> int:
    if given.cpu is not None:
        notes.append(f"cpu: {given.cpu}, as given")
        return given.cpu
    # Clients use one version of a model at a time.
    by_name: dict[str, int] = {}
    for each in models:
        cores = DEFAULT_CORES if each.num_cores is None else each.num_cores
        by_name[each.name] = max(cores, by_name.get(each.name, 0))
    listed = ", ".join(f"{name} {cores}" for name, cores in by_name.items())
    guessed = [each.label for each in models if each.num_cores is None]
    why = f"; not measured: {', '.join(guessed)}" if guessed else ""
    notes.append(f"cpu: {listed}, the server {SERVER_CORES}{why}")
    return sum(by_name.values()) + SERVER_CORES


def _memory(models: Sequence[ModelNeeds], given: SizeOverrides, notes: list[str]) -> int:
    if given.memory_bytes is not None:
        notes.append(f"memory: {units.size(given.memory_bytes)}, as given")
        return given.memory_bytes
    total, parts = float(SERVER_BYTES), [f"the server {units.size(SERVER_BYTES)}"]
    for each in models:
        needed, why = _memory_of(each)
        total += needed
        parts.append(f"{each.label} {units.size(round(needed))} ({why})")
    notes.append(f"memory: {', '.join(parts)}")
    return math.ceil(total / MEMORY_STEP) * MEMORY_STEP


def _memory_of(each: ModelNeeds) -> tuple[float, str]:
    if each.memory_limit_bytes is not None:
        return each.num_workers * each.memory_limit_bytes, "penstock.memory_bytes"
    if each.memory_bytes is not None:
        measured = units.size(each.memory_bytes)
        return HEADROOM * each.memory_bytes, f"measured {measured} and a quarter"
    needed = each.num_workers * (WORKER_BYTES + WEIGHT_COPIES * each.file_bytes)
    if each.cache_bytes:
        cache = f"its KV cache of {units.size(each.cache_bytes)}"
        return needed + each.cache_bytes, f"estimated from its files and {cache}"
    return needed, "estimated from its files"


def _gpus(models: Sequence[ModelNeeds], given: SizeOverrides, notes: list[str]) -> int:
    found = max(each.num_gpus for each in models)
    gpus = found if given.gpus is None else given.gpus
    if gpus < found:
        asking = next(each.label for each in models if each.num_gpus == found)
        raise ConfigError(f"--gpus {gpus}: {asking} needs {found}, by its instance_group")
    if gpus:
        why = "by the models' instance_group" if given.gpus is None else "as given"
        notes.append(f"GPUs: {gpus} of {given.gpu_resource}, {why}")
    measured = sum(each.gpu_memory_bytes or 0 for each in models)
    if not gpus or not measured:
        return gpus
    notes.append(f"GPU memory: {units.size(measured)} measured")
    _check_slices(models, given.gpu_resource, gpus, measured)
    return gpus


def _check_slices(models: Sequence[ModelNeeds], resource: str, gpus: int, measured: int) -> None:
    found = MIG.fullmatch(resource)
    if found is None:
        return
    of_slice = int(found[1]) * 10**9
    largest = max(each.instance_gpu_bytes or 0 for each in models)
    if measured > gpus * of_slice:
        problem = (
            f"the models need {units.size(measured)} of GPU memory, more than {gpus} of {resource} "
            "have"
        )
    elif largest > of_slice:
        problem = f"an instance needs {units.size(largest)} of GPU memory, more than a slice has"
    else:
        return
    raise ConfigError(f"--gpu-resource {resource}: {problem}; use a larger slice")


def _queue_depth(models: Sequence[ModelNeeds], given: SizeOverrides, notes: list[str]) -> int:
    """Return the depth of the model that tolerates the shortest queue."""
    if given.queue_depth is not None:
        notes.append(f"queue depth per replica: {given.queue_depth}, as given")
        return given.queue_depth
    depth, why = min(map(_queue_depth_of, models))
    notes.append(f"queue depth per replica: {depth}, {why}")
    return depth


def _queue_depth_of(each: ModelNeeds) -> tuple[int, str]:
    if each.slo_latency_s is not None and each.rate_per_s is not None:
        wait_s = WAIT_SHARE * each.slo_latency_s
        why = (
            f"as {each.label} answers {units.number(each.rate_per_s)} requests/s and its SLO "
            f"leaves {units.duration(wait_s)} for waiting"
        )
        return max(1, round(wait_s * each.rate_per_s)), why
    if not each.num_rows:
        return LLM_QUEUE_DEPTH, f"not measured for {each.label}"
    return each.num_rows, f"one full batch of each instance of {each.label}; no SLO was measured"

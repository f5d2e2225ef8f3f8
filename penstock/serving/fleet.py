"""Assigns model instances to the GPUs of this machine, and checks that they fit together.

Queries the machine, then lets `placement` decide. Starts nothing: the catalog loads the
arrangement, and the command line shows the plan. The need of an instance is the first known of: the
configured size, the size measured for the version's evidence, and an estimate from its weights at
their loaded precision plus a fixed amount for the rest. A limit of ONNX Runtime's memory counts as
configured.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from penstock.backends import GPU_MEMORY
from penstock.backends.onnxruntime_providers import memory_limit
from penstock.config import CPU, DECODE_BYTES, GPU_MEMORY_RESERVE, LLM, ONNX_RUNTIME, ModelConfig
from penstock.errors import ConfigError
from penstock.repository import manifest as manifests
from penstock.repository import onnx_file, pretrained
from penstock.serving.placement import GpuPlan, Need, Share, make_plan, place, shortages
from penstock.system import devices
from penstock.system.devices import Gpu
from penstock.system.host_policy import HostPolicy, cores_of
from penstock.system.memory import read_memory

# GPU memory of one model beyond its weights: the driver's context with its kernels, and activations
# with the libraries' workspaces. Deliberately low: refusing a model that would fit is worse than
# one that fails to load.
CONTEXT_BYTES = 512 << 20
WORKSPACE_BYTES = 256 << 20
# Bytes of a float by `penstock.dtype`, and the safetensors datatypes that the setting converts.
FLOAT_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4, "tf32": 4}
FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(slots=True)
class Arrangement:
    """Configurations that may be loaded, with a device for each instance; problems of those that
    may not, by model; and the memory plan of all wanted GPUs."""

    configs: list[ModelConfig] = field(default_factory=list)
    problems: dict[str, list[str]] = field(default_factory=dict)
    plan: tuple[GpuPlan, ...] = ()
    # GPU memory of the configurations that may be loaded.
    shares: list[Share] = field(default_factory=list)
    # Whether a model may not be loaded because GPU memory is short now.
    is_short: bool = False


class Fleet:
    """The GPUs, queried each time. `reserve` is the share of their memory that is kept free."""

    def __init__(
        self,
        reserve: float = GPU_MEMORY_RESERVE,
        read: Callable[[], Sequence[Gpu]] | None = None,
        policies: Mapping[str, HostPolicy] | None = None,
    ) -> None:
        """`policies` are the cores and memory nodes of instance groups, by their names."""
        self._reserve = reserve
        self._read = read
        self._policies = policies or {}

    def memory_of(self, device: str) -> int:
        """Return the memory of a GPU, or of this machine for the CPU; 0 if it is unknown. Queries
        the driver: not for the event loop."""
        if device == CPU:
            return read_memory().total
        gpus = (self._read or devices.read_gpus)()
        return next((gpu.total_bytes for gpu in gpus if gpu.device == device), 0)

    def pin(self, config: ModelConfig) -> ModelConfig:
        """Give each device of a model the host policy that its instance group names, or that has
        the device's name in Triton: cpu, gpu_0."""
        named, pinned = config.host_policies, dict[str, HostPolicy]()
        for device in dict.fromkeys(config.devices):
            kind, _, number = device.partition(":")
            usual = f"gpu_{number}" if number else CPU
            policy = self._policies.get(named.get(device) or named.get(kind) or usual)
            if policy is not None and config.backend != LLM:
                pinned[device] = replace(policy, cores=cores_of(policy))
        warnings = [
            f"instance_group.host_policy: '{name}' has no effect; {_unpinned(config)}"
            for name in sorted(set(named.values()))
            if config.backend == LLM or name not in self._policies
        ]
        warnings = [each for each in warnings if each not in config.warnings]
        return replace(config, pinned=pinned, warnings=(*config.warnings, *warnings))

    def arrange(self, configs: Iterable[ModelConfig], loading: Sequence[Share] = ()) -> Arrangement:
        """Assign devices, as far as memory allows. `loading` was arranged before and may not have
        allocated its memory yet. Either all versions of a model are arranged or none. Reads files
        and queries the driver: not for the event loop."""
        by_name: dict[str, list[ModelConfig]] = {}
        for config in configs:
            by_name.setdefault(config.name, []).append(config)
        found = Arrangement()
        uses_gpu = any(config.uses_gpu for versions in by_name.values() for config in versions)
        gpus = (self._read or devices.read_gpus)() if uses_gpu else ()
        wanted = list(loading)
        for name, versions in by_name.items():
            try:
                placed = [self.pin(place(config, gpus)) for config in versions]
            except ConfigError as error:
                found.problems[name] = list(error.problems)
                continue
            # Models loaded on demand get their memory when they are loaded.
            at_once = [config for config in placed if not config.scaling.is_on_demand]
            shares = [share for config in at_once for share in shares_of(config)]
            wanted += shares
            there = {share.device for share in shares}
            asked = [gpu for gpu in gpus if gpu.device in there]
            promised = [*loading, *found.shares, *shares]
            if short := shortages(make_plan(promised, asked, self._reserve)):
                found.problems[name] = short
                found.is_short = True
                continue
            found.configs += placed
            found.shares += shares
        found.plan = tuple(each for each in make_plan(wanted, gpus, self._reserve) if each.shares)
        return found


def _unpinned(config: ModelConfig) -> str:
    if config.backend == LLM:
        return "an engine uses all cores"
    return "the server has no --host-policy of that name"


class GpuReservations:
    """GPU memory reserved for each load in progress, which it may not have allocated yet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._promised: list[list[Share]] = []
        self._arranging = asyncio.Lock()
        # Set when reserved memory was allocated or given up.
        self._settled = asyncio.Event()

    async def arrange(self, configs: Sequence[ModelConfig]) -> Arrangement:
        """Assign devices and reserve GPU memory; CPU-only models never wait. Memory of loads in
        progress may count twice, as reserved and as already allocated. So if memory is short, try
        again whenever one of them is done."""
        if not any(config.uses_gpu for config in configs):
            return Arrangement([self._fleet.pin(config) for config in configs])
        async with self._arranging:
            while True:
                self._settled.clear()
                promised = [share for each in self._promised for share in each]
                arranged = await asyncio.to_thread(self._fleet.arrange, configs, promised)
                if not (arranged.is_short and promised):
                    self._promised.append(arranged.shares)
                    return arranged
                await self._settled.wait()

    async def find_room(self, config: ModelConfig) -> Callable[[], None] | None:
        """Reserve GPU memory for one more worker, whose configuration this is. Return what gives
        the reservation back, to be called once the worker has its memory; None: no room."""
        arranged = await self.arrange([config])
        if arranged.problems:
            self.release(arranged.shares)
            return None
        return partial(self.release, arranged.shares)

    def settle(self, shares: list[Share], name: str, version: str = "") -> None:
        """Drop the reservation of a model or version that has allocated its memory or failed: from
        now on the driver's figures are right."""
        shares[:] = [
            share
            for share in shares
            if share.model != name or (version and share.version != version)
        ]
        self._settled.set()

    def release(self, shares: list[Share]) -> None:
        """Drop what is left of the reservations of a load that has ended."""
        self._promised = [each for each in self._promised if each is not shares]
        self._settled.set()


def shares_of(config: ModelConfig) -> list[Share]:
    """Return the memory that a placed version takes on each GPU."""
    if not config.uses_gpu:
        return []
    need = need_of(config)
    counts = Counter(device for device, _ in config.workers if device != CPU)
    instances = Counter(config.devices)
    return [
        Share(config.name, config.version, device, count, need, instances[device])
        for device, count in counts.items()
    ]


def need_of(config: ModelConfig) -> Need:
    """Return the GPU memory that one instance needs."""
    if config.gpu_memory_bytes is not None:
        return Need(config.gpu_memory_bytes, "configured")
    if (limit := _arena_limit(config)) is not None:
        return Need(limit + CONTEXT_BYTES, "configured")
    if (measured := _measured(config)) is not None:
        return Need(measured + CONTEXT_BYTES, "evidence")
    num_bytes = weight_bytes(config) + WORKSPACE_BYTES + CONTEXT_BYTES
    return Need(num_bytes + config.decodes_on_gpu * DECODE_BYTES, "estimated")


def _arena_limit(config: ModelConfig) -> int | None:
    """Return the configured limit of the memory that ONNX Runtime takes; None without one."""
    return memory_limit(config) if config.engine == ONNX_RUNTIME else None


def weight_bytes(config: ModelConfig) -> int:
    """Return the size of the artifact, with an ONNX file's external weights, or, if that is code,
    of the safetensors files beside it, with floats as `penstock.dtype` loads them."""
    path = Path(config.artifact)
    if path.suffix == ".onnx" and path.is_file():
        try:
            names = onnx_file.weight_files(path)
        except ConfigError:  # The worker reports the error.
            names = []
        return _size(path) + sum(_size(path.parent / name) for name in names)
    if not config.artifact or path.suffix != ".py":
        return _size(path) if path.is_file() else 0
    float_bytes = FLOAT_BYTES.get(config.options.get("penstock.dtype", ""))
    return sum(_loaded_bytes(file, float_bytes) for file in path.parent.glob("*.safetensors"))


def _loaded_bytes(file: Path, float_bytes: int | None) -> int:
    """Return the size of a file's tensors with floats of `float_bytes` each; None keeps their size.
    An invalid file counts with its file size: loading it reports the error."""
    tensors = pretrained.read_header(file) if float_bytes is not None else None
    if tensors is None or float_bytes is None:
        return _size(file)
    return sum(
        float_bytes * math.prod(each.shape)
        if each.dtype in FLOATS
        else each.data_offsets[1] - each.data_offsets[0]
        for each in tensors
    )


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _measured(config: ModelConfig) -> int | None:
    if not config.manifest:
        return None
    try:
        manifest = manifests.read(Path(config.manifest).parent)
    except ConfigError:  # The worker reports the error.
        return None
    found = manifest.evidence.get(GPU_MEMORY) if manifest is not None else None
    return found if isinstance(found, int) and found > 0 else None

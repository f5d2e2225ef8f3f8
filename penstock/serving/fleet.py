"""Assigns model instances to the GPUs of this machine, and checks that they fit together.

Queries the machine, then lets `placement` and `memory_plan` decide. Starts nothing: the catalog
loads the arrangement, and the command line shows the plan. The need of an instance is the first
known of: the configured size, the size measured for the version's evidence, and an estimate from
its weights at their loaded precision plus a fixed amount for the rest.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from penstock.backends import GPU_MEMORY
from penstock.config import CPU, GPU_MEMORY_RESERVE, ModelConfig
from penstock.errors import ConfigError
from penstock.repository import manifest as manifests
from penstock.repository import safetensors_file
from penstock.serving.memory_plan import (
    CONTEXT_BYTES,
    WORKSPACE_BYTES,
    GpuPlan,
    Need,
    Share,
    make_plan,
    shortages,
)
from penstock.serving.placement import place
from penstock.system import devices
from penstock.system.devices import Gpu

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
        self, reserve: float = GPU_MEMORY_RESERVE, read: Callable[[], Sequence[Gpu]] | None = None
    ) -> None:
        self._reserve = reserve
        self._read = read

    def arrange(self, configs: Iterable[ModelConfig], loading: Sequence[Share] = ()) -> Arrangement:
        """Assign devices, as far as memory allows. `loading` was arranged before and may not have
        allocated its memory yet. Either all versions of a model are arranged or none. Reads files
        and queries the driver: not for the event loop."""
        by_name: dict[str, list[ModelConfig]] = {}
        for config in configs:
            by_name.setdefault(config.name, []).append(config)
        found = Arrangement()
        gpus = self._gpus() if any(c.uses_gpu for each in by_name.values() for c in each) else ()
        wanted = list(loading)
        for name, versions in by_name.items():
            try:
                placed = [place(config, gpus) for config in versions]
            except ConfigError as error:
                found.problems[name] = list(error.problems)
                continue
            shares = [share for config in placed for share in shares_of(config)]
            wanted += shares
            short = self._shortages([*loading, *found.shares, *shares], gpus, shares)
            if short:
                found.problems[name] = short
                found.is_short = True
                continue
            found.configs += placed
            found.shares += shares
        found.plan = tuple(each for each in make_plan(wanted, gpus, self._reserve) if each.shares)
        return found

    def _gpus(self) -> Sequence[Gpu]:
        return (self._read or devices.read_gpus)()

    def _shortages(
        self, shares: Sequence[Share], gpus: Sequence[Gpu], asking: Sequence[Share]
    ) -> list[str]:
        """Return the shortages on the GPUs that `asking` wants."""
        wanted = {share.device for share in asking}
        return shortages(
            make_plan(shares, [gpu for gpu in gpus if gpu.device in wanted], self._reserve)
        )


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
    if (measured := _measured(config)) is not None:
        return Need(measured + CONTEXT_BYTES, "evidence")
    return Need(weight_bytes(config) + WORKSPACE_BYTES + CONTEXT_BYTES, "estimated")


def weight_bytes(config: ModelConfig) -> int:
    """Return the size of the artifact or, if that is code, of the safetensors files beside it, with
    floats as `penstock.dtype` loads them."""
    path = Path(config.artifact)
    if not config.artifact or path.suffix != ".py":
        return _size(path) if path.is_file() else 0
    float_bytes = FLOAT_BYTES.get(config.options.get("penstock.dtype", ""))
    return sum(_loaded_bytes(file, float_bytes) for file in path.parent.glob("*.safetensors"))


def _loaded_bytes(file: Path, float_bytes: int | None) -> int:
    """Return the size of a file's tensors with floats of `float_bytes` each; None keeps their size.
    An invalid file counts with its file size: loading it reports the error."""
    tensors = safetensors_file.read_header(file) if float_bytes is not None else None
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

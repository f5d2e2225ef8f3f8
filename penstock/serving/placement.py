"""Which instance of a model runs on which device, and whether all fit the GPUs' memory. Pure.

`instance_group` may name GPUs, or mean each of them; here that becomes one device per instance. A
memory plan is made before loading, so most needs are estimates, marked as such. Loaded models are
not in it: the driver no longer reports their memory as free. A reload needs room for both versions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from penstock.config import CPU, EACH_GPU, MAX_INSTANCES, ModelConfig
from penstock.errors import ConfigError
from penstock.repository.parameters import scaling_problem

if TYPE_CHECKING:
    from penstock.system.devices import Gpu

NO_GPU = "no NVIDIA GPU is seen here (by the driver's libnvidia-ml.so.1, and CUDA_VISIBLE_DEVICES)"
# Models named per GPU that is too small.
MAX_NAMED = 5

Source = Literal["configured", "evidence", "estimated"]


def place(config: ModelConfig, gpus: Sequence[Gpu]) -> ModelConfig:
    """Assign a device of this machine to each instance. Instances already placed stay there."""
    if not config.uses_gpu:
        return config
    known = {gpu.device for gpu in gpus}
    asked = [device for device in dict.fromkeys(config.devices) if device != CPU]
    is_plan = config.backend == "tensorrt"
    advice = "a TensorRT plan needs one" if is_plan else "KIND_CPU runs it on the CPU"
    problems = [] if gpus else [f"instance_group: {_asks(asked)}, and {NO_GPU}; {advice}"]
    if gpus:
        problems += [
            f"instance_group: {_asks([device])}, and there {_those_there(gpus)}"
            for device in asked
            if device not in known and device != EACH_GPU
        ]
    each = [gpu.device for gpu in gpus]
    devices = [d for at in config.devices for d in (each if at == EACH_GPU else [at])]
    if len(devices) > MAX_INSTANCES:
        text = f"{len(devices)} instances on {len(gpus)} GPUs; at most {MAX_INSTANCES}"
        problems.append(f"instance_group: {text}")
    if not problems and (found := scaling_problem(config.on(devices))) is not None:
        problems.append(f"parameters.{found[0]}: {found[1]}")
    if problems:
        raise ConfigError(problems)
    return config.on(devices)


def instances_by_device(config: ModelConfig) -> dict[str, list[int]]:
    """Return the instance numbers of each device."""
    found: dict[str, list[int]] = {}
    for index, device in enumerate(config.devices):
        found.setdefault(device, []).append(index)
    return found


def describe_placement(config: ModelConfig, gpus: Sequence[Gpu]) -> str:
    """Describe which instance runs where on a machine with these GPUs."""
    try:
        placed = place(config, gpus)
    except ConfigError as error:
        return f"cannot be placed here: {'; '.join(error.problems)}"
    names = {gpu.device: f" ({gpu.name})" for gpu in gpus}
    return "; ".join(
        f"{', '.join(map(str, instances))} on {device}{names.get(device, '')}"
        for device, instances in instances_by_device(placed).items()
    )


def briefly(config: ModelConfig) -> str:
    """Describe the devices for a narrow column."""
    devices = dict.fromkeys(config.devices)
    gpus = [device for device in devices if device != CPU]
    parts = gpus if len(gpus) < 2 else [f"{len(gpus)} GPUs"]
    return ", ".join([*parts, CPU] if CPU in devices else parts)


def _asks(devices: Sequence[str]) -> str:
    numbers = [device.partition(":")[2] for device in devices]
    if "" in numbers:
        return "asks for KIND_GPU"
    return f"asks for GPU {', '.join(numbers)}"


def _those_there(gpus: Sequence[Gpu]) -> str:
    if len(gpus) == 1:
        return "is only GPU 0"
    return f"are only GPUs {', '.join(str(gpu.index) for gpu in gpus)}"


@dataclass(frozen=True, slots=True)
class Need:
    """GPU memory of one worker, and the source of that figure."""

    num_bytes: int
    source: Source


@dataclass(frozen=True, slots=True)
class Share:
    """The workers of one version on one GPU: one for all its instances there, or one for each."""

    model: str
    version: str
    device: str
    num_workers: int
    need: Need
    # Instances of the model there; more than workers if these have several slots. 0: as many.
    num_instances: int = 0

    @property
    def num_bytes(self) -> int:
        return self.num_workers * self.need.num_bytes


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """One GPU, with the models to load onto it, the largest first."""

    gpu: Gpu
    shares: tuple[Share, ...]
    reserve_bytes: int

    @property
    def needed_bytes(self) -> int:
        return sum(share.num_bytes for share in self.shares)

    @property
    def room_bytes(self) -> int:
        return max(0, self.gpu.free_bytes - self.reserve_bytes)

    @property
    def fits(self) -> bool:
        """True also if nothing is planned for it, or if its size is unknown."""
        return not self.shares or not self.gpu.total_bytes or self.needed_bytes <= self.room_bytes


def make_plan(shares: Sequence[Share], gpus: Sequence[Gpu], reserve: float) -> tuple[GpuPlan, ...]:
    """Assign shares to GPUs. `reserve` is the share of each GPU's memory that is kept free."""
    plan: list[GpuPlan] = []
    for gpu in gpus:
        there = [share for share in shares if share.device == gpu.device]
        there.sort(key=lambda share: -share.num_bytes)
        plan.append(GpuPlan(gpu, tuple(there), round(reserve * gpu.total_bytes)))
    return tuple(plan)


def shortages(plan: Sequence[GpuPlan]) -> list[str]:
    """Describe each GPU whose models do not fit; empty: everything fits."""
    return [_shortage(each) for each in plan if not each.fits]


def _shortage(plan: GpuPlan) -> str:
    gpu = plan.gpu
    named = "; ".join(describe_share(share) for share in plan.shares[:MAX_NAMED])
    if len(plan.shares) > MAX_NAMED:
        named += f"; and {len(plan.shares) - MAX_NAMED} smaller ones"
    used = gib(gpu.total_bytes - gpu.free_bytes)
    return (
        f"GPU {gpu.index} ({gpu.name}): {gib(plan.needed_bytes)} of memory would be needed and "
        f"{gib(plan.room_bytes)} can be had ({gib(gpu.total_bytes)}, of which {used} in use and "
        f"{gib(plan.reserve_bytes)} kept back). Largest: {named}. Spread them with "
        "instance_group.gpus, serve fewer, give what an instance really takes as "
        "parameters.penstock.gpu_memory_bytes, or keep less back with --gpu-memory-reserve"
    )


def describe_share(share: Share) -> str:
    count = f"{share.num_workers} x " if share.num_workers > 1 else ""
    each = gib(share.need.num_bytes)
    if share.num_instances > share.num_workers:
        each += f" for {share.num_instances} instances"
    return f"{share.model}/{share.version} {count}{each} ({share.need.source})"


def gib(num_bytes: int) -> str:
    if num_bytes < 1 << 30:
        return f"{num_bytes / (1 << 20):.0f} MiB"
    return f"{num_bytes / (1 << 30):.1f} GiB"

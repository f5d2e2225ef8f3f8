"""Which instance of a model runs on which device. Pure.

`instance_group` may name GPUs, or mean each of them; here that becomes one device per instance. A
batch goes to any idle instance, so several GPUs serve a model in parallel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.config import CPU, EACH_GPU, MAX_INSTANCES, ModelConfig
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.system.devices import Gpu

NO_GPU = (
    "no NVIDIA GPU is seen here (by the driver's libnvidia-ml.so.1, and CUDA_VISIBLE_DEVICES); "
    "KIND_CPU runs it on the CPU"
)


def place(config: ModelConfig, gpus: Sequence[Gpu]) -> ModelConfig:
    """Assign a device of this machine to each instance. Instances already placed stay there."""
    if not config.uses_gpu:
        return config
    known = {gpu.device for gpu in gpus}
    asked = [device for device in dict.fromkeys(config.devices) if device != CPU]
    problems = [] if gpus else [f"instance_group: {_asks(asked)}, and {NO_GPU}"]
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

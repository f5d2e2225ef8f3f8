"""Fields of config.pbtxt about where a model runs and by which library: `cc_model_filenames`,
`runtime`, shape tensors, and instance groups that take no requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from penstock.config import CPU, EACH_GPU
from penstock.errors import ConfigError
from penstock.repository.pbtxt_fields import Proto
from penstock.system import devices


def active(groups: Sequence[Proto]) -> list[Proto]:
    """Return the groups whose instances take requests. In Triton those of a passive group are only
    for backends that address them, which none of ours does, so they are not started."""
    return [group for group in groups if not group.passive]


def host_policies(
    groups: Sequence[Proto], devices_of: Callable[[Proto], Sequence[str]]
) -> dict[str, str]:
    """Return the names of host policies by device; ConfigError if two groups share a device and
    have different ones, as workers belong to devices, not to groups."""
    found: dict[str, str] = {}
    for group in groups:
        for device in sorted(set(devices_of(group))):
            if found.setdefault(device, group.host_policy) != group.host_policy:
                both = f"'{found[device]}' and '{group.host_policy}'"
                raise ConfigError(f"{both} on {device}; expected one host_policy for each device")
    return {device: name for device, name in found.items() if name}


def problems(message: Proto, backend: str) -> Iterator[tuple[str, str]]:
    """Yield what cannot be done as Triton does it, as path and text."""
    groups = message.instance_group
    if groups and not active(groups):
        yield "instance_group", "every group is passive, so no instance would take requests"
    for index, group in enumerate(groups):
        for device in group.secondary_devices:
            kind = device.SecondaryDeviceKind.Name(device.kind)
            where = f"instance_group[{index}].secondary_devices"
            yield where, f"{kind} is not supported; an instance has one device"
    if not _is_usual(message.runtime, backend):
        usual = f"expected libtriton_{backend}.so or nothing"
        yield "runtime", f"'{message.runtime}' runs the model in another way in Triton; {usual}"
    for kind, items in (("input", message.input), ("output", message.output)):
        for index, item in enumerate(items):
            if item.is_shape_tensor and message.max_batch_size > 0:
                why = "a shape tensor has no batch dimension, so requests cannot share a batch"
                advice = f"expected max_batch_size 0, not {message.max_batch_size}"
                yield f"{kind}[{index}].is_shape_tensor", f"{why}; {advice}"


def _is_usual(runtime: str, backend: str) -> bool:
    """Whether a runtime is the library of the backend, or code for one that runs model.py."""
    return runtime in ("", f"libtriton_{backend}.so", "model.py" if backend == "python" else "")


def file_for_gpus(names: Sequence[tuple[str, str]], placed: Sequence[str]) -> str:
    """Return the file of `cc_model_filenames` for the GPUs of the instances; empty if none of them
    is named there, or there are none. ConfigError if they need different files."""
    gpus = {gpu.device: gpu for gpu in devices.read_gpus()}
    used = [each for each in placed if each != CPU]
    seen = gpus.values() if EACH_GPU in used else [gpus[each] for each in used if each in gpus]
    known = dict(names)
    found = {known.get(gpu.compute_capability, "") for gpu in seen}
    if len(found) > 1:
        have = ", ".join(f"{gpu.device} {gpu.compute_capability}" for gpu in seen)
        advice = "expected instances on GPUs of one kind: name them in instance_group.gpus"
        raise ConfigError(f"the GPUs differ ({have}), and so would their files; {advice}")
    return found.pop() if found else ""

"""Assigns model instances to the GPUs of this machine, and checks that they fit together.

Queries the machine, then lets `placement` and `memory_plan` decide. Starts nothing: the catalog
loads the arrangement, and the command line shows the plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from penstock.config import CPU, GPU_MEMORY_RESERVE, ModelConfig
from penstock.errors import ConfigError
from penstock.serving.gpu_needs import need_of
from penstock.serving.memory_plan import GpuPlan, Share, make_plan, shortages
from penstock.serving.placement import place
from penstock.system import devices
from penstock.system.devices import Gpu


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

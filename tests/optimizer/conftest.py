"""Tests of the optimiser run beside other work. What they assert must not depend on it, so the run
assumes a quiet machine; the meter itself is tested in `test_this_machine`."""

from collections.abc import Iterator

import pytest

from penstock.optimizer import endpoints, model_run
from penstock.optimizer.machine import Conditions

SPEED_S = 1e-3


class QuietMachine:
    def read(self) -> Conditions:
        return Conditions(own_cpu=0.1, speed_s=SPEED_S, load_average=0.1, num_cores=2)


@pytest.fixture(scope="session", autouse=True)
def _quiet_machine() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(endpoints, "CpuMeter", QuietMachine)
        patch.setattr(model_run, "machine_speed_s", lambda: SPEED_S)
        yield

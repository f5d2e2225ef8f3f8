"""An alarm rings when asked, not before, and only for the last time asked for."""

import asyncio
import time

from penstock.benchmark.alarm import Alarm


def ring_times(*delays_s: float, wait_s: float = 0.2, cancels: bool = False) -> list[float]:
    """When it rang, in seconds from the start, after being set to each delay in turn."""

    async def scenario() -> list[float]:
        began = time.monotonic()
        rung: list[float] = []
        alarm = Alarm(asyncio.get_running_loop(), lambda: rung.append(time.monotonic() - began))
        for delay_s in delays_s:
            alarm.set(began + delay_s)
        if cancels:
            alarm.cancel()
        await asyncio.sleep(wait_s)
        alarm.close()
        return rung

    return asyncio.run(scenario())


def test_it_rings_once_and_not_early() -> None:
    (rung,) = ring_times(0.0305)
    assert rung >= 0.0305


def test_the_last_setting_counts() -> None:
    (rung,) = ring_times(0.01, 0.1)
    assert rung >= 0.1


def test_a_moment_that_has_passed_rings_at_once() -> None:
    assert len(ring_times(-5.0)) == 1


def test_a_cancelled_alarm_is_silent() -> None:
    assert ring_times(0.01, cancels=True) == []


def test_closing_twice_does_nothing() -> None:
    async def scenario() -> None:
        alarm = Alarm(asyncio.get_running_loop(), lambda: None)
        alarm.close()
        alarm.close()

    asyncio.run(scenario())

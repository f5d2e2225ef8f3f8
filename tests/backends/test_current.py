"""What threads and tasks see of a value that was set."""

import asyncio
import threading

from penstock.backends.current import Current


def in_thread(*steps: object) -> list[object]:
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.extend([step() for step in steps]))
    thread.start()
    thread.join()
    return found


def test_a_thread_sees_its_own_value_or_else_the_last_one():
    value: Current[int] = Current("value")
    assert value.get() is None
    value.set(1)
    assert in_thread(value.get) == [1]
    assert in_thread(lambda: value.set(2), value.get) == [None, 2]
    assert value.get() == 1 and in_thread(value.get) == [2]


def test_tasks_inherit_the_value():
    value: Current[int] = Current("value")
    value.set(1)

    async def task() -> int | None:
        await asyncio.sleep(0)
        return value.get()

    async def three() -> list[int | None]:
        started = asyncio.create_task(task())
        value.set(2)
        return [await started, await task()]

    assert asyncio.run(three()) == [1, 2]

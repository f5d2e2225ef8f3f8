"""A store that is slow, full or gone: whoever asks hears something, and nobody waits for long."""

import asyncio
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import until

from penstock.serving import remote_store
from penstock.serving.remote_store import (
    LONGEST_PAUSE_S,
    MAX_LOOKUPS,
    MAX_UNWRITTEN_BYTES,
    MAX_VALUE_BYTES,
    RemoteStore,
    pause_s,
)

# Longer than any test; what must not be waited for hangs it.
NEVER_S = 100.0


class Elsewhere:
    """What the clients of one test connect to. `broken`: every call fails. While `gate` is clear,
    answers do not come."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.broken: OSError | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.num_connections = self.num_questions = self.num_open = 0

    def connect(self) -> "Client":
        self.num_connections += 1
        self.num_open += 1
        return Client(self)

    async def pass_(self) -> None:
        await self.gate.wait()
        if self.broken is not None:
            raise self.broken


class Client:
    def __init__(self, there: Elsewhere) -> None:
        self._there = there

    async def ping(self) -> None:
        await self._there.pass_()

    async def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        self._there.num_questions += 1
        await self._there.pass_()
        return [self._there.values.get(key) for key in keys]

    async def set(self, key: bytes, value: bytes) -> None:
        await self._there.pass_()
        self._there.values[key] = value

    async def close(self) -> None:
        self._there.num_open -= 1


def run(scenario, look_s: float = NEVER_S, is_open: bool = True) -> None:
    async def main() -> None:
        there = Elsewhere()
        store = RemoteStore(there.connect, look_s)
        if is_open:
            store.open()
            await until(lambda: store.is_connected)
        await scenario(store, there)
        await store.close()
        assert there.num_open == 0

    asyncio.run(main())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_store, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(remote_store, "LONGEST_PAUSE_S", 0.002)


def test_what_was_written_is_found():
    async def scenario(store, there):
        heard: list[bytes | None] = []
        assert store.put(b"a", b"1")
        await until(lambda: there.values)
        assert store.look(b"a", heard.append) and store.look(b"b", heard.append)
        await until(lambda: len(heard) == 2)
        assert heard == [b"1", None]
        # Both were one question.
        assert there.num_questions == 1

    run(scenario)


def test_answers_come_in_the_order_of_the_questions():
    async def scenario(store, there):
        heard: list[int] = []
        for number in range(200):
            store.look(b"%d" % number, lambda _, number=number: heard.append(number))
        await until(lambda: len(heard) == 200)
        assert heard == list(range(200))

    run(scenario)


def test_who_asks_a_store_that_is_silent_hears_nothing_soon_and_the_next_is_not_asked():
    async def scenario(store, there):
        there.gate.clear()
        heard: list[bytes | None] = []
        for _ in range(50):
            assert store.look(b"a", heard.append)
        await until(lambda: len(heard) == 50)
        assert heard == [None] * 50 and not store.is_connected
        assert not store.look(b"a", heard.append) and not store.put(b"a", b"1")
        there.gate.set()
        await until(lambda: store.is_connected)

    run(scenario, look_s=0.005)


@pytest.mark.parametrize("fail", [ConnectionResetError, TimeoutError, OSError])
def test_a_store_that_fails_is_asked_again_once_it_answers(fail: Callable[[], OSError], caplog):
    async def scenario(store, there):
        there.broken = fail()
        heard: list[bytes | None] = []
        store.look(b"a", heard.append)
        await until(lambda: heard)
        assert heard == [None] and not store.is_connected
        tried = there.num_connections
        await until(lambda: there.num_connections >= tried + 3)
        assert not store.is_connected
        there.broken = None
        await until(lambda: store.is_connected)
        there.values[b"a"] = b"1"
        store.look(b"a", heard.append)
        await until(lambda: len(heard) == 2)
        assert heard[1] == b"1"

    caplog.set_level("INFO")
    run(scenario)
    # One line when it fails, and one when it is back, however often it was tried.
    assert [r.levelname for r in caplog.records if r.name == "penstock.cache"] == [
        "WARNING",
        "INFO",
    ]


def test_a_store_that_is_not_there_at_the_start_is_found_later():
    async def scenario(store, there):
        there.broken = ConnectionRefusedError()
        store.open()
        assert not store.look(b"a", pytest.fail)
        await until(lambda: there.num_connections >= 2)
        there.broken = None
        await until(lambda: store.is_connected)

    run(scenario, is_open=False)


def test_a_write_that_fails_is_dropped():
    async def scenario(store, there):
        there.broken = ConnectionResetError()
        store.put(b"a", b"1")
        await until(lambda: not store.is_connected)
        there.broken = None
        await until(lambda: store.is_connected)
        store.put(b"b", b"2")
        await until(lambda: there.values)
        assert there.values == {b"b": b"2"}

    run(scenario)


def test_what_waits_is_limited():
    async def scenario(store, there):
        there.gate.clear()
        heard: list[bytes | None] = []
        asked = [store.look(b"a", heard.append) for _ in range(MAX_LOOKUPS + 1)]
        assert asked == [True] * MAX_LOOKUPS + [False]
        value = bytes(MAX_VALUE_BYTES)
        written = [store.put(b"a", value) for _ in range(MAX_UNWRITTEN_BYTES // len(value) + 1)]
        assert written == [True] * (len(written) - 1) + [False]
        assert not store.put(b"a", bytes(MAX_VALUE_BYTES + 1))
        there.gate.set()
        await until(lambda: len(heard) == MAX_LOOKUPS)

    run(scenario)


@pytest.mark.parametrize("is_asked", [False, True])
def test_closing_answers_whoever_still_waits(is_asked):
    async def scenario(store, there):
        there.gate.clear()
        heard: list[bytes | None] = []
        for _ in range(40):
            store.look(b"a", heard.append)
        if is_asked:
            await until(lambda: there.num_questions)
        await store.close()
        assert heard == [None] * 40
        assert not store.look(b"a", heard.append)

    run(scenario)


@given(st.integers(1, 10_000))
def test_pauses_grow_to_a_limit(number):
    assert pause_s(number) <= pause_s(number + 1) <= LONGEST_PAUSE_S

"""Inputs in shared memory: placed, registered once under a name of their own, and unregistered."""

import asyncio
import json
import os

import pytest

from penstock.benchmark.targets.http_messages import parse_url
from penstock.benchmark.targets.shared_inputs import SharedInputs, support_problem
from penstock.errors import ConfigError
from penstock.processes import shared_memfd
from penstock.types import TensorSpec
from penstock.wire.region_keys import parse_memfd_key


class Server:
    """What it was asked; `is_refusing`: it takes nothing."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, bytes]] = []
        self.is_refusing = False

    async def ask(self, path: str, body: bytes, timeout_s: float) -> None:
        assert timeout_s > 0
        self.asked.append((path, body))
        if self.is_refusing:
            raise ConfigError(["refused"])

    @property
    def actions(self) -> list[str]:
        return [path.rpartition("/")[2] for path, _ in self.asked]


def test_inputs_are_placed_and_registered_once_under_a_name_of_their_own():
    server, inputs = Server(), SharedInputs()
    parts = [b"one", b"two" * 100, b"three"]
    places = [inputs.place(part) for part in parts]
    for _ in range(2):
        asyncio.run(inputs.register(server.ask))
    ((path, body),) = server.asked
    (name,) = {place.region for place in places}
    assert path == f"/v2/systemsharedmemory/region/{name}/register"
    asked = json.loads(body)
    assert asked["offset"] == 0
    fd = parse_memfd_key(asked["key"]).fd
    assert asked["byte_size"] == os.fstat(fd).st_size
    for part, place in zip(parts, places, strict=True):
        assert os.pread(fd, place.nbytes, place.offset) == part
    assert SharedInputs().place(b"x").region != name


def test_memory_is_unregistered_and_may_be_registered_again():
    server, inputs = Server(), SharedInputs()
    inputs.place(b"x")

    async def scenario() -> None:
        await inputs.unregister(server.ask)
        assert server.actions == [], "there is nothing to unregister"
        for _ in range(2):
            await inputs.register(server.ask)
            await inputs.unregister(server.ask)
            await inputs.unregister(server.ask)

    asyncio.run(scenario())
    assert server.actions == ["register", "unregister"] * 2


def test_a_refusal_is_told_and_the_end_is_quiet():
    server, inputs = Server(), SharedInputs()
    server.is_refusing = True
    inputs.place(b"x")

    async def scenario() -> None:
        with pytest.raises(ConfigError, match="refused"):
            await inputs.register(server.ask)
        await inputs.unregister(server.ask)

    asyncio.run(scenario())
    assert server.actions == ["register", "unregister"], "its answer may have come too late"


def test_texts_are_refused():
    specs = [TensorSpec("a", "FP32", (1,)), TensorSpec("b", "BYTES", (1,))]
    SharedInputs().check(specs[:1])
    with pytest.raises(ConfigError, match="input 'b': BYTES cannot be sent through shared memory"):
        SharedInputs().check(specs)


def test_no_memory_is_an_error_in_words(monkeypatch: pytest.MonkeyPatch):
    inputs = SharedInputs()

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared_memfd.os, "pwrite", full)
    with pytest.raises(ConfigError, match="no memory for 3 bytes of inputs: .*No space left"):
        inputs.place(b"abc")
    monkeypatch.setattr(shared_memfd.os, "memfd_create", full)
    with pytest.raises(ConfigError, match="no memory could be made: .*No space left"):
        SharedInputs()


@pytest.mark.parametrize(
    ("address", "extensions", "problem"),
    [
        ("http://127.0.0.1:80", ["penstock_shared_memory"], ""),
        ("http://localhost:80", ["binary_tensor_data", "penstock_shared_memory"], ""),
        ("http://127.0.0.1:80", [], "start it with: penstock serve MODEL --shared-memory"),
        ("http://127.0.0.1:80", ["system_shared_memory"], "needs a Penstock server"),
        # TEST-NET-1: no machine has it.
        ("http://192.0.2.1:80", ["penstock_shared_memory"], "needs a server on this machine"),
    ],
)
def test_which_servers_can_share_memory(address: str, extensions: list[str], problem: str):
    found = support_problem(parse_url(address), extensions)
    assert bool(found) == bool(problem)
    assert problem in found
    assert not found or found.startswith(f"{address}: --shared-memory ")

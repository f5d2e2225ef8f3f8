"""Memory that `Client` shares with a server: when it is used, reused and given up.
`tests/e2e/test_shared_memory.py` has the real server."""

import mmap
import os
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from penstock.api.client_memory import (
    MAX_BLOCKS,
    MIN_BLOCK_BYTES,
    MIN_BYTES,
    SharedCalls,
    SharedPool,
)
from penstock.api.endpoint import parse_endpoint
from penstock.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NotAllowed,
    NotReady,
    Overloaded,
    PenstockError,
)
from penstock.types import Array, RequestedOutput, Tensor
from penstock.wire.region_keys import parse_memfd_key

HERE = parse_endpoint("http://127.0.0.1:8000")


class Server:
    """A server on this machine: its model doubles bytes, where its client wants them."""

    def __init__(self) -> None:
        self.regions: dict[str, memoryview] = {}
        self.error: PenstockError | None = None
        self.refusal: PenstockError | None = None
        self.offers = ["penstock_shared_memory"]
        self.growth = 1
        self.num_asked = 0

    def extensions(self) -> Sequence[str]:
        self.num_asked += 1
        return self.offers

    def register(self, name: str, key: str, nbytes: int) -> None:
        if self.refusal is not None:
            raise self.refusal
        parsed = parse_memfd_key(key)
        assert parsed.pid == os.getpid() and parsed.token in os.readlink(f"/dev/fd/{parsed.fd}")
        self.regions[name] = memoryview(mmap.mmap(parsed.fd, nbytes))

    def unregister(self, name: str) -> None:
        del self.regions[name]

    def infer(
        self,
        model: str,
        version: str,
        tensors: Sequence[Tensor],
        outputs: Sequence[RequestedOutput] = (),
        places: Mapping[str, memoryview] | None = None,
    ) -> dict[str, Array]:
        if self.error is not None:
            raise self.error
        (tensor,) = tensors
        place = tensor.place
        if place is not None and place.region not in self.regions:
            raise InvalidRequest(f"Unable to find shared memory region: '{place.region}'")
        data = tensor.data if place is None else self._view(place.region, place)
        values = np.tile(np.frombuffer(data, np.uint8) * 2, self.growth)
        if not outputs or outputs[0].place is None:
            return {"y": values}
        wanted = outputs[0].place
        if wanted.nbytes < values.nbytes:
            raise InvalidRequest(f"should be at least {values.nbytes} bytes to hold the results")
        self._view(wanted.region, wanted)[: values.nbytes] = values.data
        return {"y": np.frombuffer(places["y"], np.uint8)[: values.nbytes]}

    def _view(self, region: str, place) -> memoryview:
        return self.regions[region][place.offset : place.offset + place.nbytes]


def tensor(nbytes: int, seed: int = 0) -> Tensor:
    data = np.random.default_rng(seed).bytes(nbytes)
    return Tensor("x", "UINT8", (nbytes,), data)


def ask(calls: SharedCalls, nbytes: int = MIN_BYTES, seed: int = 0) -> Array | None:
    sent = tensor(nbytes, seed)
    found = calls.infer("m", "", [sent])
    if found is not None:
        assert np.array_equal(found["y"], np.frombuffer(sent.data, np.uint8) * 2)
        assert found["y"].flags.owndata
        return found["y"]
    return None


def test_large_tensors_are_shared_and_small_ones_sent():
    server = Server()
    calls = SharedCalls(server, HERE)
    assert ask(calls, MIN_BYTES - 1) is None and server.num_asked == 0
    for seed in range(4):
        assert ask(calls, seed=seed) is not None
    assert len(server.regions) == 1 and server.num_asked == 1
    calls.close()
    assert not server.regions


def test_outputs_are_shared_once_their_size_is_known():
    server = Server()
    calls = SharedCalls(server, HERE)
    server.growth = 1 << 10
    small = tensor(1 << 10)
    assert calls.infer("m", "", [small]) is None, "nothing here is large"
    calls.learn("m", "", [small], server.infer("m", "", [small]))
    found = calls.infer("m", "", [small])
    assert found["y"].nbytes == 1 << 20
    server.growth = 1 << 11
    assert calls.infer("m", "", [small]) is None, "it does not fit: the body is sent"
    calls.learn("m", "", [small], {"y": np.zeros(1 << 21, np.uint8)})
    assert calls.infer("m", "", [small]) is None, "the sizes of this model vary"
    calls.close()


@pytest.mark.parametrize("offers", [[], ["system_shared_memory"]])
def test_a_server_that_takes_no_memfds_is_asked_once(offers: list[str]):
    server = Server()
    server.offers = offers
    calls = SharedCalls(server, HERE)
    assert ask(calls) is None and ask(calls) is None
    assert server.num_asked == 1 and not server.regions


def test_a_key_that_may_not_register_sends_the_body():
    server = Server()
    server.refusal = NotAllowed("no scope")
    calls = SharedCalls(server, HERE)
    assert ask(calls) is None
    server.refusal = None
    assert ask(calls) is None, "it was refused once"


def test_a_server_that_is_not_ready_is_asked_again():
    server = Server()
    server.refusal = NotReady("loading")
    calls = SharedCalls(server, HERE)
    assert ask(calls) is None
    server.refusal = None
    assert ask(calls) is not None
    calls.close()


def test_a_server_elsewhere_is_not_asked():
    server = Server()
    # TEST-NET-1: no machine has it.
    assert ask(SharedCalls(server, parse_endpoint("http://192.0.2.1:8000"))) is None
    assert server.num_asked == 0


def test_regions_that_the_server_has_lost_are_replaced():
    server = Server()
    calls = SharedCalls(server, HERE)
    ask(calls)
    server.regions.clear()
    server.unregister = lambda name: server.regions.pop(name, None)
    assert ask(calls) is None
    assert ask(calls) is not None and len(server.regions) == 1
    calls.close()


@pytest.mark.parametrize(
    ("error", "is_kept"),
    [(InvalidRequest("shape"), True), (Overloaded("full"), True), (DeadlineExceeded("x"), False)],
)
def test_memory_that_the_server_may_still_use_is_not_used_again(
    error: PenstockError, is_kept: bool
):
    server = Server()
    calls = SharedCalls(server, HERE)
    ask(calls)
    (name,) = server.regions
    server.error = error
    with pytest.raises(type(error)):
        ask(calls)
    assert (name in server.regions) is is_kept
    server.error = None
    assert ask(calls) is not None
    assert (name in server.regions) is is_kept and len(server.regions) == 1
    calls.close()


class TestPool:
    def test_blocks_are_reused_if_they_are_not_far_too_large(self):
        server = Server()
        pool = SharedPool(server)
        large = pool.take(16 * MIN_BLOCK_BYTES)
        pool.give_back(large)
        small = pool.take(1)
        assert small is not large and small.nbytes == MIN_BLOCK_BYTES
        assert pool.take(5 * MIN_BLOCK_BYTES) is large
        pool.give_back(small)
        pool.close()
        assert list(server.regions) == [large.name]

    def test_it_is_limited_and_drops_what_is_idle(self):
        server = Server()
        pool = SharedPool(server)
        blocks = [pool.take(1) for _ in range(MAX_BLOCKS)]
        assert pool.take(1) is None and len(server.regions) == MAX_BLOCKS
        pool.give_back(blocks[0])
        larger = pool.take(32 * MIN_BLOCK_BYTES)
        assert larger is not None and blocks[0].name not in server.regions
        assert pool.take(1 << 30) is None
        for block in (*blocks[1:], larger):
            pool.give_back(block)
        pool.close()
        assert not server.regions

    def test_a_forked_process_has_blocks_of_its_own(self, monkeypatch: pytest.MonkeyPatch):
        server = Server()
        pool = SharedPool(server)
        block = pool.take(1)
        pool.give_back(block)
        parent = os.getpid()
        monkeypatch.setattr(os, "getpid", lambda: parent + 1)
        monkeypatch.setattr(server, "register", lambda name, key, nbytes: None)
        assert pool.take(1) is not block
        pool.close()
        assert block.name in server.regions, "it is the parent's"

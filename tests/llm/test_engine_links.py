"""An engine's sockets to shards: one that does not read holds nobody up."""

import socket
from contextlib import contextmanager

import pytest

from penstock.llm import engine_links, messages
from penstock.llm.engine_links import EngineLink, EngineLinks
from penstock.llm.messages import StepReport, TokenEvent
from penstock.processes.channel import socket_pair

CHUNK = messages.PromptLogprobsChunk(1, 0, [messages.Logprobs(-0.5)] * 1024)


def report(*requests):
    events = [TokenEvent(request, 0, 5, "", 0) for request in requests]
    return StepReport(events, len(requests), 0, 10, 0.1)


@contextmanager
def links(num_shards=2):
    """The links, the engine's ends, and those of the shards."""
    core, theirs = socket_pair()
    found = EngineLinks(theirs)
    shards, ends = [], []
    for _ in range(num_shards):
        ours, engine = socket_pair()
        ends.append(found.attach(engine.detach()))
        shards.append(ours)
    try:
        yield found, ends, shards
    finally:
        found.close()
        for sock in (core, theirs, *shards):
            sock.close()


def received(sock):
    """All that can be read now."""
    found = []
    while True:
        try:
            found.append(messages.decode_engine_to_shard(sock.recv(1 << 20)))
        except BlockingIOError:
            return found


def test_events_go_to_the_shard_that_asked():
    with links() as (found, (one, two), _):
        for request, link in ((1, one), (2, two), (3, one)):
            found.open_request(request, link)
        events = report(1, 2, 3).events
        told = found.events_by_link(events)
        numbers = {link: [each.request for each in own] for link, own in told.items()}
        assert numbers == {one: [1, 3], two: [2]}
        assert found.requests_by_link([1, 2, 9]) == {one: [1], two: [2]}
        # A shard with an open request hears of each step; one without hears nothing.
        assert found.events_by_link([])[two] == []
        found.close_request(2)
        assert list(found.events_by_link(events[:1])) == [one] and found.owner(2) is None


def test_a_shard_that_does_not_read_gets_all_of_it_later_and_in_order():
    with links() as (found, (slow, other), (stuck, quick)):
        chunks = 0
        while not slow.has_unsent:
            assert slow.send(CHUNK)
            chunks += 1
        for number in range(5):
            assert slow.send(report(number))
            assert other.send(report(number))
        assert [each.events[0].request for each in received(quick)] == list(range(5))
        seen = received(stuck)
        while slow.has_unsent:
            assert found.wait(False) == (False, [])
            seen += received(stuck)
        seen += received(stuck)
        assert [type(each) for each in seen[:chunks]] == [type(CHUNK)] * chunks
        assert [each.events[0].request for each in seen[chunks:]] == list(range(5))


def test_a_shard_that_never_reads_is_given_up(monkeypatch):
    monkeypatch.setattr(engine_links, "MAX_UNSENT_BYTES", 1 << 16)
    with links(1) as (_, (link,), (stuck,)):
        while link.send(CHUNK):
            pass
        link.drop_unsent()
        while received(stuck):
            pass
        assert link.send(report(1)) and received(stuck)


def test_a_shard_that_is_gone_is_noticed_and_its_requests_are_nobodys():
    with links() as (found, (gone, other), (sock, _)):
        found.open_request(1, gone)
        found.open_request(2, other)
        sock.close()
        # What is sent now goes nowhere, without an error.
        assert gone.send(report(1))
        assert found.wait(True) == (False, [gone])
        assert gone.channel.receive() is None
        found.detach(gone)
        assert gone.requests == {1} and found.owner(1) is None and found.owner(2) is other
        assert found.wait(False) == (False, [])


def test_the_core_is_heard_beside_shards():
    core, theirs = socket_pair()
    found = EngineLinks(theirs)
    core.send(b"x")
    assert found.wait(True) == (True, [])
    core.close()
    theirs.close()


def test_a_datagram_that_no_socket_takes_is_an_error():
    ours, theirs = socket_pair()
    link = EngineLink(socket.socket(fileno=theirs.detach()))
    with pytest.raises(OSError, match="too long"):
        link.send(messages.StepFailed((), "x" * (2 << 20)))
    link.channel.close()
    ours.close()

"""The stream of the dashboard: for all listeners alike, and bounded whatever they do."""

import asyncio
import contextlib
import http.client
import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
from page_server import KEYS, SECRETS, PageServer, null_config, page_server
from waiting import wait_until

from penstock.dashboard import event_feed
from penstock.dashboard.event_feed import FeedListener
from penstock.protocols.gate import Gate

CONFIG = null_config("echo", {"x": ("INT32", (2,))}, slo="p99 < 20ms")


@pytest.fixture
def server() -> Iterator[PageServer]:
    with page_server([CONFIG]) as running:
        yield running


@contextlib.contextmanager
def listening(server: PageServer, **headers: str) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("GET", "/dashboard/events", headers=headers)
    answer = connection.getresponse()
    try:
        yield answer
    finally:
        answer.close()
        connection.close()


def next_event(answer: http.client.HTTPResponse) -> tuple[str, dict]:
    name = answer.readline().decode()
    data = answer.readline().decode()
    assert answer.readline() == b"\n"
    assert name.startswith("event: ") and data.startswith("data: ")
    return name[7:].strip(), json.loads(data[6:])


def test_a_listener_gets_the_past_then_an_event_a_second(server: PageServer) -> None:
    with listening(server) as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        assert answer.headers["Cache-Control"] == "no-store"
        name, start = next_event(answer)
        assert name == "start" and start["scopes"] == ["infer", "metrics", "shared_memory", "admin"]
        events = [next_event(answer) for _ in range(3)]
        assert {name for name, _ in events} == {"tick"}
        times = [event["time"] for _, event in events]
        assert times == sorted(set(times))
        (model,) = events[0][1]["models"]
        assert (model["name"], model["state"], model["slo"]) == ("echo", "READY", "p99 < 20ms")


def test_listeners_share_one_sampler_and_are_forgotten(server: PageServer) -> None:
    with listening(server) as one, listening(server) as other:
        next_event(one), next_event(other)
        first = next_event(one)[1]
        second = next_event(other)[1]
        while second["time"] < first["time"]:
            second = next_event(other)[1]
        assert first == second
        assert server.pages.feed.num_listeners == 2
    wait_until(lambda: server.pages.feed.num_listeners == 0)


def test_too_many_listeners_are_refused(
    server: PageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_feed, "MAX_LISTENERS", 2)
    with listening(server) as one, listening(server), listening(server) as third:
        assert (one.status, third.status) == (200, 503)
        assert "2 dashboards are open" in json.loads(third.read())["error"]
        assert third.headers["Retry-After"] == "5"


def test_a_listener_that_takes_nothing_is_dropped() -> None:
    async def main() -> None:
        listener = FeedListener()
        taken = [listener.offer(b"%d" % n) for n in range(event_feed.MAX_PENDING + 2)]
        assert taken == [True] * event_feed.MAX_PENDING + [False, False]
        assert [event async for event in listener.events()] == [b"0", b"1", b"2", b"3"]

    asyncio.run(main())


def test_streams_end_when_the_server_shuts_down(server: PageServer) -> None:
    with listening(server) as answer:
        next_event(answer)
        server.management.lifecycle.drain()
        assert answer.read() is not None  # The rest, with its end.
    assert server.ask("/dashboard/events")[0] == 503


@pytest.mark.parametrize(("key", "status"), [("", 401), ("infer", 403), ("admin", 403)])
def test_events_need_the_scope_of_metrics(key: str, status: int) -> None:
    with page_server([CONFIG], Gate(KEYS)) as running:
        headers = {"X-API-Key": SECRETS[key]} if key else {}
        assert running.ask("/dashboard/events", headers)[0] == status


def test_a_revoked_key_ends_the_stream() -> None:
    gate = Gate(KEYS)
    key = {"X-API-Key": SECRETS["both"]}
    with page_server([CONFIG], gate) as running, listening(running, **key) as answer:
        assert next_event(answer)[1]["scopes"] == ["infer", "metrics"]
        next_event(answer)
        gate.keys = replace(KEYS, scopes={})
        assert answer.read().count(b"event: tick") <= 2


def test_a_head_has_no_end_to_wait_for(server: PageServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("HEAD", "/dashboard/events")
    answer = connection.getresponse()
    assert (answer.status, answer.read()) == (200, b"")
    connection.close()
    wait_until(lambda: server.pages.feed.num_listeners == 0)

"""The client: connections on demand, whose turn it is, what becomes of exchanges when they fail."""

import asyncio
import socket
import ssl
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from suites.target import Sent, assert_good, run, until

from penstock.benchmark.exchange import TimedExchange
from penstock.benchmark.targets.http_client import HttpClient, NoAnswer, ask, connect_failure
from penstock.benchmark.targets.http_connection import STALE_S
from penstock.benchmark.targets.http_messages import Url, parse_url, request_bytes
from penstock.errors import ConfigError

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"


class Peer:
    """One connection as the server sees it. Requests here have no body."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def request(self) -> bytes:
        return await self.reader.readuntil(b"\r\n\r\n")

    def reply(self, data: bytes = OK) -> None:
        self.writer.write(data)

    def leave(self) -> None:
        self.writer.transport.abort()


class Server:
    """Accepts, and leaves everything else to the test; with `answer` it answers by itself."""

    def __init__(self, answer: bytes | None = None) -> None:
        self.peers: list[Peer] = []
        self.url: Url
        self._answer = answer

    @asynccontextmanager
    async def serve(self, tls: ssl.SSLContext | None = None) -> AsyncIterator["Server"]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0, ssl=tls)
        port = server.sockets[0].getsockname()[1]
        host = "localhost" if tls is not None else "127.0.0.1"
        self.url = parse_url(f"{'http' if tls is None else 'https'}://{host}:{port}/")
        try:
            yield self
        finally:
            server.close()
            for peer in self.peers:
                peer.leave()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(reader, writer)
        self.peers.append(peer)
        try:
            while self._answer is not None:
                await peer.request()
                peer.reply(self._answer)
        except (asyncio.IncompleteReadError, OSError):
            pass

    async def peer(self, index: int) -> Peer:
        await until(lambda: len(self.peers) > index)
        return self.peers[index]


@asynccontextmanager
async def client_of(
    server: Server, max_connections: int = 8, **options
) -> AsyncIterator[HttpClient]:
    client = HttpClient(server.url, 20.0, max_connections, **options)
    try:
        yield client
    finally:
        await client.close()


def message(server: Server, path: str = "/") -> bytes:
    return request_bytes(server.url, "GET", path, {})


def test_connections_are_made_as_they_are_needed():
    async def scenario() -> None:
        async with Server(OK).serve() as server, client_of(server) as client:
            assert client.num_connections == 0
            assert_good(await Sent(client, message(server)).end())
            assert_good(await Sent(client, message(server)).end())
            assert client.num_connections == 1
            for each in [Sent(client, message(server)) for _ in range(4)]:
                assert_good(await each.end())
            # One that became idle meanwhile may have spared another.
            assert 2 <= client.num_connections <= 4
            assert client.num_waited == 0

    run(scenario())


def test_open_makes_them_beforehand_but_no_more_than_allowed():
    async def scenario() -> None:
        async with Server(OK).serve() as server, client_of(server, 100) as client:
            await client.open(70)
            assert client.num_connections == 70
            await client.open(5)
            assert client.num_connections == 70
            await client.open(1000)
            assert client.num_connections == 100
            await until(lambda: len(server.peers) == 100)

    run(scenario())


def test_who_finds_all_busy_waits_and_leaves_in_order():
    async def scenario() -> None:
        async with Server().serve() as server, client_of(server, 2) as client:
            await client.open(2)
            sent = [Sent(client, message(server, f"/{i}")) for i in range(5)]
            assert client.num_waited == 3
            # The last connection made is the first that is used.
            peers = {(await peer.request()).split()[1]: peer for peer in server.peers}
            assert set(peers) == {b"/0", b"/1"}
            for i in (2, 3, 4):
                peer = peers[b"/1"]
                peer.reply()
                assert (await peer.request()).split()[1] == b"/%d" % i
            peers[b"/0"].reply()
            peer.reply()
            for each in sent:
                assert_good(await each.end())
            departures = [each.exchange.sent for each in sent]
            assert departures == sorted(departures)
            assert sent[2].exchange.sent >= sent[1].exchange.done
            assert client.num_connections == 2

    run(scenario())


def test_what_waits_is_sent_when_a_lost_connection_makes_room():
    async def scenario() -> None:
        async with Server().serve() as server, client_of(server, 1) as client:
            first, second = (Sent(client, message(server)) for _ in range(2))
            await (await server.peer(0)).request()
            server.peers[0].leave()
            assert (await first.end()).failure == "connection lost"
            await (await server.peer(1)).request()
            server.peers[1].reply()
            assert_good(await second.end())

    run(scenario())


def test_the_next_exchange_after_a_loss_makes_a_new_connection():
    async def scenario() -> None:
        async with Server(OK).serve() as server, client_of(server) as client:
            assert_good(await Sent(client, message(server)).end())
            server.peers[0].leave()
            await until(lambda: client.num_connections == 0)
            assert_good(await Sent(client, message(server)).end())
            assert len(server.peers) == 2

    run(scenario())


@pytest.mark.parametrize("idle_s, is_sent_again", [(STALE_S / 2, False), (2 * STALE_S, True)])
def test_a_server_that_closes_idle_connections_costs_no_request(idle_s, is_sent_again):
    """It may hang up just when the next request is on its way."""

    async def scenario() -> None:
        past = [0.0]

        def now() -> float:
            return 1000.0 + past[0]

        async with Server().serve() as server, client_of(server, now=now) as client:
            first = Sent(client, message(server))
            await (await server.peer(0)).request()
            server.peers[0].reply()
            await first.end()
            past[0] += idle_s
            second = Sent(client, message(server))
            await server.peers[0].request()
            server.peers[0].leave()
            if is_sent_again:
                await (await server.peer(1)).request()
                server.peers[1].reply()
            exchange = await second.end()
            assert exchange.failure == (None if is_sent_again else "connection lost")
            assert second.num_ended == 1

    run(scenario())


def test_what_is_sent_again_goes_before_what_waits():
    async def scenario() -> None:
        past = [0.0]
        async with (
            Server().serve() as server,
            client_of(server, 1, now=lambda: time.monotonic() + past[0]) as client,
        ):
            await client.open(1)
            past[0] += 2 * STALE_S
            sent = [Sent(client, message(server, f"/{i}")) for i in range(3)]
            assert b" /0 " in await (await server.peer(0)).request()
            server.peers[0].leave()
            for i, each in enumerate(sent):
                assert b" /%d " % i in await (await server.peer(1)).request()
                server.peers[1].reply()
                assert (await each.end()).failure is None

    run(scenario())


def test_an_answer_that_ends_the_connection_is_followed_by_another_connection():
    async def scenario() -> None:
        answer = OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        async with Server(answer).serve() as server, client_of(server) as client:
            for _ in range(3):
                assert_good(await Sent(client, message(server)).end())
            assert len(server.peers) == 3
            assert client.num_connections == 0

    run(scenario())


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def test_nobody_there_is_said_in_words():
    async def scenario() -> None:
        url = parse_url(f"http://127.0.0.1:{free_port()}/path")
        client = HttpClient(url, 20.0, 8)
        text = f"^{url.text}: the server cannot be reached: connection refused$"
        with pytest.raises(ConfigError, match=text):
            await client.open(3)
        sent = [Sent(client, b"GET / HTTP/1.1\r\n\r\n") for _ in range(20)]
        for each in sent:
            exchange = await each.end()
            assert exchange.failure == "connection refused"
            assert exchange.sent <= exchange.done
        assert [each.num_ended for each in sent] == [1] * 20
        with pytest.raises(NoAnswer, match="^connection refused$"):
            await ask(url, b"GET / HTTP/1.1\r\n\r\n")
        await client.close()

    run(scenario())


@pytest.mark.parametrize(
    "error, text",
    [
        (ConnectionRefusedError(111, "Connect call failed ('127.0.0.1', 1)"), "connection refused"),
        (ConnectionResetError(), "connection lost"),
        (socket.gaierror(-2, "Name or service not known"), "unknown host"),
        (TimeoutError(), "no connection within 7 s"),
        (
            OSError(24, "Too many open files"),
            "no connection: too many open files here (raise ulimit -n)",
        ),
        (OSError(113, "No route to host"), "no connection: no route to host"),
    ],
)
def test_each_cause_has_one_spelling(error, text):
    assert connect_failure(error, 7.0) == text


def test_no_answer_in_time_drops_the_connection():
    async def scenario() -> None:
        past = [0.0]
        async with (
            Server().serve() as server,
            client_of(server, 1, now=lambda: time.monotonic() + past[0]) as client,
        ):
            await client.open(1)
            late, waiting = (Sent(client, message(server)) for _ in range(2))
            await server.peers[0].request()
            past[0] += 19.0
            client.sweep()
            assert not late.num_ended
            past[0] += 2.0
            client.sweep()
            assert (await late.end()).failure == "no answer within 20 s"
            # It had its own time, but waited since the same moment.
            assert (await waiting.end()).failure == "no answer within 20 s"
            assert await server.peers[0].reader.read() == b""
            fresh = Sent(client, message(server))
            client.sweep()
            await (await server.peer(1)).request()
            server.peers[1].reply()
            assert (await fresh.end()).failure is None

    run(scenario())


def test_the_sweep_runs_by_itself():
    async def scenario() -> None:
        async with Server().serve() as server:
            client = HttpClient(server.url, 0.02, 1)
            exchange = await Sent(client, message(server)).end()
            assert exchange.failure == "no answer within 0.02 s"
            await client.close()

    run(scenario())


def test_close_cancels_what_is_under_way_waits_or_connects():
    async def scenario() -> None:
        async with Server().serve() as server:
            client = HttpClient(server.url, 20.0, 2)
            await client.open(1)
            ended: list[TimedExchange] = []
            for _ in range(4):
                client.send(TimedExchange(time.monotonic(), message(server), ended.append))
            await client.close()
            assert [exchange.failure for exchange in ended] == ["cancelled"] * 4
            assert client.num_connections == 0
            assert all(exchange.sent <= exchange.done for exchange in ended)

    run(scenario())


def test_what_was_closed_opens_again():
    """A level that was given up is followed by another one."""

    async def scenario() -> None:
        async with Server().serve() as server:
            client = HttpClient(server.url, 0.2, 2)
            await client.open(1)
            await client.close()
            await client.open(2)
            assert client.num_connections == 2
            ended: list[TimedExchange] = []
            client.send(TimedExchange(time.monotonic(), message(server), ended.append))
            client.send(TimedExchange(time.monotonic(), message(server), ended.append))
            peer = await server.peer(2)
            await peer.request()
            peer.reply()
            # Late ones are swept as before.
            await until(lambda: len(ended) == 2)
            assert [exchange.failure for exchange in ended] == [None, "no answer within 0.2 s"]
            await client.close()

    run(scenario())


def test_who_sends_again_when_cancelled_is_cancelled_again_and_not_at_once():
    async def scenario() -> None:
        async with Server().serve() as server:
            client = HttpClient(server.url, 20.0, 1)
            failures: list[str | None] = []
            depth = 0

            def finish(exchange: TimedExchange) -> None:
                nonlocal depth
                failures.append(exchange.failure)
                assert depth == 0
                depth += 1
                if len(failures) < 10:
                    client.send(TimedExchange(time.monotonic(), message(server), finish))
                depth -= 1

            client.send(TimedExchange(time.monotonic(), message(server), finish))
            await client.close()
            await until(lambda: len(failures) == 10)
            assert set(failures) == {"cancelled"}

    run(scenario())


def test_questions_are_answered_whole():
    async def scenario() -> None:
        body = bytes(range(256)) * 1000
        answer = b"HTTP/1.1 404 Not Found\r\nX-Name: a\r\nContent-Length: %d\r\n\r\n" % len(body)
        async with Server(answer + body).serve() as server:
            said = await ask(server.url, message(server))
            assert (said.status, said.is_good, said.body) == (404, False, body)
            assert said.headers[b"x-name"] == b"a"
        async with Server(b"nonsense\r\n\r\n").serve() as server:
            with pytest.raises(NoAnswer, match="the answer is not HTTP/1.1"):
                await ask(server.url, message(server))
        async with Server().serve() as server:
            with pytest.raises(NoAnswer, match="no answer within 0.02 s"):
                await ask(server.url, message(server), 0.02)

    run(scenario())


def certificate(folder: Path) -> tuple[Path, Path]:
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    return certificate, key


def test_tls_is_spoken_and_certificates_are_checked(tmp_path, monkeypatch):
    own, key = certificate(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(own, key)

    async def scenario(is_trusted: bool) -> None:
        async with Server(OK).serve(tls) as server, client_of(server) as client:
            if not is_trusted:
                with pytest.raises(ConfigError, match="no TLS: CERTIFICATE_VERIFY_FAILED"):
                    await client.open(1)
                return
            await client.open(2)
            for _ in range(3):
                assert_good(await Sent(client, message(server)).end())

    run(scenario(False))
    monkeypatch.setenv("SSL_CERT_FILE", str(own))
    run(scenario(True))

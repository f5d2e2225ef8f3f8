"""TLS from files: what is refused, and that new connections get a new certificate."""

from __future__ import annotations

import asyncio
import logging
import shutil
import ssl
import subprocess
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from certificates import make_certificates
from long_bodies import Receiver, bytes_of, post

from penstock.config import HttpLimits, TlsConfig
from penstock.errors import ConfigError
from penstock.protocols import tls
from penstock.protocols.http import Exchange
from penstock.protocols.http_server import HttpServer
from penstock.protocols.tls import BEGIN, END, TlsFiles, Validity, read_validity, watch

GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(made, tmp_path / "tls"))


def config(folder: Path, client_ca: str = "") -> TlsConfig:
    issuer = str(folder / f"{client_ca}.pem") if client_ca else ""
    return TlsConfig(str(folder / "server.pem"), str(folder / "server.key"), issuer)


def client(folder: Path, name: str = "") -> ssl.SSLContext:
    """A client that trusts `ca`, with a certificate of its own or without."""
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    if name:
        context.load_cert_chain(folder / f"{name}.pem", folder / f"{name}.key")
    return context


def renew(folder: Path) -> None:
    """As a tool that renews certificates does."""
    for suffix in ("pem", "key"):
        (folder / f"renewed.{suffix}").rename(folder / f"server.{suffix}")


def garble(path: Path) -> None:
    """PEM still, but of nothing."""
    first, *_, last = path.read_text().splitlines()
    path.write_text(f"{first}\nAAAA\n{last}\n")


def reissue(folder: Path, name: str, days: int) -> None:
    """A certificate for the same key."""
    command = ["openssl", "req", "-x509", "-new", "-key", f"{name}.key", "-subj", f"/CN={name}"]
    days_and_file = ["-days", str(days), "-out", f"{name}.pem"]
    subprocess.run([*command, *days_and_file], cwd=folder, check=True, capture_output=True)


class Peer:
    """One connection to the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        found = writer.get_extra_info("peercert")
        self.name = dict(pair[0] for pair in found["subject"])["commonName"]

    async def ask(self) -> int:
        self._writer.write(GET)
        head = await self._reader.readuntil(b"\r\n\r\n")
        await self._reader.readexactly(2)
        return int(head.split()[1])

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


async def connect(port: int, context: ssl.SSLContext) -> Peer:
    return Peer(*await asyncio.open_connection("localhost", port, ssl=context))


def answer(exchange: Exchange) -> None:
    exchange.reply(200, b"", (b"ok",))


async def refused(port: int, context: ssl.SSLContext) -> bool:
    try:
        peer = await connect(port, context)
    except (ssl.SSLError, ConnectionError):
        return True
    try:
        # With TLS 1.3 a client hears of it when it reads.
        await peer.ask()
    except (ssl.SSLError, ConnectionError, asyncio.IncompleteReadError):
        return True
    finally:
        with suppress(ssl.SSLError, ConnectionError):
            await peer.close()
    return False


async def test_a_server_speaks_tls_and_nothing_else(folder: Path) -> None:
    server = HttpServer(answer, HttpLimits())
    port = await server.start("127.0.0.1", 0, tls=TlsFiles(config(folder)).load())
    peer = await connect(port, client(folder))
    assert (peer.name, await peer.ask(), await peer.ask()) == ("server", 200, 200)
    await peer.close()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(GET)
    assert b"HTTP/1.1" not in await reader.read()
    writer.close()
    await server.close()


async def test_long_bodies_and_answers_are_encrypted_like_short_ones(folder: Path) -> None:
    receiver = Receiver()
    server = HttpServer(receiver, HttpLimits(), prepare=receiver.prepare)
    port = await server.start("127.0.0.1", 0, tls=TlsFiles(config(folder)).load())
    context = client(folder)
    reader, writer = await asyncio.open_connection("localhost", port, ssl=context)
    for size in (5, 100_000, 3_000_000, 5, 100_000, 8_000_000):
        body = bytes_of(size)
        writer.write(post(body))
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert await reader.readexactly(size) == body
    assert len(receiver.bodies) == 4
    writer.close()
    await writer.wait_closed()
    await server.close()


async def test_clients_without_the_right_certificate_are_refused(folder: Path) -> None:
    server = HttpServer(answer, HttpLimits())
    port = await server.start("127.0.0.1", 0, tls=TlsFiles(config(folder, "ca")).load())
    peer = await connect(port, client(folder, "client"))
    assert await peer.ask() == 200
    await peer.close()
    for name in ("", "stranger"):
        assert await refused(port, client(folder, name))
    await server.close()


async def test_new_connections_get_the_new_certificate(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "WATCH_S", 0.01)
    files = TlsFiles(config(folder, "ca"))
    server = HttpServer(answer, HttpLimits())
    port = await server.start("127.0.0.1", 0, tls=files.load())
    watching = asyncio.create_task(watch(files, [server]))
    old = await connect(port, client(folder, "client"))
    assert old.name == "server"
    renew(folder)
    while True:
        new = await connect(port, client(folder, "client"))
        assert await new.ask() == 200
        await new.close()
        if new.name == "renewed":
            break
    assert await old.ask() == 200, "connections stay as they began"
    await old.close()
    watching.cancel()
    await server.close()


async def test_the_issuer_of_clients_can_be_replaced(folder: Path) -> None:
    shutil.copy(folder / "ca.pem", folder / "clients.pem")
    files = TlsFiles(config(folder, "clients"))
    server = HttpServer(answer, HttpLimits())
    port = await server.start("127.0.0.1", 0, tls=files.load())
    shutil.copy(folder / "other-ca.pem", folder / "clients.pem")
    context = files.load_if_changed()
    assert context is not None
    await server.replace_tls(context)
    peer = await connect(port, client(folder, "stranger"))
    assert await peer.ask() == 200
    await peer.close()
    assert await refused(port, client(folder, "client"))
    await server.close()


async def test_no_connection_is_lost_while_a_certificate_is_replaced(folder: Path) -> None:
    files = TlsFiles(config(folder))
    server = HttpServer(answer, HttpLimits())
    port = await server.start("127.0.0.1", 0, tls=files.load())
    context = client(folder)

    async def once() -> int:
        peer = await connect(port, context)
        status = await peer.ask()
        await peer.close()
        return status

    async def replace() -> None:
        for _ in range(20):
            await server.replace_tls(files.load())
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        group.create_task(replace())
        asked = [group.create_task(once()) for _ in range(50)]
    assert [task.result() for task in asked] == [200] * 50
    await server.close()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: (folder / "server.pem").unlink(), "--tls-cert .*No such file"),
        (lambda folder: (folder / "server.key").unlink(), "--tls-key .*No such file"),
        (lambda folder: (folder / "server.pem").write_text("x"), "--tls-cert .*no PEM certificate"),
        (lambda folder: garble(folder / "server.pem"), "--tls-cert .*not a certificate"),
        (lambda folder: (folder / "server.key").write_text("x"), "--tls-key .*no PEM private key"),
        (lambda folder: garble(folder / "server.key"), "--tls-key .*cannot be read: [^(]*$"),
        (
            lambda folder: shutil.copy(folder / "client.key", folder / "server.key"),
            "--tls-key .*is not the key of --tls-cert",
        ),
        (lambda folder: (folder / "ca.pem").write_text("x"), "--tls-client-ca"),
        (lambda folder: (folder / "ca.pem").unlink(), "--tls-client-ca .*No such file"),
    ],
)
def test_files_that_cannot_be_used_are_explained(
    folder: Path, change: Callable[[Path], object], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    files = TlsFiles(config(folder, "ca"))
    files.load()
    change(folder)
    with pytest.raises(ConfigError, match=words) as caught:
        TlsFiles(config(folder, "ca")).load()
    assert "BEGIN" not in str(caught.value)
    with caplog.at_level(logging.ERROR):
        assert files.load_if_changed() is None
        assert files.load_if_changed() is None
    assert caplog.text.count("stays as it is") == 1


def test_an_encrypted_key_is_refused_without_asking_the_terminal(folder: Path) -> None:
    command = ["openssl", "ec", "-in", "server.key", "-out", "locked.key", "-aes128"]
    subprocess.run(
        [*command, "-passout", "pass:secret"], cwd=folder, check=True, capture_output=True
    )
    (folder / "locked.key").rename(folder / "server.key")
    with pytest.raises(ConfigError, match="--tls-key .*server.key: the private key is encrypted"):
        TlsFiles(config(folder)).load()


@pytest.mark.parametrize(
    ("days", "words"), [(3, "the certificate is expired on"), (-1, "is not valid before")]
)
def test_a_certificate_that_is_not_valid_is_logged_at_start(
    folder: Path, days: int, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    def then() -> datetime:
        return datetime.now(UTC) + timedelta(days=days)

    TlsFiles(config(folder), warns=False, now=then).load()
    TlsFiles(config(folder)).load()
    assert not caplog.records
    TlsFiles(config(folder), now=then).load()
    (record,) = caplog.records
    assert record.levelname == "WARNING" and words in record.getMessage()
    assert str(folder / "server.pem") in record.getMessage()


def test_an_expired_certificate_does_not_replace_a_valid_one(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reissue(folder, "server", days=30)
    now = datetime.now(UTC) + timedelta(days=3)
    files = TlsFiles(config(folder), now=lambda: now)
    files.load()
    renew(folder)
    assert files.load_if_changed() is None
    assert files.load_if_changed() is None
    (record,) = caplog.records
    assert record.levelname == "ERROR" and "the new certificate expired on" in record.getMessage()
    # Once the one in use has expired too, it is no better.
    now += timedelta(days=30)
    (folder / "server.pem").touch()
    assert files.load_if_changed() is not None
    assert caplog.records[-1].levelname == "WARNING"


def test_what_was_reloaded_is_named(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    shutil.copy(folder / "ca.pem", folder / "clients.pem")
    files = TlsFiles(config(folder, "clients"))
    files.load()
    shutil.copy(folder / "other-ca.pem", folder / "clients.pem")
    assert files.load_if_changed() is not None
    renew(folder)
    assert files.load_if_changed() is not None
    first, second = [record.getMessage() for record in caplog.records]
    assert first == f"TLS files reloaded: --tls-client-ca {folder / 'clients.pem'}"
    assert second == (
        f"TLS files reloaded: --tls-cert {folder / 'server.pem'}, --tls-key {folder / 'server.key'}"
    )


# Dates of certificates, against what the openssl command says.


def test_the_first_certificate_of_a_chain_counts(tmp_path: Path) -> None:
    folder = make_certificates(tmp_path)
    own, issuer = (folder / name for name in ("server.pem", "ca.pem"))
    found = read_validity(own.read_text() + issuer.read_text())
    assert found.ends - found.begins == timedelta(days=2)
    assert not found.problem(datetime.now(UTC))
    assert read_validity("text before\n" + own.read_text()) == found


@pytest.mark.parametrize(
    "text", ["", "x", f"{BEGIN}\n{END}", f"{BEGIN}\nAAAA\n{END}", f"{BEGIN}\n!\n{END}", BEGIN]
)
def test_what_is_no_certificate_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="certificate"):
        read_validity(text)


@pytest.mark.parametrize("size", range(0, 200, 7))
def test_a_certificate_that_is_cut_off_is_refused(tmp_path: Path, size: int) -> None:
    import base64

    data = base64.b64encode(bytes([0x30, 0x82, 4, 0]) + bytes(size)).decode()
    with pytest.raises(ValueError, match="not a certificate"):
        read_validity(f"{BEGIN}\n{data}\n{END}")


def test_a_problem_names_the_date() -> None:
    validity = Validity(datetime(2026, 1, 2, tzinfo=UTC), datetime(2026, 3, 4, 5, 6, tzinfo=UTC))
    assert validity.problem(datetime(2026, 2, 1, tzinfo=UTC)) == ""
    assert validity.problem(datetime(2027, 1, 1, tzinfo=UTC)) == "expired on 2026-03-04 05:06 UTC"
    early = validity.problem(datetime(2025, 1, 1, tzinfo=UTC))
    assert early == "not valid before 2026-01-02 00:00 UTC"

"""What the thread beside the event loop does when the loop is stuck."""

import asyncio
import os
import signal
import socket
import ssl
import threading
import urllib.error
import urllib.request

import pytest
from certificates import make_certificates

from penstock.protocols.watchdog import LATE_S, Grace, Pulse, Watchdog
from penstock.system.exit_codes import ExitCode


class TestPulse:
    def test_silence_counts_from_the_question(self):
        pulse = Pulse()
        assert pulse.silent_s(100.0) == 0.0
        assert pulse.ask(100.0) and not pulse.ask(103.0)
        assert pulse.silent_s(105.0) == 5.0
        pulse.answer()
        assert pulse.silent_s(105.0) == 0.0 and pulse.ask(106.0)


class TestGrace:
    @pytest.mark.parametrize(
        ("signalled_at", "now", "silent_s", "expected"),
        [
            (None, 1000.0, 999.0, False),
            (10.0, 39.0, 25.0, False),
            (10.0, 40.0, 25.0, True),
            (10.0, 40.0, LATE_S - 0.1, False),
            (10.0, 80.0, LATE_S, True),
        ],
    )
    def test_only_a_loop_that_says_nothing_is_ended(self, signalled_at, now, silent_s, expected):
        assert Grace(30.0, signalled_at).is_over(now, silent_s) is expected


def get(port, trusts=None):
    """With `trusts`, the certificate of an issuer, over TLS."""
    scheme = "http" if trusts is None else "https"
    context = None if trusts is None else ssl.create_default_context(cafile=trusts)
    url = f"{scheme}://127.0.0.1:{port}/v2/health/live"
    try:
        with urllib.request.urlopen(url, timeout=60, context=context) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


@pytest.mark.parametrize("has_tls", [False, True], ids=["plain", "tls"])
def test_a_stuck_loop_is_not_live_and_its_place_is_logged(tmp_path, caplog, has_tls):
    found, tls, trusts = [], None, None
    if has_tls:
        folder = make_certificates(tmp_path)
        tls, trusts = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), folder / "ca.pem"
        tls.load_cert_chain(folder / "server.pem", folder / "server.key")

    def hold_the_loop(port, is_seen):
        """As a template that never ends: until somebody has seen that the server is not live."""

        def ask():
            if has_tls:  # A client without TLS does not hold up the others.
                with socket.create_connection(("127.0.0.1", port)) as plain:
                    plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
            found.append(get(port, trusts))
            is_seen.set()

        asker = threading.Thread(target=ask)
        asker.start()
        assert is_seen.wait(60)
        asker.join()

    async def scenario():
        watchdog = Watchdog(30.0, lambda number: None, stuck_s=0.2)
        listener = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        watchdog.cover(listener.sockets, lambda: tls)
        watchdog.start()
        try:
            hold_the_loop(listener.sockets[0].getsockname()[1], threading.Event())
            while "runs again" not in caplog.text:
                await asyncio.sleep(0.01)
        finally:
            watchdog.stop()
            listener.close()
            await listener.wait_closed()

    asyncio.run(scenario())
    ((status, body),) = found
    assert status == 503 and b"stuck" in body
    errors = [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]
    # Told once; a machine that stands still may stop the loop elsewhere.
    (told,) = [each for each in errors if "hold_the_loop" in each]
    assert errors[0] == told


def test_signals_reach_a_loop_that_runs():
    async def scenario():
        received: asyncio.Queue[signal.Signals] = asyncio.Queue()
        before = signal.getsignal(signal.SIGTERM)
        watchdog = Watchdog(30.0, received.put_nowait)
        watchdog.start()
        try:
            for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGINT):
                os.kill(os.getpid(), number)
                assert await asyncio.wait_for(received.get(), 60) == number
        finally:
            watchdog.stop()
        assert signal.getsignal(signal.SIGTERM) is before

    asyncio.run(scenario())


@pytest.mark.parametrize(("grace_s", "num_signals"), [(0.0, 1), (1000.0, 2)])
def test_a_stuck_loop_ends_with_its_grace_period_or_a_second_signal(grace_s, num_signals, caplog):
    async def scenario():
        codes, is_ended = [], threading.Event()

        def end(code):
            codes.append(code)
            is_ended.set()

        watchdog = Watchdog(grace_s, lambda number: None, 0.2, end)
        watchdog.start()
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            while num_signals == 2 and not is_ended.wait(0.5):
                os.kill(os.getpid(), signal.SIGTERM)
            assert is_ended.wait(60)
        finally:
            watchdog.stop()
        return codes

    assert asyncio.run(scenario())[0] == ExitCode.FAILED
    assert "ending" in caplog.text


def test_a_listener_is_closed_when_it_is_released():
    async def scenario():
        watchdog = Watchdog(30.0, lambda number: None)
        watchdog.start()
        listener = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        watchdog.cover(listener.sockets)
        address = listener.sockets[0].getsockname()
        watchdog.release()
        listener.close()
        await listener.wait_closed()
        with socket.socket() as again:
            again.bind(address)
            again.listen()
        watchdog.stop()

    asyncio.run(scenario())


def test_a_service_manager_hears_of_a_loop_that_runs_only():
    """Between two signs of life of a stuck loop nothing is told."""
    beats = threading.Semaphore(0)

    async def scenario():
        watchdog = Watchdog(30.0, lambda number: None, stuck_s=0.2, on_alive=beats.release)
        watchdog.start()
        try:
            assert await asyncio.to_thread(beats.acquire, timeout=60)
            loop_is_free = threading.Event()
            while beats.acquire(blocking=False):
                pass
            # The loop's own thread waits here, until the watchdog has looked a few times.
            loop_is_free.wait(2.5)
            told = 0
            while beats.acquire(blocking=False):
                told += 1
            assert told <= 1
            assert await asyncio.to_thread(beats.acquire, timeout=60)
        finally:
            watchdog.stop()

    asyncio.run(scenario())

"""Answers of a build behind its server: many concurrent clients, all instances, real batches.

A build may answer well in a trial process and differently behind the server: in a second instance,
after many requests, or because of its environment. So the served answers of the build to commit are
compared with those that the accuracy gate judged.
"""

from __future__ import annotations

import http.client
import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from penstock.config import ModelConfig
from penstock.errors import BackendFailed
from penstock.optimizer.simulate import fitted
from penstock.optimizer.trials import stacked
from penstock.types import Array
from penstock.wire.v2_client import HEAD_LENGTH, decode_answer, encode_infer

NUM_CLIENTS = 16
# Requests per instance: a model that degrades with use shows it after some hundreds.
NUM_REQUESTS = 1024
TIMEOUT_S = 60.0
# A server in slo mode refuses requests that would be late; the client retries this often.
NUM_TRIES = 20
RETRY_S = 0.02

Row = Mapping[str, Array]


@dataclass(slots=True)
class _Asked:
    """State shared by the clients: encoded rows, the next turn, and the answers."""

    messages: Sequence[tuple[int, bytes]]
    turns: itertools.count[int]
    num_requests: int
    ends_at: float
    lock: threading.Lock = field(default_factory=threading.Lock)
    answers: list[tuple[int, dict[str, Array]]] = field(default_factory=list)


def ask(
    address: str, config: ModelConfig, rows: Sequence[Row], seconds: float
) -> list[tuple[int, dict[str, Array]]]:
    """Return the server's answers with the index of each row, some rows several times; as many as
    `seconds` allow, and at least one per client."""
    fitting = fitted(rows, config)
    has_one = fitting is not rows
    messages = [encode_infer(stacked(config, [row])) for row in fitting]
    num_requests = max(len(rows), NUM_REQUESTS * config.num_instances)
    asked = _Asked(messages, itertools.count(), num_requests, time.monotonic() + seconds)
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        clients = [pool.submit(_be_client, address, asked) for _ in range(NUM_CLIENTS)]
        for client in clients:
            client.result()
    if config.max_batch_size == 0 or has_one:
        return asked.answers
    return [
        (place, {name: array[0, ...] for name, array in answer.items()})
        for place, answer in asked.answers
    ]


def _be_client(address: str, asked: _Asked) -> None:
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(parts.netloc, timeout=TIMEOUT_S)
    try:
        while True:
            with asked.lock:
                turn = next(asked.turns)
            is_late = time.monotonic() > asked.ends_at and turn >= NUM_CLIENTS
            if turn >= asked.num_requests or is_late:
                return
            place = turn % len(asked.messages)
            answer = _infer(connection, f"{parts.path}/infer", asked.messages[place])
            if answer is not None:
                with asked.lock:
                    asked.answers.append((place, answer))
    except (OSError, http.client.HTTPException) as error:
        raise BackendFailed(f"the server did not answer: {error or type(error).__name__}") from None
    finally:
        connection.close()


def _infer(
    connection: http.client.HTTPConnection, path: str, message: tuple[int, bytes]
) -> dict[str, Array] | None:
    """Send one request; None if the server refuses all tries."""
    head_length, body = message
    for _ in range(NUM_TRIES):
        connection.request("POST", path, body, {HEAD_LENGTH: str(head_length)})
        response = connection.getresponse()
        data = response.read()
        if response.status == http.HTTPStatus.OK:
            return decode_answer(int(response.headers[HEAD_LENGTH]), data)
        if response.status != http.HTTPStatus.SERVICE_UNAVAILABLE:
            raise BackendFailed(f"the server answered {response.status}: {data[:300]!r}")
        time.sleep(RETRY_S)
    return None

"""Answers of a build behind its server: many concurrent clients, all instances, real batches.

A build may answer well in a trial process and differently behind the server: in a second instance,
after many requests, or because of its environment. So the served answers of the build to commit are
compared with those that the accuracy gate judged.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from urllib.parse import urlsplit

from penstock.config import ModelConfig
from penstock.errors import BackendFailed
from penstock.optimizer.simulate import Row, fitted
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


def ask(
    address: str, config: ModelConfig, rows: Sequence[Row], seconds: float
) -> list[tuple[int, dict[str, Array]]]:
    """Return the server's answers with the index of each row, some rows several times; as many as
    `seconds` allow, and at least one per client."""
    fitting = fitted(rows, config)
    has_one = fitting is not rows
    messages = [encode_infer(stacked(config, [row])) for row in fitting]
    num_requests = max(len(rows), NUM_REQUESTS * config.num_instances)
    ends_at = time.monotonic() + seconds
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        clients = [
            pool.submit(_be_client, address, messages, range(n, num_requests, NUM_CLIENTS), ends_at)
            for n in range(NUM_CLIENTS)
        ]
        answers = [answer for client in clients for answer in client.result()]
    if config.max_batch_size == 0 or has_one:
        return answers
    return [
        (place, {name: array[0, ...] for name, array in answer.items()})
        for place, answer in answers
    ]


def _be_client(
    address: str, messages: Sequence[tuple[int, bytes]], turns: Sequence[int], ends_at: float
) -> list[tuple[int, dict[str, Array]]]:
    parts = urlsplit(address)
    found: list[tuple[int, dict[str, Array]]] = []
    try:
        with closing(http.client.HTTPConnection(parts.netloc, timeout=TIMEOUT_S)) as connection:
            for turn in turns:
                if time.monotonic() > ends_at and turn >= NUM_CLIENTS:
                    break
                place = turn % len(messages)
                answer = _infer(connection, f"{parts.path}/infer", messages[place])
                if answer is not None:
                    found.append((place, answer))
    except (OSError, http.client.HTTPException) as error:
        raise BackendFailed(f"the server did not answer: {error or type(error).__name__}") from None
    return found


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

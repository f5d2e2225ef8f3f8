"""Bodies of inference messages with a new head: their encoding, and where their JSON ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from penstock.config import HttpLimits
from penstock.errors import InvalidRequest, PenstockError, TooLarge
from penstock.protocols.http import Exchange
from penstock.protocols.http_errors import Refusal, WrongHead
from penstock.protocols.infer_http import InferCall
from penstock.wire import compression


@dataclass(frozen=True, slots=True, eq=False)
class InferBodies:
    """Checks bodies, and inflates compressed ones: `infer` or `refuse` then hears of them later."""

    _limits: HttpLimits
    _infer: Callable[[InferCall, Exchange], None]
    _refuse: Callable[[Exchange, object, Refusal], None]
    # Counts a request whose body or encoding is wrong.
    _count: Callable[[InferCall, float, Refusal], None]
    _inflating: set[asyncio.Task[None]] = field(default_factory=set)

    def read(self, call: InferCall, exchange: Exchange) -> bool:
        """Check a head that was not seen before. False if its body has to be inflated first."""
        try:
            return self._read(call, exchange)
        except (PenstockError, WrongHead) as error:
            self._count(call, exchange.received, error)
            raise

    def _read(self, call: InferCall, exchange: Exchange) -> bool:
        head = exchange.head
        encoding = head.headers.get(b"content-encoding", b"identity").lower()
        if encoding not in (b"identity", *compression.ENCODINGS):
            text = f"Content-Encoding '{encoding.decode('latin-1')}' is not supported"
            raise WrongHead(415, text)
        if encoding != b"identity":
            task = asyncio.get_running_loop().create_task(self._inflate(call, exchange, encoding))
            self._inflating.add(task)
            task.add_done_callback(self._inflating.discard)
            return False
        long = exchange.long
        size = len(exchange.body) if long is None else long.num_received
        call.json_bytes = json_bytes_of(head.headers, size, self._limits)
        head.note = call
        return True

    async def _inflate(self, call: InferCall, exchange: Exchange, encoding: bytes) -> None:
        """Inflate off the loop, because a few bytes may expand to many."""
        packed, limit = exchange.body, self._limits.max_body_bytes
        is_read = False
        try:
            exchange.body = await asyncio.to_thread(compression.inflate, packed, encoding, limit)
            size = len(exchange.body)
            call.json_bytes = json_bytes_of(exchange.head.headers, size, self._limits)
            is_read = True
            self._infer(call, exchange)
        except PenstockError as error:
            if not is_read:
                self._count(call, exchange.received, error)
            exchange.body = packed
            self._refuse(exchange, call, error)
        except Exception:  # Keep serving.
            exchange.reply_bug()

    async def close(self) -> None:
        for task in self._inflating:
            task.cancel()
        await asyncio.gather(*self._inflating, return_exceptions=True)


def json_bytes_of(headers: Mapping[bytes, bytes], size: int, limits: HttpLimits) -> int | None:
    """Return the length of the JSON part of a body of `size` bytes; None when it is the whole."""
    header = "Inference-Header-Content-Length"
    given, length = headers.get(header.lower().encode()), None
    if given is not None:
        if not given.isdigit() or len(given) > 18:
            text = f"{header} must be a number of bytes, got '{given.decode('latin-1')}'"
            raise InvalidRequest(text)
        length = int(given)
        if length > size:
            raise InvalidRequest(f"{header} is {length}, the body has {size} bytes")
    if (size if length is None else length) > limits.max_json_bytes:
        raise too_much_json(limits, "send large tensors as binary data, or ")
    return length


def too_much_json(limits: HttpLimits, advice: str = "") -> TooLarge:
    most = limits.max_json_bytes
    return TooLarge(f"the JSON of a request may have {most} bytes; {advice}raise --max-json-bytes")

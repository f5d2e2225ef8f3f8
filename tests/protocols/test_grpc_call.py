"""gRPC calls frame by frame: messages, compression, deadlines, and calls that are malformed."""

from __future__ import annotations

import gzip
import zlib
from typing import Any

import pytest
from h2_client import (
    STREAM,
    call,
    connected,
    data,
    head,
    headers,
    make_server,
    message,
)

from penstock.wire import h2_frames as h2
from penstock.wire.h2_frames import H2Error

GZIP, DEFLATE = (b"grpc-encoding", b"gzip"), (b"grpc-encoding", b"deflate")
LARGE = bytes(range(256)) * 100


async def status(client: Any, number: int) -> tuple[int, str]:
    fields = dict((await client.answer(number))[0])
    return int(fields[b"grpc-status"]), fields.get(b"grpc-message", b"").decode()


@pytest.mark.parametrize(
    ("fields", "sent", "code", "words"),
    [
        (head(), b"", 13, "no message"),
        (head(), message(b"a") * 2, 13, "several messages"),
        (head(), message(b"abc")[:-1], 13, "incomplete"),
        (head(), b"\0\0", 13, "incomplete"),
        (head(), message(b"abc", 1), 13, "marked as compressed"),
        (head(STREAM), message(b"abc", 2), 13, "marked as compressed"),
        (head(STREAM, GZIP), message(b"abc", 2), 13, "marked as compressed"),
        (head(STREAM, GZIP), message(b"abc", 1), 13, "the message is not gzip"),
        (head(STREAM, GZIP), message(LARGE, 1), 13, "the message is not gzip"),
        (head(STREAM, DEFLATE), message(zlib.compress(LARGE)[:-9], 1), 13, "cut off"),
        (head(STREAM), b"\0\x7f\xff\xff\xff" + bytes(9), 8, "--grpc-max-message-bytes"),
        (head(STREAM, GZIP), message(gzip.compress(bytes(1 << 18)), 1), 8, "inflates to more"),
        (head("/a/b"), message(b"a"), 12, "Method not found!"),
        (head("/inference.GRPCInferenceService/modelinfer"), message(b"a"), 12, "not found"),
        (head(STREAM, (b"grpc-encoding", b"br")), message(b"a"), 12, "expected identity, deflate"),
        (head(STREAM, (b"grpc-timeout", b"1")), message(b"a"), 3, "grpc-timeout '1'"),
        (head(STREAM, (b"grpc-timeout", b"123456789S")), message(b"a"), 3, "8 digits"),
        (head(STREAM, (b"grpc-timeout", b"-1S")), message(b"a"), 3, "grpc-timeout"),
    ],
)
async def test_malformed_calls_are_told_what_is_wrong(fields, sent, code, words):
    async with connected(server=make_server(max_message_bytes=1 << 17)) as client:
        client.send(headers(1, fields), data(1, sent))
        found, text = await status(client, 1)
        assert found == code
        assert words in text
        client.send(call(3))
        assert (await status(client, 3))[0] == 0


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({b":method": b"GET"}, b"405"),
        ({b"content-type": b"application/json"}, b"415"),
        ({b"content-type": b"application/grpc-web"}, b"415"),
    ],
)
async def test_what_is_not_a_grpc_call_gets_a_status_of_http(changes, code):
    fields = [(name, changes.get(name, value)) for name, value in head()]
    async with connected() as client:
        client.send(headers(1, fields), data(1, message(b"a")))
        answer, _ = await client.answer(1)
        assert (b":status", code) in answer
        client.send(call(3))
        assert (await status(client, 3))[0] == 0


async def test_a_call_without_a_body_ends_with_its_head():
    async with connected() as client:
        client.send(headers(1, head(), h2.END_HEADERS | h2.END_STREAM))
        assert "no message" in (await status(client, 1))[1]
        client.send(headers(3, head(STREAM), h2.END_HEADERS | h2.END_STREAM))
        assert (await status(client, 3))[0] == 0


async def test_messages_and_frames_need_not_have_the_same_bounds():
    texts = [b"", b"a", bytes(20_000), b"b" * 300, LARGE]
    sent = b"".join(map(message, texts))
    async with connected(h2.settings({h2.INITIAL_WINDOW_SIZE: 1 << 20})) as client:
        for number, size in ((1, 1 << 20), (3, 7), (5, 4096)):
            step = size if size != 7 else 977
            client.send(headers(number, head(STREAM)))
            for start in range(0, len(sent), step):
                client.send(data(number, sent[start : start + step], 0))
            client.send(data(number, b""), h2.window_update(0, len(sent)))
            fields, body = await client.answer(number)
            assert body == sent
            assert (b"grpc-status", b"0") in fields


@pytest.mark.parametrize(
    ("field", "compress"),
    [(GZIP, gzip.compress), (DEFLATE, zlib.compress)],
    ids=["gzip", "deflate"],
)
async def test_compressed_messages_keep_their_order(field, compress):
    """Long ones are inflated in a thread; those behind them wait."""
    noise = bytes((n * n * 31 + n // 7) % 256 for n in range(60_000))
    texts = [b"first", noise, b"short", noise[::-1], b"", b"last"]
    sent = b"".join(message(compress(text), 1) if text else message(b"") for text in texts)
    async with connected(h2.settings({h2.INITIAL_WINDOW_SIZE: 1 << 20})) as client:
        client.send(h2.window_update(0, 1 << 20), headers(1, head(STREAM, field)))
        client.send(data(1, sent[:70_000], 0), data(1, sent[70_000:]))
        _, body = await client.answer(1)
        assert body == b"".join(map(message, texts))


@pytest.mark.parametrize("encoding", [b"gzip", b"deflate"])
async def test_answers_are_compressed_for_clients_that_accept_it(encoding):
    accept = (b"grpc-accept-encoding", b"identity, deflate,gzip")
    inflate = {b"gzip": gzip.decompress, b"deflate": zlib.decompress}[encoding]
    async with connected(server=make_server(compression=encoding.decode())) as client:
        client.send(call(1, LARGE, head(STREAM, accept)))
        fields, body = await client.answer(1)
        assert (b"grpc-encoding", encoding) in fields
        assert body[0] == 1 and len(body) < len(LARGE) and inflate(body[5:]) == LARGE
        client.send(call(3, b"short", head(STREAM, accept)))
        assert (await client.answer(3))[1] == message(b"short")
        client.send(call(5, LARGE, head(STREAM)))
        fields, body = await client.answer(5)
        assert body == message(LARGE) and b"grpc-encoding" not in dict(fields)


async def test_a_deadline_ends_a_call():
    async with connected() as client:
        for number, timeout in ((1, b"30m"), (3, b"1000u"), (5, b"0S")):
            fields = head("/inference.GRPCInferenceService/ModelInfer", (b"grpc-timeout", timeout))
            client.send(call(number, b"never", fields))
            assert await status(client, number) == (4, "Deadline Exceeded")
        client.send(call(7, b"quick", head(STREAM, (b"grpc-timeout", b"1H"))))
        assert (await status(client, 7))[0] == 0


async def test_a_message_that_is_too_long_is_refused_before_it_comes():
    async with connected(server=make_server(max_message_bytes=1000)) as client:
        client.send(headers(1), data(1, b"\0" + (1001).to_bytes(4), 0))
        assert (await status(client, 1))[0] == 8
        assert (await client.until(h2.RST_STREAM, 1)).code == H2Error.NO_ERROR
        client.send(headers(3), data(3, message(bytes(1001))))
        assert (await status(client, 3))[0] == 8
        client.send(call(5, bytes(1000)))
        assert (await status(client, 5))[0] == 0


@pytest.mark.parametrize("kind", [b"application/grpc+proto", b"application/grpc; charset=utf-8"])
async def test_the_content_type_may_say_more(kind):
    fields = [(name, kind if name == b"content-type" else value) for name, value in head()]
    async with connected() as client:
        client.send(call(1, b"a", fields))
        assert (await status(client, 1))[0] == 0

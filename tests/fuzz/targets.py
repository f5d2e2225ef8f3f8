"""Every parser of bytes that others wrote, as a function of bytes: whatever comes, only the errors
that belong there leave, and what is accepted keeps its law. Run by hypothesis in `make test` and
under coverage guidance by `make fuzz` (`run.py`)."""

import asyncio
import contextlib
import io
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
from tritonclient.grpc import service_pb2

from penstock import slo
from penstock.benchmark.exchange import TimedExchange as LoadExchange
from penstock.benchmark.targets import http_connection
from penstock.benchmark.targets.http_client import HttpClient
from penstock.benchmark.targets.http_messages import Causes, parse_url
from penstock.benchmark.targets.openai import StreamReader
from penstock.config import GrpcConfig, HttpLimits
from penstock.data import InputSpec, RequestForm, open_source
from penstock.data.lengths import draw as draw_lengths
from penstock.data.lengths import parse as parse_lengths
from penstock.data.traces import read_trace
from penstock.errors import ConfigError, PenstockError, TooLarge
from penstock.protocols.gate import Gate
from penstock.protocols.grpc_call import GrpcCall, UnaryCall
from penstock.protocols.grpc_server import GrpcServer
from penstock.protocols.h2 import H2Connection
from penstock.protocols.http import Connection, Exchange
from penstock.protocols.http_server import HttpServer
from penstock.protocols.key_file import read_keys
from penstock.protocols.route_table import INFERENCE
from penstock.repository import ensemble_parameters, pbtxt
from penstock.types import Buffer, Request, TensorSpec
from penstock.wire import compression, frames, h2_frames, hpack, v2, v2_pb

MAX_INFLATED = 1 << 16
# Between requests; no JSON contains it.
SEPARATOR = b"\x1e"


class Nobody:
    def respond(self, request: Request, answer: object, final: bool) -> None:
        raise AssertionError("nothing is answered here")


def v2_json(data: bytes) -> None:
    """Several requests, one behind the other: to each a codec that has seen the others says what a
    new one says. The first two bytes are the length of the JSON part, if there is to be one."""
    codec = v2.Codec()
    for request in data.split(SEPARATOR):
        length, body = int.from_bytes(request[:2], "little"), request[2:]
        json_bytes = None if length == 0xFFFF else min(length, len(body))
        remembered = _decoded(codec, body, json_bytes)
        fresh = _decoded(v2.Codec(), body, json_bytes)
        assert remembered == fresh, (remembered, fresh)


def _decoded(codec: v2.Codec, body: bytes, json_bytes: int | None) -> object:
    try:
        request = codec.decode_infer(body, json_bytes, Nobody(), 0.0)
    except PenstockError as error:
        assert str(error)
        return type(error), str(error)
    inputs = [(t.name, t.datatype, t.shape, bytes(t.data)) for t in request.inputs]
    outputs = [(each.name, each.parameters) for each in request.outputs]
    rest = (request.priority, request.timeout_s, request.prefers_binary)
    return request.id, inputs, outputs, request.parameters, rest


def event_stream(data: bytes) -> None:
    """A streamed answer, which says the same wherever it is cut. The first byte says where."""
    cut, stream = data[:1], data[1:]
    position = cut[0] % (len(stream) + 1) if cut else 0
    whole, halves = _read_stream(stream), _read_stream(stream[:position], stream[position:])
    single = _read_stream(*(stream[i : i + 1] for i in range(len(stream))))
    assert whole == halves == single, (whole, halves, single)


def _read_stream(*pieces: bytes) -> object:
    exchange = LoadExchange(0.0, b"", lambda exchange: None)
    reader = StreamReader(exchange, Causes(), lambda: 1.0)
    reader.head(200, {b"content-type": b"text/event-stream"})
    for piece in pieces:
        reader.chunk(piece)
    failure, stream = reader.end(), exchange.stream
    assert stream is not None
    return failure, stream.times, stream.num_input_tokens, stream.num_output_tokens


def v2_protobuf(data: bytes) -> None:
    with contextlib.suppress(PenstockError):
        message = v2_pb.parse(service_pb2.ModelInferRequest, data)
        v2_pb.decode_infer(message, Nobody(), 0.0)


def header_blocks(data: bytes) -> None:
    """Blocks of one connection. What is decoded is the same after encoding."""
    decoder, encoder, again = (
        hpack.HpackDecoder(4096),
        hpack.HpackEncoder(),
        hpack.HpackDecoder(1 << 20, 1000),
    )
    for block in data.split(SEPARATOR):
        try:
            fields = decoder.decode(block)
        except hpack.HeaderListTooLarge:
            continue
        except hpack.HpackError as error:
            assert str(error)
            return
        assert again.decode(encoder.encode(tuple(fields))) == fields
        assert decoder.table_bytes <= hpack.TABLE_BYTES


def compressed(data: bytes) -> None:
    for encoding in compression.ENCODINGS:
        try:
            body = compression.inflate(data, encoding, MAX_INFLATED)
        except (PenstockError, TooLarge):
            continue
        assert len(body) <= MAX_INFLATED
        packed = compression.deflate(body, encoding)
        assert compression.inflate(packed, encoding, MAX_INFLATED) == body


def frame(data: bytes) -> None:
    """What can be read can be written and reads the same again."""
    for decode in (
        frames.decode_to_worker,
        frames.decode_from_worker,
        frames.decode_shard_to_worker,
        frames.decode_worker_to_shard,
        frames.decode_to_shard,
        frames.decode_all_to_shard,
        frames.decode_all_from_shard,
    ):
        try:
            read = decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        again = frames.encode(read)
        assert frames.encode(decode(again)) == again


def config_pbtxt(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    with contextlib.suppress(ConfigError):
        pbtxt.resolve(pbtxt.parse(text), "model", Path("/nowhere"))


def condition_text(data: bytes) -> None:
    """What is read as a condition reads back from its parts, and the same of a default."""
    text = data.decode(errors="replace")
    with contextlib.suppress(ValueError):
        found = ensemble_parameters.parse_condition(text)
        written = [f"{each.tensor} {each.operator} {_constant(each.value)}" for each in found]
        assert ensemble_parameters.parse_condition(" and ".join(written)) == found, text
    with contextlib.suppress(ValueError):
        default = ensemble_parameters.parse_default(text)
        if default.value is not None:
            again = ensemble_parameters.parse_default(_constant(default.value))
            assert again == default, text


def _constant(value: float | str) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


def slo_text(data: bytes) -> None:
    try:
        parsed = slo.parse(data.decode("utf-8", "replace"))
    except ConfigError as error:
        assert error.problems
        return
    assert slo.parse(str(parsed)) == parsed


_folder = tempfile.TemporaryDirectory()


def api_keys(data: bytes) -> None:
    path = Path(_folder.name) / "keys.toml"
    path.write_bytes(data)
    with contextlib.suppress(ConfigError):
        read_keys(path)


def lengths_text(data: bytes) -> None:
    with contextlib.suppress(ConfigError):
        lengths = parse_lengths(data.decode("utf-8", "replace").replace("list:", ""))
        assert draw_lengths(lengths, np.random.default_rng(0), 10).min() >= 1


def trace_file(data: bytes) -> None:
    """The same bytes as a table and as lines of JSON."""
    for suffix in ("csv", "jsonl"):
        path = Path(_folder.name) / f"trace.{suffix}"
        path.write_bytes(data)
        with contextlib.suppress(ConfigError):
            times = read_trace(path).times_s
            assert times[0] == 0
            assert all(earlier <= later for earlier, later in zip(times, times[1:], strict=False))


def data_file(data: bytes) -> None:
    """The same bytes as every format that this process reads without another library."""
    for suffix in ("npy", "npz", "json", "jsonl"):
        path = Path(_folder.name) / f"data.{suffix}"
        path.write_bytes(data)
        for form in _FORMS:
            with contextlib.suppress(ConfigError):
                open_source(InputSpec(str(path)), form, 0, 1).next()


_FORMS = [
    *(
        RequestForm("tensors", (TensorSpec("x", datatype, shape),))
        for datatype in ("FP16", "UINT64", "BF16", "BYTES", "BOOL")
        for shape in ((2,), (), (-1, 2))
    ),
    RequestForm("prompt"),
    RequestForm("messages"),
]


class Wire:
    """A transport that keeps what it is given."""

    def __init__(self) -> None:
        self.sent = b""
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.sent += data

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def get_extra_info(self, name: str) -> "Wire":
        return self

    def setsockopt(self, *option: int) -> None: ...

    def can_write_eof(self) -> bool:
        return True

    write_eof = close

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def set_write_buffer_limits(self, high: int) -> None: ...


def echo(exchange: Exchange) -> None:
    exchange.reply(200, b"", (exchange.head.method, exchange.head.path, exchange.body))


UNARY, STREAM = INFERENCE + "ModelInfer", INFERENCE + "ModelStreamInfer"


class EchoOnce(UnaryCall):
    __slots__ = ()

    def run(self, data: Buffer) -> None:
        self.reply([data])


class EchoAll(GrpcCall):
    __slots__ = ()

    def message(self, data: Buffer) -> None:
        self.send([data])

    def ended(self) -> None:
        self.end()


async def _make_servers() -> tuple[HttpServer, GrpcServer]:
    grpc = GrpcServer({UNARY: EchoOnce, STREAM: EchoAll}, GrpcConfig(), Gate(), HttpLimits())
    return HttpServer(echo, HttpLimits()), grpc


_server, _grpc_server = asyncio.run(_make_servers())
_grpc_server.now = lambda: 0.0


def http2(data: bytes) -> None:
    """Frames after the preface and SETTINGS mean the same whether they come at once or in two
    pieces, cut where the first byte says; and nothing goes wrong inside."""
    if not data:
        return
    cut, frames = data[0], data[1:]
    at_once, in_two = _frames(frames), _frames(frames[:cut], frames[cut:])
    assert at_once == in_two
    assert b"internal error" not in at_once


def _frames(*pieces: bytes) -> bytes:
    connection, wire = H2Connection(_grpc_server), Wire()
    connection.connection_made(wire)  # type: ignore[arg-type]
    for piece in (h2_frames.PREFACE + h2_frames.settings({}), *pieces):
        if piece and not wire.is_closed:
            connection.data_received(piece)
    connection.connection_lost(None)
    return wire.sent


def http(data: bytes) -> None:
    """Bytes mean the same whether they come at once or in two pieces, cut where the first byte
    says; and our answer is never that something went wrong inside. Of two mistakes in one message
    either may be told."""
    if not data:
        return
    cut, message = data[0], data[1:]
    at_once, in_two = _answers(message), _answers(message[:cut], message[cut:])
    assert _without_reasons(at_once) == _without_reasons(in_two)
    assert not at_once or at_once.startswith(b"HTTP/1.1 ")
    assert b"HTTP/1.1 500 " not in at_once


def _without_reasons(answers: bytes) -> bytes:
    """An error is always the last answer."""
    return re.sub(rb'Content-Length: \d+\r\n\r\n{"error":.*', b"", answers, flags=re.S)


def _answers(*pieces: bytes) -> bytes:
    connection, wire = Connection(_server), Wire()
    connection.connection_made(wire)  # type: ignore[arg-type]
    for piece in pieces:
        if piece and not wire.is_closed:
            connection.data_received(piece)
    connection.connection_lost(None)
    return wire.sent


def http_answer(data: bytes) -> None:
    """An answer means the same whether it comes at once or in two pieces, cut where the first byte
    says, and whether or not one like it came before; and it ends its exchange exactly once."""
    if not data:
        return
    cut, answer = data[0], data[1:]
    client = HttpClient(parse_url("http://a"), 60.0, 1)
    fresh = HttpClient(parse_url("http://a"), 60.0, 1)
    outcomes = [
        _outcome(client, answer),
        _outcome(client, answer),
        _outcome(client, answer[:cut], answer[cut:]),
        _outcome(fresh, answer[:cut], answer[cut:]),
    ]
    assert outcomes == outcomes[:1] * 4


def _outcome(client: HttpClient, *pieces: bytes) -> str | None:
    """Why the exchange failed, if it did."""
    connection, wire = http_connection.ClientConnection(client), Wire()
    connection.connection_made(wire)  # type: ignore[arg-type]
    ended: list[LoadExchange] = []
    connection.start(LoadExchange(0.0, b"question", ended.append))
    for piece in pieces:
        if piece and not wire.is_closed:
            connection.data_received(piece)
    connection.eof_received()
    connection.connection_lost(None)
    assert len(ended) == 1
    assert client.num_connections == 0
    return ended[0].failure


_TENSOR = b'{"name":"x","datatype":"INT32","shape":[2],"data":[1,2]}'
_SIZED = b'{"name":"x","datatype":"INT32","shape":[2],"parameters":{"binary_data_size":8}}'
_PIECE = b'data: {"choices":[{"delta":{"content":"x"},"text":"y"}]}\n\n'
_USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2}}\n\n'
_KEY = b'[[key]]\nname = "a"\nsecret = "0123456789abcdef"\nscopes = ["infer"]\n'
_CONFIG = b"""backend: "null" max_batch_size: 4 dynamic_batching { preferred_batch_size: [2, 4] }
input { name: "x" data_type: TYPE_INT32 dims: [ -1 ] } output { name: "y" data_type: TYPE_FP32 }
"""
_ENSEMBLE = b"""platform: "ensemble" max_batch_size: 4
input { name: "x" data_type: TYPE_INT32 dims: 1 } output { name: "y" data_type: TYPE_INT32 dims: 1 }
ensemble_scheduling { step { model_name: "a" model_version: -1
input_map { key: "i" value: "x" } output_map { key: "o" value: "y" } } }
parameters { key: "penstock.if.0" value { string_value: "x > 0" } }
parameters { key: "penstock.default.y" value { string_value: "x" } }
parameters { key: "penstock.fan_out.a" value { string_value: "x" } }
"""


def _saved(save: Callable[[io.BytesIO, np.ndarray], None]) -> bytes:
    file = io.BytesIO()
    save(file, np.array([[1, 2]], np.uint8))
    return file.getvalue()


def _call(number: int, path: str, body: bytes) -> bytes:
    fields = ((b":method", b"POST"), (b":scheme", b"http"), (b":path", path.encode()))
    block = hpack.HpackEncoder().encode((*fields, (b"content-type", b"application/grpc")))
    head = h2_frames.frame(h2_frames.HEADERS, h2_frames.END_HEADERS, number, block)
    return head + h2_frames.frame(h2_frames.DATA, h2_frames.END_STREAM, number, body)


def _seeds() -> dict[Callable[[bytes], None], list[bytes]]:
    """Something to start from, so that luck is not needed to get past the first check."""
    request = service_pb2.ModelInferRequest(model_name="m", id="1")
    item = request.inputs.add(name="x", datatype="INT32", shape=[2])
    item.contents.int_contents.extend([1, 2])
    request.parameters["priority"].int64_param = 1
    raw = service_pb2.ModelInferRequest(model_name="m", raw_input_contents=[bytes(8)])
    raw.inputs.add(name="x", datatype="INT32", shape=[2])
    head = b'{"inputs":[' + _SIZED + b'],"outputs":[{"name":"y"}]}'
    whole = b'{"id":"1","inputs":[' + _TENSOR + b'],"parameters":{"priority":1,"timeout":5}}'
    strings = b'{"inputs":[' + _TENSOR.replace(b"INT32", b"BYTES").replace(b"1,2", b'"a","b"')
    get = b"\x05GET /v2 HTTP/1.1\r\nHost: x\r\n\r\n"
    post = b"\x30POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc"
    chunked = b"\x40POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    text = b"\xff\xff" + whole
    update = h2_frames.window_update(0, 9)
    sized = len(head).to_bytes(2, "little") + head + bytes(8)
    return {
        v2_json: [
            text,
            b"\xff\xff" + strings + b"]}",
            sized,
            SEPARATOR.join((text, text.replace(b"[1,2]", b"[3,4]"), text)),
            SEPARATOR.join((sized, sized)),
        ],
        event_stream: [
            b"\x20" + b": ping\n\n" + _PIECE + _USAGE + b"data: [DONE]\n\n",
            b"\x41" + _PIECE.replace(b"\n", b"\r\n") + b'data: {"error":{"message":"no"}}\r\n\r\n',
        ],
        v2_protobuf: [request.SerializeToString(), raw.SerializeToString()],
        header_blocks: [
            bytes.fromhex("828684418cf1e3c2e5f23a6ba0ab90f4ff1e828684be5886a8eb10649cbf"),
            bytes.fromhex("3fe11f400a637573746f6d2d6b65790d637573746f6d2d6865616465721ebe"),
        ],
        compressed: [compression.deflate(whole, each) for each in compression.ENCODINGS],
        frame: [
            frames.encode(frames.MapSlab(1, 4096)),
            frames.encode(frames.Dispatch(7, (), more=frames.Want((5,), geometry="g"))),
            frames.encode(frames.Claim(3, 16, 48, 0.5, True)),
            frames.encode(frames.Attach(1)),
            frames.encode(frames.StartFailed(("why",))),
            frames.encode(frames.Forwarded(1, frames.Parcel())),
            frames.join([frames.encode(frames.Cancel(1)), frames.encode(frames.Pong())]),
        ],
        config_pbtxt: [_CONFIG, _ENSEMBLE],
        condition_text: [
            b"score > 0.5 and not found and a:0 <= -1e3",
            b'lang == "d\\"e" and b != true',
            b'"none"',
            b"[]",
        ],
        slo_text: [b"p99 < 20ms, p50 ttft < 100ms, throughput >= 500/s at 200/s gamma 3"],
        api_keys: [_KEY, _KEY + _KEY],
        http_answer: [
            b"\x10HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc",
            b"\x40HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;a=b\r\nabc\r\n0\r\n\r\n",
            b"\x20HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n",
            b"\x20HTTP/1.1 503 Busy\r\nContent-Length: 16\r\n\r\n" + b'{"error":"full"}',
            b"\x12HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nall the rest",
        ],
        lengths_text: [b"128", b"uniform:16:512", b"normal:128:30", b"lognormal:100:900"],
        trace_file: [
            b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n",
            b"time_ms\n1\n2.5\n",
            b'{"timestamp": 1, "input_length": 2, "output_length": 3}\n',
        ],
        data_file: [
            b'{"x": [1, 2]}\n{"x": {"content": {"b64": "AAAAAA=="}, "shape": [2]}}\n',
            b'{"data": [{"x": ["a", "b"]}, {"x": [true, false]}]}',
            b'[{"prompt": "a", "max_tokens": 3}, {"messages": [{"role": "user", "content": "b"}]}]',
            b'{"conversations": [{"from": "human", "value": "c"}]}',
            _saved(np.save),
            _saved(np.savez),
        ],
        http2: [
            bytes((30,)) + _call(1, UNARY, b"\0\0\0\0\3abc"),
            bytes((99,)) + _call(1, STREAM, b"\0\0\0\0\1a\0\0\0\0\0") + update,
            bytes((9,)) + _call(1, "/a/b", b"") + h2_frames.reset(1, h2_frames.H2Error.CANCEL),
            bytes((12,)) + h2_frames.frame(h2_frames.HEADERS, 0, 1, b"\x83\x86"),
            bytes((5,)) + h2_frames.settings({4: 0, 1: 0}) + _call(3, UNARY, b"\0\0\0\0\0"),
        ],
        http: [get, post, get + get[1:], chunked + b"3;a=b\r\nabc\r\n0\r\nT: u\r\n\r\n"],
    }


SEEDS = _seeds()
TARGETS = {target.__name__: target for target in SEEDS}

"""Requests that no server should take: what is sent, which answer is right, which words must be in
it. Written by hand; one line or two each, so that the list reads as the specification.

The models they are sent to do nothing but repeat their inputs; `good` gets only good requests.
"""

import gzip
import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpc_health.v1 import health_pb2
from tritonclient.grpc import service_pb2 as pb

# name: (datatype of config.pbtxt, dims of its inputs). Small memory, so that what leaks is missed.
MODELS = {
    "good": ("INT32", ["4"]),
    "ints": ("INT32", ["4"]),
    "tiny": ("INT8", ["2"]),
    "wide": ("UINT64", ["1"]),
    "floats": ("FP32", ["-1"]),
    "doubles": ("FP64", ["1"]),
    "halves": ("FP16", ["2"]),
    "brains": ("BF16", ["2"]),
    "flags": ("BOOL", ["2"]),
    "strings": ("STRING", ["2"]),
    "texts": ("STRING", ["-1"]),
    "pair": ("INT32", ["2", "3"]),
    "grids": ("FP32", ["-1, -1"]),
}
MAX_BATCH = 8


def write_repository(root: Path) -> Path:
    for name, (datatype, dims) in MODELS.items():
        lines = [f'backend: "null" max_batch_size: {MAX_BATCH} dynamic_batching {{}}']
        for index, each in enumerate(dims):
            for kind, letter in (("input", "x"), ("output", "y")):
                tensor = f'name: "{letter}{index or ""}" data_type: TYPE_{datatype} dims: [{each}]'
                lines.append(f"{kind} {{ {tensor} }}")
        for key, value in (("max_slabs", 1), ("spill_bytes", 1 << 16)):
            text = f'key: "penstock.{key}" value {{ string_value: "{value}" }}'
            lines.append(f"parameters {{ {text} }}")
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text("\n".join(lines))
    return root


@dataclass(frozen=True)
class Http:
    """Bytes on a new connection. `status` 0: it is closed without an answer. `closes`: the answer
    is the last, and what follows on the connection is not run. `is_endless`: nothing can follow."""

    name: str
    data: bytes
    status: int = 400
    words: tuple[str, ...] = ()
    closes: bool = False
    is_endless: bool = False


@dataclass(frozen=True)
class Rpc:
    """The bytes of a message to a method."""

    name: str
    method: str
    data: bytes
    code: str = "INVALID_ARGUMENT"
    words: tuple[str, ...] = ()


# HTTP, built.


def head(method: str, target: str, *lines: str, host: str = "Host: localhost") -> bytes:
    first = f"{method} {target} HTTP/1.1"
    return "\r\n".join([first, *([host] if host else []), *lines, "", ""]).encode("latin-1")


def post(body: bytes, *lines: str, target: str = "/v2/models/ints/infer") -> bytes:
    return head("POST", target, f"Content-Length: {len(body)}", *lines) + body


def chunks(body: bytes, *lines: str) -> bytes:
    """A POST whose body is given as it goes over the wire."""
    return head("POST", "/v2/models/ints/infer", "Transfer-Encoding: chunked", *lines) + body


def tensor(data: Any = (1, 2, 3, 4), **changes: Any) -> dict[str, Any]:
    item = {"name": "x", "datatype": "INT32", "shape": [1, 4], "data": data, **changes}
    return {key: value for key, value in item.items() if value is not ...}


def text(message: Any) -> bytes:
    return message if isinstance(message, bytes) else json.dumps(message).encode()


def infer(message: Any, model: str = "ints") -> bytes:
    return post(text(message), target=f"/v2/models/{model}/infer")


def one(data: Any = (1, 2, 3, 4), model: str = "ints", **changes: Any) -> bytes:
    return infer({"inputs": [tensor(data, **changes)]}, model)


def raw_data(data: str, model: str, datatype: str, shape: list[int]) -> bytes:
    """`data` as it stands, where json.dumps would not write it."""
    body = text({"inputs": [tensor("@", datatype=datatype, shape=shape)]})
    return infer(body.replace(b'"@"', data.encode("utf-8", "surrogatepass")), model)


def with_fields(**fields: Any) -> bytes:
    return infer({"inputs": [tensor()], **fields})


def binary(message: Any, tail: bytes, model: str = "ints", length: str | None = None) -> bytes:
    body = text(message)
    line = f"Inference-Header-Content-Length: {len(body) if length is None else length}"
    return post(body + tail, line, target=f"/v2/models/{model}/infer")


def sized(size: Any, tail: bytes, model: str = "ints", **changes: Any) -> bytes:
    """One binary input that says it has `size` bytes, and those that it has."""
    parameters = {"binary_data_size": size}
    return binary({"inputs": [tensor(..., parameters=parameters, **changes)]}, tail, model)


def strings(data: bytes, shape: tuple[int, ...] = (1, 2)) -> bytes:
    return sized(len(data), data, "strings", datatype="BYTES", shape=list(shape))


def json_length(value: str) -> bytes:
    """A good binary request but for the length of its JSON."""
    message = {"inputs": [tensor(..., parameters={"binary_data_size": 16})]}
    return binary(message, bytes(16), length=value)


def packed(body: bytes, encoding: str) -> bytes:
    return post(body, f"Content-Encoding: {encoding}")


GOOD = text({"inputs": [tensor()]})
DEEP = 100_000


def framing() -> Iterator[Http]:
    """Bytes that are not a message, or could be two different ones."""

    def bad(name: str, data: bytes, status: int = 400, *words: str) -> Http:
        return Http(name, data, status, words, closes=True)

    def endless(name: str, data: bytes, status: int = 400, *words: str) -> Http:
        return Http(f"an endless {name}", data, status, words, closes=True, is_endless=True)

    length = f"Content-Length: {len(GOOD)}"
    whole = b"%x\r\n%b\r\n0\r\n\r\n" % (len(GOOD), GOOD)
    yield bad("CL and TE", chunks(whole, length))
    yield bad("TE and CL 0", chunks(whole, "Content-Length: 0"))
    yield bad("two equal CL", post(GOOD, length), 400, "Content-Length")
    yield bad("two different CL", post(GOOD, "Content-Length: 5"), 400, "Content-Length")
    yield bad("CL as a list", post(GOOD).replace(length.encode(), (length + ", 5").encode()))
    for value in ("-1", "+5", "0x10", "1e2", "5 5", "", "٣", "9" * 40):
        message = head("POST", "/v2/models/ints/infer") + GOOD
        line = b"localhost\r\nContent-Length: " + value.encode()
        yield bad(f"CL {value[:8]!r}", message.replace(b"localhost", line))
    yield bad("CL of 10^15", head("POST", "/", f"Content-Length: {10**15}"), 413, "larger than")
    yield bad("CL over the limit", head("POST", "/", f"Content-Length: {65 << 20}"), 413)
    yield bad("TE twice", chunks(whole, "Transfer-Encoding: chunked"), 400, "Transfer-Encoding")
    for value in ("xchunked", "chunked, chunked", "gzip, chunked", "identity", "chunked;q=1"):
        yield bad(f"TE {value}", chunks(whole).replace(b": chunked", f": {value}".encode()))
    for size in (b"-5", b"+5", b"0x5", b"g", b"", b" ", b"f" * 17, b"5 5"):
        yield bad(f"chunk size {size.decode()!r}", chunks(size + b"\r\nabcde\r\n0\r\n\r\n"))
    yield bad("a chunk longer than it says", chunks(b"2\r\nabcde\r\n0\r\n\r\n"))
    yield bad("a chunk that ends in LF", chunks(b"5\nabcde\n0\n\n"))
    yield endless("chunk extension", chunks(b"5;" + b"a" * (3 << 20)), 400, "chunks")
    yield endless("trailer", chunks(b"0\r\nA: " + b"a" * (3 << 20)), 400, "chunks")
    yield endless("header", head("GET", "/v2")[:-2] + b"A: " + b"a" * (1 << 20), 431)
    yield endless("header name", head("GET", "/v2")[:-2] + b"a" * (1 << 20), 431)
    yield endless("URL", b"GET /" + b"a" * (1 << 20), 414)
    piece = b"a" * 65536 + b"\r\n10000\r\n"
    yield endless("body", chunks(b"10000\r\n" + piece * 1030), 413, "larger")
    many = b"".join(b"T%d: a\r\n" % i for i in range(5000))
    yield bad("5,000 trailers", chunks(b"0\r\n" + many + b"\r\n"), 431)
    yield bad("bare LF", head("GET", "/v2").replace(b"\r\n", b"\n"))
    yield bad("bare CR in a header", head("GET", "/v2", "A: b\rC: d"))
    yield bad("obs-fold", head("GET", "/v2", "A: b", " c"))
    yield bad("obs-fold of the first header", head("GET", "/v2", host=" Host: localhost"))
    yield bad("space before the colon", head("GET", "/v2", "Content-Length : 3"))
    yield bad("a header without a colon", head("GET", "/v2", "Content-Length"))
    yield bad("a header without a name", head("GET", "/v2", ": a"))
    yield bad("a header name with a bracket", head("GET", "/v2", "A[]: a"))
    yield bad("NUL in a header", head("GET", "/v2", "A: b\0c"))
    yield bad("ESC in a header", head("GET", "/v2", "A: \x1b[31m"))
    yield bad("no Host", head("GET", "/v2", host=""), 400, "Host")
    yield bad("two Hosts", head("GET", "/v2", "Host: localhost"), 400, "host")
    yield bad("absolute target without a host", head("GET", "http:///v2"), 400, "path")
    for name, escape in {"NUL": "%00", "LF": "%0a", "CRLF": "%0d%0aA:%20b", "DEL": "%7F"}.items():
        target = f"/v2/models/ints{escape}/infer"
        yield bad(f"{name}, encoded", post(GOOD, target=target), 400, "control character")
    yield bad("no slash in front", head("GET", "v2"))
    yield bad("asterisk", head("OPTIONS", "*"))
    yield bad("CONNECT", head("CONNECT", "localhost:80"))
    yield bad("a tab in the first line", head("GET", "/v2\t"))
    yield bad("a space in the target", head("GET", "/v2/models/a b"))
    yield bad("NUL in the target", head("GET", "/v2\0"))
    yield bad("bytes above 127 in the target", head("GET", "/v2/models/\xff"))
    yield bad("HTTP/1.2", head("GET", "/v2").replace(b"1.1", b"1.2"))
    yield bad("HTTP/2 preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    yield bad("unknown method", head("FROB", "/v2"))
    yield bad("lower case method", head("post", "/v2/models/ints/infer"))
    yield bad("a TLS handshake", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200))
    yield bad("1 MB header", head("GET", "/v2", "A: " + "a" * (1 << 20)), 431, "headers")
    yield bad("1 MB header name", head("GET", "/v2", "a" * (1 << 20) + ": a"), 431)
    yield bad("10,000 headers", head("GET", "/v2", *(f"A{i}: 1" for i in range(10_000))), 431)
    yield bad("101 headers", head("GET", "/v2", *(f"A{i}: 1" for i in range(100))), 431)
    yield bad("1 MB URL", head("GET", "/" + "a" * (1 << 20)), 414, "URL")
    query = "&".join(f"a{i}=1" for i in range(100_000))
    yield bad("100,000 query parameters", head("GET", "/v2?" + query), 414)
    yield bad("garbage", bytes(range(128, 256)) * 10)
    yield Http("a body that is cut off", post(GOOD)[:-5], 0)
    yield Http("a head that is cut off", post(GOOD)[:40], 0)
    yield Http("chunks that are cut off", chunks(b"5\r\nabc"), 0)


def paths() -> Iterator[Http]:
    def lost(name: str, target: str, *words: str) -> Http:
        return Http(name, post(GOOD, target=target), 404, words)

    yield lost("unknown model", "/v2/models/none/infer", "unknown model", "'none'")
    yield lost("the parent folder", "/v2/models/../infer")
    yield lost("the parent folder, encoded", "/v2/models/%2e%2e/infer")
    yield lost("slashes, encoded", "/v2/models/..%2f..%2fetc%2fpasswd/infer")
    yield lost("UTF-8 overlong slash", "/v2/models/..%c0%af../infer")
    yield lost("half a percent sign", "/v2/models/%/infer")
    yield lost("other letters", "/v2/models/INTS/infer")
    yield lost("a homoglyph", "/v2/models/%D1%96nts/infer")
    yield lost("no model name", "/v2/models//infer")
    yield lost("a matrix parameter", "/v2/models/ints;a=b/infer")
    yield lost("a slash behind", "/v2/models/ints/infer/")
    yield lost("a fragment", "/v2/models/ints/infer%23")
    for version in ("0", "-1", "01", "1e0", "99999999999999999999", "%D9%A1", "1%20", "latest"):
        target = f"/v2/models/ints/versions/{version}/infer"
        yield lost(f"version {version}", target, "version", "is not found")
    for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
        message = head(method, "/v2/models/ints/infer")
        yield Http(f"infer by {method}", message, 405, ("POST",))
    for target in ("/v2", "/v2/health/ready", "/v2/models/ints", "/v2/models/stats", "/metrics"):
        yield Http(f"POST to {target}", post(b"{}", target=target), 405)
    index = "/v2/repository/index"
    yield Http("index of nothing", post(b"[", target=index), 400, ("JSON",))
    yield Http("index by a list", post(b"[]", target=index), 400, ("JSON",))
    yield Http("index by a word", post(b'{"ready": "yes"}', target=index), 400, ("ready",))
    yield Http("deep index", post(b'{"a":' + b"[" * DEEP, target=index), 400, ("JSON",))
    load = "/v2/repository/models/ints/load"
    yield Http("load where nobody may", post(b"{}", target=load), 403, ("explicit",))
    unload = "/v2/repository/models/../unload"
    yield Http("unload the parent folder", post(b"{}", target=unload), 403)
    foreign = head("GET", "/v2", host="Host: evil.example")
    yield Http("another Host", foreign, 403, ("evil.example",))
    for host in ("localhost:80.evil.example", "localhost@evil.example", ""):
        yield Http(
            f"Host {host!r}", head("GET", "/v2", host=f"Host: {host}"), 403, ("--allow-host",)
        )
    absolute = head("GET", "http://evil.example/v2")
    yield Http("another host in the target", absolute, 403, ("evil.example",))


def documents() -> Iterator[Http]:
    """Bodies that are no request at all."""

    def bad(name: str, body: bytes, *words: str) -> Http:
        return Http(name, post(body), 400, words or ("JSON",))

    yield bad("an empty body", b"")
    for body in (b"null", b"[]", b"1", b'"a"', b"{", b"{}}", b"{'inputs': []}", b"{}", b"\0"):
        yield bad(f"the body {body.decode()!r}", body)
    yield bad("a byte order mark", b"\xef\xbb\xbf" + GOOD)
    yield bad("UTF-16", GOOD.decode().encode("utf-16"))
    yield bad("two documents", GOOD + GOOD)
    yield bad("a comma too many", GOOD[:-1] + b",}")
    yield bad("a comment", b"/* */" + GOOD)
    yield bad("not UTF-8 in a name", GOOD.replace(b'"x"', b'"\xff"'))
    yield bad("not UTF-8 where nobody looks", GOOD[:-1] + b',"more":"\xff"}')
    kind = "Content-Type: application/x-www-form-urlencoded"
    yield Http("a form", post(b"inputs=1&outputs=2", kind), 400, ("JSON",))
    yield bad(
        "multipart", b'--a\r\nContent-Disposition: form-data; name="inputs"\r\n\r\n1\r\n--a--'
    )
    message = pb.ModelInferRequest(model_name="ints", id="a").SerializeToString()
    kind = "Content-Type: application/grpc"
    yield Http("protobuf", post(message, kind), 400, ("JSON",))
    yield bad("deep arrays", b"[" * DEEP)
    yield bad("deep objects", b'{"a":' * DEEP)
    deep = b"[" * DEEP + b"]" * DEEP
    for where in ("inputs", "outputs", "parameters", "id", "more"):
        fields = GOOD[:-1] if where != "inputs" else b'{"a":1'
        yield bad(f"deep {where}", fields + b',"%b":%b}' % (where.encode(), deep))
    yield bad("deep data", GOOD.replace(b"[1, 2, 3, 4]", deep))
    yield bad("deep shape", GOOD.replace(b"[1, 4]", deep))
    yield bad("inputs as an object", b'{"inputs":{"name":"x"}}', "inputs")
    yield bad("inputs as null", b'{"inputs":null}', "inputs")
    yield bad("no inputs", b'{"inputs":[]}', "inputs")
    yield bad("inputs of null", b'{"inputs":[null]}', "inputs")
    yield bad("50,000 inputs", text({"inputs": [tensor([], shape=[0])] * 50_000}), "inputs")
    outputs = [{"name": "y"}] * 50_000
    yield Http("50,000 outputs", with_fields(outputs=outputs), 400, ("outputs",))
    big = b'{"inputs":[%b]}' % (b" " * (9 << 20))
    yield Http("9 MB of JSON", post(big), 413, ("binary",))
    open_ = b'{"inputs":[{"name":"x","data":' + b"[" * (7 << 20)
    yield Http("7 MB of brackets", post(open_), 400, ("JSON",))


def shapes() -> Iterator[Http]:
    def bad(name: str, shape: Any, *words: str) -> Http:
        return Http(f"shape {name}", one(shape=shape), 400, words or ("'x'",))

    yield bad("negative", [1, -4])
    yield bad("of a negative batch", [-1, 4])
    yield bad("of batch 0", [0, 4])
    yield bad("too small", [1, 3])
    yield bad("too large", [2, 4])
    yield bad("of another size", [1, 5])
    yield bad("of no dimension", [])
    yield bad("without the batch", [4])
    yield bad("of three dimensions", [1, 2, 2])
    yield bad("of rank 1000", [1] * 1000)
    yield bad("2^31", [1, 2**31])
    yield bad("2^63", [1, 2**63])
    yield bad("2^64", [1, 2**64], "shape")
    yield bad("beyond any number", [1, 10**400], "shape")
    yield bad("whose product overflows to 32", [16, 2**60 + 2])
    yield bad("whose product overflows to 8", [4, 2**60 + 2])
    for name, shape in (("float", [1, 4.0]), ("string", [1, "4"]), ("bool", [True, 4])):
        yield bad(f"with a {name}", shape, "shape")
    yield bad("null", None, "shape")
    yield bad("a number", 4, "shape")
    yield bad("nested", [[1, 4]], "shape")
    yield Http("no shape", one(shape=...), 400, ("shape",))
    over = one([1] * 36, shape=[9, 4])
    yield Http("more rows than a batch", over, 400, ("batch-size must be <= 8",))
    grid = one([], "grids", datatype="FP32", shape=[1, 2**62, 2**62])
    yield Http("a huge shape where any would do", grid, 400, ("'x'",))
    wide = one([], "floats", datatype="FP32", shape=[1, 2**62])
    yield Http("2^62 elements of nothing", wide, 400, ("'x'",))
    zero = one([1], "floats", datatype="FP32", shape=[1, 0])
    yield Http("an element for a shape of none", zero, 400, ("'x'",))


def tensors() -> Iterator[Http]:
    def bad(name: str, data: bytes, *words: str) -> Http:
        return Http(name, data, 400, words or ("'x'",))

    for name, data in {
        "ragged rows": [[1, 2], [3]],
        "rows of unequal lengths": [[1], [2, 3, 4]],
        "a row beside a number": [[1, 2, 3], 4],
        "regular rows, too many": [[1, 2, 3], [4, 5, 6]],
        "half nested": [1, 2, [3, 4]],
        "too few elements": [1, 2, 3],
        "too many elements": [1, 2, 3, 4, 5],
        "no elements": [],
        "an empty row": [[]],
        "null": None,
        "a null": [1, None, 3, 4],
        "a number": 4,
        "an object": {"0": 1},
        "a string": "1234",
        "strings for numbers": ["1", "2", "3", "4"],
        "booleans for numbers": [True, False, True, False],
        "fractions for integers": [1.5, 2, 3, 4],
        "objects": [{}, {}, {}, {}],
        "2^31 into INT32": [2**31, 0, 0, 0],
        "-2^31 - 1 into INT32": [-(2**31) - 1, 0, 0, 0],
        "2^64 into INT32": [2**64, 0, 0, 0],
        "10^400 into INT32": [10**400, 0, 0, 0],
    }.items():
        yield bad(f"data: {name}", one(data))
    yield bad("128 into INT8", one([128, 0], "tiny", datatype="INT8", shape=[1, 2]))
    yield bad("-1 into UINT64", one([-1], "wide", datatype="UINT64", shape=[1, 1]))
    yield bad("2^64 into UINT64", one([2**64], "wide", datatype="UINT64", shape=[1, 1]))
    yield bad("1 into BOOL", one([1, 0], "flags", datatype="BOOL", shape=[1, 2]))
    yield bad("'true' into BOOL", one(["true"] * 2, "flags", datatype="BOOL", shape=[1, 2]))
    yield bad("true into FP32", one([True], "floats", datatype="FP32", shape=[1, 1]))
    yield bad("1 into BYTES", one([1, 2], "strings", datatype="BYTES", shape=[1, 2]))
    for literal in ("NaN", "Infinity", "-Infinity", "nan", "1e999", "-1e999", "0x1p3", "1.", ".5"):
        message = raw_data(f"[{literal}]", "doubles", "FP64", [1, 1])
        yield bad(f"{literal} into FP64", message, "JSON" if "999" not in literal else "'x'")
    yield bad("1e39 into FP32", raw_data("[1e39]", "floats", "FP32", [1, 1]))
    yield bad("a leading zero", raw_data("[01,2,3,4]", "ints", "INT32", [1, 4]), "JSON")
    yield bad("a plus sign", raw_data("[+1,2,3,4]", "ints", "INT32", [1, 4]), "JSON")
    yield bad("FP16 as JSON", one([1, 2], "halves", datatype="FP16", shape=[1, 2]))
    yield bad("BF16 as JSON", one([1, 2], "brains", datatype="BF16", shape=[1, 2]))
    lone = raw_data('["\\ud800","a"]', "strings", "BYTES", [1, 2])
    yield bad("a lone surrogate", lone, "JSON")
    control = raw_data('["\n","a"]', "strings", "BYTES", [1, 2])
    yield bad("a control character in a string", control, "JSON")
    yield bad("not enough strings", one(["a"], "strings", datatype="BYTES", shape=[1, 2]))
    yield bad("another datatype", one([1.0] * 4, datatype="FP32"), "'x'", "INT32")
    yield bad("an unknown datatype", one(datatype="INT33"), "'x'", "INT33")
    yield bad("a datatype in lower case", one(datatype="int32"), "'x'")
    yield bad("a datatype of config.pbtxt", one(datatype="TYPE_INT32"), "'x'")
    yield bad("no datatype", one(datatype=...), "datatype")
    yield bad("a datatype that is a number", one(datatype=5), "datatype")
    yield bad("no name", one(name=...), "name")
    yield bad("a name that is a number", one(name=5), "name")
    yield bad("no data", one(...))
    yield bad("an unknown input", one(name="z"), "'z'", "'x'")
    yield bad("the same input twice", infer({"inputs": [tensor(), tensor()]}))
    half = {"inputs": [tensor([1, 2], shape=[1, 2])]}
    yield bad("one input of two", infer(half, "pair"), "expected 2 inputs", "'x1'")
    uneven = [tensor([1, 2], shape=[1, 2]), tensor([1] * 6, name="x1", shape=[2, 3])]
    yield bad("inputs of different batches", infer({"inputs": uneven}, "pair"), "'x1'", "batch")


def binaries() -> Iterator[Http]:
    def bad(name: str, data: bytes, *words: str) -> Http:
        return Http(name, data, 400, words or ("'x'",))

    header = "Inference-Header-Content-Length"
    for value in ("-1", "+5", "abc", "", "1.5", "0x10", "1e2", "1_0", "9999", str(2**64 + 10)):
        yield bad(f"JSON length {value!r}", json_length(value), header)
    yield bad("JSON length of 5,000 digits", json_length("9" * 5000), header)
    yield bad("JSON length twice", json_length("5\r\n" + header + ": 5"), header.lower())
    yield bad("JSON length too short", json_length("10"), "JSON")
    yield bad("JSON length into the tensor", json_length(str(len(GOOD) + 10)), "JSON")
    yield bad("JSON length 0 and JSON", json_length("0"))
    missing = text({"inputs": [tensor(..., parameters={"binary_data_size": 16})]}) + bytes(16)
    yield bad("no JSON length", post(missing), "JSON")
    for size in (-1, 1.5, "16", True, 17, 2**63, 2**64 + 16, 10**30):
        yield bad(f"binary size {size!r}", sized(size, bytes(16)))
    yield bad("binary size null", sized(None, bytes(16)), "JSON")
    yield bad("binary size 0 and 16 bytes", sized(0, bytes(16)), "additional input data")
    yield bad("binary size 15 and 16 bytes", sized(15, bytes(16)), "additional input data")
    yield bad("fewer bytes than the shape", sized(12, bytes(12)), "'x'", "Expected 16, got 12")
    yield bad("more bytes than the shape", sized(20, bytes(20)), "'x'", "Expected 16, got 20")
    both = tensor(parameters={"binary_data_size": 16})
    yield bad("data and binary size", binary({"inputs": [both]}, bytes(16)))
    yield bad("bytes behind JSON tensors", binary(GOOD, bytes(16)), "additional input data")
    shape = {"shape": [1, 2**61], "datatype": "FP32"}
    yield bad("a binary shape of 2^61", sized(16, bytes(16), "floats", **shape))
    yield bad("a negative binary shape", sized(16, bytes(16), shape=[1, -4]))
    yield bad("an unknown binary datatype", sized(16, bytes(16), datatype="FP8"))
    a, b = struct.pack("<I1s", 1, b"a"), struct.pack("<I1s", 1, b"b")
    yield bad("BYTES: length 2^32 - 1", strings(a + b"\xff\xff\xff\xff"))
    yield bad("BYTES: the last one too long", strings(a + struct.pack("<I1s", 2, b"b")))
    yield bad("BYTES: half a length", strings(a + b + b"\0\0"))
    yield bad("BYTES: one too few", strings(a))
    yield bad("BYTES: one too many", strings(a + b + a))
    yield bad("BYTES: nothing", strings(b""))
    yield bad("BYTES: a million empty ones", strings(bytes(4_000_000)))
    yield bad("raw: not one element", post(bytes(3), f"{header}: 0"), "'x'")
    pair = post(bytes(20), f"{header}: 0", target="/v2/models/pair/infer")
    yield bad("raw: two inputs", pair, "'pair' has 2")
    two = post(bytes(16), f"{header}: 0", target="/v2/models/grids/infer")
    yield bad("raw: two variable dimensions", two, "'x'")
    one_string = post(b"a", f"{header}: 0", target="/v2/models/strings/infer")
    yield bad("raw: two strings", one_string, "'x'")


def compressions() -> Iterator[Http]:
    squeezed = gzip.compress(GOOD)
    yield Http("gzip that is not", packed(GOOD, "gzip"), 400, ("gzip",))
    yield Http("deflate that is gzip", packed(squeezed, "deflate"), 400, ("deflate",))
    yield Http("gzip that is deflate", packed(zlib.compress(GOOD), "gzip"), 400, ("gzip",))
    yield Http("gzip cut off", packed(squeezed[:-9], "gzip"), 400, ("gzip", "cut off"))
    damaged = squeezed[:-8] + bytes(4) + squeezed[-4:]
    yield Http("gzip with a wrong sum", packed(damaged, "gzip"), 400, ("gzip",))
    yield Http("gzip and more", packed(squeezed + b"more", "gzip"), 400, ("gzip",))
    yield Http("an empty gzip body", packed(b"", "gzip"), 400, ("gzip",))
    yield Http("gzip twice", packed(gzip.compress(squeezed), "gzip"), 400, ("JSON",))
    bomb = gzip.compress(bytes(100 << 20), 6)
    yield Http("a bomb", packed(bomb, "gzip"), 413, ("inflates",))
    spaces = gzip.compress(b" " * (9 << 20))
    yield Http("9 MB of JSON, compressed", packed(spaces, "gzip"), 413, ("JSON",))
    for encoding in ("br", "zstd", "gzip, gzip", "compress", "x"):
        yield Http(f"encoding {encoding}", packed(squeezed, encoding), 415, (encoding,))
    lying = post(squeezed, "Content-Encoding: gzip", "Inference-Header-Content-Length: 9999")
    yield Http("JSON length beyond what inflates", lying, 400, ("9999",))


def requests() -> Iterator[Http]:
    """Good tensors; something else is wrong."""

    def bad(name: str, data: bytes, *words: str) -> Http:
        return Http(name, data, 400, words)

    def parameters(**values: Any) -> bytes:
        return with_fields(parameters=values)

    def output(**values: Any) -> bytes:
        return with_fields(outputs=[{"name": "y", "parameters": values}])

    yield bad("an id that is a number", with_fields(id=7), "id")
    yield bad("an id that is a list", with_fields(id=["a"]), "id")
    surrogate = GOOD[:-1] + b',"id":"\\ud800"}'
    yield bad("an id with a lone surrogate", post(surrogate), "JSON")
    yield bad("outputs as an object", with_fields(outputs={"name": "y"}), "outputs")
    yield bad("outputs as names", with_fields(outputs=["y"]), "outputs")
    yield bad("an output without a name", with_fields(outputs=[{}]), "name")
    yield bad("an unknown output", with_fields(outputs=[{"name": "z"}]), "'z'", "'y'")
    twice = with_fields(outputs=[{"name": "y"}] * 2)
    yield bad("the same output twice", twice, "'y' already exists")
    for value in (0, -1, "3", 1.5, True, 1001):
        message = output(classification=value)
        yield bad(f"classification {value!r}", message, "'y'", "classification")
    yield bad("classification null", output(classification=None), "outputs[0].parameters")
    for value in (1, "true"):
        yield bad(f"binary_data {value!r}", output(binary_data=value), "'y'", "binary_data")
    yield bad("parameters as a list", with_fields(parameters=[1]), "parameters")
    yield bad("a parameter that is null", parameters(a=None), "parameters")
    yield bad("a parameter that is a list", parameters(a=[1]), "parameters")
    yield bad("a parameter that is an object", parameters(a={}), "parameters")
    yield bad("a parameter beyond 64 bits", parameters(a=2**64), "'a'")
    yield bad("a reserved parameter", parameters(triton_x=1), "'triton_x'", "reserved")
    for value in (1, "yes", 0.0):
        message = parameters(binary_data_output=value)
        yield bad(f"binary_data_output {value!r}", message, "binary_data_output")
    for value in (-1, 1.5, "high", True):
        yield bad(f"priority {value!r}", parameters(priority=value), "priority")
        yield bad(f"timeout {value!r}", parameters(timeout=value), "timeout")
    strange = tensor(parameters=[])
    yield bad("parameters of an input as a list", infer({"inputs": [strange]}), "parameters")
    nested = tensor(parameters={"a": {"b": 1}})
    yield bad("a parameter of an input as an object", infer({"inputs": [nested]}), "parameters")


def heavy() -> Iterator[Http]:
    """More beside the tensors than fits a message between processes."""
    item = tensor(["a", "b"], datatype="BYTES", shape=[1, 2])
    for name, fields in {
        "an id of 2 MB": {"id": "a" * (2 << 20)},
        "a parameter of 2 MB": {"parameters": {"a": "b" * (2 << 20)}},
        "a parameter's name of 2 MB": {"parameters": {"a" * (2 << 20): 1}},
        "100,000 parameters": {"parameters": {f"a{i}": i for i in range(100_000)}},
    }.items():
        yield Http(name, infer({"inputs": [item], **fields}, "strings"), 413, ("too large",))


HTTP = [
    *framing(),
    *paths(),
    *documents(),
    *shapes(),
    *tensors(),
    *binaries(),
    *compressions(),
    *requests(),
    *heavy(),
]


# gRPC, built.


def message(model: str = "ints", **fields: Any) -> pb.ModelInferRequest:
    return pb.ModelInferRequest(model_name=model, **fields)


def given(
    shape: tuple[int, ...] = (1, 4), datatype: str = "INT32", name: str = "x", **contents: Any
) -> pb.ModelInferRequest.InferInputTensor:
    made = pb.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=shape)
    for field, values in contents.items():
        getattr(made.contents, field).extend(values)
    return made


def raw(
    *inputs: Any, contents: tuple[bytes, ...] = (bytes(16),), model: str = "ints", **fields: Any
) -> pb.ModelInferRequest:
    made = message(model, inputs=inputs or [given()], **fields)
    made.raw_input_contents.extend(contents)
    return made


def nested(depth: int) -> bytes:
    """Groups inside groups, which a parser has to walk."""
    return b"\xb3\x06" * depth + b"\xb4\x06" * depth


def rpcs() -> Iterator[Rpc]:
    def bad(name: str, wire: Any, *words: str) -> Rpc:
        data = wire if isinstance(wire, bytes) else wire.SerializeToString()
        return Rpc(name, "ModelInfer", data, words=words or ("'x'",))

    def shaped(name: str, *shape: int) -> Rpc:
        return bad(f"shape {name}", raw(given(shape)))

    good = raw().SerializeToString()
    yield bad("noise", b"\xff" * 40, "parse")
    yield bad("JSON", GOOD, "parse")
    yield bad("a message that is cut off", good[:-5], "parse")
    yield bad("a length beyond the end", b"\x0a\xff\xff\xff\xff\x0f", "parse")
    yield bad("a varint without end", b"\x08" + b"\xff" * 11, "parse")
    yield bad("field number 0", b"\x00\x01", "parse")
    yield bad("wire type 7", b"\x0f", "parse")
    yield bad("a group without end", b"\xb3\x06", "parse")
    yield bad("groups 100,000 deep", good + nested(DEEP), "parse")
    yield bad("a name that is not UTF-8", b"\x0a\x01\xff" + good, "parse")
    yield bad("no inputs", message(), "got 0 inputs")
    yield bad("50,000 inputs", message(inputs=[given()] * 50_000), "inputs")
    outputs = [pb.ModelInferRequest.InferRequestedOutputTensor(name="y")] * 50_000
    yield bad("50,000 outputs", raw(outputs=outputs), "outputs")
    for name, shape in {
        "negative": (1, -4),
        "of a negative batch": (-1, 4),
        "of no dimension": (),
        "without the batch": (4,),
        "of rank 1000": (1,) * 1000,
        "2^62": (1, 2**62),
        "2^63 - 1": (1, 2**63 - 1),
        "-2^63": (1, -(2**63)),
        "whose product overflows to 32": (16, 2**60 + 2),
        "of another size": (1, 5),
    }.items():
        yield shaped(name, *shape)
    none = raw(given((0, 4)), contents=(b"",))
    yield bad("no rows", none, "batch-size must be at least 1")
    rows = raw(given((9, 4)), contents=(bytes(144),))
    yield bad("more rows than a batch", rows, "batch-size must be <= 8")
    yield bad("raw and typed", raw(given(int_contents=[1] * 4)))
    yield bad("too few raw contents", raw(given(), given(name="z")), "'z'", "raw_input_contents")
    extra = raw(contents=(bytes(16), bytes(16)))
    yield bad("too many raw contents", extra, "'x'", "raw_input_contents")
    yield bad("no contents at all", message(inputs=[given()]))
    yield bad("raw of 12 bytes", raw(contents=(bytes(12),)), "'x'", "Expected 16, got 12")
    yield bad("raw of 20 bytes", raw(contents=(bytes(20),)), "'x'", "Expected 16, got 20")
    yield bad("empty raw", raw(contents=(b"",)), "'x'", "Expected 16, got 0")
    for name, item in {
        "too few elements": given(int_contents=[1] * 3),
        "too many elements": given(int_contents=[1] * 5),
        "elements of another type": given(fp32_contents=[1] * 4),
        "elements of two types": given(int_contents=[1] * 4, fp32_contents=[1] * 4),
        "an unknown datatype": given(datatype="INT33", int_contents=[1] * 4),
        "another datatype": given(datatype="FP32", fp32_contents=[1] * 4),
        "a shape of 2^62 of nothing": given((1, 2**62)),
    }.items():
        yield bad(name, message(inputs=[item]))
    small = given((1, 2), "INT8", int_contents=[128, 0])
    yield bad("128 into INT8", message("tiny", inputs=[small]))
    for model, datatype in (("halves", "FP16"), ("brains", "BF16")):
        item = given((1, 2), datatype, fp32_contents=[1, 2])
        yield bad(f"typed {datatype}", message(model, inputs=[item]))
    yield bad("another name", raw(given(name="z")), "'z'", "'x'")
    twice = raw(given(), given(), contents=(bytes(16),) * 2)
    yield bad("the same input twice", twice)
    lone = raw(given((1, 2)), contents=(bytes(8),), model="pair")
    yield bad("one input of two", lone, "'x1'")
    for name, data in {
        "length 2^32 - 1": struct.pack("<I1s", 1, b"a") + b"\xff\xff\xff\xff",
        "half a length": struct.pack("<I1s", 1, b"a") + b"\0\0",
        "one too few": struct.pack("<I1s", 1, b"a"),
        "one too many": bytes(12),
    }.items():
        item = given((1, 2), "BYTES")
        yield bad(f"BYTES: {name}", raw(item, contents=(data,), model="strings"))

    def output(name: str = "y", **values: Any) -> Any:
        made = pb.ModelInferRequest.InferRequestedOutputTensor(name=name)
        for key, (kind, value) in values.items():
            setattr(made.parameters[key], kind, value)
        return made

    yield bad("an unknown output", raw(outputs=[output("z")]), "'z'", "'y'")
    yield bad("the same output twice", raw(outputs=[output(), output()]), "'y' already exists")
    zero = output(classification=("int64_param", 0))
    yield bad("classification 0", raw(outputs=[zero]), "'y'", "classification")
    words = output(classification=("string_param", "3"))
    yield bad("classification '3'", raw(outputs=[words]), "'y'", "classification")
    for key, kind, value in (
        ("priority", "string_param", "high"),
        ("priority", "int64_param", -1),
        ("timeout", "double_param", 1.5),
        ("timeout", "bool_param", True),
    ):
        made = raw()
        setattr(made.parameters[key], kind, value)
        yield bad(f"{key} {value!r}", made, key)
    made = raw()
    made.parameters["a"].SetInParent()
    yield bad("a parameter without a value", made, "'a'")
    yield bad("an id of 2 MB", raw(id="a" * (2 << 20)), "too large")
    many = raw()
    for index in range(100_000):
        many.parameters[f"a{index}"].int64_param = index
    yield bad("100,000 parameters", many, "too large")
    for version in ("0", "-1", "01", "1e0", "9" * 20, "latest"):
        data = raw(model_version=version).SerializeToString()
        yield Rpc(f"version {version[:6]}", "ModelInfer", data, "NOT_FOUND", ("'ints'",))
    for name in ("none", "..", "../etc", "ints\0", "a" * 5000, ""):
        data = raw(model=name).SerializeToString()
        yield Rpc(f"model {name[:6]!r}", "ModelInfer", data, "NOT_FOUND", ("unknown model",))
        ask = pb.ModelMetadataRequest(name=name).SerializeToString()
        yield Rpc(f"metadata of {name[:6]!r}", "ModelMetadata", ask, "NOT_FOUND")
    for method in ("ModelReady", "ModelConfig", "ModelStatistics", "ServerLive"):
        yield Rpc(f"noise to {method}", method, b"\xff" * 9, words=("parse",))
    check = "/grpc.health.v1.Health/Check"
    other = health_pb2.HealthCheckRequest(service="other").SerializeToString()
    yield Rpc("the health of another service", check, other, "NOT_FOUND", ("'other'",))
    yield Rpc("noise to the health service", check, b"\xff" * 9, words=("parse",))


GRPC = list(rpcs())

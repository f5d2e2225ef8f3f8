"""Random requests for identity models of every datatype, as the bytes that go to two servers, and
answers in a form that can be compared. The seed decides everything."""

import json
import mmap
import random
import struct
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2 as pb

ITEMSIZES = {
    "BOOL": 1, "UINT8": 1, "UINT16": 2, "UINT32": 4, "UINT64": 8, "INT8": 1, "INT16": 2,
    "INT32": 4, "INT64": 8, "FP16": 2, "FP32": 4, "FP64": 8, "BF16": 2, "BYTES": 0,
}  # fmt: skip
DATATYPES = list(ITEMSIZES)
NUMPY = {
    "BOOL": "?", "UINT8": "<u1", "UINT16": "<u2", "UINT32": "<u4", "UINT64": "<u8", "INT8": "<i1",
    "INT16": "<i2", "INT32": "<i4", "INT64": "<i8", "FP32": "<f4", "FP64": "<f8",
}  # fmt: skip
CONTENTS = {
    "BOOL": "bool_contents", "INT8": "int_contents", "INT16": "int_contents",
    "INT32": "int_contents", "INT64": "int64_contents", "UINT8": "uint_contents",
    "UINT16": "uint_contents", "UINT32": "uint_contents", "UINT64": "uint64_contents",
    "FP32": "fp32_contents", "FP64": "fp64_contents", "BYTES": "bytes_contents",
}  # fmt: skip
RANKS = (1, 2, 3, 4)
MAX_BATCH = 8
IDENTITY = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [answer(request) for request in requests]


def answer(request):
    return pb_utils.InferenceResponse([same(tensor) for tensor in request.inputs()])


def same(tensor):
    name = tensor.name().replace("IN_", "OUT_", 1)
    if tensor.name().startswith("IN_BF16"):
        return pb_utils.Tensor.from_dlpack(name, tensor)
    return pb_utils.Tensor(name, tensor.as_numpy())
"""


def write_repository(root: Path) -> Path:
    """For each datatype a model that batches; and two that take any datatype in any rank, all of
    their inputs optional, one of them without a batch dimension."""
    for datatype in DATATYPES:
        _write_model(root / datatype.lower(), MAX_BATCH, [(datatype, 2)], is_optional=False)
    anything = [(datatype, rank) for datatype in DATATYPES for rank in RANKS]
    _write_model(root / "plain", 0, anything, is_optional=True)
    batched = [(datatype, rank) for datatype, rank in anything if rank < max(RANKS)]
    _write_model(root / "batched", MAX_BATCH, batched, is_optional=True)
    return root


def _write_model(
    folder: Path, max_batch: int, tensors: list[tuple[str, int]], is_optional: bool
) -> None:
    lines = [f'backend: "python" max_batch_size: {max_batch}']
    if max_batch:
        lines.append("dynamic_batching {}")
    for datatype, rank in tensors:
        kind = f"TYPE_{'STRING' if datatype == 'BYTES' else datatype}"
        rest = f"data_type: {kind} dims: {[-1] * rank}"
        optional = " optional: true" if is_optional else ""
        lines.append(f'input {{ name: "IN_{datatype}_{rank}" {rest}{optional} }}')
        lines.append(f'output {{ name: "OUT_{datatype}_{rank}" {rest} }}')
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(IDENTITY)
    (folder / "config.pbtxt").write_text("\n".join(lines))


@dataclass(frozen=True)
class Given:
    """One input. `elements` are Python values where it can be JSON, `data` the raw bytes."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes
    elements: list[Any] | None
    is_binary: bool

    @property
    def output(self) -> str:
        return self.name.replace("IN_", "OUT_", 1)


@dataclass(frozen=True)
class Call:
    """One request, before it is bytes. `outputs` maps names to binary_data (None: not said); empty
    asks for none by name."""

    model: str
    inputs: tuple[Given, ...]
    outputs: dict[str, bool | None] = field(default_factory=dict)
    is_binary: bool | None = None
    id: str = ""
    is_grpc: bool = False
    is_raw: bool = True
    # "", or "as the shape", or in another way that is regular too.
    nesting: str = ""

    def __str__(self) -> str:
        tensors = ", ".join(f"{t.name}{list(t.shape)}" for t in self.inputs)
        return f"{'gRPC' if self.is_grpc else 'HTTP'} {self.model}({tensors})"


class Calls:
    """Valid requests at random."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def next(self) -> Call:
        rng = self.random
        is_grpc = rng.random() < 0.4
        model, tensors = self._signature()
        batch = rng.randint(1, MAX_BATCH) if model != "plain" else None
        may_be_text = [datatype not in ("FP16", "BF16") for datatype, _ in tensors]
        inputs = []
        outputs: dict[str, bool | None] = {}
        default = rng.choice([True, False, None])
        if not all(may_be_text):
            default = True
        is_raw = not is_grpc or rng.random() < 0.6 or not all(may_be_text)
        for (datatype, rank), is_text in zip(tensors, may_be_text, strict=True):
            asked = rng.choice([True, False, None]) if is_text else True
            # What is not a number, or not UTF-8, has no place in JSON.
            is_json_in = is_text and rng.random() < 0.5 and not is_grpc
            is_json_out = is_text and not is_grpc
            given = self._tensor(datatype, rank, batch, is_json_in, is_json_in or is_json_out)
            if not is_raw and datatype in ("FP32", "FP64"):
                # Python's floats are doubles, and a signalling NaN does not survive that.
                data = np.array(given.elements, NUMPY[datatype]).tobytes()
                given = replace(given, data=data)
            inputs.append(given)
            outputs[given.output] = asked
        if model not in ("plain", "batched") and rng.random() < 0.4:
            outputs = {}
        id = rng.choice(["", "7", "a b", "ü", 'a"\\b'])
        nesting = rng.choice(["", "", "", "as the shape", "other"])
        return Call(model, tuple(inputs), outputs, default, id, is_grpc, is_raw, nesting)

    def _signature(self) -> tuple[str, list[tuple[str, int]]]:
        rng = self.random
        kind = rng.random()
        if kind < 0.5:
            datatype = rng.choice(DATATYPES)
            return datatype.lower(), [(datatype, 2)]
        model = "plain" if kind < 0.75 else "batched"
        ranks = RANKS if model == "plain" else RANKS[:-1]
        names = rng.sample([(d, r) for d in DATATYPES for r in ranks], rng.randint(1, 3))
        return model, names

    def _tensor(
        self, datatype: str, rank: int, batch: int | None, is_json: bool, is_text: bool
    ) -> Given:
        rng = self.random
        sizes = [rng.choice([0, 1, 1, 2, 3, 5, 17]) for _ in range(rank)]
        if rank < 3 and rng.random() < 0.1:
            sizes[-1] = rng.randint(100, 3000)
        shape = (*([] if batch is None else [batch]), *sizes)
        count = int(np.prod(shape))
        elements, data = self._values(datatype, count, is_text)
        name = f"IN_{datatype}_{rank}"
        return Given(name, datatype, shape, data, elements, not is_json)

    def _values(self, datatype: str, count: int, is_text: bool) -> tuple[list[Any] | None, bytes]:
        rng = self.random
        if datatype == "BYTES":
            if is_text:
                texts = ["", "a", "penstock", "ü", "水", "\0", '"\\/\n', "x" * 300]
                words = [rng.choice(texts) for _ in range(count)]
                return words, pack([word.encode() for word in words])
            return None, pack([rng.randbytes(rng.choice([0, 1, 3, 9])) for _ in range(count)])
        if datatype == "BOOL":
            data = bytes(rng.getrandbits(1) for _ in range(count))
        else:
            data = rng.randbytes(count * ITEMSIZES[datatype])
        if datatype not in NUMPY:
            return None, data
        array = np.frombuffer(data, NUMPY[datatype])
        if array.dtype.kind == "f" and is_text:
            scale = 10.0 ** np.array([rng.randint(-12, 12) for _ in range(count)])
            array = np.array([rng.uniform(-1, 1) for _ in range(count)] * scale).astype(array.dtype)
        return array.tolist(), array.tobytes()


def pack(words: list[bytes]) -> bytes:
    return b"".join(struct.pack("<I", len(word)) + word for word in words)


# To bytes.


def http_message(call: Call) -> tuple[bytes, int | None]:
    """The body, and the length of its JSON part where something follows it."""
    message: dict[str, Any] = {"id": call.id} if call.id else {}
    message["inputs"] = [_http_input(item, call.nesting) for item in call.inputs]
    if call.outputs:
        message["outputs"] = [
            {"name": name} | ({} if asked is None else {"parameters": {"binary_data": asked}})
            for name, asked in call.outputs.items()
        ]
    if call.is_binary is not None:
        message["parameters"] = {"binary_data_output": call.is_binary}
    head = json.dumps(message, ensure_ascii=False).encode()
    tail = b"".join(item.data for item in call.inputs if item.is_binary)
    has_tail = any(item.is_binary for item in call.inputs)
    return head + tail, len(head) if has_tail else None


def _http_input(item: Given, nesting: str) -> dict[str, Any]:
    wire: dict[str, Any] = {
        "name": item.name,
        "datatype": item.datatype,
        "shape": list(item.shape),
    }
    if item.is_binary:
        wire["parameters"] = {"binary_data_size": len(item.data)}
        return wire
    assert item.elements is not None
    if nesting and 0 not in item.shape:
        array = np.empty(len(item.elements), dtype=object)
        array[:] = item.elements
        shape = item.shape if nesting == "as the shape" else (1, *item.shape[::-1])
        wire["data"] = array.reshape(shape).tolist()
    else:
        wire["data"] = item.elements
    return wire


def grpc_message(call: Call) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name=call.model, id=call.id)
    is_raw = call.is_raw or any(item.elements is None for item in call.inputs)
    for item in call.inputs:
        wire = message.inputs.add(name=item.name, datatype=item.datatype, shape=item.shape)
        if is_raw:
            message.raw_input_contents.append(item.data)
        else:
            values = [v.encode() if isinstance(v, str) else v for v in item.elements or ()]
            getattr(wire.contents, CONTENTS[item.datatype]).extend(values)
    for name in call.outputs:
        message.outputs.add(name=name)
    return message


# From bytes.


@dataclass(frozen=True)
class Answer:
    """`outputs`: name to (datatype, shape, raw bytes)."""

    status: str
    outputs: dict[str, tuple[str, tuple[int, ...], bytes]] = field(default_factory=dict)
    id: str = ""
    error: str = ""


def http_answer(status: int, json_bytes: int | None, body: bytes) -> Answer:
    kind = f"{status // 100}xx"
    if status != 200:
        return Answer(kind, error=body.decode("utf-8", "replace"))
    head, tail = (body, b"") if json_bytes is None else (body[:json_bytes], body[json_bytes:])
    message = json.loads(head)
    outputs = {}
    for output in message.get("outputs", []):
        datatype, shape = output["datatype"], tuple(output["shape"])
        size = output.get("parameters", {}).get("binary_data_size")
        if size is not None:
            data, tail = tail[:size], tail[size:]
        else:
            # Neither: it is in shared memory.
            data = _from_json(datatype, output["data"]) if "data" in output else b""
        outputs[output["name"]] = (datatype, shape, data)
    assert tail == b""
    return Answer(kind, outputs, message.get("id", ""))


def _from_json(datatype: str, values: list[Any]) -> bytes:
    if datatype == "BYTES":
        return pack([value.encode() for value in values])
    return np.array(values, dtype=NUMPY[datatype]).tobytes()


def grpc_answer(message: pb.ModelInferResponse) -> Answer:
    # Those in shared memory have an empty entry, or none.
    outputs = {
        output.name: (output.datatype, tuple(output.shape), data)
        for output, data in zip_longest(message.outputs, message.raw_output_contents, fillvalue=b"")
    }
    return Answer("2xx", outputs, message.id)


def expected(call: Call) -> Answer:
    """What an identity must say."""
    return Answer(
        "2xx",
        {item.output: (item.datatype, item.shape, item.data) for item in call.inputs},
        call.id,
    )


# In shared memory: inputs in the first half of the region, outputs at the same places of the other.

REGION = "differential"
HALF_BYTES = 16 << 20


def places(call: Call) -> dict[str, tuple[int, int]]:
    """Offset and size of each input and output."""
    found: dict[str, tuple[int, int]] = {}
    offset = 0
    for item in call.inputs:
        found[item.name] = (offset, len(item.data))
        found[item.output] = (HALF_BYTES + offset, len(item.data))
        offset += len(item.data)
    assert offset <= HALF_BYTES
    return found


def _region(place: tuple[int, int]) -> dict[str, Any]:
    offset, size = place
    named = {"shared_memory_region": REGION, "shared_memory_byte_size": size}
    return named | ({"shared_memory_offset": offset} if offset else {})


def http_message_in_region(call: Call) -> bytes:
    at = places(call)
    inputs = [
        {
            "name": item.name,
            "datatype": item.datatype,
            "shape": item.shape,
            "parameters": _region(at[item.name]),
        }
        for item in call.inputs
    ]
    outputs = [{"name": i.output, "parameters": _region(at[i.output])} for i in call.inputs]
    return json.dumps({"id": call.id, "inputs": inputs, "outputs": outputs}).encode()


def grpc_message_in_region(call: Call) -> pb.ModelInferRequest:
    at = places(call)
    message = pb.ModelInferRequest(model_name=call.model, id=call.id)
    for item in call.inputs:
        given = message.inputs.add(name=item.name, datatype=item.datatype, shape=item.shape)
        asked = message.outputs.add(name=item.output)
        for tensor, name in ((given, item.name), (asked, item.output)):
            for key, value in _region(at[name]).items():
                kind = "string_param" if isinstance(value, str) else "int64_param"
                setattr(tensor.parameters[key], kind, value)
    return message


def write_inputs(call: Call, memory: mmap.mmap) -> None:
    """And clear what an earlier answer left."""
    at = places(call)
    for item in call.inputs:
        begin, size = at[item.name]
        memory[begin : begin + size] = item.data
        begin, size = at[item.output]
        memory[begin : begin + size] = bytes(size)


def read_outputs(call: Call, answer: Answer, memory: mmap.mmap) -> Answer:
    """Return the answer with the bytes of the outputs that it says are in the region."""
    at = places(call)
    outputs = {}
    for name, (datatype, shape, data) in answer.outputs.items():
        assert data == b"", f"{name} is in the answer too"
        begin, size = at[name]
        outputs[name] = (datatype, shape, memory[begin : begin + size])
    return replace(answer, outputs=outputs)


# Wrong in one way each.


@dataclass(frozen=True)
class Wrong:
    """What is wrong, and the bytes: to `model` over HTTP, or over gRPC where `model` is empty."""

    kind: str
    body: bytes
    model: str = ""
    json_bytes: str | None = None


class WrongCalls:
    """A valid request with one mistake in it. Each kind of mistake is a method."""

    def __init__(self, seed: int) -> None:
        self._calls = Calls(seed)
        self._random = self._calls.random
        names = [name for name in dir(type(self)) if name.startswith(("http_", "grpc_"))]
        self.kinds = sorted(names)

    def next(self, number: int) -> Wrong:
        kind = self.kinds[number % len(self.kinds)]
        is_grpc = kind.startswith("grpc_")
        while True:
            call = self._calls.next()
            # Enough of everything for any mistake.
            if call.is_grpc != is_grpc or any(0 in item.shape for item in call.inputs):
                continue
            made = getattr(self, kind)(call)
            if made is not None:
                return replace(made, kind=kind)

    # Over HTTP. `_sent` writes a message that was changed; the tail stays as it was.

    def _sent(self, call: Call, change: Any, tail: bytes | None = None) -> Wrong:
        body, json_bytes = http_message(call)
        message = json.loads(body[:json_bytes])
        change(message)
        head = json.dumps(message, ensure_ascii=False).encode()
        rest = (b"" if json_bytes is None else body[json_bytes:]) if tail is None else tail
        has_length = json_bytes is not None or bool(rest)
        return Wrong("", head + rest, call.model, str(len(head)) if has_length else None)

    def _json_only(self, call: Call) -> Call | None:
        if any(item.elements is None for item in call.inputs):
            return None
        inputs = tuple(replace(item, is_binary=False) for item in call.inputs)
        return replace(call, inputs=inputs, nesting="")

    def _binary_only(self, call: Call) -> Call:
        return replace(call, inputs=tuple(replace(item, is_binary=True) for item in call.inputs))

    def http_unknown_model(self, call: Call) -> Wrong:
        return replace(self._sent(call, lambda m: None), model="none")

    def http_unknown_version(self, call: Call) -> Wrong:
        return replace(self._sent(call, lambda m: None), model=f"{call.model}/versions/9")

    def http_unknown_input(self, call: Call) -> Wrong:
        return self._sent(call, lambda m: m["inputs"][0].update(name="other"))

    def http_no_inputs(self, call: Call) -> Wrong | None:
        if call.model in ("plain", "batched"):
            return None
        return self._sent(call, lambda m: m.update(inputs=[]), b"")

    def http_no_optional_inputs(self, call: Call) -> Wrong | None:
        if call.model != "plain":
            return None
        return self._sent(replace(call, outputs={}), lambda m: m.update(inputs=[]), b"")

    def http_inputs_missing(self, call: Call) -> Wrong:
        return self._sent(call, lambda m: m.pop("inputs"), b"")

    def http_input_twice(self, call: Call) -> Wrong | None:
        text = self._json_only(call)
        return text and self._sent(text, lambda m: m["inputs"].append(m["inputs"][0]))

    def http_unknown_output(self, call: Call) -> Wrong:
        return self._sent(call, lambda m: m.update(outputs=[{"name": "other"}]))

    def http_other_datatype(self, call: Call) -> Wrong | None:
        if call.inputs[0].datatype != "INT32":
            return None
        other = replace(call.inputs[0], is_binary=True)
        call = replace(call, inputs=(other, *call.inputs[1:]))
        return self._sent(call, lambda m: m["inputs"][0].update(datatype="UINT32"))

    def http_unknown_datatype(self, call: Call) -> Wrong:
        return self._sent(call, lambda m: m["inputs"][0].update(datatype="FP8"))

    def http_rank_too_high(self, call: Call) -> Wrong:
        return self._sent(call, lambda m: m["inputs"][0]["shape"].append(1))

    def http_negative_dimension(self, call: Call) -> Wrong:
        def change(message: Any) -> None:
            message["inputs"][0]["shape"][-1] *= -1

        return self._sent(call, change)

    def http_shape_larger_than_data(self, call: Call) -> Wrong:
        def change(message: Any) -> None:
            message["inputs"][0]["shape"][-1] += 1

        return self._sent(call, change)

    def http_shape_smaller_than_data(self, call: Call) -> Wrong | None:
        if call.inputs[0].shape[-1] < 2:
            return None

        def change(message: Any) -> None:
            message["inputs"][0]["shape"][-1] -= 1

        return self._sent(call, change)

    def http_shape_of_text(self, call: Call) -> Wrong:
        return self._sent(call, lambda m: m["inputs"][0].update(shape="[1, 2]"))

    def http_batch_too_large(self, call: Call) -> Wrong | None:
        if call.model in ("plain", "batched") or call.inputs[0].datatype == "BYTES":
            return None
        (item,) = self._binary_only(call).inputs
        rows = MAX_BATCH + 1
        data = item.data[: len(item.data) // item.shape[0]] * rows
        item = replace(item, shape=(rows, *item.shape[1:]), data=data)
        return self._sent(replace(call, inputs=(item,)), lambda m: None)

    def http_too_few_elements(self, call: Call) -> Wrong | None:
        text = self._json_only(call)
        return text and self._sent(text, lambda m: m["inputs"][0]["data"].pop())

    def http_too_many_elements(self, call: Call) -> Wrong | None:
        text = self._json_only(call)
        return text and self._sent(
            text, lambda m: m["inputs"][0]["data"].append(m["inputs"][0]["data"][0])
        )

    def http_no_data(self, call: Call) -> Wrong | None:
        text = self._json_only(call)
        return text and self._sent(text, lambda m: m["inputs"][0].pop("data"))

    def http_text_for_numbers(self, call: Call) -> Wrong | None:
        text = self._json_only(call)
        if text is None or call.inputs[0].datatype in ("BYTES", "BOOL"):
            return None
        return self._sent(text, lambda m: m["inputs"][0]["data"].__setitem__(0, "1"))

    def http_number_for_text(self, call: Call) -> Wrong | None:
        text = self._json_only(call)
        if text is None or call.inputs[0].datatype != "BYTES":
            return None
        return self._sent(text, lambda m: m["inputs"][0]["data"].__setitem__(0, 1))

    def http_null_element(self, call: Call) -> Wrong | None:
        text = self._json_only(call)
        return text and self._sent(text, lambda m: m["inputs"][0]["data"].__setitem__(0, None))

    def http_number_too_large(self, call: Call) -> Wrong | None:
        text = self._json_only(call)
        if text is None or call.inputs[0].datatype not in ("INT8", "UINT8", "INT16", "INT32"):
            return None
        return self._sent(text, lambda m: m["inputs"][0]["data"].__setitem__(0, 1 << 40))

    def http_negative_for_unsigned(self, call: Call) -> Wrong | None:
        text = self._json_only(call)
        if text is None or not call.inputs[0].datatype.startswith("UINT"):
            return None
        return self._sent(text, lambda m: m["inputs"][0]["data"].__setitem__(0, -1))

    def http_fraction_for_integer(self, call: Call) -> Wrong | None:
        text = self._json_only(call)
        if text is None or not call.inputs[0].datatype.startswith("INT"):
            return None
        return self._sent(text, lambda m: m["inputs"][0]["data"].__setitem__(0, 1.5))

    def http_nan(self, call: Call) -> Wrong | None:
        text = self._json_only(call)
        if text is None or not call.inputs[0].datatype.startswith("FP"):
            return None
        nan = float("nan")
        return self._sent(text, lambda m: m["inputs"][0]["data"].__setitem__(0, nan))

    def http_ragged(self, call: Call) -> Wrong | None:
        text = self._json_only(call)
        if text is None or len(text.inputs[0].elements or ()) < 3:
            return None

        def change(message: Any) -> None:
            values = message["inputs"][0]["data"]
            message["inputs"][0]["data"] = [values[:1], values[1:]]

        return self._sent(text, change)

    def http_half_as_json(self, call: Call) -> Wrong | None:
        if call.inputs[0].datatype not in ("FP16", "BF16"):
            return None
        count = len(call.inputs[0].data) // 2
        item = replace(call.inputs[0], elements=[1.0] * count, is_binary=False)
        return self._sent(replace(call, inputs=(item, *call.inputs[1:])), lambda m: None)

    def http_half_asked_as_json(self, call: Call) -> Wrong | None:
        if call.model not in ("fp16", "bf16"):
            return None
        return self._sent(replace(call, outputs={}, is_binary=False), lambda m: None)

    def http_binary_size_too_large(self, call: Call) -> Wrong:
        def change(message: Any) -> None:
            message["inputs"][-1]["parameters"]["binary_data_size"] += 8

        return self._sent(self._binary_only(call), change)

    def http_binary_size_too_small(self, call: Call) -> Wrong:
        def change(message: Any) -> None:
            message["inputs"][-1]["parameters"]["binary_data_size"] -= 1

        return self._sent(self._binary_only(call), change)

    def http_binary_size_negative(self, call: Call) -> Wrong:
        def change(message: Any) -> None:
            message["inputs"][0]["parameters"]["binary_data_size"] *= -1

        return self._sent(self._binary_only(call), change)

    def http_bytes_left_over(self, call: Call) -> Wrong:
        call = self._binary_only(call)
        tail = b"".join(item.data for item in call.inputs)
        return self._sent(call, lambda m: None, tail + b"more")

    def http_bytes_missing(self, call: Call) -> Wrong:
        call = self._binary_only(call)
        tail = b"".join(item.data for item in call.inputs)
        return self._sent(call, lambda m: None, tail[:-1])

    def http_strings_overrun(self, call: Call) -> Wrong | None:
        if call.model != "bytes":
            return None
        (item,) = self._binary_only(call).inputs
        item = replace(item, data=b"\xff\xff\xff\x7f" + item.data[4:])
        return self._sent(replace(call, inputs=(item,)), lambda m: None)

    def http_json_length_text(self, call: Call) -> Wrong:
        made = self._sent(self._binary_only(call), lambda m: None)
        return replace(made, json_bytes="many")

    def http_json_length_beyond(self, call: Call) -> Wrong:
        made = self._sent(self._binary_only(call), lambda m: None)
        return replace(made, json_bytes=str(len(made.body) + 1))

    def http_json_length_short(self, call: Call) -> Wrong:
        made = self._sent(self._binary_only(call), lambda m: None)
        return replace(made, json_bytes="20")

    def http_not_json(self, call: Call) -> Wrong:
        return Wrong("", b"{inputs", call.model)

    def http_a_list(self, call: Call) -> Wrong:
        return Wrong("", b"[]", call.model)

    def http_empty(self, call: Call) -> Wrong:
        return Wrong("", b"", call.model)

    def http_priority_text(self, call: Call) -> Wrong:
        return self._sent(call, lambda m: m.update(parameters={"priority": "high"}))

    def http_timeout_negative(self, call: Call) -> Wrong:
        return self._sent(call, lambda m: m.update(parameters={"timeout": -5}))

    # Over gRPC.

    def _message(self, call: Call) -> Any:
        return grpc_message(replace(call, is_raw=True))

    def _typed(self, call: Call) -> Any:
        if any(item.elements is None for item in call.inputs):
            return None
        return grpc_message(replace(call, is_raw=False))

    def grpc_unknown_model(self, call: Call) -> Wrong:
        message = self._message(replace(call, model="none"))
        return Wrong("", message.SerializeToString())

    def grpc_unknown_version(self, call: Call) -> Wrong:
        message = self._message(call)
        message.model_version = "9"
        return Wrong("", message.SerializeToString())

    def grpc_unknown_input(self, call: Call) -> Wrong:
        message = self._message(call)
        message.inputs[0].name = "other"
        return Wrong("", message.SerializeToString())

    def grpc_no_inputs(self, call: Call) -> Wrong | None:
        if call.model in ("plain", "batched"):
            return None
        return Wrong("", pb.ModelInferRequest(model_name=call.model).SerializeToString())

    def grpc_no_optional_inputs(self, call: Call) -> Wrong | None:
        if call.model != "plain":
            return None
        return Wrong("", pb.ModelInferRequest(model_name=call.model).SerializeToString())

    def grpc_unknown_output(self, call: Call) -> Wrong:
        message = self._message(call)
        message.outputs.add(name="other")
        return Wrong("", message.SerializeToString())

    def grpc_unknown_datatype(self, call: Call) -> Wrong:
        message = self._message(call)
        message.inputs[0].datatype = "FP8"
        return Wrong("", message.SerializeToString())

    def grpc_rank_too_high(self, call: Call) -> Wrong:
        message = self._message(call)
        message.inputs[0].shape.append(1)
        return Wrong("", message.SerializeToString())

    def grpc_negative_dimension(self, call: Call) -> Wrong:
        message = self._message(call)
        message.inputs[0].shape[-1] *= -1
        return Wrong("", message.SerializeToString())

    def grpc_shape_larger_than_data(self, call: Call) -> Wrong:
        message = self._message(call)
        message.inputs[0].shape[-1] += 1
        return Wrong("", message.SerializeToString())

    def grpc_raw_missing(self, call: Call) -> Wrong:
        message = self._message(call)
        del message.raw_input_contents[:]
        return Wrong("", message.SerializeToString())

    def grpc_raw_too_short(self, call: Call) -> Wrong:
        message = self._message(call)
        message.raw_input_contents[0] = message.raw_input_contents[0][:-1]
        return Wrong("", message.SerializeToString())

    def grpc_raw_too_long(self, call: Call) -> Wrong:
        message = self._message(call)
        message.raw_input_contents[0] += b"more"
        return Wrong("", message.SerializeToString())

    def grpc_raw_too_many(self, call: Call) -> Wrong:
        message = self._message(call)
        message.raw_input_contents.append(b"more")
        return Wrong("", message.SerializeToString())

    def grpc_raw_and_typed(self, call: Call) -> Wrong | None:
        message = self._typed(call)
        if message is None:
            return None
        message.raw_input_contents.append(call.inputs[0].data)
        return Wrong("", message.SerializeToString())

    def grpc_typed_too_few(self, call: Call) -> Wrong | None:
        message = self._typed(call)
        if message is None:
            return None
        getattr(message.inputs[0].contents, CONTENTS[call.inputs[0].datatype]).pop()
        return Wrong("", message.SerializeToString())

    def grpc_typed_as_another(self, call: Call) -> Wrong | None:
        message = self._typed(call)
        if message is None or call.inputs[0].datatype != "INT32":
            return None
        values = [1.0] * len(message.inputs[0].contents.int_contents)
        message.inputs[0].ClearField("contents")
        message.inputs[0].contents.fp32_contents.extend(values)
        return Wrong("", message.SerializeToString())

"""Requests to a v2 model over HTTP: paths, and messages ready to write. Pure.

Tensors are little-endian bytes after a JSON header (the binary extension), JSON numbers, or in
shared memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from urllib.parse import quote, unquote

import msgspec
import numpy as np

from penstock.benchmark.targets import TargetSpec, shared
from penstock.benchmark.targets.http_messages import Url, parse_url
from penstock.errors import ConfigError
from penstock.types import DATATYPES, Array, Buffer, RegionPlace, TensorSpec, from_array
from penstock.wire.v2_templates import region_parameters

# /v2/models/NAME[/versions/VERSION][/infer], possibly behind a proxy's prefix.
MODEL_PATH = re.compile(
    r"(?P<prefix>.*)/v2/models/(?P<name>[^/?]+)(/versions/(?P<version>[^/?]+))?(/infer)?/?"
)
MAX_HEADS = 1024


class V2Address(msgspec.Struct, frozen=True):
    """A model of a server; `prefix` is the path before /v2."""

    url: Url
    prefix: str
    model: str
    version: str = ""

    @property
    def path(self) -> str:
        path = f"{self.prefix}/v2/models/{quote(self.model, safe='')}"
        return f"{path}/versions/{quote(self.version, safe='')}" if self.version else path


def find_place(spec: TargetSpec) -> V2Address:
    """Find the model from the address, or else from `--model`; ConfigError if neither names one."""
    url = parse_url(spec.address)
    match = MODEL_PATH.fullmatch(url.path)
    if match is None:
        if not spec.model:
            raise ConfigError([f"{spec.address}: names no model: expected …/v2/models/NAME"])
        prefix = url.path.rstrip("/").removesuffix("/v2")
        return V2Address(url, prefix, spec.model, spec.version)
    name, version = unquote(match["name"]), unquote(match["version"] or "")
    if problems := shared.contradictions(spec, name, version):
        raise ConfigError([f"{spec.address}: {text}" for text in problems])
    return V2Address(url, match["prefix"], name, version or spec.version)


class RequestTemplate:
    """The common part of requests that differ only in values, and in sizes of BYTES tensors."""

    def __init__(
        self,
        start: bytes,
        inputs: Sequence[TensorSpec],
        is_binary: bool,
        place: Callable[[Buffer], RegionPlace] | None = None,
    ) -> None:
        """`start`: the constant lines of the head. Shapes of `inputs` include the batch. `place`
        puts a tensor into shared memory; None: requests carry their tensors."""
        self._start = start
        self.inputs = inputs
        self.is_binary = is_binary
        self._place = place
        self._head = lru_cache(MAX_HEADS)(self._binary_head)

    def message(self, tensors: Mapping[str, Array]) -> bytes:
        if not self.is_binary:
            return self._json_message(tensors)
        made = [from_array(each.name, each.datatype, tensors[each.name]) for each in self.inputs]
        parts = [tensor.data for tensor in made]
        if self._place is not None:
            named = [region_parameters(self._place(part)) for part in parts]
            return self._head_for(named, 0)
        return b"".join((self._head(tuple(map(len, parts))), *parts))

    def _binary_head(self, sizes: tuple[int, ...]) -> bytes:
        return self._head_for([{"binary_data_size": size} for size in sizes], sum(sizes))

    def _head_for(self, parameters: Sequence[Mapping[str, str | int]], num_bytes: int) -> bytes:
        """Return head and JSON of a request whose inputs have these parameters, and which ends with
        `num_bytes` of tensors."""
        inputs = [
            _described(spec) | {"parameters": each}
            for spec, each in zip(self.inputs, parameters, strict=True)
        ]
        body = {"inputs": inputs, "parameters": {"binary_data_output": True}}
        text = msgspec.json.encode(body)
        lines = b"Content-Type: application/octet-stream\r\nInference-Header-Content-Length: %d\r\n"
        length = b"Content-Length: %d\r\n\r\n" % (len(text) + num_bytes)
        return self._start + lines % len(text) + length + text

    def _json_message(self, tensors: Mapping[str, Array]) -> bytes:
        values = {spec.name: _numbers(tensors[spec.name], spec) for spec in self.inputs}
        inputs = [_described(spec) | {"data": values[spec.name]} for spec in self.inputs]
        body = msgspec.json.encode({"inputs": inputs})
        lines = b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        return self._start + lines + body


def _described(spec: TensorSpec) -> dict[str, object]:
    return {"name": spec.name, "datatype": spec.datatype, "shape": spec.shape}


def _numbers(array: Array, spec: TensorSpec) -> list[object]:
    """Return elements for JSON in row-major order; ConfigError for values that JSON cannot hold."""
    if spec.datatype == "BYTES":
        try:
            return [each.decode() if isinstance(each, bytes) else str(each) for each in array.flat]
        except UnicodeDecodeError:
            text = "holds bytes that are not UTF-8, which JSON cannot say: send binary tensors"
            raise ConfigError([f"input '{spec.name}': {text}"]) from None
    array = array.astype(DATATYPES[spec.datatype].numpy, copy=False)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        text = "holds NaN or infinity, which JSON cannot say: send binary tensors"
        raise ConfigError([f"input '{spec.name}': {text}"])
    numbers: list[object] = array.ravel().tolist()
    return numbers

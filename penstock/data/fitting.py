"""Fits given values to a model's input and makes the array that is sent. Pure.

Casts may lose precision only: integers to floats, floats to shorter floats, integers to integer
types that hold them. A float never becomes an integer. Messages are those of the server.
"""

from __future__ import annotations

import base64
import binascii

import numpy as np

from penstock.serving.padding import bf16_bits, bf16_floats
from penstock.types import DATATYPES, Array, TensorSpec, num_elements, shape_fits, split_bytes

# Allowed casts, target to sources, by numpy's kind letters.
CASTS = {"f": "fiub", "i": "iub", "u": "iub", "b": "biu"}
KINDS = {"f": "floats", "i": "integers", "u": "integers", "b": "booleans", "U": "strings"}


class DataMismatch(Exception):
    """Values that do not fit; the text begins with the input's name."""

    def __init__(self, spec: TensorSpec, problem: str) -> None:
        super().__init__(f"input '{spec.name}': {problem}")


def example(spec: TensorSpec, value: object) -> Array:
    """Make one example from a file's row: nested lists, a flat list in row-major order, a single
    value, an array, or perf_analyzer's {"content", "shape"} and {"b64"}."""
    array = _described(spec, value) if isinstance(value, dict) else _array(spec, value)
    size = num_elements(spec.shape)
    if array.ndim == 1 and min(spec.shape, default=-1) >= 0 and array.size == size:
        array = array.reshape(spec.shape)
    fitted: Array = examples(spec, array[None])[0, ...]
    return fitted


def examples(spec: TensorSpec, array: Array) -> Array:
    """Fit many examples at once: the first axis of `array` counts them."""
    if array.ndim == 1 and spec.shape in ((1,), (-1,)):
        array = array[:, None]
    if not shape_fits(array.shape[1:], spec.shape):
        raise DataMismatch(spec, f"shape {list(array.shape[1:])} does not fit {list(spec.shape)}")
    if spec.datatype == "BYTES":
        return _strings(spec, array)
    if spec.datatype == "BF16":
        floats = TensorSpec(spec.name, "FP32", spec.shape)
        return bf16_bits(_numbers(floats, array))
    return _numbers(spec, array)


def _numbers(spec: TensorSpec, array: Array) -> Array:
    dtype = DATATYPES[spec.datatype].numpy
    if array.dtype == dtype or array.size == 0:
        return np.ascontiguousarray(array, dtype=dtype)
    if array.dtype.kind not in CASTS[dtype.kind]:
        given = KINDS.get(array.dtype.kind, str(array.dtype))
        raise DataMismatch(spec, f"{given} cannot be cast to {spec.datatype}")
    with np.errstate(over="ignore"):
        cast: Array = np.ascontiguousarray(array, dtype=dtype)
    if not _holds(array, cast):
        raise DataMismatch(spec, f"a value does not fit {spec.datatype}")
    return cast


def _holds(array: Array, cast: Array) -> bool:
    """Whether the cast changed no value beyond its precision."""
    if cast.dtype.kind == "f":
        infinite = np.isinf(cast)
        return not infinite.any() or bool(np.isinf(array[infinite]).all())
    lowest, highest = int(array.min()), int(array.max())
    if cast.dtype.kind == "b":
        return lowest >= 0 and highest <= 1
    limits = np.iinfo(cast.dtype)
    return limits.min <= lowest and highest <= limits.max


def _strings(spec: TensorSpec, array: Array) -> Array:
    if array.dtype.kind not in "OUS" and array.size:
        given = KINDS.get(array.dtype.kind, str(array.dtype))
        raise DataMismatch(spec, f"{given} cannot be cast to BYTES; expected strings")
    strings = np.empty(array.size, np.object_)
    for position, element in enumerate(array.ravel().tolist()):
        if isinstance(element, str):
            strings[position] = _utf8(spec, element)
        elif isinstance(element, bytes):
            strings[position] = element
        else:
            raise DataMismatch(spec, f"expected strings, got {type(element).__name__}")
    return strings.reshape(array.shape)


def _utf8(spec: TensorSpec, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise DataMismatch(spec, "a string is not valid Unicode") from None


def _array(spec: TensorSpec, value: object) -> Array:
    if isinstance(value, np.ndarray):
        return value
    try:
        if spec.datatype == "BYTES":
            # As objects: numpy's own strings drop trailing zero bytes.
            return np.array(value, np.object_)
        array = np.asarray(value)
        if spec.datatype == "UINT64" and array.dtype.kind == "f":
            # numpy turns integers beyond INT64 into floats.
            exact = np.asarray(value, np.object_)
            if all(isinstance(element, int) for element in exact.ravel().tolist()):
                return exact.astype(np.uint64)
        return array
    except (ValueError, OverflowError):
        problem = "lists of different lengths beside each other are no tensor"
        raise DataMismatch(spec, problem) from None


def _described(spec: TensorSpec, value: dict[str, object]) -> Array:
    unknown = value.keys() - {"content", "shape", "b64"}
    if unknown or not value.keys() & {"content", "b64"}:
        raise DataMismatch(spec, 'an object must have "content", with or without "shape", or "b64"')
    content = value.get("content", value)
    if isinstance(content, dict):
        array = _decoded(spec, content.get("b64"))
    else:
        array = _array(spec, content)
    return _reshaped(spec, array, value["shape"]) if "shape" in value else array


def _decoded(spec: TensorSpec, text: object) -> Array:
    """Decode little-endian raw bytes; each string has a four-byte length in front."""
    try:
        data = base64.b64decode(text if isinstance(text, str) else "?", validate=True)
    except (binascii.Error, ValueError):
        raise DataMismatch(spec, '"b64" is not base64') from None
    try:
        if spec.datatype == "BYTES":
            return np.array(split_bytes(data), np.object_)
        array = np.frombuffer(data, DATATYPES[spec.datatype].numpy)
    except ValueError as error:
        problem = f'"b64" of {len(data)} bytes is no {spec.datatype}: {error}'
        raise DataMismatch(spec, problem) from None
    return bf16_floats(array) if spec.datatype == "BF16" else array


def _reshaped(spec: TensorSpec, array: Array, shape: object) -> Array:
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise DataMismatch(spec, '"shape" must be a list of whole numbers')
    if num_elements(shape) != array.size:
        sizes = f"{num_elements(shape)} elements, got {array.size}"
        raise DataMismatch(spec, f"shape {shape} needs {sizes}")
    return array.reshape(shape)

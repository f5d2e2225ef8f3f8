"""The JSON of a load over HTTP: parameters, and files in base64. Only translates;
`repository.load_request` decides what is accepted."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from penstock.errors import InvalidRequest
from penstock.repository.load_request import FILE
from penstock.types import Buffer, Parameter

# Types of values in JSON, by what they are called.
KINDS = {dict: "an object", list: "an array", type(None): "null"}


@dataclass(frozen=True, slots=True)
class LoadParameters:
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    files: Mapping[str, Buffer] = field(default_factory=dict)


def read_load(body: Buffer, given: Mapping[str, msgspec.Raw]) -> LoadParameters:
    """Return the parameters of a load, files decoded. `given` are those that a decoder found in
    `body`, which keeps one of several with the same name."""
    if not given:
        return LoadParameters()
    _refuse_duplicates(body)
    parameters: dict[str, Parameter] = {}
    files: dict[str, Buffer] = {}
    for name, raw in given.items():
        value = msgspec.json.decode(raw)
        if name.startswith(FILE):
            files[name] = _decode(name, value)
        elif type(value) in KINDS:
            expected = "expected text, a number, true or false"
            raise InvalidRequest(f"parameter '{name}' is {KINDS[type(value)]}; {expected}")
        else:
            parameters[name] = value
    return LoadParameters(parameters, files)


def _decode(name: str, value: object) -> bytes:
    if not isinstance(value, str):
        raise InvalidRequest(f"parameter '{name}': expected the file's bytes as base64 text")
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"parameter '{name}': not base64: {error}") from None


def _refuse_duplicates(body: Buffer) -> None:
    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise InvalidRequest(f"'{twice}' is given {names.count(twice)} times")
        return found

    json.loads(bytes(body), object_pairs_hook=once)

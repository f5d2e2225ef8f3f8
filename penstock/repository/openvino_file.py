"""Signature of an OpenVINO IR (`model.xml`), read without OpenVINO."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NoReturn
from xml.etree.ElementTree import Element, ParseError, TreeBuilder
from xml.parsers import expat

from penstock.errors import ConfigError
from penstock.repository.signature import Signature
from penstock.types import DATATYPES, TensorSpec

# v2 datatypes by the precision of a port, such as U8, I64 and FP32.
PRECISIONS = {name.replace("INT", "I").replace("UI", "U"): name for name in DATATYPES}
PRECISIONS["STRING"] = PRECISIONS.pop("BYTES")


def read_signature(path: Path) -> Signature:
    """Read the signature; ConfigError, in one line, unless it is an IR with tensors in and out."""
    root = read_xml(path)
    layers = root.findall("layers/layer")
    # Tensor names of output ports, by layer and port.
    ports = [(each.get("id", ""), port) for each in layers for port in each.findall("output/port")]
    names = {(layer, port.get("id", "")): port.get("names", "") for layer, port in ports}
    sources = {
        edge.get("to-layer", ""): (edge.get("from-layer", ""), edge.get("from-port", ""))
        for edge in root.findall("edges/edge")
    }
    inputs, outputs = [], []
    for layer in layers:
        if layer.get("type") == "Parameter":
            port = layer.find("output/port")
            given = "" if port is None else port.get("names", "")
            inputs.append(_spec(layer, port, given))
        elif layer.get("type") == "Result":
            source = sources.get(layer.get("id", ""), ("", ""))
            given = layer.get("output_names") or names.get(source, "")
            outputs.append(_spec(layer, layer.find("input/port"), given))
    if not inputs or not outputs:
        raise ConfigError("cannot be read as OpenVINO IR: it has no inputs or no outputs")
    return Signature(tuple(inputs), tuple(outputs))


def read_xml(path: Path) -> Element:
    """Return the root; every operator, including constants, is in `layers/layer`."""
    builder = TreeBuilder()
    parser = expat.ParserCreate()
    parser.StartElementHandler = builder.start
    parser.EndElementHandler = builder.end
    parser.CharacterDataHandler = builder.data
    parser.StartDoctypeDeclHandler = _refuse_doctype
    try:
        parser.Parse(path.read_bytes(), True)
        return builder.close()
    except (OSError, ParseError, expat.ExpatError, AssertionError, ValueError) as error:
        raise ConfigError(f"cannot be read as OpenVINO IR: {error}") from None


def _refuse_doctype(*declaration: object) -> NoReturn:
    """Refuse a DTD: its entities can blow up a small file, and no model needs them."""
    raise ValueError("it has a document type declaration")


def _spec(layer: Element, port: Element | None, names: str) -> TensorSpec:
    # The first name of a list in which commas inside names are escaped with a backslash.
    first = re.split(r"(?<!\\),", names)[0].replace("\\,", ",")
    name = first or layer.get("name", "")
    precision = "" if port is None else port.get("precision", "")
    if port is None or precision not in PRECISIONS:
        raise ConfigError(f"'{name}': not a tensor of a datatype that the protocol has")
    data = layer.find("data")
    if data is not None and data.get("shape") == "...":
        raise ConfigError(f"'{name}': any number of dimensions; say in config.pbtxt which it takes")
    try:
        shape = tuple(int(dim.text or "") for dim in port.findall("dim"))
    except ValueError as error:
        raise ConfigError(f"'{name}': cannot be read as OpenVINO IR: {error}") from None
    return TensorSpec(name, PRECISIONS[precision], shape)

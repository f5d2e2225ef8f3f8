"""A valid request to each model, as curl and as Python; for the start page and at start. Pure.

The values are made up: texts are a sentence, images a single pixel, numbers are 0. Inputs that are
too large for a line of JSON follow it as zero bytes, as the binary tensor extension allows.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

import msgspec

from penstock.config import IMAGE, LLM, ModelConfig
from penstock.types import DATATYPES, TensorSpec, num_elements
from penstock.wire.documented import ExampleCall, Form
from penstock.wire.json_errors import JsonObject

# Stands for the server's address, where it comes first; names may contain it too.
URL = "{url}"
# Name of the environment variable with the client's API key.
KEY = "PENSTOCK_API_KEY"
TEXT = "The river is calm today."
QUESTION = "Write one sentence about rivers."
MAX_TOKENS = 64
# A PNG file of one pixel, as base64.
PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR42mOQj98PAAHeAT60WFnNAAAAAElFTkSuQmCC"
)
# The file that the calls of the page send to models of images.
PHOTO = "photo.jpg"
OPEN_PHOTO = (f'with open("{PHOTO}", "rb") as file:', "    photo = file.read()")
# Elements of an input that are written out in JSON.
MAX_ELEMENTS = 64
# Height and width of images of any size.
IMAGE_SIZE = 224
# JSON cannot carry these.
HALVES = ("FP16", "BF16")


def example_call(
    config: ModelConfig, has_chat: bool = False, needs_key: bool = False, is_latest: bool = True
) -> ExampleCall:
    """Return a call of a model. `has_chat`: it is a language model with a chat template;
    `is_latest`: the call need not name the version."""
    is_text = config.backend == LLM
    request = _text(config, has_chat) if is_text else _infer(config, is_latest)
    return ExampleCall(
        request.form,
        request.path,
        request.json,
        request.num_zeros,
        request.shown_curl(URL, key_options() if needs_key else ()),
        request.python(needs_key),
        request.input,
    )


def curl_line(call: ExampleCall, url: str, options: Sequence[str] = ()) -> str:
    request = ExampleRequest(call.form, call.path, msgspec.json.decode(call.body), call.num_zeros)
    return request.curl(url, options)


def key_options() -> list[str]:
    """Return curl's options for an API key, which the shell takes from its environment."""
    return ["-H", f'"Authorization: Bearer ${KEY}"']


@dataclass(frozen=True, slots=True)
class ExampleRequest:
    """A request: the JSON `body`, then zeros."""

    form: Form
    path: str
    body: JsonObject
    num_zeros: int = 0
    input: str = ""

    @property
    def json(self) -> str:
        return msgspec.json.encode(self.body).decode()

    @property
    def is_answer_binary(self) -> bool:
        return "binary_data_output" in self.body.get("parameters", {})

    def curl(self, url: str, options: Sequence[str]) -> str:
        parts = ["curl", *options, f"{url}/{self.path}"]
        if self.is_answer_binary:
            parts += ["--output", "answer.bin"]
        body = shlex.quote(self.json)
        if not self.num_zeros:
            return " ".join([*parts, "-d", body])
        length = len(self.json.encode())
        parts += ["-H", f"'Inference-Header-Content-Length: {length}'", "--data-binary", "@-"]
        sent = f"{{ printf %s {body}; head -c {self.num_zeros} /dev/zero; }}"
        return f"{sent} | {' '.join(parts)}"

    def shown_curl(self, url: str, options: Sequence[str]) -> str:
        """Return the command for the page: images come from a file."""
        if self.form != "image":
            return self.curl(url, options)
        before, after = self.json.split(PIXEL)
        sent = f"printf %s {shlex.quote(before)}; base64 < {PHOTO}; printf %s {shlex.quote(after)}"
        return f"{{ {sent}; }} | {' '.join(['curl', *options, f'{url}/{self.path}'])} -d @-"

    def python(self, needs_key: bool) -> str:
        if self.form in ("chat", "completion"):
            return self._openai(needs_key)
        return self._urllib(needs_key)

    def _openai(self, needs_key: bool) -> str:
        arguments = "".join(f"    {name}={_python(value)},\n" for name, value in self.body.items())
        key = f'os.environ["{KEY}"]' if needs_key else '"none"'
        is_chat = self.form == "chat"
        method = "chat.completions" if is_chat else "completions"
        text = "message.content" if is_chat else "text"
        return (
            f"{'import os' if needs_key else ''}\n\nfrom openai import OpenAI\n\n"
            f'client = OpenAI(base_url="{URL}/v1", api_key={key})\n'
            f"answer = client.{method}.create(\n{arguments})\n"
            f"print(answer.choices[0].{text})\n"
        ).lstrip("\n")

    def _urllib(self, needs_key: bool) -> str:
        is_image = self.form == "image"
        uses = {"base64": is_image, "json": True, "os": needs_key, "urllib.request": True}
        lines = [f"import {name}" for name, is_used in uses.items() if is_used]
        lines += ["", f'url = "{URL}/{self.path}"', *(OPEN_PHOTO if is_image else ())]
        lines += [f"body = {self._literal()}", "data = json.dumps(body).encode()"]
        lines.append("request = urllib.request.Request(url, data)")
        if needs_key:
            key = f"os.environ['{KEY}']"
            lines.append(f'request.add_header("Authorization", f"Bearer {{{key}}}")')
        if self.num_zeros:
            length = '"Inference-Header-Content-Length", str(len(data))'
            lines.append(f"request.add_header({length})")
            lines.append(f"request.data = data + bytes({self.num_zeros})")
        read = "answer.read()" if self.is_answer_binary else "json.load(answer)"
        lines += ["with urllib.request.urlopen(request) as answer:", f"    print({read})", ""]
        return "\n".join(lines)

    def _literal(self) -> str:
        """Return the body in Python, an input a line."""
        inputs = "".join(f"        {_tensor(each)},\n" for each in self.body["inputs"])
        rest = {name: value for name, value in self.body.items() if name != "inputs"}
        more = "".join(f'    "{name}": {_python(value)},\n' for name, value in rest.items())
        inputs = inputs.replace(f'"{PIXEL}"', "base64.b64encode(photo).decode()")
        return f'{{\n    "inputs": [\n{inputs}    ],\n{more}}}'


def _tensor(tensor: JsonObject) -> str:
    """Return a tensor in Python; a repeated value once."""
    data = tensor.get("data", [])
    if len(data) < 2 or len(set(data)) > 1:
        return _python(tensor)
    rest = {name: value for name, value in tensor.items() if name != "data"}
    return f'{_python(rest)[:-1]}, "data": [{_python(data[0])}] * {len(data)}}}'


def _python(value: object) -> str:
    """Return a JSON value in Python, with double quotes."""
    match value:
        case str():
            # Every JSON string is a Python string.
            return json.dumps(value, ensure_ascii=False)
        case dict():
            return f"{{{', '.join(f'{_python(name)}: {_python(value[name])}' for name in value)}}}"
        case list():
            return f"[{', '.join(map(_python, value))}]"
    return repr(value)


def _text(config: ModelConfig, has_chat: bool) -> ExampleRequest:
    chat = {"messages": [{"role": "user", "content": QUESTION}]}
    given = chat if has_chat else {"prompt": TEXT}
    body = {"model": config.name, **given, "max_tokens": MAX_TOKENS}
    if has_chat:
        return ExampleRequest("chat", "v1/chat/completions", body)
    return ExampleRequest("completion", "v1/completions", body)


def _infer(config: ModelConfig, is_latest: bool) -> ExampleRequest:
    needed = [spec for spec in config.inputs if not spec.is_optional]
    has_batch = config.max_batch_size > 0
    inputs, num_zeros = [], 0
    for spec in needed:
        shape = ([1] if has_batch else []) + _sizes(spec)
        tensor: JsonObject = {"name": spec.name, "shape": shape, "datatype": spec.datatype}
        count = num_elements(shape)
        if count <= MAX_ELEMENTS and spec.datatype not in HALVES:
            tensor["data"] = [PIXEL if is_image(config) else _value(spec)] * count
        else:
            # An empty string is its length, which is 0.
            size = count * (DATATYPES[spec.datatype].itemsize or 4)
            tensor["parameters"] = {"binary_data_size": size}
            num_zeros += size
        inputs.append(tensor)
    body: JsonObject = {"inputs": inputs}
    parameters: JsonObject = {}
    if config.sequences is not None:
        types = [each.datatype for each in config.sequences.controls if each.kind == "CORRID"]
        id = "example" if types == ["BYTES"] else 1
        parameters |= {"sequence_id": id, "sequence_start": True, "sequence_end": True}
    if any(spec.datatype in HALVES for spec in config.outputs):
        parameters["binary_data_output"] = True
    if parameters:
        body["parameters"] = parameters
    is_text = len(needed) == 1 and needed[0].is_text
    form: Form = "image" if is_image(config) else "text" if is_text else "tensors"
    version = "" if is_latest else f"/versions/{config.version}"
    path = f"v2/models/{quote(config.name, safe='')}{version}/infer"
    name = needed[0].name if is_text else ""
    return ExampleRequest(form, path, body, num_zeros, name)


def is_image(config: ModelConfig) -> bool:
    return config.preprocess is not None and config.preprocess.function == IMAGE


def _sizes(spec: TensorSpec) -> list[int]:
    """Return the shape with a size for each variable dimension."""
    is_image = len(spec.shape) == 3 and spec.shape.count(-1) == 2
    is_image = is_image and DATATYPES[spec.datatype].numpy.kind == "f"
    return [(IMAGE_SIZE if is_image else 1) if size < 0 else size for size in spec.shape]


def _value(spec: TensorSpec) -> object:
    if spec.datatype == "BYTES":
        return TEXT
    kind = DATATYPES[spec.datatype].numpy.kind
    if kind == "b":
        return False
    # A mask of zeros would leave nothing to attend to.
    return 1 if "mask" in spec.name.lower() else 0

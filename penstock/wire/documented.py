"""Messages of the HTTP API as types, for its description (`/openapi.json`). Pure.

The codecs write most answers without them; a test compares each with a running server.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from penstock.types import Parameter, RequestedOutput, TensorSpec
from penstock.wire.json_errors import JsonList, JsonObject
from penstock.wire.openai_v1 import SamplingFields


class ErrorAnswer(msgspec.Struct):
    """What failed, and what to do next."""

    error: str


class OpenAiProblem(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class OpenAiErrorAnswer(msgspec.Struct):
    """An error as OpenAI's API reports it."""

    error: OpenAiProblem


class TraceSettingsBody(msgspec.Struct):
    """Changes of trace settings; null clears one."""

    trace_level: list[str] | None | msgspec.UnsetType = msgspec.UNSET
    trace_rate: str | int | None | msgspec.UnsetType = msgspec.UNSET
    trace_count: str | int | None | msgspec.UnsetType = msgspec.UNSET
    log_frequency: str | int | None | msgspec.UnsetType = msgspec.UNSET


class TraceSettings(msgspec.Struct):
    """Trace settings; further ones are of the mode."""

    trace_level: list[str]
    trace_rate: str
    trace_count: str
    trace_mode: str
    log_frequency: str | msgspec.UnsetType = msgspec.UNSET
    trace_file: str | msgspec.UnsetType = msgspec.UNSET


class LogSettingsBody(msgspec.Struct):
    """Changes of log settings; null changes nothing."""

    log_info: bool | None | msgspec.UnsetType = msgspec.UNSET
    log_warning: bool | None | msgspec.UnsetType = msgspec.UNSET
    log_error: bool | None | msgspec.UnsetType = msgspec.UNSET
    log_verbose_level: int | None | msgspec.UnsetType = msgspec.UNSET
    log_format: str | None | msgspec.UnsetType = msgspec.UNSET


class LogSettingsAnswer(msgspec.Struct):
    log_file: str
    log_info: bool
    log_warning: bool
    log_error: bool
    log_verbose_level: int
    log_format: str


class LiveAnswer(msgspec.Struct):
    live: bool


class ReadyAnswer(msgspec.Struct):
    ready: bool
    # Set in the answer for one model.
    name: str | msgspec.UnsetType = msgspec.UNSET


class ServerDescription(msgspec.Struct):
    name: str
    version: str
    extensions: list[str]


class TensorDescription(msgspec.Struct):
    """A tensor with its batch dimension; -1 is any size."""

    name: str
    datatype: str
    shape: list[int]


class ModelDescription(msgspec.Struct):
    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorDescription]
    outputs: list[TensorDescription]


def describe_tensors(specs: Sequence[TensorSpec], has_batch: bool) -> list[TensorDescription]:
    """Return tensors with their batch dimension, if they have one."""
    batch = [-1] if has_batch else []
    return [TensorDescription(spec.name, spec.datatype, [*batch, *spec.shape]) for spec in specs]


class InputTensor(msgspec.Struct):
    """A tensor of a request: in `data`, flat or nested, or as bytes after the JSON, whose number is
    the parameter `binary_data_size`."""

    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Parameter] = {}
    data: JsonList | msgspec.UnsetType = msgspec.UNSET


class InferFields(msgspec.Struct):
    """The JSON of an inference request; the fields of `v2_request.InferBody`."""

    inputs: list[InputTensor]
    outputs: list[RequestedOutput] = []
    id: str = ""
    parameters: dict[str, Parameter] = {}


class OutputTensor(msgspec.Struct):
    """A tensor of an answer: in `data`, or as bytes after the JSON."""

    name: str
    datatype: str
    shape: list[int]
    data: JsonList | msgspec.UnsetType = msgspec.UNSET
    parameters: dict[str, int] | msgspec.UnsetType = msgspec.UNSET


class InferAnswer(msgspec.Struct):
    model_name: str
    model_version: str
    outputs: list[OutputTensor]
    id: str | msgspec.UnsetType = msgspec.UNSET
    parameters: dict[str, Parameter] | msgspec.UnsetType = msgspec.UNSET


class GenerateBody(SamplingFields, kw_only=True):
    """The JSON of a generate request. Sampling parameters may also be in `parameters`."""

    text_input: str
    id: str | msgspec.UnsetType = msgspec.UNSET
    parameters: JsonObject | None = None
    exclude_input_in_output: bool | None = None
    return_finish_reason: bool | None = None
    return_num_input_tokens: bool | None = None
    return_num_output_tokens: bool | None = None


class GenerateAnswer(msgspec.Struct):
    """`text_output` is a list if several answers were requested."""

    model_name: str
    model_version: str
    text_output: str | list[str]
    id: str | msgspec.UnsetType = msgspec.UNSET


class IndexBody(msgspec.Struct):
    """The JSON of a request for the repository's index."""

    ready: bool = False


class LoadBody(msgspec.Struct):
    """The JSON of a request to load a model. `config` is a configuration as JSON text, and
    `file:<version>/<name>` the content of a file in base64."""

    parameters: dict[str, msgspec.Raw] | None = None


class UnloadBody(msgspec.Struct):
    """The JSON of a request to unload a model; `unload_dependents` is true or false."""

    parameters: dict[str, bool | int | float | str] | None = None


class StatisticsAnswer(msgspec.Struct):
    model_stats: list[JsonObject]


class IndexRow(msgspec.Struct, omit_defaults=True):
    """A version in the repository. Empty fields are left out."""

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""


class SystemRegionBody(msgspec.Struct):
    """The JSON of a request to register system shared memory."""

    key: str
    byte_size: int
    offset: int = 0


class RawHandle(msgspec.Struct):
    """A cudaIpcMemHandle_t in base64."""

    b64: str


class CudaRegionBody(msgspec.Struct):
    """The JSON of a request to register memory of a GPU."""

    raw_handle: RawHandle
    byte_size: int
    device_id: int = 0


class SystemRegionRow(msgspec.Struct):
    """A registered region of system shared memory."""

    name: str
    key: str
    offset: int
    byte_size: int


class CudaRegionRow(msgspec.Struct):
    """A registered region of a GPU's memory."""

    name: str
    device_id: int
    byte_size: int


class OpenAiModel(msgspec.Struct):
    id: str
    object: str
    created: int
    owned_by: str
    max_model_len: int | msgspec.UnsetType = msgspec.UNSET


def describe_model(
    name: str, created: int, max_length: int | msgspec.UnsetType = msgspec.UNSET
) -> OpenAiModel:
    """Describe a model: when it was loaded (seconds since 1970), and its context length."""
    return OpenAiModel(name, "model", created, "penstock", max_length)


class OpenAiModels(msgspec.Struct):
    object: str
    data: list[OpenAiModel]


class TextAnswer(msgspec.Struct):
    """A completion or chat, as in OpenAI's API."""

    id: str
    object: str
    created: int
    model: str
    choices: list[JsonObject]
    usage: JsonObject


class ResponseAnswer(msgspec.Struct):
    """A response, as in OpenAI's API."""

    id: str
    object: str
    created_at: int
    model: str
    status: str
    output: list[JsonObject]
    usage: JsonObject


class EmbeddingsList(msgspec.Struct):
    object: str
    data: list[JsonObject]
    model: str
    usage: dict[str, int]


class TokenizeAnswer(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(msgspec.Struct):
    prompt: str


# The state route, which the server's own pages read. Fields are only ever added. The first `{url}`
# in a call stands for the address under which the client reaches the server: the server itself does
# not know it behind a proxy.

# Kinds of forms.
Form = Literal["text", "image", "tensors", "chat", "completion"]


class ExampleCall(msgspec.Struct, frozen=True):
    """A valid request to a model: `body` is its JSON, followed by `num_zeros` bytes that are 0."""

    form: Form
    # Relative to the server's address, percent-encoded.
    path: str
    body: str
    num_zeros: int
    curl: str
    python: str
    # The input that the form's text or image goes to.
    input: str = ""


class ModelLoad(msgspec.Struct, frozen=True):
    """Figures that need the scope `metrics`."""

    num_waiting: int
    num_answered: int
    num_failed: int


class ModelState(msgspec.Struct, frozen=True):
    """One version of a model. A model that could not be loaded has no version."""

    name: str
    version: str
    state: str
    reason: str
    backend: str = ""
    batching: str = ""
    # Empty without an SLO.
    slo: str = ""
    devices: list[str] = []
    num_instances: int = 0
    num_ready: int = 0
    inputs: list[TensorDescription] = []
    outputs: list[TensorDescription] = []
    # Names of the elements, by output.
    labels: dict[str, list[str]] = {}
    call: ExampleCall | None = None
    load: ModelLoad | None = None


class ServerState(msgspec.Struct, frozen=True):
    """The part of the server that the caller may see; `scopes` are those of its API key."""

    name: str
    version: str
    state: Literal["loading", "ready", "not ready", "shutting down"]
    needs_key: bool
    scopes: list[str]
    models: list[ModelState]


class Links(msgspec.Struct, frozen=True):
    """The answer of `/` to clients that are not browsers; paths are relative to it."""

    name: str
    version: str
    docs: str = "docs"
    openapi: str = "openapi.json"
    state: str = "dashboard/state"
    metrics: str = "metrics"
    live: str = "v2/health/live"
    ready: str = "v2/health/ready"

"""A model as Triton serves it: its config.pbtxt, the name of its file, and what differs. Pure.

Triton knows no parameter that starts with `penstock.`, so these are left out, and a note says what
each of them did.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.config import CPU, LLM, TORCHSCRIPT, ModelConfig
from penstock.errors import ConfigError
from penstock.repository import pbtxt, torchscript_file
from penstock.repository.pbtxt_fields import Proto

PREFIX = "penstock."
FILE_MARK = "# Written by penstock export triton"
# Backends whose files Triton reads as they are: its name of the file, by ours.
PLATFORMS = {"onnxruntime": "onnxruntime_onnx", "tensorrt": "tensorrt_plan"}
# What Penstock's parameters do that Triton does not.
LOST = {
    "penstock.slo": "the SLO is not enforced: Triton refuses no request for its latency",
    "penstock.pad": "requests of different lengths are not padded, and do not share a batch",
    "penstock.max_wait_ms": "waiting is not limited: set default_queue_policy.max_queue_size",
    "penstock.record": "requests are not recorded",
}


@dataclass(frozen=True, slots=True)
class TritonConfig:
    """The config.pbtxt of a model, and what differs from how Penstock serves it."""

    text: str
    notes: tuple[str, ...]


def problem(config: ModelConfig) -> str:
    """Return why Triton cannot serve a model's file; empty if it can."""
    file = Path(config.artifact)
    types = {spec.datatype for spec in (*config.inputs, *config.outputs)}
    if config.backend == LLM:
        return "a language model; Triton's vLLM backend serves its Hugging Face folder"
    if not config.max_batch_size and any(not spec.shape for spec in config.model.inputs):
        return "a model with a scalar input and no batch dimension, which Triton does not have"
    if config.backend == "python" and "BF16" in types:
        return "BF16 in a Python model, which numpy does not have; use FP32"
    if config.backend == "pytorch" and file.suffix == ".py":
        return "a module.py, which Triton does not load; export it to ONNX, or write TorchScript"
    if config.backend == "pytorch" and file.name == "config.json":
        return "a Hugging Face folder; `penstock optimize` writes an ONNX version that Triton reads"
    if config.backend not in ("python", "onnxruntime", "openvino", "pytorch", "tensorrt"):
        return f"backend '{config.backend}', which Triton does not have"
    return ""


def configure(config: ModelConfig, notes: tuple[str, ...] = ()) -> TritonConfig:
    """Return the configuration of a model that has no `problem`; ConfigError if the result would
    not be Triton's."""
    message = pbtxt.to_served(config.model)
    written = pbtxt.parse(config.written)
    told = [*notes, *_give_dims(message), *_differences(config, message)]
    message.ClearField("model_repository_agents")
    message.cc_model_filenames.clear()
    message.ClearField("default_model_filename")
    message.ClearField("runtime")
    for key in list(message.parameters):
        if key.startswith(PREFIX):
            del message.parameters[key]
    # Without groups Triton uses the GPUs there are.
    del message.instance_group[:]
    message.instance_group.extend(written.instance_group)
    _set_platform(message, config)
    lines = [f"{FILE_MARK}: {config.name}", *(f"# note: {note}" for note in told)]
    text = "\n".join([*lines, pbtxt.to_text(message)])
    try:
        pbtxt.parse(text)
    except ConfigError as error:  # This is a bug.
        raise ConfigError([f"{config.name}: {problem}" for problem in error.problems]) from None
    return TritonConfig(text, tuple(told))


def file_name(config: ModelConfig) -> str:
    """Return the name that Triton expects of the model's file."""
    if config.backend == "pytorch" and torchscript_file.is_named(config.artifact):
        return "model.pt"
    return f"model{Path(config.artifact).suffix}"


def _set_platform(message: Proto, config: ModelConfig) -> None:
    message.platform = PLATFORMS.get(config.backend, "")
    message.backend = config.backend
    if config.backend == "pytorch":
        is_script = file_name(config) == "model.pt"
        message.platform = TORCHSCRIPT if is_script else "torch_aoti"


def _give_dims(message: Proto) -> Iterator[str]:
    """Give each tensor of one value a dimension, as Triton needs one."""
    scalars = [item for item in (*message.input, *message.output) if not item.dims]
    for item in scalars:
        item.dims.append(1)
        item.reshape.SetInParent()
    if scalars:
        names = ", ".join(item.name for item in scalars)
        yield f"{names}: shape [rows, 1] for clients, where Penstock has [rows]"


def _differences(config: ModelConfig, message: Proto) -> Iterator[str]:
    for what in ("preprocess", "postprocess"):
        if getattr(config, what) is not None:
            yield f"penstock.{what} is not exported: clients send and get the model's own tensors"
    lost = [key for key in message.parameters if key.startswith(PREFIX)]
    for key in lost:
        reason = next((text for name, text in LOST.items() if key.startswith(name)), "")
        yield f"{key} is left out" + (f": {reason}" if reason else "")
    if config.min_instances < config.max_instances:
        yield "the number of instances does not follow the load"
    if message.HasField("dynamic_batching"):
        queue = message.dynamic_batching.default_queue_policy
        if not queue.max_queue_size:
            yield "the queue is unbounded; set dynamic_batching.default_queue_policy.max_queue_size"
        if not all(spec.is_fixed for spec in config.model.inputs):
            yield "a request of another shape ends the batch that is forming"
    if config.backend == "onnxruntime" and not config.uses_gpu and not message.instance_group:
        yield "without instance_group Triton runs it on a GPU, if there is one"
    if config.engine != config.backend and any(device != CPU for device in config.devices):
        yield "on GPUs ONNX Runtime runs it, not Penstock's engine"

"""OpenVINO on CPUs: `model.xml` with `model.bin` beside it, or `model.onnx`.

docs/backends.md explains the options; the effective settings are read back and compared. FP64 is
computed as FP32; INT64, UINT64 and UINT32 as INT32, and numbers that do not fit are refused.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from penstock.backends import Batch, Execution, Runner
from penstock.backends.checks import check_signature, num_threads, share_of_cores
from penstock.backends.finished import Finished
from penstock.config import ModelConfig
from penstock.errors import BackendFailed, ConfigError
from penstock.types import DATATYPES, Array, TensorSpec

# Before the import, which sends telemetry unless this package seems to be missing.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
import openvino as ov  # noqa: E402

# OpenVINO properties by option.
PROPERTIES = {
    "inference_num_threads": "INFERENCE_NUM_THREADS",
    "num_streams": "NUM_STREAMS",
    "performance_hint": "PERFORMANCE_HINT",
    "inference_precision": "INFERENCE_PRECISION_HINT",
}
HINTS = ("LATENCY", "THROUGHPUT")
PRECISIONS = ("f32", "bf16", "f16")
OTHER_NAMES = {"BOOL": "boolean", "BF16": "bf16", "BYTES": "string"}
# v2 datatypes by the library's names of element types, such as u8 and f32.
ELEMENT_TYPES = {
    OTHER_NAMES.get(name, f"{each.numpy.kind}{8 * each.numpy.itemsize}"): name
    for name, each in DATATYPES.items()
}
# Computed as INT32.
NARROWED = ("INT64", "UINT32", "UINT64")
INT32 = np.iinfo(np.int32)
DEVICE = "CPU"


class OpenVinoRunner(Runner):
    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        properties = properties_of(config)
        label = config.label
        model = read_model(Path(config.artifact), label)
        self.inputs = _specs(model.inputs, config.inputs)
        self.outputs = _specs(model.outputs, config.outputs)
        check_signature(config, self.inputs, self.outputs)
        try:
            self._compiled = ov.Core().compile_model(model, DEVICE, properties)
        except Exception as error:  # The library raises RuntimeError and other types.
            raise BackendFailed(f"{label}: OpenVINO cannot compile it: {_reason(error)}") from None
        self._actual = {name: _property(self._compiled, name) for name in properties}
        self._check_properties(properties)
        self._request = self._compiled.create_infer_request()
        self._has_state = bool(self._request.query_state())
        input_names = [spec.name for spec in self.inputs]
        output_names = [spec.name for spec in self.outputs]
        self._feeds = [(spec, input_names.index(spec.name)) for spec in config.inputs]
        self._answers = [(spec, output_names.index(spec.name)) for spec in config.outputs]

    def built(self) -> Mapping[str, str]:
        devices = ",".join(self._compiled.get_property("EXECUTION_DEVICES"))
        built = {"openvino": ov.__version__, "devices": devices}
        return built | {name.lower(): text for name, text in self._actual.items()}

    def start(self, batch: Batch) -> Execution:
        feeds = {index: _feed(spec, batch.inputs[spec.name]) for spec, index in self._feeds}
        if self._has_state:
            # State must not leak from one batch to the next.
            self._request.reset_state()
        try:
            self._request.infer(feeds, share_outputs=True)
        except RuntimeError as error:
            raise BackendFailed(f"OpenVINO: {_reason(error)}") from None
        # Copies: the next batch is written to the same memory.
        arrays: dict[str, Array] = {}
        for spec, index in self._answers:
            array = np.array(self._request.get_output_tensor(index).data)
            arrays[spec.name] = array.view(np.uint16) if spec.datatype == "BF16" else array
        return Finished(arrays)

    def close(self) -> None:
        del self._request, self._compiled

    def _check_properties(self, properties: Mapping[str, str]) -> None:
        """Raise ConfigError if OpenVINO silently took fewer threads or another precision. Our own
        default for the threads is only an upper bound."""
        given = {key.lower() for key in self._config.options} | {"inference_precision"}
        problems = [
            f"parameters.{key}: asked for {properties[name]}, got {self._actual[name]}"
            for key, name in PROPERTIES.items()
            if key in given and self._actual[name] != properties[name]
        ]
        if problems:
            raise ConfigError(problems)


def load(config: ModelConfig) -> OpenVinoRunner:
    return OpenVinoRunner(config)


def properties_of(config: ModelConfig) -> dict[str, str]:
    """Return the properties; raise ConfigError with all problems."""
    problems: list[str] = []
    if config.device != "cpu":
        problems.append(f"device: '{config.device}' is not supported; expected 'cpu'")
    # OpenVINO's Python API frees string memory twice, which crashes the process.
    why = "BYTES is not supported; use backend 'onnxruntime' or 'python'"
    for kind, specs in (("input", config.inputs), ("output", config.outputs)):
        texts = [spec.name for spec in specs if spec.datatype == "BYTES"]
        problems += [f"{kind} '{name}': {why}" for name in texts]
    why = "OpenVINO needs all inputs; it cannot be optional"
    problems += [f"input '{spec.name}': {why}" for spec in config.inputs if spec.is_optional]
    lower = {key: key.lower() for key in config.options if key.lower() in PROPERTIES}
    settings = {lower.get(key, key): text for key, text in config.options.items()}
    hint = settings.get("performance_hint", "LATENCY").upper()
    precision = settings.get("inference_precision", "f32").lower()
    chosen = ("performance_hint", hint, HINTS), ("inference_precision", precision, PRECISIONS)
    for key, text, known in chosen:
        if text not in known:
            problems.append(f"parameters.{key}: '{text}' is not one of {', '.join(known)}")
    threads = num_threads(settings, "inference_num_threads", share_of_cores(config), problems)
    properties = {
        "PERFORMANCE_HINT": hint,
        # The default is bf16 on processors that have it.
        "INFERENCE_PRECISION_HINT": precision,
        "INFERENCE_NUM_THREADS": str(threads),
        # Otherwise every instance and model would be pinned to the same first cores.
        "ENABLE_CPU_PINNING": "NO",
    }
    if "num_streams" in settings:
        properties["NUM_STREAMS"] = str(num_threads(settings, "num_streams", 1, problems))
    for key, text in settings.items():
        if key.startswith("ov."):
            properties[key.removeprefix("ov.")] = text
    if problems:
        raise ConfigError(problems)
    return properties


def read_model(path: Path, label: str) -> ov.Model:
    if path.suffix not in (".xml", ".onnx"):
        raise ConfigError(f"{label}: expected model.xml with model.bin, or model.onnx")
    weights = path.with_suffix(".bin")
    if path.suffix == ".xml" and not weights.resolve().is_relative_to(path.parent.resolve()):
        raise ConfigError(f"{label}: its weights {weights.name} leave the version folder")
    try:
        return ov.Core().read_model(path)
    except Exception as error:  # The library raises RuntimeError and other types.
        raise BackendFailed(f"{label}: OpenVINO cannot read it: {_reason(error)}") from None


def _specs(ports: Sequence[ov.Output], configured: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Return the specs of ports. A tensor may have several names; the configured one is used."""
    wanted = {spec.name for spec in configured}
    specs = []
    for port in ports:
        names = sorted(port.get_names()) or [port.get_node().get_friendly_name()]
        name = next((name for name in names if name in wanted), names[0])
        element_type = port.get_element_type().get_type_name()
        specs.append(TensorSpec(name, ELEMENT_TYPES.get(element_type, element_type), _shape(port)))
    return tuple(specs)


def _shape(port: ov.Output) -> tuple[int, ...]:
    shape = port.get_partial_shape()
    if shape.rank.is_dynamic:
        return ()
    return tuple(-1 if size.is_dynamic else size.get_length() for size in shape)


def _feed(spec: TensorSpec, array: Array) -> Array | ov.Tensor:
    """Return an input for the library, which copies arrays; BF16 becomes a tensor of its bits."""
    if spec.datatype == "BF16":
        return ov.Tensor(array.copy(), ov.Shape(array.shape), ov.Type.bf16)
    if spec.datatype in NARROWED and array.size:
        for number in (int(array.min()), int(array.max())):
            if not INT32.min <= number <= INT32.max:
                why = f"does not fit INT32, and OpenVINO computes {spec.datatype} as INT32"
                raise BackendFailed(f"input '{spec.name}': {number} {why}")
    return array


def _reason(error: Exception) -> str:
    """Return the last line of an error; those before are locations in the library."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _property(compiled: ov.CompiledModel, name: str) -> str:
    try:
        value = compiled.get_property(name)
    except RuntimeError:
        return "not told"
    if isinstance(value, ov.Type):
        return str(value.get_type_name())
    is_plain = type(value).__module__ == "builtins"
    return str(value) if is_plain else str(value).rpartition(".")[2]

"""A folder of models to resolved configurations. Reads Triton's layout and config.pbtxt.

    <repository>/<model>/[config.pbtxt]
    <repository>/<model>/<version>/model.onnx

A model without a config.pbtxt gets one worked out from its file. All problems of all models are
found in one pass, each with the path of what is wrong; one bad model does not hide the others.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from penstock.config import BatchPolicy, MemoryPolicy, ModelConfig, QueuePolicy
from penstock.errors import ConfigError
from penstock.types import TensorSpec, TimeoutAction

FILES = {"onnxruntime": "model.onnx"}
PLATFORMS = {"onnxruntime_onnx": "onnxruntime"}
DEFAULT_MAX_BATCH = 64
MAX_INSTANCES = 64
# Fields of config.pbtxt that change what a model does and that this version does not carry out.
UNSUPPORTED = (
    "sequence_batching",
    "ensemble_scheduling",
    "batch_input",
    "batch_output",
    "model_operations",
    "model_transaction_policy",
    "response_cache",
)


@dataclass(slots=True)
class Found:
    """What a repository holds: versions that can be loaded, and problems by model."""

    configs: list[ModelConfig] = field(default_factory=list)
    problems: dict[str, list[str]] = field(default_factory=dict)


def read(path: str | os.PathLike[str]) -> Found:
    """Every model of a repository, or the one model if `path` is its folder."""
    root = Path(path)
    if not root.is_dir():
        raise ConfigError([f"{path}: no such folder; expected a model repository or a model"])
    folders = [root] if _is_model(root) else sorted(f for f in root.iterdir() if _is_model(f))
    if not folders:
        raise ConfigError(
            [
                f"{path}: holds no model; expected <model>/<version>/model.onnx, "
                "with the version a number"
            ]
        )
    found = Found()
    for folder in folders:
        try:
            found.configs += read_model(folder)
        except ConfigError as error:
            found.problems[folder.name] = list(error.problems)
    return found


def read_model(folder: Path) -> list[ModelConfig]:
    """The versions of one model that its version policy asks for."""
    name = folder.resolve().name
    message = _parse(folder / "config.pbtxt", name)
    versions = _versions(folder, message)
    problems: list[str] = []
    configs: list[ModelConfig] = []
    for version in versions:
        try:
            configs.append(_Resolver(folder, name, version, message).resolve())
        except ConfigError as error:
            problems += [problem for problem in error.problems if problem not in problems]
    if problems:
        raise ConfigError(problems)
    return configs


def describe(config: ModelConfig) -> str:
    """The resolved configuration as text in the form of config.pbtxt."""
    from google.protobuf import text_format

    return str(text_format.MessageToString(to_message(config)))


def to_message(config: ModelConfig) -> Any:
    """The resolved configuration as a ModelConfig message."""
    message = _message_type()()
    message.name = config.name
    message.backend = config.backend
    message.max_batch_size = config.max_batch_size
    message.version_policy.specific.versions.append(int(config.version))
    for target, specs in ((message.input, config.inputs), (message.output, config.outputs)):
        for spec in specs:
            item = target.add(name=spec.name, dims=spec.shape)
            item.data_type = _type_number(spec.datatype)
            if spec.label_file:
                item.label_filename = spec.label_file
            if spec.is_optional:
                item.optional = True
    group = message.instance_group.add(count=config.num_instances)
    group.kind = group.KIND_CPU
    _describe_batching(message, config.batching)
    for key, value in sorted(config.options.items()):
        message.parameters[key].string_value = value
    return message


def _describe_batching(message: Any, policy: BatchPolicy) -> None:
    if not policy.is_dynamic:
        return
    batching = message.dynamic_batching
    batching.SetInParent()
    batching.preferred_batch_size.extend(policy.preferred_batch_sizes)
    batching.max_queue_delay_microseconds = round(policy.max_queue_delay_s * 1e6)
    batching.preserve_ordering = policy.preserve_ordering
    batching.priority_levels = policy.num_priorities
    batching.default_priority_level = policy.default_priority
    for level, queue in enumerate(policy.policies):
        if queue == QueuePolicy():
            continue
        target = (
            batching.default_queue_policy if level == 0 else batching.priority_queue_policy[level]
        )
        target.timeout_action = target.TimeoutAction.Value(queue.timeout_action)
        target.default_timeout_microseconds = round(queue.default_timeout_s * 1e6)
        target.allow_timeout_override = queue.allow_timeout_override
        target.max_queue_size = queue.max_queue_size


def _is_model(folder: Path) -> bool:
    return folder.is_dir() and (
        (folder / "config.pbtxt").is_file() or bool(_version_folders(folder))
    )


def _version_folders(folder: Path) -> list[str]:
    """Names that are version numbers: digits without a leading zero."""
    return sorted(
        (
            entry.name
            for entry in folder.iterdir()
            if entry.is_dir()
            and entry.name.isascii()
            and entry.name.isdigit()
            and not entry.name.startswith("0")
        ),
        key=int,
    )


def _message_type() -> Any:
    from tritonclient.grpc import model_config_pb2

    return model_config_pb2.ModelConfig


def _type_number(datatype: str) -> int:
    from tritonclient.grpc import model_config_pb2

    name = "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"
    return cast(int, model_config_pb2.DataType.Value(name))


def _parse(path: Path, name: str) -> Any:
    from google.protobuf import text_format

    message = _message_type()()
    if path.is_file():
        try:
            text_format.Parse(path.read_text(encoding="utf-8"), message)
        except (text_format.ParseError, UnicodeDecodeError) as error:
            raise ConfigError([f"config.pbtxt: {error}"]) from None
    if message.name and message.name != name:
        raise ConfigError([f"name: '{message.name}' but the model's folder is '{name}'"])
    return message


def _versions(folder: Path, message: Any) -> list[str]:
    available = _version_folders(folder)
    if not available:
        raise ConfigError(["no version folder; expected one named by a number, such as 1"])
    policy = message.version_policy
    match policy.WhichOneof("policy_choice"):
        case "all":
            return available
        case "specific":
            wanted = [str(number) for number in policy.specific.versions]
            missing = [number for number in wanted if number not in available]
            if missing or not wanted:
                raise ConfigError(
                    [
                        f"version_policy.specific: no version {', '.join(missing) or 'named'}; "
                        f"there are {', '.join(available)}"
                    ]
                )
            return wanted
        case _:
            return available[-max(1, policy.latest.num_versions) :]


class _Resolver:
    """One version: message and file to a ModelConfig, collecting problems."""

    def __init__(self, folder: Path, name: str, version: str, message: Any) -> None:
        self._folder = folder
        self._name = name
        self._version = version
        self._message = message
        self._problems: list[str] = []

    def resolve(self) -> ModelConfig:
        message = self._message
        for name in UNSUPPORTED:
            if name in {descriptor.name for descriptor, _ in message.ListFields()}:
                self._problem(name, "not supported")
        backend = self._backend()
        artifact = self._artifact(backend)
        inputs, outputs, max_batch = self._tensors(backend, artifact)
        options = {key: value.string_value for key, value in message.parameters.items()}
        config = ModelConfig(
            name=self._name,
            version=self._version,
            backend=backend,
            artifact=str(artifact),
            inputs=inputs,
            outputs=outputs,
            max_batch_size=max_batch,
            batching=self._batching(max_batch),
            num_instances=self._instances(),
            memory=self._memory(options),
            hang_s=self._number(options, "penstock.hang_s", 30.0),
            options=options,
        )
        if self._problems:
            raise ConfigError(self._problems)
        return config

    def _problem(self, path: str, text: str) -> None:
        self._problems.append(f"{path}: {text}")

    def _backend(self) -> str:
        message = self._message
        backend = message.backend or PLATFORMS.get(message.platform, "")
        if not backend and not message.platform:
            if (self._folder / self._version / "model.onnx").exists():
                return "onnxruntime"
            self._problem("backend", f"not given, and {self._version}/model.onnx does not exist")
        elif not backend:
            self._problem("platform", f"'{message.platform}' is not one of {', '.join(PLATFORMS)}")
        return str(backend)

    def _artifact(self, backend: str) -> Path:
        file = self._message.default_model_filename or FILES.get(backend, "")
        base = (self._folder / self._version).resolve()
        path = (base / file).resolve()
        if not path.is_relative_to(base):
            self._problem("default_model_filename", f"'{file}' leaves the version folder")
        elif file and not path.exists():
            self._problem(f"{self._version}/{file}", "no such file")
        return path

    def _tensors(
        self, backend: str, artifact: Path
    ) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...], int]:
        message = self._message
        inputs = tuple(self._spec("input", i, item) for i, item in enumerate(message.input))
        outputs = tuple(self._spec("output", i, item) for i, item in enumerate(message.output))
        max_batch = message.max_batch_size
        if max_batch < 0:
            self._problem("max_batch_size", f"{max_batch} is negative")
        if (not inputs or not outputs) and not self._problems:
            if backend == "onnxruntime":
                inputs, outputs, max_batch = self._complete(artifact, inputs, outputs)
            else:
                self._problem("input, output", f"must be given for backend '{backend}'")
        self._check_names("input", inputs)
        self._check_names("output", outputs)
        return inputs, outputs, max_batch

    def _complete(
        self, artifact: Path, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
    ) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...], int]:
        """Tensors as the ONNX file declares them; a symbolic first dimension is the batch."""
        try:
            file_inputs, file_outputs, has_batch = onnx_signature(artifact)
        except Exception as error:  # onnx and protobuf raise many types for a broken file.
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            self._problem(f"{self._version}/{artifact.name}", f"cannot be read as ONNX: {text}")
            return (), (), 0
        is_given = self._message.max_batch_size > 0
        max_batch = self._message.max_batch_size if is_given or not has_batch else DEFAULT_MAX_BATCH
        if max_batch:
            file_inputs = [_without_batch(spec) for spec in file_inputs]
            file_outputs = [_without_batch(spec) for spec in file_outputs]
        return tuple(inputs or file_inputs), tuple(outputs or file_outputs), max_batch

    def _spec(self, kind: str, index: int, item: Any) -> TensorSpec:
        path = f"{kind}[{index}]"
        from tritonclient.grpc import model_config_pb2

        datatype = model_config_pb2.DataType.Name(item.data_type).removeprefix("TYPE_")
        if datatype == "INVALID":
            self._problem(f"{path}.data_type", f"missing for '{item.name}'")
        if not item.name:
            self._problem(f"{path}.name", "missing")
        if any(size == 0 or size < -1 for size in item.dims):
            self._problem(f"{path}.dims", f"{list(item.dims)}: each must be positive or -1")
        if item.HasField("reshape"):
            self._problem(f"{path}.reshape", "not supported")
        if kind == "input" and item.allow_ragged_batch:
            self._problem(f"{path}.allow_ragged_batch", "not supported")
        return TensorSpec(
            item.name,
            "BYTES" if datatype == "STRING" else datatype,
            tuple(item.dims),
            is_optional=kind == "input" and item.optional,
            label_file=item.label_filename if kind == "output" else "",
        )

    def _check_names(self, kind: str, specs: Sequence[TensorSpec]) -> None:
        names = [spec.name for spec in specs]
        for name in sorted({name for name in names if names.count(name) > 1}):
            self._problem(kind, f"'{name}' is given {names.count(name)} times")

    def _batching(self, max_batch: int) -> BatchPolicy:
        message = self._message
        batching = message.dynamic_batching
        is_dynamic = message.HasField("dynamic_batching")
        if not is_dynamic:
            # A model whose configuration we worked out ourselves is batched.
            is_worked_out = not message.input and max_batch > 0
            return BatchPolicy(max(1, max_batch), is_dynamic=is_worked_out)
        path = "dynamic_batching"
        if max_batch == 0:
            self._problem(path, "needs max_batch_size > 0")
        preferred = tuple(sorted(batching.preferred_batch_size))
        if any(size < 1 or size > max_batch for size in preferred):
            self._problem(
                f"{path}.preferred_batch_size",
                f"{list(preferred)}: each must be from 1 to max_batch_size {max_batch}",
            )
        levels, default = batching.priority_levels, batching.default_priority_level
        if levels and not 1 <= default <= levels:
            self._problem(
                f"{path}.default_priority_level", f"{default} is not one of 1 to {levels}"
            )
        if levels > 256:
            self._problem(f"{path}.priority_levels", f"{levels} is more than 256")
            levels = 0
        base = self._policy(batching.default_queue_policy)
        policies = [base]
        for level in range(1, levels + 1):
            own = batching.priority_queue_policy
            policies.append(self._policy(own[level]) if level in own else base)
        return BatchPolicy(
            max_batch_size=max(1, max_batch),
            is_dynamic=True,
            preferred_batch_sizes=preferred,
            max_queue_delay_s=batching.max_queue_delay_microseconds / 1e6,
            preserve_ordering=batching.preserve_ordering,
            num_priorities=levels,
            default_priority=default if levels else 0,
            policies=tuple(policies),
        )

    def _policy(self, message: Any) -> QueuePolicy:
        action = message.TimeoutAction.Name(message.timeout_action)
        return QueuePolicy(
            timeout_action=cast(TimeoutAction, action),
            default_timeout_s=message.default_timeout_microseconds / 1e6,
            allow_timeout_override=message.allow_timeout_override,
            max_queue_size=message.max_queue_size,
        )

    def _instances(self) -> int:
        total = 0
        for index, group in enumerate(self._message.instance_group):
            path = f"instance_group[{index}]"
            if group.kind == group.KIND_GPU:
                self._problem(f"{path}.kind", "KIND_GPU is not supported")
            if group.count < 0:
                self._problem(f"{path}.count", f"{group.count} is negative")
            total += max(1, group.count)
        if total > MAX_INSTANCES:
            self._problem("instance_group", f"{total} instances; at most {MAX_INSTANCES}")
        return max(1, total)

    def _memory(self, options: dict[str, str]) -> MemoryPolicy:
        base = MemoryPolicy()
        slab = self._number(options, "penstock.slab_bytes", 0.0)
        return MemoryPolicy(
            slab_bytes=int(slab) or None,
            max_slabs=int(self._number(options, "penstock.max_slabs", base.max_slabs)),
            spill_bytes=int(self._number(options, "penstock.spill_bytes", base.spill_bytes)),
        )

    def _number(self, options: dict[str, str], key: str, default: float) -> float:
        text = options.get(key)
        if text is None:
            return default
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 < value < 1e15:
            self._problem(f"parameters.{key}", f"'{text}' is not a positive number")
            return default
        return value


def onnx_signature(path: Path) -> tuple[list[TensorSpec], list[TensorSpec], bool]:
    """Inputs, outputs (batch dimension included) and whether there is a batch dimension: the first
    one of every tensor symbolic."""
    import onnx

    graph = onnx.load(str(path), load_external_data=False).graph
    weights = {tensor.name for tensor in graph.initializer}
    inputs = [_onnx_spec(value) for value in graph.input if value.name not in weights]
    outputs = [_onnx_spec(value) for value in graph.output]
    has_batch = all(spec.shape[:1] == (-1,) for spec in (*inputs, *outputs))
    return inputs, outputs, has_batch and bool(inputs)


def _onnx_spec(value: Any) -> TensorSpec:
    import onnx

    kind = value.type.tensor_type
    name = onnx.TensorProto.DataType.Name(kind.elem_type)
    names = {"FLOAT": "FP32", "DOUBLE": "FP64", "FLOAT16": "FP16", "BFLOAT16": "BF16"}
    datatype = "BYTES" if name == "STRING" else names.get(name, name)
    shape = tuple(
        dim.dim_value if dim.HasField("dim_value") and dim.dim_value > 0 else -1
        for dim in kind.shape.dim
    )
    return TensorSpec(value.name, datatype, shape)


def _without_batch(spec: TensorSpec) -> TensorSpec:
    return TensorSpec(spec.name, spec.datatype, spec.shape[1:])

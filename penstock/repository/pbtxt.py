"""config.pbtxt to a resolved ModelConfig and back.

The message types are Triton's own, from the `tritonclient` package. Resolving collects every
problem, each with the path of its field, before it fails. The written text reads back to an equal
ModelConfig; fields that a ModelConfig does not hold are kept from the edited message.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import cast

from penstock import backends
from penstock.config import (
    CLASSIFIER,
    CPU,
    EACH_GPU,
    ENSEMBLE,
    GPU_ENGINE,
    IMAGE,
    LLM,
    MAX_INSTANCES,
    ONNX_RUNTIME,
    PLATFORM_NAMES,
    STAGES,
    TORCHSCRIPT,
    BatchPolicy,
    ModelConfig,
    Preprocess,
    QueuePolicy,
    RateLimit,
    Warmup,
)
from penstock.errors import ConfigError, InvalidRequest, first_line
from penstock.repository import (
    accelerators,
    checksums,
    ensemble_parameters,
    ensemble_rules,
    foreign_models,
    image_settings,
    onnx_file,
    openvino_file,
    parameters,
    pbtxt_decoupled,
    pbtxt_ensemble,
    pbtxt_fields,
    pbtxt_metrics,
    pbtxt_placement,
    pbtxt_rate,
    pbtxt_sequences,
    pbtxt_views,
    pbtxt_warmup,
    pretrained,
    pt2_file,
    python_file,
    torchscript_file,
)
from penstock.repository.ensemble_parameters import LIMITS
from penstock.repository.parameters import (
    IMAGE_INPUT,
    IMAGE_SETTINGS,
    MAX_WAIT,
    MODEL_INPUTS,
    SLO,
    ParameterReader,
    check_names,
)
from penstock.repository.pbtxt_fields import Proto
from penstock.repository.signature import Signature
from penstock.system import devices
from penstock.types import TensorSpec, TimeoutAction

# Files that each backend loads; of several, the first that exists.
FILES = {
    "onnxruntime": ("model.onnx",),
    "python": ("model.py",),
    # TorchScript last: an exported program is better.
    "pytorch": ("model.pt2", "module.py", "model.pt"),
    "openvino": ("model.xml", "model.onnx"),
    "tensorrt": ("model.plan",),
    # A Hugging Face folder's configuration; weights and tokenizer are beside it.
    LLM: ("model.gguf", "config.json"),
}
# The signature of a language model over v2.
TEXT_SIGNATURE = Signature(
    (TensorSpec("text_input", "BYTES", (1,)),), (TensorSpec("text_output", "BYTES", (1,)),), None
)
Specs = tuple[TensorSpec, ...]
SignatureReader = Callable[[Path], Signature]
# What reads the tensors of a backend's file, without the backend's library.
READERS: Mapping[str, SignatureReader] = {
    "onnxruntime": onnx_file.read_signature,
    "openvino": openvino_file.read_signature,
    "pytorch": pt2_file.read_signature,
    "python": python_file.read_signature,
    LLM: lambda path: TEXT_SIGNATURE,
}
OUTPUT_EXAMPLE = 'for example: output { name: "y" data_type: TYPE_FP32 dims: 2 }'
EXAMPLE = (
    'for example: max_batch_size: 8 input { name: "x" data_type: TYPE_FP32 dims: 3 } '
    'output { name: "y" data_type: TYPE_FP32 dims: 2 }'
)
PLATFORMS = {
    **{platform: backend for backend, platform in PLATFORM_NAMES.items()},
    TORCHSCRIPT: "pytorch",
    "torch_aoti": "pytorch",
}
DEFAULT_MAX_BATCH = 64
MAX_PRIORITIES = 256
# Backends that honour `ModelConfig.device`, including `null`, which computes nothing.
GPU_BACKENDS = frozenset({"onnxruntime", "pytorch", "tensorrt", "null", LLM})
# Backends that use a GPU by default.
AUTO_BACKENDS = frozenset({"pytorch", "tensorrt", LLM})
# Refused as a whole.
UNSUPPORTED = tuple(sorted(pbtxt_fields.REFUSED))
# Fields without effect for language models, and with an SLO.
NOT_IN_ENGINES = {
    "model_warmup": "an engine warms up by itself",
    "dynamic_batching": "an engine batches continuously",
    "response_cache.enable": "texts are sampled anew; an engine caches prefixes of prompts",
}
NOT_IN_SLO_MODE = (
    "dynamic_batching.preferred_batch_size",
    "dynamic_batching.max_queue_delay_microseconds",
    "dynamic_batching.default_queue_policy.timeout_action",
    "dynamic_batching.default_queue_policy.default_timeout_microseconds",
)
# Labels that metrics already have, and the syntax of a label's name.
_LABELS = "model version reason cause le instance device model_name quantile finished_reason "
_LABELS += "tensor quantity"
LABELS = frozenset(_LABELS.split())
LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


def parse(text: str, where: str = "config.pbtxt") -> Proto:
    """Parse a message; ConfigError names line and column."""
    from google.protobuf import text_format

    try:
        with warnings.catch_warnings():
            # About unknown escapes, which stay as written.
            warnings.simplefilter("ignore", DeprecationWarning)
            return text_format.Parse(text, _types().ModelConfig())
    except text_format.ParseError as error:
        raise ConfigError(f"{where}: {error}") from None


def parse_json(text: str, where: str) -> Proto:
    """Parse the JSON form of a message, with the names of fields as in config.pbtxt."""
    from google.protobuf import json_format

    try:
        return json_format.Parse(text, _types().ModelConfig())
    except (json_format.ParseError, RecursionError) as error:
        raise InvalidRequest(f"{where}: {first_line(error)}") from None


def named_backend(message: Proto) -> str:
    """Return the backend that a message names, or means by its platform; empty if it names none."""
    return str(message.backend or PLATFORMS.get(message.platform, message.platform))


def resolve(message: Proto, name: str, folder: Path, artifact: Path | None = None) -> ModelConfig:
    """Resolve the configuration of a version; ConfigError lists all problems. `artifact` is a file
    named by the operator, which may be anywhere."""
    resolver = _Resolver(message, name, folder, artifact)
    if pbtxt_ensemble.is_ensemble(message):
        return resolver.resolve_ensemble()
    return resolver.resolve()


def describe(config: ModelConfig) -> str:
    """Format the resolved configuration as config.pbtxt, which parses to the same one."""
    return to_text(to_message(config))


def write(config: ModelConfig, base: Proto = None) -> str:
    """Format the config.pbtxt of a version, without a version policy and without an SLO that comes
    from the evidence. `base` is the message being edited: its fields beyond a ModelConfig stay."""
    message = to_message(config, base)
    message.ClearField("version_policy")
    # A manifest has the digests of a version, which has one file for all GPUs.
    message.ClearField("model_repository_agents")
    message.cc_model_filenames.clear()
    suits = partial(pbtxt_warmup.fits, has_files=base is not None)
    warmups = message.model_warmup
    suitable = [each for each in warmups if suits(each, config.inputs, config.max_batch_size)]
    message.ClearField("model_warmup")
    message.model_warmup.extend(suitable)
    if config.is_slo_from_evidence:
        del message.parameters[SLO]
    return to_text(message)


def to_text(message: Proto) -> str:
    from google.protobuf import text_format

    return str(text_format.MessageToString(message))


def to_message(config: ModelConfig, base: Proto = None) -> Proto:
    message = _types().ModelConfig()
    if base is not None:
        message.CopyFrom(base)
    message.name = config.name
    message.backend = config.backend
    if PLATFORMS.get(message.platform) != config.backend:
        message.ClearField("platform")
    message.max_batch_size = config.max_batch_size
    message.version_policy.specific.versions[:] = [int(config.version)]
    message.default_model_filename = config.file
    describe_tensors(message.input, config.inputs)
    describe_tensors(message.output, config.outputs)
    _describe_instances(message.instance_group, config)
    pbtxt_sequences.describe(message, config)
    if config.sequences is None:
        _describe_batching(message, config.batching)
    pbtxt_views.describe_batch(message, config)
    pbtxt_decoupled.describe(message, config)
    message.metric_tags.update(config.metric_tags)
    if config.is_cached:
        message.response_cache.enable = True
    if config.warmups:
        _describe_warmups(message.model_warmup, config.warmups)
    if GPU_ENGINE in config.options:
        # They are among the options.
        message.optimization.ClearField("execution_accelerators")
    if not message.optimization.ListFields():
        message.ClearField("optimization")
    message.parameters.clear()
    for key, value in {**config.options, **parameters.write(config)}.items():
        message.parameters[key].string_value = value
    if config.is_ensemble:
        pbtxt_ensemble.describe(message, config)
    return message


def to_json(config: ModelConfig) -> dict[str, object]:
    """Return the body of `/config`: every plain field, numbers as numbers (protobuf's own JSON
    writes 64-bit ones as text)."""
    return to_dict(to_served(config))


def to_served(config: ModelConfig) -> Proto:
    """Return config.pbtxt as written, completed with resolved values, as Triton's API does."""
    written = parse(config.written)
    message = to_message(config, written)
    message.ClearField("version_policy")
    if written.HasField("version_policy"):
        message.version_policy.CopyFrom(written.version_policy)
    else:
        message.version_policy.latest.num_versions = 1
    message.platform = written.platform or PLATFORM_NAMES.get(config.backend, "")
    message.default_model_filename = written.default_model_filename
    if written.HasField("dynamic_batching") and config.batching.is_dynamic:
        message.dynamic_batching.CopyFrom(written.dynamic_batching)
    if written.model_warmup:
        del message.model_warmup[:]
        message.model_warmup.extend(written.model_warmup)
    if written.HasField("optimization"):
        message.optimization.CopyFrom(written.optimization)
    for key, value in written.parameters.items():
        message.parameters[key].CopyFrom(value)
    return message


def to_dict(message: Proto) -> dict[str, object]:
    """Convert a ModelConfig message, as for `to_json`."""
    values: dict[str, object] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        is_message = field.message_type is not None
        if is_message and field.message_type.GetOptions().map_entry:
            values[field.name] = {
                str(key): to_dict(item) if hasattr(item, "DESCRIPTOR") else item
                for key, item in value.items()
            }
        elif field.is_repeated:
            values[field.name] = [
                to_dict(item) if is_message else _plain(field, item) for item in value
            ]
        elif is_message:
            if message.HasField(field.name):
                values[field.name] = to_dict(value)
        elif not field.has_presence or message.HasField(field.name):
            values[field.name] = _plain(field, value)
    return values


def _plain(field: Proto, value: object) -> object:
    return field.enum_type.values_by_number[value].name if field.enum_type is not None else value


def describe_tensors(target: Proto, specs: Sequence[TensorSpec]) -> None:
    known = {item.name: item for item in target}
    num_old = len(target)
    for spec in specs:
        item = target.add()
        if spec.name in known:
            item.CopyFrom(known[spec.name])
        item.name = spec.name
        item.data_type = _type_number(spec.datatype)
        item.dims[:] = spec.shape
        # The first field exists for outputs only, the second for inputs only.
        for field, value in (("label_filename", spec.label_file), ("optional", spec.is_optional)):
            if field in item.DESCRIPTOR.fields_by_name:
                setattr(item, field, value)
        pbtxt_views.describe_tensor(item, spec)
    del target[:num_old]


def _describe_instances(groups: Proto, config: ModelConfig) -> None:
    """Keep groups that already match; otherwise rebuild them with the first as template."""
    if not config.devices:
        return
    active = pbtxt_placement.active(groups)
    said = [device for group in active for device in _devices(group, config.backend)]
    if said and config.on(said).devices == config.devices:
        return
    if config.rate_limits and not groups:
        pbtxt_rate.describe(groups, config)
        return
    first = groups[0] if groups else groups.add()
    del groups[1:]
    for number, (device, count) in enumerate(Counter(config.devices).items()):
        kind, _, index = device.partition(":")
        last = groups[-1]
        if number and index and last.count == count and last.gpus:
            last.gpus.append(int(index))
            continue
        group = groups.add() if number else first
        group.CopyFrom(first)
        group.ClearField("passive")
        group.count = count
        on_gpu = group.KIND_AUTO if config.is_gpu_optional else group.KIND_GPU
        group.kind = group.KIND_CPU if kind == CPU else on_gpu
        group.gpus[:] = [int(index)] if index else []


def _describe_warmups(target: Proto, warmups: Sequence[Warmup]) -> None:
    del target[:]
    for warmup in warmups:
        item = target.add()
        item.name, item.batch_size, item.count = warmup.name, warmup.num_rows, warmup.count
        for tensor in warmup.inputs:
            value = item.inputs[tensor.name]
            value.data_type = _type_number(tensor.datatype)
            value.dims[:] = tensor.shape
            if tensor.source == "file":
                value.input_data_file = tensor.file
            else:
                setattr(value, f"{tensor.source}_data", True)


def _describe_batching(message: Proto, policy: BatchPolicy) -> None:
    message.ClearField("dynamic_batching")
    if not policy.is_dynamic:
        return
    batching = message.dynamic_batching
    batching.SetInParent()
    batching.preferred_batch_size.extend(policy.preferred_batch_sizes)
    batching.max_queue_delay_microseconds = round(policy.max_queue_delay_s * 1e6)
    batching.preserve_ordering = policy.preserve_ordering
    batching.priority_levels = policy.num_priorities
    batching.default_priority_level = policy.default_priority
    if policy.policies[0] != QueuePolicy():
        _describe_queue(batching.default_queue_policy, policy.policies[0])
    for level, queue in enumerate(policy.policies[1:], 1):
        if queue != policy.policies[0]:
            _describe_queue(batching.priority_queue_policy[level], queue)


def _describe_queue(target: Proto, queue: QueuePolicy) -> None:
    target.timeout_action = target.TimeoutAction.Value(queue.timeout_action)
    target.default_timeout_microseconds = round(queue.default_timeout_s * 1e6)
    target.allow_timeout_override = queue.allow_timeout_override
    target.max_queue_size = queue.max_queue_size


@dataclass(slots=True)
class _Resolver:
    """Resolves a message and files to a ModelConfig, collecting problems."""

    _message: Proto
    _name: str
    _folder: Path
    # The artifact, if the operator named it.
    _named: Path | None
    _problems: list[str] = dataclasses.field(default_factory=list)
    _notes: list[str] = dataclasses.field(default_factory=list)
    _warnings: list[str] = dataclasses.field(default_factory=list)
    # Whether the file's signature says so.
    _says_decoupled: bool = False
    # The artifact's name, if it is not the backend's usual one.
    _file: str = ""

    def _refuse_unsupported(self) -> None:
        message = self._message
        if message.HasField(pbtxt_ensemble.FIELD) and not pbtxt_ensemble.is_ensemble(message):
            given = message.backend or message.platform
            problem = f"beside '{given}'; expected platform: '{ENSEMBLE}' and no backend"
            self._problem(pbtxt_ensemble.FIELD, problem)
        for path in UNSUPPORTED:
            if _is_set(self._message, path):
                field, _, detail = path.partition(".")
                self._problem(field, f"{detail} is not supported" if detail else "not supported")
        if self._message.response_cache.enable:
            for path, why in pbtxt_fields.NOT_CACHED.items():
                if _is_set(self._message, path):
                    self._problem("response_cache", f"not with {path.partition('.')[0]}: {why}")

    def _options(self, backend: str, *, has_gpu: bool) -> dict[str, str]:
        options = accelerators.read(self._message, backend, self._problem)
        # Accelerators are for GPUs: on the CPU ONNX Runtime runs the model without them.
        return (options if has_gpu else {}) | _texts(self._message)

    def _check_name(self) -> None:
        name = self._message.name
        if name and name != self._name:
            self._problem("name", f"'{name}' but the model's folder is '{self._name}'")

    def resolve_ensemble(self) -> ModelConfig:
        """Resolve a model that only runs others; its version folder may be empty."""
        message, options = self._message, _texts(self._message)
        self._check_name()
        self._refuse_unsupported()
        pbtxt_ensemble.refuse(message, self._problem)
        inputs, outputs, max_batch = self._tensors(ENSEMBLE, self._folder)
        reader = ParameterReader(options, ENSEMBLE, self._folder, self._problem)
        numbers = {key: value for key, value in reader.numbers().items() if key in LIMITS}
        steps = pbtxt_ensemble.read_steps(message, self._problem)
        record = reader.record((*inputs, *outputs))
        self._check_tags()
        buckets = pbtxt_metrics.read(message.model_metrics, self._problem)
        config = ModelConfig(
            name=self._name,
            version=self._folder.name,
            backend=ENSEMBLE,
            artifact=str(self._folder.resolve()),
            inputs=inputs,
            outputs=outputs,
            max_batch_size=max_batch,
            batching=BatchPolicy(max(1, max_batch)),
            num_instances=0,
            steps=steps,
            defaults=ensemble_parameters.read_defaults(options, self._problem),
            options=parameters.options_of(options),
            record=record,
            metric_tags=dict(message.metric_tags),
            first_response_ms=buckets,
            written=to_text(message),
        )
        config = parameters.with_numbers(config, numbers)
        if problem := parameters.on_demand_problem(config) if reader.on_demand() else "":
            self._problem(f"parameters.{parameters.ON_DEMAND}", problem)
        problems = self._problems or ensemble_rules.graph_problems(config)
        if problems:
            raise ConfigError(problems)
        warnings = [*pbtxt_fields.unused(message), *ensemble_rules.unused_inputs(config)]
        warnings += ensemble_rules.idle_parameters(config)
        return replace(config, warnings=(*warnings, *pbtxt_ensemble.without_effect(message)))

    def resolve(self) -> ModelConfig:
        message = self._message
        self._check_name()
        self._refuse_unsupported()
        backend = self._backend()
        artifact = self._artifact(backend)
        inputs, outputs, max_batch = self._tensors(backend, artifact)
        placed = self._instances(backend)
        options = self._options(backend, has_gpu=set(placed) != {CPU})
        if parameters.takes_images(options):
            inputs = self._image_inputs(options, backend, artifact, inputs)
        reader = ParameterReader(options, backend, self._folder, self._problem)
        numbers = reader.numbers()
        preprocess = reader.preprocess()
        if preprocess is not None and preprocess.function == IMAGE:
            self._check_image_batch(backend, artifact, max_batch)
            self._check_image(preprocess, inputs)
        padding = reader.padding(preprocess.inputs if preprocess else inputs)
        batching = replace(self._batching(max_batch), slo_latency_s=reader.slo_latency_s())
        # Without inputs the number of rows of a batch is undefined.
        batching = replace(batching, is_dynamic=batching.is_dynamic and bool(inputs))
        config = ModelConfig(
            name=self._name,
            version=self._folder.name,
            backend=backend,
            artifact=str(artifact),
            inputs=inputs,
            outputs=outputs,
            max_batch_size=max_batch,
            batching=batching,
            env=reader.env(),
            padding=None if preprocess else padding,
            preprocess=replace(preprocess, padding=padding) if preprocess else None,
            postprocess=reader.postprocess(),
            rate_limits=self._rate_limits(backend),
            host_policies=self._host_policies(backend),
            file=self._file,
            options=parameters.options_of(options),
            batch_inputs=pbtxt_views.read_batch_inputs(message.batch_input, inputs, self._problem),
            batch_outputs=pbtxt_views.read_batch_outputs(
                message.batch_output, inputs, outputs, self._problem
            ),
            is_decoupled=self._is_decoupled(backend, artifact),
            sequences=pbtxt_sequences.read(message, self._folder.resolve().parent, self._problem),
            slo=reader.slo(),
            record=reader.record((*inputs, *outputs)),
        )
        config = self._with_labels(parameters.with_numbers(config, numbers))
        config = replace(config, scaling=replace(config.scaling, on_demand=reader.on_demand()))
        # A stage tells how long rows are before the model's own queue.
        is_known = preprocess is None or preprocess.function in STAGES
        if problem := parameters.tokens_problem(config.batching, padding, is_sent=is_known):
            self._problem(f"parameters.{parameters.MAX_TOKENS}", problem)
        is_optional = self._is_gpu_optional(backend) and set(placed) != {CPU}
        if is_optional and config.on(placed).engine == ONNX_RUNTIME:
            # ONNX Runtime is chosen by name: nothing else runs the model instead.
            is_optional = False
            if not _names_gpu_provider(options):
                placed = [CPU] * len(placed)
        if not self._problems and (found := parameters.scaling_problem(config.on(placed))):
            self._problem(f"parameters.{found[0]}", found[1])
        self._check_tags()
        buckets = pbtxt_metrics.read(message.model_metrics, self._problem)
        is_cached = message.response_cache.enable and backend != LLM
        self._check_fit(config, is_cached=is_cached)
        digests, warmups = self._files(backend, inputs, max_batch)
        if self._problems:
            raise ConfigError(self._problems)
        config = replace(config.on(placed), is_gpu_optional=is_optional)
        return replace(
            config,
            metric_tags=dict(message.metric_tags),
            first_response_ms=buckets,
            checksums=digests,
            is_cached=is_cached,
            warmups=warmups,
            written=to_text(message),
            notes=tuple(self._notes),
            warnings=(*self._warnings, *_ineffective(config, message)),
        )

    def _files(
        self, backend: str, inputs: Specs, max_batch: int
    ) -> tuple[checksums.Checksums, tuple[Warmup, ...]]:
        """Return the files of the model's folder that have a digest, and the warm-ups."""
        message, folder = self._message, self._folder.resolve().parent
        digests = checksums.read(message.model_repository_agents, folder, self._problem)
        # An engine warms up by itself.
        messages = () if backend == LLM else message.model_warmup
        return digests, pbtxt_warmup.read(messages, inputs, max_batch, folder, self._problem)

    def _with_labels(self, config: ModelConfig) -> ModelConfig:
        """Name the classes of a built-in classifier's scores, from the folder's config.json."""
        made = config.postprocess
        if made is None or made.function != CLASSIFIER or self._problems:
            return config
        try:
            labels = pretrained.labels(pretrained.read_config(config.folder))
        except ConfigError as error:
            self._problems += error.problems
            return config
        scores = (len(labels),)
        outputs = [replace(s, labels=labels) if s.shape == scores else s for s in config.outputs]
        return replace(config, outputs=tuple(outputs))

    def _check_fit(self, config: ModelConfig, *, is_cached: bool) -> None:
        """Refuse fields that do not fit each other."""
        misfits = pbtxt_views.conflicts(config)
        misfits += pbtxt_sequences.conflicts(config, is_cached=is_cached)
        misfits += pbtxt_decoupled.conflicts(config, is_cached=is_cached)
        misfits += pbtxt_placement.problems(self._message, config.backend)
        self._problems += [f"{path}: {why}" for path, why in misfits]

    def _check_tags(self) -> None:
        for tag in self._message.metric_tags:
            if tag in LABELS:
                self._problem(f"metric_tags.{tag}", "every metric has this label already")
            elif LABEL.fullmatch(tag) is None or tag.startswith("__"):
                self._problem(f"metric_tags.{tag}", "expected a name of letters, digits and _")

    def _problem(self, path: str, text: str) -> None:
        self._problems.append(f"{path}: {text}")

    def _backend(self) -> str:
        message = self._message
        backend = str(message.backend or PLATFORMS.get(message.platform, ""))
        if not backend and not message.platform:
            for name, files in FILES.items():
                if any((self._folder / file).exists() for file in files):
                    return name
        names = [item.name for item in message.input], [item.name for item in message.output]
        if problem := foreign_models.problem(
            self._folder, message.platform, message.backend, *names
        ):
            self._problem("platform" if message.platform else "backend", problem)
        elif backend:
            if backend not in (*backends.NAMES, LLM):
                known = ", ".join(sorted((*backends.NAMES, LLM)))
                self._problem("backend", f"'{backend}' is not known; expected one of {known}")
        elif message.platform:
            self._problem("platform", f"'{message.platform}' is not one of {', '.join(PLATFORMS)}")
        else:
            usual = " nor ".join(f"{self._folder.name}/{names[0]}" for names in FILES.values())
            self._problem("backend", f"not given, and neither {usual} exists")
        return backend

    def _artifact(self, backend: str) -> Path:
        self._file = self._message.default_model_filename
        if self._named is not None:
            return self._named
        base = self._folder.resolve()
        usual = FILES.get(backend, ("",))
        there = [name for name in usual if (base / name).exists()]
        self._file = self._file_for_gpus(backend) or self._file
        file = self._file or (there or usual)[0]
        path = _inside(base, file, base) or self._linked(backend, base, file)
        if path is None:
            path = base
            is_link = backend == LLM and (base / file).is_symlink()
            hint = f" through a link; parameters.{parameters.FOLLOW_LINKS} 'true' allows that"
            problem = f"'{file}' leaves the version folder{hint * is_link}"
            self._problem("default_model_filename", problem)
        elif file and not path.exists():
            self._problem(f"{self._folder.name}/{file}", "no such file")
        elif backend in FILES and not path.is_file():
            self._problem(f"{self._folder.name}/{file}", "not a file")
        elif backend == "pytorch" and torchscript_file.is_named(path):
            self._check_script(path, f"{self._folder.name}/{file}")
        return path

    def _file_for_gpus(self, backend: str) -> str:
        names = sorted(self._message.cc_model_filenames.items())
        if not names:
            return ""
        groups = self._message.instance_group or [_types().ModelInstanceGroup()]
        placed = [device for group in groups for device in _places(group, backend)]
        try:
            return pbtxt_placement.file_for_gpus(names, placed)
        except ConfigError as error:
            self._problem("cc_model_filenames", error.problems[0])
            return ""

    def _host_policies(self, backend: str) -> dict[str, str]:
        groups = pbtxt_placement.active(self._message.instance_group)
        try:
            return pbtxt_placement.host_policies(groups, lambda each: _places(each, backend))
        except ConfigError as error:
            self._problem("instance_group.host_policy", error.problems[0])
            return {}

    def _check_script(self, path: Path, label: str) -> None:
        try:
            torchscript_file.check(path)
        except ConfigError as error:
            self._problems += [f"{label}: {problem}" for problem in error.problems]
        else:
            self._warnings.append(f"{label}: {torchscript_file.DEPRECATED}")

    def _linked(self, backend: str, base: Path, file: str) -> Path | None:
        """Return the file of a language model that is a link: always if it stays in the model's
        folder, elsewhere only if the configuration allows it, as for Hugging Face's cache. Not
        resolved: other files are found beside the link."""
        if backend != LLM or Path(file).name != file:
            return None
        if parameters.follows_links(self._message):
            return base / file
        return base / file if _inside(base, file, self._folder.parent.resolve()) else None

    def _tensors(self, backend: str, artifact: Path) -> tuple[Specs, Specs, int]:
        """Return inputs, outputs and the largest batch."""
        message = self._message
        inputs = tuple(self._spec("input", i, item) for i, item in enumerate(message.input))
        outputs = tuple(self._spec("output", i, item) for i, item in enumerate(message.output))
        max_batch = message.max_batch_size
        if max_batch < 0:
            self._problem("max_batch_size", f"{max_batch} is negative")
        read = _signature_reader(backend, artifact)
        # Encoded images need no input: its name has a default.
        takes_images = parameters.takes_images(_texts(message)) and read is None
        # A Python model may have outputs but no inputs.
        is_whole = bool(outputs) and (bool(inputs) or backend == "python" or takes_images)
        if not is_whole and not self._problems:
            if read is not None:
                inputs, outputs, max_batch = self._complete(read, artifact, inputs, outputs)
            elif takes_images:
                self._problem("output", f"must be given for backend '{backend}', {OUTPUT_EXAMPLE}")
            else:
                self._problem("input, output", f"must be given for backend '{backend}', {EXAMPLE}")
        check_names("input", inputs, self._problem)
        check_names("output", outputs, self._problem)
        return inputs, outputs, max_batch

    def _complete(
        self, read_signature: SignatureReader, artifact: Path, inputs: Specs, outputs: Specs
    ) -> tuple[Specs, Specs, int]:
        """Complete missing tensors from the file's signature."""
        try:
            signature = read_signature(artifact)
        except ConfigError as error:
            for problem in error.problems:
                where = "" if self._named else f"{self._folder.name}/"
                self._problem(f"{where}{artifact.name}", problem)
            # The file might have allowed batches.
            return (), (), self._message.max_batch_size or DEFAULT_MAX_BATCH
        if not signature.outputs and not outputs:
            self._problem("output", f"must be given here or in {artifact.name}, {OUTPUT_EXAMPLE}")
        max_batch = self._message.max_batch_size
        if not max_batch and not inputs and not outputs:
            if signature.has_batch:
                most = signature.chosen_batch or DEFAULT_MAX_BATCH
                max_batch = min(most, signature.max_batch or most)
            self._notes += _batching_notes(signature, max_batch)
        self._notes += signature.notes
        self._says_decoupled = signature.is_decoupled
        skip = 1 if max_batch else 0
        # Control inputs and states are not clients'.
        hidden = pbtxt_sequences.tensor_names(self._message)
        read = [
            tuple(
                replace(spec, shape=spec.shape[skip:]) for spec in specs if spec.name not in hidden
            )
            for specs in (signature.inputs, signature.outputs)
        ]
        return inputs or read[0], outputs or read[1], max_batch

    def _is_decoupled(self, backend: str, artifact: Path) -> bool:
        """Whether a request has any number of responses, as config.pbtxt or the code says."""
        if backend == LLM:
            return False
        if self._says_decoupled or pbtxt_decoupled.read(self._message):
            return True
        read = _signature_reader(backend, artifact)
        if not pbtxt_decoupled.may_say_so(self._message, backend, artifact) or read is None:
            return False
        try:
            return read(artifact).is_decoupled
        except ConfigError as error:
            self._problem(artifact.name, str(error))
            return False

    def _image_inputs(
        self, options: dict[str, str], backend: str, artifact: Path, inputs: Specs
    ) -> Specs:
        """Return what clients send to a model that takes images. What the model takes is added to
        the options, from its file, unless it is there already."""
        is_given = bool(self._message.input)
        if MODEL_INPUTS not in options and not self._problems:
            taken = inputs
            if is_given and (read := _signature_reader(backend, artifact)) is not None:
                taken, _, _ = self._complete(read, artifact, (), inputs)
            if taken and not (is_given and taken is inputs):
                options[MODEL_INPUTS] = parameters.format_tensors(taken)
        return inputs if is_given else (IMAGE_INPUT,)

    def _check_image_batch(self, backend: str, artifact: Path, max_batch: int) -> None:
        """Images are rows of a batch; a file of one fixed size of batch takes no rows."""
        if self._problems:
            return
        fixed: Sequence[TensorSpec] = ()
        if (read := _signature_reader(backend, artifact)) is not None:
            # A file that is not read here declares its tensors in config.pbtxt.
            with contextlib.suppress(ConfigError):
                fixed = [spec for spec in read(artifact).inputs if spec.shape[:1] != (-1,)]
        if fixed:
            what = f"'{fixed[0].name}' has shape {list(fixed[0].shape)}"
            needs = "encoded images need a variable first dimension, the batch"
            self._problem(artifact.name, f"{what}; {needs}: export the model with one")
        elif not max_batch:
            self._problem("max_batch_size", "0; encoded images need a batch of rows")

    def _check_image(self, step: Preprocess, inputs: Specs) -> None:
        if self._problems:
            return
        found = [(spec.datatype, spec.shape) for spec in inputs]
        if found != [(IMAGE_INPUT.datatype, IMAGE_INPUT.shape)]:
            given = parameters.format_tensors(inputs)
            sent = "expected what clients send: one of TYPE_STRING, dims 1, an encoded image"
            own = f"leave it out, or name the model's own in parameters.{MODEL_INPUTS}"
            self._problem("input", f"{given}; {sent}; {own}")
        if len(step.inputs) != 1:
            names = ", ".join(spec.name for spec in step.inputs)
            problem = f"{names}: expected {image_settings.SHAPES}"
            self._problem(f"parameters.{MODEL_INPUTS}", problem)
            return
        key = f"parameters.{parameters.PREPROCESS}"
        try:
            if step.image is None:
                pretrained.image_settings(self._folder).check(step.inputs[0])
            else:
                key = f"parameters.{IMAGE_SETTINGS}"
                image_settings.parse(step.image, step.inputs[0])
        except ConfigError as error:
            for problem in error.problems:
                self._problem(key, problem)

    def _spec(self, kind: str, index: int, item: Proto) -> TensorSpec:
        path = f"{kind}[{index}]"
        datatype = pbtxt_fields.datatype_name(item)
        if datatype == "INVALID":
            self._problem(f"{path}.data_type", f"missing for '{item.name}'")
        elif not datatype:
            self._problem(f"{path}.data_type", f"{item.data_type} is no datatype")
        if not item.name:
            self._problem(f"{path}.name", "missing")
        if any(size == 0 or size < -1 for size in item.dims):
            self._problem(f"{path}.dims", f"{list(item.dims)}: each must be positive or -1")
        max_batch = self._message.max_batch_size
        label_file = item.label_filename if kind == "output" else ""
        return TensorSpec(
            item.name,
            datatype,
            tuple(item.dims),
            is_optional=kind == "input" and item.optional,
            label_file=label_file,
            labels=self._labels(f"{path}.label_filename", label_file) if label_file else (),
            reshape=pbtxt_views.read_reshape(item, path, max_batch, self._problem),
            is_ragged=kind == "input" and item.allow_ragged_batch,
        )

    def _labels(self, path: str, file: str) -> tuple[str, ...]:
        """Read one label per line from a file of the version, or else of the model."""
        version = self._folder.resolve()
        model = version.parent
        own, shared = (_inside(base, file, model) for base in (version, model))
        if own is None or shared is None:
            self._problem(path, f"'{file}' leaves the model's folder")
            return ()
        labels = own if own.is_file() else shared
        if not labels.is_file():
            self._problem(path, f"no such file: {shared}, nor is it in the version's folder")
            return ()
        try:
            return tuple(labels.read_text(encoding="utf-8").splitlines())
        except (OSError, UnicodeDecodeError) as error:
            self._problem(path, f"'{file}' cannot be read: {error}")
            return ()

    def _batching(self, max_batch: int) -> BatchPolicy:
        message = self._message
        if message.HasField(pbtxt_sequences.PATH):
            return pbtxt_sequences.read_batching(message, max_batch, self._problem)
        if not message.HasField("dynamic_batching"):
            # A model without a written configuration is batched.
            is_worked_out = not message.input and not message.output and max_batch > 0
            return BatchPolicy(max(1, max_batch), is_dynamic=is_worked_out)
        batching = message.dynamic_batching
        if max_batch == 0:
            self._problem("dynamic_batching", "needs max_batch_size > 0")
        policies = self._priorities(batching)
        num_priorities = len(policies) - 1
        preferred = tuple(sorted(set(batching.preferred_batch_size)))
        if any(size < 1 or size > max_batch for size in preferred):
            problem = f"{list(preferred)}: each must be from 1 to max_batch_size {max_batch}"
            self._problem("dynamic_batching.preferred_batch_size", problem)
        can_overtake = num_priorities > 1 or any(
            policy.timeout_action == "DELAY" and policy.default_timeout_s > 0 for policy in policies
        )
        if batching.preserve_ordering and can_overtake:
            problem = "cannot be kept with priority levels or the timeout action DELAY"
            self._problem("dynamic_batching.preserve_ordering", problem)
        return BatchPolicy(
            max_batch_size=max(1, max_batch),
            is_dynamic=True,
            preferred_batch_sizes=preferred,
            max_queue_delay_s=batching.max_queue_delay_microseconds / 1e6,
            preserve_ordering=batching.preserve_ordering,
            num_priorities=num_priorities,
            default_priority=batching.default_priority_level if num_priorities else 0,
            policies=policies,
        )

    def _priorities(self, batching: Proto) -> tuple[QueuePolicy, ...]:
        """Return the default policy, then one per level."""
        levels, default = batching.priority_levels, batching.default_priority_level
        own = batching.priority_queue_policy
        base = _queue_policy(batching.default_queue_policy)
        path = "dynamic_batching"
        if levels > MAX_PRIORITIES:
            self._problem(f"{path}.priority_levels", f"{levels} is more than {MAX_PRIORITIES}")
            return (base,)
        if levels and not 1 <= default <= levels:
            problem = f"{default} is not one of 1 to {levels}"
            self._problem(f"{path}.default_priority_level", problem)
        if strange := sorted(level for level in own if not 1 <= level <= levels):
            problem = f"no level {strange} of 1 to {levels}"
            self._problem(f"{path}.priority_queue_policy", problem)
        each = [_queue_policy(own[k]) if k in own else base for k in range(1, levels + 1)]
        return (base, *each)

    def _is_gpu_optional(self, backend: str) -> bool:
        """Whether no instance group asks for a GPU by itself."""
        groups = self._message.instance_group
        is_asked = any(group.gpus or group.kind != group.KIND_AUTO for group in groups)
        return backend == "onnxruntime" and not is_asked

    def _instances(self, backend: str) -> list[str]:
        groups = self._message.instance_group or [_types().ModelInstanceGroup()]
        for index, group in enumerate(groups):
            if group.passive:
                self._notes.append(f"instance_group[{index}] is passive: it has no instances here")
            for name, problem in _group_problems(group, backend):
                self._problem(f"instance_group[{index}].{name}", problem)
        groups = pbtxt_placement.active(groups) or groups
        total = _num_instances(groups)
        if total > MAX_INSTANCES:
            self._problem("instance_group", f"{total} instances; at most {MAX_INSTANCES}")
            return [CPU]
        return [device for group in groups for device in _devices(group, backend)]

    def _rate_limits(self, backend: str) -> tuple[RateLimit, ...]:
        groups = pbtxt_placement.active(self._message.instance_group)
        if _num_instances(groups) > MAX_INSTANCES:
            return ()
        found = pbtxt_rate.read(groups, lambda each: _devices(each, backend), self._problem)
        if found and backend != LLM:
            self._notes.append(pbtxt_rate.NOTE)
        return () if backend == LLM else found


def _num_instances(groups: Sequence[Proto]) -> int:
    return sum(max(1, group.count) * max(1, len(group.gpus)) for group in groups)


def _ineffective(config: ModelConfig, message: Proto) -> list[str]:
    """Return warnings about fields that have no effect, at all or with the rest of this file."""
    found: list[tuple[str, str]] = []
    policy = config.batching
    is_text = config.backend == LLM
    if message.platform and PLATFORMS.get(message.platform) != config.backend:
        found.append(("platform", f"backend '{config.backend}' is given too, and decides"))
    reasons: Mapping[str, str] = {}
    if is_text:
        reasons = NOT_IN_ENGINES
    elif policy.slo_latency_s is not None:
        reasons = dict.fromkeys(NOT_IN_SLO_MODE, f"parameters.{SLO} decides")
    found += [(path, why) for path, why in reasons.items() if _is_set(message, path)]
    if policy.max_wait_s is not None and config.sequences is not None:
        found.append((f"parameters.{MAX_WAIT}", "requests wait for their sequence"))
    if policy.max_wait_s is not None and is_text:
        found.append((f"parameters.{MAX_WAIT}", "see parameters.penstock.max_waiting"))
    elif policy.max_wait_s is not None and policy.slo_latency_s is not None:
        found.append((f"parameters.{MAX_WAIT}", f"parameters.{SLO} limits the time"))
    if IMAGE_SETTINGS in message.parameters and parameters.PREPROCESS in message.parameters:
        why = f"parameters.{IMAGE_SETTINGS} decides, so preprocessor_config.json is not read"
        found.append((f"parameters.{parameters.PREPROCESS}", why))
    found += _without_engine(config, message)
    found += pbtxt_decoupled.warnings(config)
    warnings = [f"{path}: has no effect; {why}" for path, why in found]
    return [*pbtxt_fields.unused(message), *warnings, *parameters.unknown_options(config)]


def _without_engine(config: ModelConfig, message: Proto) -> list[tuple[str, str]]:
    """Return what has no effect on the engine that runs an ONNX file, and why."""
    found: list[tuple[str, str]] = []
    if config.engine == ONNX_RUNTIME:
        ran_by, engine = "ONNX Runtime runs the model", "Penstock's own engine would"
        why = (
            f"{ran_by}; {engine}" if config.uses_gpu else f"{ran_by}; on a GPU (KIND_GPU) {engine}"
        )
        keys = parameters.OF_OWN_ENGINE if config.uses_gpu else parameters.OF_ONNX
        found += [(f"parameters.{key}", why) for key in keys if key in config.options]
    if _is_set(message, accelerators.PATH) and not config.uses_gpu:
        why = "no instance is on a GPU, so ONNX Runtime runs the model on the CPU"
        found.append((accelerators.PATH, why))
    if GPU_ENGINE in config.options and not config.uses_gpu:
        found.append((f"parameters.{GPU_ENGINE}", "no instance is on a GPU"))
    if config.backend == ONNX_RUNTIME and config.engine != ONNX_RUNTIME:
        # Accelerators become options of providers.
        given = [
            f"parameters.{key}" if key in message.parameters else accelerators.PATH
            for key in sorted(config.options)
            if key.startswith("provider")
        ]
        decides = f"parameters.{GPU_ENGINE} decides"
        found += [(path, decides) for path in dict.fromkeys(given)]
    return found


def _texts(message: Proto) -> dict[str, str]:
    return {key: value.string_value for key, value in message.parameters.items()}


def _names_gpu_provider(options: Mapping[str, str]) -> bool:
    """Whether the chosen providers of ONNX Runtime use a GPU; without a choice they do."""
    named = options.get("providers")
    return named is None or any(name in named for name in accelerators.GPU_PROVIDERS)


def _is_set(message: Proto, path: str) -> bool:
    head, _, rest = path.partition(".")
    if all(descriptor.name != head for descriptor, _ in message.ListFields()):
        return False
    return _is_set(getattr(message, head), rest) if rest else True


def _inside(base: Path, file: str, limit: Path) -> Path | None:
    """Resolve a path with links; None if it leaves `limit` or is invalid."""
    try:
        path = (base / file).resolve()
        path.exists()
    except (OSError, ValueError, RuntimeError):
        return None
    return path if path.is_relative_to(limit) else None


def may_use_gpu(backend: str) -> bool:
    """Whether models of a backend use a GPU by default. ONNX files do if torch is installed, whose
    engine runs them there."""
    return backend in AUTO_BACKENDS or (backend == "onnxruntime" and find_spec("torch") is not None)


def _devices(group: Proto, backend: str) -> list[str]:
    """Return the device of each instance of a group."""
    return _places(group, backend) * max(1, int(group.count))


def _places(group: Proto, backend: str) -> list[str]:
    """Return the devices of a group, each of which gets its count of instances. Without a kind they
    are GPUs, if the backend supports them and there are any."""
    if group.gpus:
        return [f"{EACH_GPU}:{gpu}" for gpu in group.gpus]
    is_auto = group.kind == group.KIND_AUTO and may_use_gpu(backend)
    is_gpu = group.kind == group.KIND_GPU or (is_auto and bool(devices.read_gpus()))
    # An engine takes all free memory: one per GPU only if the kind is given.
    where = f"{EACH_GPU}:0" if backend == LLM and not group.kind else EACH_GPU
    return [where if is_gpu else CPU]


def _group_problems(group: Proto, backend: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    if group.count < 0:
        found.append(("count", f"{group.count} is negative"))
    gpus = list(group.gpus)
    is_gpu = group.kind == group.KIND_GPU
    if gpus and group.kind not in (group.KIND_AUTO, group.KIND_GPU):
        found.append(("gpus", f"{gpus} given for {group.Kind.Name(group.kind)}"))
    elif any(gpu < 0 for gpu in gpus) or len(set(gpus)) < len(gpus):
        expected = "expected each GPU once, by its number from 0 on"
        found.append(("gpus", f"{gpus}: {expected}; count says how many instances each gets"))
    elif group.kind == group.KIND_CPU and backend == "tensorrt":
        found.append(("kind", "KIND_CPU, but a TensorRT plan runs on a GPU; expected KIND_GPU"))
    elif (gpus or is_gpu) and backend not in GPU_BACKENDS:
        what = f"asks for KIND_GPU, which is not supported for backend '{backend}'"
        found.append(("kind" if is_gpu else "gpus", what))
    return found


def _queue_policy(message: Proto) -> QueuePolicy:
    action = message.TimeoutAction.Name(message.timeout_action)
    return QueuePolicy(
        timeout_action=cast(TimeoutAction, action),
        default_timeout_s=message.default_timeout_microseconds / 1e6,
        allow_timeout_override=message.allow_timeout_override,
        max_queue_size=message.max_queue_size,
    )


def _signature_reader(backend: str, artifact: Path) -> SignatureReader | None:
    """Return the function that reads a file's signature without its library, or None."""
    if backend in ("openvino", "pytorch") and artifact.suffix == ".onnx":
        return onnx_file.read_signature
    if backend == "pytorch" and (artifact.suffix == ".py" or torchscript_file.is_named(artifact)):
        return None
    return READERS.get(backend)


def _batching_notes(signature: Signature, max_batch: int) -> list[str]:
    """Say how a model is batched whose configuration was worked out from its file, and why."""
    if signature is TEXT_SIGNATURE:
        return []
    if max_batch:
        why = "the first dimension of every input and output is variable"
        return [f"batches of up to {max_batch} rows, as {why}"]
    fixed = [s for s in (*signature.inputs, *signature.outputs) if s.shape[:1] != (-1,)]
    if not fixed or signature.chosen_batch == 0:
        return ["no batching, as the file allows none"]
    name, shape = fixed[0].name, list(fixed[0].shape)
    return [f"no batching, as the first dimension of '{name}' {shape} is not variable"]


def _types() -> Proto:
    from tritonclient.grpc import model_config_pb2

    return model_config_pb2


def _type_number(datatype: str) -> int:
    name = "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"
    return cast(int, _types().DataType.Value(name))

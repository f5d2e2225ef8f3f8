"""Penstock's own parameters in config.pbtxt: one table of keys, types, bounds and fields.

`pbtxt` reads and writes them by this table; `docs/` has a row for each. Keys that a backend
interprets stay in `ModelConfig.options`, all others become fields. Keys without `penstock.` belong
to the backends' libraries.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import numpy as np

from penstock import slo
from penstock.config import (
    EACH_GPU,
    ENSEMBLE,
    GPU_ENGINE,
    GPU_ENGINES,
    HEADS,
    IMAGE,
    LLM,
    MAX_INSTANCES,
    ONNX_RUNTIME,
    SLO_OFF,
    STAGES,
    BatchPolicy,
    ModelConfig,
    PadAxis,
    Padding,
    Postprocess,
    Preprocess,
    RecordPolicy,
)
from penstock.errors import ConfigError
from penstock.repository import record_settings
from penstock.repository.pbtxt_fields import Proto
from penstock.types import DATATYPES, TensorSpec

PREFIX = "penstock."
SLO, ENV = "penstock.slo", "penstock.env"
PAD, PAD_BUCKETS = "penstock.pad", "penstock.pad_buckets"
PREPROCESS, MODEL_INPUTS = "penstock.preprocess", "penstock.model_inputs"
IMAGE_SETTINGS = "penstock.image"
POSTPROCESS, MODEL_OUTPUTS = "penstock.postprocess", "penstock.model_outputs"
MAX_TOKENS, MAX_WAIT = "penstock.max_tokens", "penstock.max_wait_ms"
MIN_COUNT, MAX_COUNT = "penstock.min_instances", "penstock.max_instances"
ON_DEMAND = "penstock.on_demand"
# Whether links among a language model's files may lead out of its folder.
FOLLOW_LINKS = "penstock.follow_links"
MAX_BUCKETS = 64
# What clients send where a model takes an image.
IMAGE_INPUT = TensorSpec("IMAGE", "BYTES", (1,))
ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\*?")
PAD_AXIS = re.compile(r"\s*(?P<input>.+?)\s*\[\s*(?P<axis>\d{1,3})\s*\]\s*(=\s*(?P<value>.+?)\s*)?")
FUNCTION = re.compile(r"(?P<file>[^/\\:]+\.py):(?P<name>[A-Za-z_]\w*)")
MODEL_TENSOR = re.compile(
    r"\s*(?P<name>.+?)\s*:\s*(?P<type>[A-Z0-9]+)\s*\[(?P<dims>[-\d\s,]*)\]\s*"
)


@dataclass(frozen=True, slots=True)
class ConfigParameter:
    """One key. A number sets `field`, a path in ModelConfig: above 0, or from 0 on with
    `takes_zero`, up to `most`. All others are texts. `page` of the documentation explains it."""

    key: str
    page: str
    field: str = ""
    most: float = 0.0
    is_whole: bool = False
    takes_zero: bool = False
    # How many of the text's unit are one of the field's.
    per_unit: float = 1.0
    # The backend that has this parameter and interprets it; empty: all have it.
    backend: str = ""
    # All texts that it takes; none: the backend knows. An empty text is the default.
    values: tuple[str, ...] = ()

    def parse(self, text: str) -> float | None:
        """Return the value of the field; None if the text is not a number within the bounds."""
        value = _whole(text) if self.is_whole else _float(text)
        if not 0 <= value <= self.most or (value == 0 and not self.takes_zero):
            return None
        return value if self.per_unit == 1 else value / self.per_unit

    def format(self, value: float) -> str:
        return repr(value) if self.per_unit == 1 else f"{value * self.per_unit:.12g}"

    @property
    def expected(self) -> str:
        kind = "whole number" if self.is_whole else "number"
        return f"{kind} {'from 0' if self.takes_zero else 'above 0'} up to {self.most:g}"


def _number(name: str, most: float, field: str = "", **more: Any) -> ConfigParameter:
    return ConfigParameter(PREFIX + name, "batching.md", field or name, most, **more)


def _scaling(name: str, most: float, **more: Any) -> ConfigParameter:
    field = f"scaling.{name}"
    return ConfigParameter(PREFIX + name, "operate-scaling.md", field, most, **more)


def _fan_out(name: str, field: str) -> ConfigParameter:
    key, path = PREFIX + name, f"fan_out_limits.{field}"
    return ConfigParameter(key, "ensembles.md", path, 1e6, is_whole=True, backend=ENSEMBLE)


def _texts(backend: str, page: str, names: str) -> Iterator[ConfigParameter]:
    keys = [PREFIX + name for name in names.split()]
    # A language model has other datatypes, which depend on its weights.
    known: Mapping[str, tuple[str, ...]] = {} if backend == LLM else VALUES
    return (ConfigParameter(key, page, backend=backend, values=known.get(key, ())) for key in keys)


# Options of GPU engines, checked whether or not a GPU is here.
MAX_STREAMS = 8
VALUES: Mapping[str, tuple[str, ...]] = {
    "penstock.compile": ("default", "reduce-overhead", "max-autotune", "regional"),
    "penstock.dtype": ("fp32", "tf32", "fp16", "bf16"),
    "penstock.memory_format": ("channels_last",),
    "penstock.fuse": ("convolutions", "transformer", "on"),
    "penstock.cuda_graphs": ("on", "off"),
    "penstock.pack": ("tokens",),
    "penstock.weights": ("int8", "int4"),
    "penstock.stream_priority": ("high", "normal", "low"),
    "penstock.streams": tuple(map(str, range(1, MAX_STREAMS + 1))),
    "penstock.nvtx": ("on", "off"),
    GPU_ENGINE: GPU_ENGINES,
    ON_DEMAND: ("true", "keep", "false"),
}
_OF_PYTORCH = (
    "factory compile dtype keep_fp32 memory_format fuse cuda_graphs pack fp8 fp8_keep weights"
)
# How any model on a GPU shares it, and whether its stages show in Nsight.
_OF_SHARING = "stream_priority streams nvtx"
# ONNX files have them on a GPU, where the PyTorch engine runs them.
_OF_ONNX = f"{_OF_PYTORCH.partition(' ')[2]} fixed_inputs {_OF_SHARING}"
OF_ONNX = tuple(PREFIX + name for name in _OF_ONNX.split())
# ONNX Runtime's providers have an equivalent of these only.
_OF_BOTH = ("dtype", "memory_format", "cuda_graphs")
OF_OWN_ENGINE = tuple(PREFIX + name for name in _OF_ONNX.split() if name not in _OF_BOTH)
ON_GPUS = (GPU_ENGINE, *OF_ONNX)
_OF_LLM = (
    "dtype block_size kv_cache_bytes max_model_len max_num_batched_tokens max_num_seqs max_waiting "
    "num_speculative_tokens random_weights text_timeout_s tool_parser reasoning_parser "
    "parse_special_tokens follow_links threads tpot_ms ttft_ms"
)
PARAMETERS = (
    _number("hang_s", 1e9),
    _number("load_timeout_s", 1e9),
    _number("memory_bytes", 1 << 50, is_whole=True),
    _number("slab_bytes", 1 << 40, "memory.slab_bytes", is_whole=True),
    _number("max_slabs", 4096, "memory.max_slabs", is_whole=True),
    _number("spill_bytes", 1 << 40, "memory.spill_bytes", is_whole=True),
    _number("tolerance", 1.0),
    _number("gpu_memory_bytes", 1 << 50, is_whole=True),
    _number("max_tokens", 1 << 40, "batching.max_tokens", is_whole=True),
    _number("max_wait_ms", 1e12, "batching.max_wait_s", takes_zero=True, per_unit=1e3),
    _scaling("min_instances", MAX_INSTANCES, is_whole=True, takes_zero=True),
    _scaling("max_instances", MAX_INSTANCES, is_whole=True),
    _scaling("scale_down_s", 1e9),
    _scaling("scale_to_zero_s", 1e9),
    _scaling("cold_start_s", 1e9),
    *_texts("", "operate-on-demand.md", "on_demand"),
    *_texts("", "batching.md", "slo env pad pad_buckets"),
    *_texts("", "backends.md", "preprocess model_inputs image postprocess model_outputs"),
    *_texts("", "operate-recording.md", "record record_share record_redact"),
    _fan_out("fan_out_limit", "max_rows"),
    _fan_out("fan_out_concurrency", "max_in_flight"),
    *_texts(ENSEMBLE, "ensembles.md", "fan_out. if. default."),
    *_texts("pytorch", "backends.md", f"{_OF_PYTORCH} {_OF_SHARING}"),
    *_texts("tensorrt", "backends.md", "cuda_graphs"),
    *_texts("onnxruntime", "onnx-on-gpus.md", f"gpu_engine {_OF_ONNX}"),
    *_texts(LLM, "llm.md", _OF_LLM),
)
_NUMBERS = tuple(parameter for parameter in PARAMETERS if parameter.field)
# Keys without `penstock.` that engines know, and prefixes of keys, which end in a dot. Engines that
# are not here check their keys themselves, or give them to the model.
_THREADS = ("intra_op_thread_count", "inter_op_thread_count")
_OF_ONNX_RUNTIME = (
    "execution_mode graph_level enable_mem_arena enable_mem_pattern providers provider_options. "
    "session. optimization."
)
LIBRARY_KEYS: Mapping[str, tuple[str, ...]] = {
    ONNX_RUNTIME: (*_THREADS, *_OF_ONNX_RUNTIME.split()),
    "pytorch": _THREADS,
    "openvino": (
        "inference_num_threads",
        "num_streams",
        "performance_hint",
        "inference_precision",
        "ov.",
    ),
    "tensorrt": (),
}
# Triton's parameters of ONNX Runtime's CUDA provider.
CUDA_PROVIDER_KEYS = (
    "cudnn_conv_algo_search",
    "arena_extend_strategy",
    "gpu_mem_limit",
    "do_copy_in_default_stream",
)
Problem = Callable[[str, str], None]
_DEFAULTS = ModelConfig("", "", "", "", (), (), 0, BatchPolicy(1))


def by_key(backend: str) -> dict[str, ConfigParameter]:
    """Return the parameters of a backend by their keys. Those that end in a dot are prefixes."""
    return {each.key: each for each in PARAMETERS if each.backend in ("", backend)}


def _find_prefix(key: str, there: Mapping[str, ConfigParameter]) -> ConfigParameter | None:
    found = (each for name, each in there.items() if name.endswith(".") and key.startswith(name))
    return next(found, None)


def options_of(given: Mapping[str, str]) -> dict[str, str]:
    """Return the parameters that become no fields: those that the backend interprets."""
    fields = by_key("")
    return {key: text for key, text in given.items() if key not in fields}


def unknown_options(config: ModelConfig) -> list[str]:
    """Return a warning for each key that the engine does not know. They are not refused, because
    configurations written for Triton have some that only Triton knows."""
    engine = config.engine
    if engine not in LIBRARY_KEYS:
        return []
    known = LIBRARY_KEYS[engine]
    if config.is_gpu_optional and config.backend != engine:
        # Without a GPU, the backend itself runs the model.
        known = tuple(dict.fromkeys((*known, *LIBRARY_KEYS[config.backend])))
    if engine == ONNX_RUNTIME and config.uses_gpu:
        known += CUDA_PROVIDER_KEYS
    listed = ", ".join(known) or ", ".join(k.key for k in PARAMETERS if k.backend == engine)
    prefixes = tuple(name for name in known if name.endswith("."))
    # Those of providers are reported with the engine that replaces them.
    others = ("provider",) if config.backend != engine else ()
    why = f"backend '{engine}' does not know it, so it has no effect; it knows {listed}"
    return [
        f"parameters.{key}: {why}"
        for key in sorted(config.options)
        if _folded(key, engine) not in known and not key.startswith((*prefixes, PREFIX, *others))
    ]


def _folded(key: str, engine: str) -> str:
    return key.lower() if engine == "openvino" else key


def with_numbers(config: ModelConfig, values: Mapping[str, float]) -> ModelConfig:
    """Return the configuration with these values, by their keys, in their fields."""
    parts: dict[str, dict[str, Any]] = {"": {}}
    for parameter in _NUMBERS:
        if parameter.key in values:
            part, _, field = parameter.field.rpartition(".")
            parts.setdefault(part, {})[field] = values[parameter.key]
    own = parts.pop("")
    for part, fields in parts.items():
        own[part] = replace(getattr(config, part), **fields)
    return replace(config, **own)


def write(config: ModelConfig) -> dict[str, str]:
    """Return the keys of fields whose values differ from their defaults."""
    values: dict[str, str] = {}
    for parameter in _NUMBERS:
        read = attrgetter(parameter.field)
        if (value := read(config)) != read(_DEFAULTS):
            values[parameter.key] = parameter.format(value)
    texts = {SLO: config.slo, ON_DEMAND: config.scaling.on_demand, ENV: ", ".join(config.env)}
    values |= {key: text for key, text in texts.items() if text}
    if config.record is not None:
        values |= record_settings.write(config.record)
    if config.preprocess is not None:
        values[MODEL_INPUTS] = format_tensors(config.preprocess.inputs)
        if config.preprocess.image is not None:
            values[IMAGE_SETTINGS] = config.preprocess.image
        else:
            values[PREPROCESS] = config.preprocess.function
    if config.postprocess is not None:
        values[POSTPROCESS] = config.postprocess.function
        values[MODEL_OUTPUTS] = format_tensors(config.postprocess.outputs)
    padding = config.model.padding
    if padding is not None:
        axes = (f"{each.input}[{each.axis}]={each.value!r}" for each in padding.axes)
        values[PAD] = ", ".join(axes)
        values[PAD_BUCKETS] = ",".join(map(str, padding.buckets))
    return values


def format_tensors(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(
        f"{spec.name}:{spec.datatype}[{','.join(map(str, spec.shape))}]" for spec in specs
    )


def takes_images(given: Mapping[str, str]) -> bool:
    """Whether clients send encoded images, by the parameters as texts."""
    return IMAGE_SETTINGS in given or given.get(PREPROCESS) == IMAGE


def follows_links(message: Proto) -> bool:
    """Whether links of a language model may lead out of its folder."""
    given = message.parameters
    return FOLLOW_LINKS in given and given[FOLLOW_LINKS].string_value == "true"


@dataclass(frozen=True, slots=True)
class ParameterReader:
    """Reads the parameters of one version, given as texts. `_problem` is called with the path and
    the text of each problem."""

    _given: Mapping[str, str]
    _backend: str
    _folder: Path
    _problem: Problem

    def _report(self, key: str, text: str) -> None:
        self._problem(f"parameters.{key}", text)

    def numbers(self) -> dict[str, float]:
        """Return the numbers by their keys, in the unit of their fields. Reports unknown keys, and
        texts that a parameter does not take."""
        there = by_key(self._backend)
        numbers: dict[str, float] = {}
        for key, text in self._given.items():
            parameter = there.get(key) or _find_prefix(key, there)
            if parameter is None and key.startswith(PREFIX):
                self._report(key, f"unknown; expected one of {', '.join(there)}")
            elif parameter is not None and parameter.values and text:
                if text not in parameter.values:
                    self._report(key, f"'{text}' is not one of {', '.join(parameter.values)}")
            elif parameter is not None and parameter.field:
                if (value := parameter.parse(text)) is None:
                    self._report(key, f"'{text}' is not a {parameter.expected}")
                else:
                    numbers[key] = value
        return numbers

    def slo(self) -> str:
        """Return the SLO, SLO_OFF if it is given empty; empty without one."""
        promised = self._given.get(SLO)
        return "" if promised is None else promised.strip() or SLO_OFF

    def on_demand(self) -> Literal["", "true", "keep", "false"]:
        match self._given.get(ON_DEMAND, ""):
            case "true" | "keep" | "false" as wanted:
                return wanted
        return ""

    def slo_latency_s(self) -> float | None:
        if (promised := self.slo()) in ("", SLO_OFF):
            return None
        try:
            return slo.parse(promised).latency_s
        except ConfigError as error:
            for problem in error.problems:
                self._report(SLO, problem)
            return None

    def padding(self, inputs: Sequence[TensorSpec]) -> Padding | None:
        """Parse `penstock.pad`: which axes of which inputs may be padded, and with what."""
        buckets = self._buckets()
        if PAD not in self._given:
            if PAD_BUCKETS in self._given:
                self._report(PAD_BUCKETS, f"needs parameters.{PAD}")
            return None
        specs = {spec.name: spec for spec in inputs}
        axes: list[PadAxis] = []
        for item in self._given[PAD].split(","):
            match = PAD_AXIS.fullmatch(item)
            if match is None:
                problem = f"'{item.strip()}' is not of the form input[axis]=value"
            else:
                axis = PadAxis(match["input"], int(match["axis"]), _float(match["value"] or "0"))
                problem = _pad_problem(axis, specs)
                axes.append(axis)
            if problem:
                self._report(PAD, problem)
        return Padding(tuple(axes), buckets) if buckets else Padding(tuple(axes))

    def preprocess(self) -> Preprocess | None:
        """Parse `penstock.preprocess` and `penstock.model_inputs`, both or neither, and
        `penstock.image`, which means the built-in step."""
        image = self._given.get(IMAGE_SETTINGS)
        if not {PREPROCESS, MODEL_INPUTS, IMAGE_SETTINGS} & self._given.keys():
            return None
        example = "x:FP32[3,224,224]" if takes_images(self._given) else "input_ids:INT64[-1]"
        inputs = self._model_tensors(MODEL_INPUTS, f"takes, such as {example}")
        if image is None:
            return Preprocess(self._function(PREPROCESS, STAGES), inputs)
        if self._given.get(PREPROCESS, IMAGE) != IMAGE:
            self._report(IMAGE_SETTINGS, f"not beside parameters.{PREPROCESS}, which decodes")
        return Preprocess(IMAGE, inputs, image=image)

    def postprocess(self) -> Postprocess | None:
        """Parse `penstock.postprocess` and `penstock.model_outputs`: both or neither."""
        if POSTPROCESS not in self._given and MODEL_OUTPUTS not in self._given:
            return None
        outputs = self._model_tensors(MODEL_OUTPUTS, "gives, such as logits:FP32[10]")
        return Postprocess(self._function(POSTPROCESS, HEADS), outputs)

    def _function(self, key: str, built_in: Sequence[str]) -> str:
        function = self._given.get(key, "")
        match = FUNCTION.fullmatch(function)
        if function in built_in:
            return function
        if match is None:
            steps = f"or one of {', '.join(built_in)} for a Hugging Face folder"
            expected = f"expected FILE.py:FUNCTION, a file of the version folder, {steps}"
            self._report(key, f"'{function}': {expected}")
        elif not (self._folder / match["file"]).is_file():
            self._problem(f"{self._folder.name}/{match['file']}", "no such file")
        return function

    def _model_tensors(self, key: str, example: str) -> tuple[TensorSpec, ...]:
        specs: list[TensorSpec] = []
        for item in re.split(r",(?![^\[]*\])", self._given.get(key, "")):
            found = MODEL_TENSOR.fullmatch(item)
            sizes = [size.strip() for size in found["dims"].split(",")] if found else []
            sizes = [size for size in sizes if size]
            is_shape = all(re.fullmatch(r"-1|[1-9]\d{0,17}", size) for size in sizes)
            if found is None or found["type"] not in DATATYPES or not is_shape:
                self._report(key, f"'{item.strip()}': expected what the model {example}")
            else:
                specs.append(TensorSpec(found["name"], found["type"], tuple(map(int, sizes))))
        check_names(f"parameters.{key}", specs, self._problem)
        return tuple(specs)

    def _buckets(self) -> tuple[int, ...]:
        text = self._given.get(PAD_BUCKETS)
        if text is None:
            return ()
        sizes = [_whole(item.strip()) for item in text.split(",")]
        buckets = tuple(int(size) for size in sizes if 0 < size < 1 << 31)
        if len(buckets) < len(sizes) or list(buckets) != sorted(set(buckets)):
            expected = "expected whole numbers, each larger than the one before, such as 16,32,64"
            self._report(PAD_BUCKETS, f"'{text}': {expected}")
        elif len(buckets) > MAX_BUCKETS:
            self._report(PAD_BUCKETS, f"more than {MAX_BUCKETS} sizes")
        return buckets

    def record(self, specs: Sequence[TensorSpec]) -> RecordPolicy | None:
        """Parse how requests are recorded; `specs` are the inputs and outputs that users see."""
        return record_settings.read(self._given, specs, self._report)

    def env(self) -> tuple[str, ...]:
        text = self._given.get(ENV, "")
        names = tuple(part.strip() for part in text.split(",") if part.strip())
        if wrong := [name for name in names if not ENV_NAME.fullmatch(name)]:
            expected = "expected e.g. 'MODEL_TOKEN, MY_PREFIX_*'"
            self._report(ENV, f"'{wrong[0]}' names no variable; {expected}")
        if names and self._backend == LLM:
            self._report(ENV, "language models run no code of their own")
        return names


def check_names(path: str, specs: Sequence[TensorSpec], problem: Problem) -> None:
    names = [spec.name for spec in specs]
    for name in sorted({name for name in names if names.count(name) > 1}):
        problem(path, f"'{name}' is given {names.count(name)} times")


def tokens_problem(policy: BatchPolicy, padding: Padding | None, *, is_sent: bool) -> str:
    """Return what is wrong with a token budget, if there is one. `is_sent`: the padded tensors are
    the user's inputs, not a function's results."""
    if policy.max_tokens is None:
        return ""
    if not policy.is_dynamic:
        return "needs dynamic_batching: each request runs by itself"
    if padding is None:
        return f"needs parameters.{PAD}, which says what axis is as long as there are tokens"
    if not is_sent:
        return f"how long rows are is known only behind parameters.{PREPROCESS}"
    longest = padding.buckets[-1]
    if policy.max_tokens < longest:
        text = f"'{policy.max_tokens}' is less than one row of the largest bucket, {longest}"
        return f"{text} (parameters.{PAD_BUCKETS})"
    return ""


def scaling_problem(config: ModelConfig) -> tuple[str, str] | None:
    """Return what is wrong with the limits of the number of instances, as key and text. `config`
    has its devices; those that mean each GPU are checked again when they are known."""
    least, most = config.scaling.min_instances, config.scaling.max_instances
    if config.scaling.is_on_demand and (problem := on_demand_problem(config)):
        return ON_DEMAND, problem
    if least is None and most is None:
        return None
    if config.backend == LLM:
        key = MIN_COUNT if most is None else MAX_COUNT
        return key, "a language model has one engine, which takes all requests together"
    if least is not None and most is not None and least > most:
        return MIN_COUNT, f"{least} is more than parameters.{MAX_COUNT}, {most}"
    count = config.num_instances
    if EACH_GPU in config.devices:
        return None
    if config.uses_gpu and config.shares_workers and most is not None and most > count:
        shared = "instances on a GPU share a worker, which is started with all of them"
        return MAX_COUNT, f"{most}, and instance_group has {count}; {shared}: raise its count"
    if not config.min_instances <= count <= config.max_instances:
        expected = f"expected from {config.min_instances} to {config.max_instances} at the start"
        key = MIN_COUNT if count < config.min_instances else MAX_COUNT
        return key, f"instance_group has {count} instances; {expected}"
    return None


def on_demand_problem(config: ModelConfig) -> str:
    """Return why requests cannot load a model; empty if they can."""
    if config.backend == LLM:
        return "a language model's engine takes its KV cache when the server starts"
    if config.is_ensemble:
        return "an ensemble has no memory of its own; give the parameter to its members"
    if config.is_staged:
        return "the built-in preprocessing step has workers of its own, which stay"
    return ""


def _pad_problem(axis: PadAxis, specs: Mapping[str, TensorSpec]) -> str:
    spec = specs.get(axis.input)
    if spec is None:
        return f"no input '{axis.input}'; there are {', '.join(specs)}"
    place = f"'{axis.input}[{axis.axis}]'"
    if spec.datatype == "BYTES":
        return f"{place}: BYTES cannot be padded"
    if axis.axis >= len(spec.shape) or spec.shape[axis.axis] != -1:
        return f"{place}: not one of the axes of size -1 in dims {list(spec.shape)}"
    dtype = DATATYPES[spec.datatype].numpy
    is_float = dtype.kind == "f" or spec.datatype == "BF16"
    if is_float:
        is_held = not math.isnan(axis.value)
    elif dtype.kind == "b":
        is_held = axis.value in (0, 1)
    else:
        limits = np.iinfo(dtype.name)
        is_held = axis.value.is_integer() and limits.min <= axis.value <= limits.max
    return "" if is_held else f"{place}: the value is not one of {spec.datatype}"


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _whole(text: str) -> float:
    return int(text) if text.isascii() and text.isdigit() else math.nan

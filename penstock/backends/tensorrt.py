"""TensorRT plans (`model.plan`) on GPUs, and building them from ONNX files.

A plan is machine code for one model of GPU and one version of TensorRT, so it is trusted like
`module.py`. Batches run through the pipeline of the PyTorch backend: pinned memory, copies beside
computation, CUDA graphs. No other module calls TensorRT; its names here are those that versions
10.3 to 11.4 have in common, which `tests/backends/test_tensorrt_api.py` checks without a GPU.

Networks are strongly typed, the only kind in version 11: layers compute in the datatypes of the
ONNX file, in INT8 and FP8 where it has QuantizeLinear and DequantizeLinear.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.backends import GPU_MEMORY
from penstock.backends.checks import check_signature, log
from penstock.backends.pytorch import TORCH_TYPES, LoadedModule, Options, TorchRunner
from penstock.config import CPU, ModelConfig
from penstock.errors import BackendFailed, ConfigError, first_line
from penstock.repository.signature import Signature
from penstock.types import TensorSpec

try:
    import tensorrt as trt
except ModuleNotFoundError:
    raise
except ImportError as error:
    # The bindings are there, the libraries behind them are not.
    problem = f"backend: 'tensorrt': TensorRT cannot be loaded: {first_line(error)}"
    raise ConfigError(f"{problem}; pip install tensorrt brings its libraries") from None

OLDEST = 10
if int(trt.__version__.split(".")[0]) < OLDEST:
    problem = f"backend: 'tensorrt': TensorRT {trt.__version__} is installed"
    raise ConfigError(f"{problem}; expected {OLDEST} or newer: pip install --upgrade tensorrt")

DATATYPES = {
    trt.DataType.FLOAT: "FP32",
    trt.DataType.HALF: "FP16",
    trt.DataType.BF16: "BF16",
    trt.DataType.INT8: "INT8",
    trt.DataType.INT32: "INT32",
    trt.DataType.INT64: "INT64",
    trt.DataType.UINT8: "UINT8",
    trt.DataType.BOOL: "BOOL",
}
# Share of the free GPU memory that layers may use while a plan is built, and later when it runs.
WORKSPACE_SHARE = 0.5
NEEDS_GPU = "a TensorRT plan runs on GPUs only; KIND_GPU in instance_group"
REBUILD = (
    "a plan runs only on the model of GPU and with the version of TensorRT that built it; build it "
    "here from its ONNX file"
)
# Smallest, usual and largest shape of each input with variable sizes.
Profile = Mapping[str, tuple[Sequence[int], Sequence[int], Sequence[int]]]
Tensors = Mapping[str, torch.Tensor]


class MessageLog(trt.ILogger):  # type: ignore[misc]
    """Messages of TensorRT, which returns None or False instead of raising."""

    def __init__(self) -> None:
        trt.ILogger.__init__(self)
        self._errors: list[str] = []

    def log(self, severity: trt.ILogger.Severity, msg: str) -> None:
        if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
            self._errors.append(" ".join(msg.split()))
        elif severity == trt.ILogger.Severity.WARNING:
            log.debug("%s", msg)

    def take(self) -> str:
        """Return the errors since the last call as one line."""
        found, self._errors = "; ".join(self._errors), []
        return found or "it gave no reason"


@dataclass(frozen=True, slots=True)
class ShapedContext:
    """An execution context with the shapes of its inputs set, and the forms of its outputs."""

    context: trt.IExecutionContext
    # Number of its optimisation profile.
    profile: int
    outputs: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


class TensorRtPlan(torch.nn.Module):  # type: ignore[misc]
    """A loaded plan as a module: tensors by name in, tensors by name out.

    Invariant: one thread calls it, on one stream, so all contexts share the memory of activations.
    A captured CUDA graph belongs to its context: with `keeps_contexts`, each shape has its own.
    """

    def __init__(
        self, runtime: trt.Runtime, engine: trt.ICudaEngine, messages: MessageLog, device: str
    ) -> None:
        super().__init__()
        self.engine: trt.ICudaEngine = engine
        self.messages = messages
        # The engine needs it as long as it lives.
        self._runtime = runtime
        self.keeps_contexts = False
        self.signature = _signature(engine)
        self._profiles = list(_profiles(engine, self.signature.inputs))
        num_bytes = max(1, engine.device_memory_size_v2)
        self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._contexts: dict[object, ShapedContext] = {}

    def check_limits(self, config: ModelConfig) -> None:
        """Compare batch sizes with the plan's profiles; every batch outside them would fail."""
        problems = []
        for name in self._profiles[0] if config.max_batch_size else ():
            least = min(profile[name][0][0] for profile in self._profiles)
            most = max(profile[name][2][0] for profile in self._profiles)
            if config.max_batch_size > most:
                built = f"the plan was built for at most {most} rows of '{name}'"
                problems.append(f"max_batch_size: {config.max_batch_size}, but {built}")
            if least > 1:
                built = f"the plan was built for at least {least} rows of '{name}'"
                problems.append(f"max_batch_size: requests have one row, but {built}")
        if problems:
            raise ConfigError(sorted(set(problems)))

    def forward(self, **inputs: torch.Tensor) -> Tensors:
        inputs = {name: tensor.contiguous() for name, tensor in inputs.items()}
        shaped = self._shaped({name: tuple(tensor.shape) for name, tensor in inputs.items()})
        device = self._memory.device
        outputs = {
            name: torch.empty(shape, dtype=dtype, device=device)
            for name, (dtype, shape) in shaped.outputs.items()
        }
        context: trt.IExecutionContext = shaped.context
        for name, tensor in (*inputs.items(), *outputs.items()):
            # An empty tensor has no address, and TensorRT wants one.
            address = tensor.data_ptr() or self._memory.data_ptr()
            if not context.set_tensor_address(name, address):
                raise BackendFailed(f"TensorRT: '{name}': {self.messages.take()}")
        if not context.execute_async_v3(stream_handle(device)):
            raise BackendFailed(f"TensorRT: {self.messages.take()}")
        return outputs

    def _shaped(self, shapes: Mapping[str, tuple[int, ...]]) -> ShapedContext:
        key = tuple(sorted(shapes.items()))
        if (known := self._contexts.get(key)) is not None:
            return known
        number = self._profile(shapes)
        context: trt.IExecutionContext = self._reused(number) or self._context(number)
        for name, shape in shapes.items():
            if not context.set_input_shape(name, shape):
                raise BackendFailed(f"TensorRT: input '{name}': {self.messages.take()}")
        if missing := context.infer_shapes():
            raise BackendFailed(f"TensorRT: it needs the values of {missing} to know its shapes")
        outputs = self.signature.outputs
        forms = {spec.name: self._form(context, spec) for spec in outputs}
        self._contexts[key] = made = ShapedContext(context, number, forms)
        return made

    def _reused(self, number: int) -> trt.IExecutionContext | None:
        """Return the profile's context for another shape, unless a graph may belong to it."""
        of_profile = [key for key, each in self._contexts.items() if each.profile == number]
        if self.keeps_contexts or not of_profile:
            return None
        return self._contexts.pop(of_profile[0]).context

    def _context(self, number: int) -> trt.IExecutionContext:
        context = self.engine.create_execution_context(
            strategy=trt.ExecutionContextAllocationStrategy.USER_MANAGED
        )
        if context is None:
            raise BackendFailed(f"TensorRT: no execution context: {self.messages.take()}")
        context.set_device_memory(self._memory.data_ptr(), self._memory.numel())
        stream = stream_handle(self._memory.device)
        # Only the first context of an engine begins with a profile.
        if not context.set_optimization_profile_async(number, stream):
            raise BackendFailed(f"TensorRT: profile {number}: {self.messages.take()}")
        return context

    def _profile(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """Return the number of the first profile that allows these shapes."""
        for number, profile in enumerate(self._profiles):
            if all(_is_within(shapes[name], *profile[name]) for name in profile):
                return number
        limits = [
            f"'{name}' {list(shapes[name])}, from {list(low)} to {list(high)}"
            for name, (low, _, high) in self._profiles[0].items()
        ]
        raise BackendFailed(f"shapes outside the plan's profiles: {', '.join(limits)}")

    def _form(
        self, context: trt.IExecutionContext, spec: TensorSpec
    ) -> tuple[torch.dtype, tuple[int, ...]]:
        shape = tuple(context.get_tensor_shape(spec.name))
        if any(size < 0 for size in shape):
            why = "its shape depends on the data, which is not supported"
            raise BackendFailed(f"output '{spec.name}': {why}")
        return TORCH_TYPES[spec.datatype], shape


class TensorRtRunner(TorchRunner):
    """The pipeline of the PyTorch backend around a plan."""

    def __init__(self, config: ModelConfig, options: Options, plan: TensorRtPlan) -> None:
        names = [spec.name for spec in plan.signature.inputs]
        loaded = LoadedModule(plan, (), names, plan.signature, is_compiled=True)
        super().__init__(config, options, loaded)
        assert self.pipeline is not None, "a plan is on a GPU"
        plan.keeps_contexts = self.pipeline.is_captured
        self._plan = plan
        self._plan_bytes = Path(config.artifact).stat().st_size

    def built(self) -> Mapping[str, str]:
        engine: trt.ICudaEngine = self._plan.engine
        assert self.pipeline is not None, "it is closed"
        weights_and_batches = self._plan_bytes + torch.cuda.max_memory_reserved(self._device)
        return {
            "tensorrt": str(trt.__version__),
            "form": "TensorRT plan",
            "device": str(self._device),
            "layers": str(engine.num_layers),
            "profiles": str(engine.num_optimization_profiles),
            "datatypes": layer_datatypes(engine),
            "activation_bytes": str(engine.device_memory_size_v2),
            **self.pipeline.facts(),
            GPU_MEMORY: str(weights_and_batches),
        }

    def close(self) -> None:
        super().close()
        del self._plan


def load(config: ModelConfig) -> TensorRtRunner:
    options = _options(config)
    plan = load_plan(Path(config.artifact), config.device, config.label)
    check_signature(config, plan.signature.inputs, plan.signature.outputs)
    plan.check_limits(config)
    return TensorRtRunner(config, options, plan)


def _options(config: ModelConfig) -> Options:
    """Return the options; raise ConfigError with all problems."""
    problems = [f"device: '{config.device}': {NEEDS_GPU}"] if config.device == CPU else []
    problems += [
        f"input '{spec.name}': a plan needs all its inputs; it cannot be optional"
        for spec in config.inputs
        if spec.is_optional
    ]
    graphs = config.options.get("penstock.cuda_graphs", "off")
    if graphs not in ("on", "off"):
        problems.append(f"parameters.penstock.cuda_graphs: '{graphs}' is not one of on, off")
    if problems:
        raise ConfigError(problems)
    threads, interop = torch.get_num_threads(), torch.get_num_interop_threads()
    return Options(
        threads, interop, "", None, "", is_channels_last=False, has_cuda_graphs=graphs == "on"
    )


def load_plan(path: Path, device: str, label: str) -> TensorRtPlan:
    """Load a plan onto a GPU; `label` names it in errors."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{label}: cannot be read: {error.strerror}") from None
    if not data:
        raise ConfigError(f"{label}: the file is empty")
    set_device(device)
    messages = MessageLog()
    trt.init_libnvinfer_plugins(messages, "")
    # Its engine_host_code_allowed stays off: no code of the plan runs on the host.
    runtime = trt.Runtime(messages)
    engine = runtime.deserialize_cuda_engine(data)
    if engine is None:
        what = f"TensorRT {trt.__version__} cannot load it on {device}"
        raise BackendFailed(f"{label}: {what}: {messages.take()}; {REBUILD}")
    try:
        return TensorRtPlan(runtime, engine, messages, device)
    except ConfigError as error:
        raise ConfigError([f"{label}: {problem}" for problem in error.problems]) from None


def set_device(device: str) -> None:
    """Make a GPU the one that TensorRT uses in this thread."""
    try:
        torch.empty(0, device=device)
        if torch.device(device).index is not None:
            torch.cuda.set_device(device)
    except Exception as error:  # torch raises RuntimeError, AssertionError and others.
        problem = f"device: '{device}' cannot be used: {first_line(error)}"
        raise ConfigError(problem) from None


def stream_handle(device: torch.device) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


def free_bytes(device: str) -> int:
    return int(torch.cuda.mem_get_info(device)[0])


def _signature(engine: trt.ICudaEngine) -> Signature:
    """Return the plan's tensors; ConfigError for those that are not plain tensors on the GPU."""
    tensors: dict[bool, list[TensorSpec]] = {True: [], False: []}
    problems: list[str] = []
    for index in range(engine.num_io_tensors):
        name = engine.get_tensor_name(index)
        datatype = engine.get_tensor_dtype(name)
        if engine.is_shape_inference_io(name):
            problems.append(f"'{name}' is a shape tensor, which is not supported")
        elif engine.get_tensor_location(name) != trt.TensorLocation.DEVICE:
            problems.append(f"'{name}' is in host memory, which is not supported")
        elif engine.get_tensor_format(name) != trt.TensorFormat.LINEAR:
            problems.append(f"'{name}' is not in the linear format; build the plan with that")
        elif datatype not in DATATYPES:
            known = ", ".join(DATATYPES.values())
            problems.append(f"'{name}' is {datatype.name}; expected one of {known}")
        else:
            shape = tuple(engine.get_tensor_shape(name))
            is_input = engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
            tensors[is_input].append(TensorSpec(name, DATATYPES[datatype], shape))
    if problems:
        raise ConfigError(problems)
    return Signature(tuple(tensors[True]), tuple(tensors[False]))


def _profiles(engine: trt.ICudaEngine, inputs: Sequence[TensorSpec]) -> Iterator[Profile]:
    """Yield the limits of variable inputs in each profile; a plan without profiles has one."""
    names = [spec.name for spec in inputs if not spec.is_fixed]
    for number in range(max(1, engine.num_optimization_profiles)):
        found = {}
        for name in names:
            low, usual, high = map(tuple, engine.get_tensor_profile_shape(name, number))
            found[name] = (low, usual, high)
        yield found


def _is_within(
    shape: Sequence[int], low: Sequence[int], usual: Sequence[int], high: Sequence[int]
) -> bool:
    ranges = zip(shape, low, high, strict=True) if len(shape) == len(usual) else ()
    return len(shape) == len(usual) and all(least <= n <= most for n, least, most in ranges)


def layer_datatypes(engine: trt.ICudaEngine) -> str:
    """Return the datatypes that layers write, with counts, as the engine's inspector reports them:
    "Half 52,Float 2"; "not told" if the plan was built without these details."""
    inspector = engine.create_engine_inspector()
    text = inspector.get_engine_information(trt.LayerInformationFormat.JSON)
    try:
        layers = json.loads(text).get("Layers", [])
    except (ValueError, AttributeError):
        return "not told"
    counts = Counter(kind for layer in layers for kind in _written(layer))
    return ",".join(f"{kind} {count}" for kind, count in counts.most_common()) or "not told"


def _written(layer: object) -> Iterator[str]:
    """Yield the datatype of each output of a layer. A layer is only a name without details; version
    10 has format and datatype in one field, 11 in two."""
    outputs = layer.get("Outputs", []) if isinstance(layer, dict) else []
    for output in outputs:
        fields = {key.casefold(): str(text) for key, text in output.items()}
        yield fields.get("datatype") or fields.get("format/datatype", "unknown")


def build_plan(
    source: Path,
    target: Path,
    *,
    device: str,
    profiles: Sequence[Profile],
    allows_tf32: bool,
    timing_cache: Path,
) -> None:
    """Build a plan from an ONNX file for this GPU; takes minutes. The timing cache keeps what was
    measured for later builds. Raise BackendFailed with TensorRT's reasons."""
    set_device(device)
    messages = MessageLog()
    trt.init_libnvinfer_plugins(messages, "")
    builder = trt.Builder(messages)
    # Version 11 ignores the flag: there it is always so.
    flags = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(flags)
    _parse(trt.OnnxParser(network, messages), source)
    config = builder.create_builder_config()
    num_bytes = int(WORKSPACE_SHARE * free_bytes(device))
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, num_bytes)
    # For `layer_datatypes`.
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if not allows_tf32:
        config.clear_flag(trt.BuilderFlag.TF32)
    for shapes in profiles:
        profile = builder.create_optimization_profile()
        for name, (low, usual, high) in shapes.items():
            profile.set_shape(name, tuple(low), tuple(usual), tuple(high))
        if config.add_optimization_profile(profile) < 0:
            raise BackendFailed(f"TensorRT: profile {dict(shapes)}: {messages.take()}")
    cache = _timing_cache(config, timing_cache)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise BackendFailed(f"TensorRT cannot build a plan: {messages.take()}")
    target.write_bytes(plan)
    timing_cache.write_bytes(cache.serialize())


def _parse(parser: trt.OnnxParser, source: Path) -> None:
    if parser.parse_from_file(str(source)):
        return
    reasons = []
    for index in range(parser.num_errors):
        error = parser.get_error(index)
        reasons.append(f"{error.node_operator()} '{error.node_name()}': {error.desc()}")
    raise BackendFailed(f"TensorRT cannot read {source.name}: {'; '.join(reasons)}")


def _timing_cache(config: trt.IBuilderConfig, path: Path) -> trt.ITimingCache:
    """Return the stored cache, or an empty one if that is of another GPU or version."""
    stored = path.read_bytes() if path.is_file() else b""
    for content in (stored, b""):
        cache = config.create_timing_cache(content)
        if cache is not None and config.set_timing_cache(cache, ignore_mismatch=False):
            return cache
    raise BackendFailed("TensorRT: no timing cache can be made")

"""TensorRT as far as penstock.backends.tensorrt calls it, on the CPU. A plan is the ONNX file with
its profiles; contexts read and write the memory at the addresses that they are given, and compute
with onnx's reference evaluator. Names and arguments are compared with the listing of the real
bindings (`tests/backends/test_tensorrt_api.py`)."""

import contextlib
import ctypes
import hashlib
import json
import sys
from enum import IntEnum

import numpy as np
import onnx
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from penstock import backends

MODULE = "penstock.backends.tensorrt"
__version__ = "11.4.0.106"
MAGIC = b"plan of the fake\n"
# What was called, for tests that ask.
calls: list[str] = []


@contextlib.contextmanager
def forgotten():
    """The backend's module is imported anew inside, and forgotten afterwards."""
    names = ("tensorrt", MODULE)
    before = {name: sys.modules.pop(name, None) for name in names}
    try:
        yield
    finally:
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update({name: module for name, module in before.items() if module is not None})
        if hasattr(backends, "tensorrt"):
            del backends.tensorrt


def install(monkeypatch):
    """Import the backend with this in place of TensorRT, and a GPU that is none. Its memory is the
    host's, so the CPU has another name."""
    from fake_gpu import FakeGpu

    monkeypatch.setitem(sys.modules, "tensorrt", sys.modules[__name__])
    backends.backend("tensorrt")
    calls.clear()
    monkeypatch.setattr("penstock.backends.pytorch.open_device", lambda name: FakeGpu())
    module = sys.modules[MODULE]
    monkeypatch.setattr(module, "CPU", "none")
    monkeypatch.setattr(module, "stream_handle", lambda device: 7)
    monkeypatch.setattr(module, "free_bytes", lambda device: 1000)
    return module


def _enum(name, *members):
    return IntEnum(name, list(members), start=0)


DataType = _enum(
    *("DataType", "FLOAT", "HALF", "INT8", "INT32", "BOOL", "UINT8", "FP8", "BF16", "INT64")
)
BuilderFlag = _enum("BuilderFlag", "TF32", "REFIT")
NetworkDefinitionCreationFlag = _enum("NetworkDefinitionCreationFlag", "NOT_USED", "STRONGLY_TYPED")
MemoryPoolType = _enum("MemoryPoolType", "WORKSPACE")
ProfilingVerbosity = _enum("ProfilingVerbosity", "LAYER_NAMES_ONLY", "NONE", "DETAILED")
LayerInformationFormat = _enum("LayerInformationFormat", "ONELINE", "JSON")
TensorIOMode = _enum("TensorIOMode", "NONE", "INPUT", "OUTPUT")
TensorLocation = _enum("TensorLocation", "DEVICE", "HOST")
TensorFormat = _enum("TensorFormat", "LINEAR", "CHW4")
ExecutionContextAllocationStrategy = _enum(
    *("ExecutionContextAllocationStrategy", "STATIC", "ON_PROFILE_CHANGE", "USER_MANAGED")
)
ONNX_TYPES = {
    TensorProto.FLOAT: DataType.FLOAT,
    TensorProto.FLOAT16: DataType.HALF,
    TensorProto.BFLOAT16: DataType.BF16,
    TensorProto.INT8: DataType.INT8,
    TensorProto.INT32: DataType.INT32,
    TensorProto.INT64: DataType.INT64,
    TensorProto.UINT8: DataType.UINT8,
    TensorProto.BOOL: DataType.BOOL,
    TensorProto.FLOAT8E4M3FN: DataType.FP8,
}


class ILogger:
    Severity = _enum("Severity", "INTERNAL_ERROR", "ERROR", "WARNING", "INFO", "VERBOSE")

    def __init__(self):
        pass

    def log(self, severity, msg):
        raise NotImplementedError


def init_libnvinfer_plugins(logger, namespace):
    return True


def _sizes(value):
    dims = value.type.tensor_type.shape.dim
    return tuple(d.dim_value if d.HasField("dim_value") else -1 for d in dims)


class IOptimizationProfile:
    def __init__(self):
        self.shapes = {}

    def set_shape(self, input, min, opt, max):
        self.shapes[input] = [list(min), list(opt), list(max)]


class ITimingCache:
    def __init__(self, content):
        self.content = content

    def serialize(self):
        return self.content + b"timed;"


class IBuilderConfig:
    def __init__(self):
        self.profiling_verbosity = ProfilingVerbosity.LAYER_NAMES_ONLY
        self.flags = {BuilderFlag.TF32}
        self.profiles = []
        self.cache = None

    def set_memory_pool_limit(self, pool, pool_size):
        calls.append(f"{pool.name} {pool_size}")

    def clear_flag(self, flag):
        self.flags.discard(flag)

    def create_timing_cache(self, serialized_timing_cache):
        return ITimingCache(serialized_timing_cache)

    def set_timing_cache(self, cache, ignore_mismatch):
        if cache.content.startswith(b"another GPU") and not ignore_mismatch:
            return False
        self.cache = cache
        return True

    def add_optimization_profile(self, profile):
        if any(low > high for low, _, high in profile.shapes.values()):
            return -1
        self.profiles.append(profile.shapes)
        return len(self.profiles) - 1


class Network:
    """INetworkDefinition, whose own functions are not called."""

    def __init__(self):
        self.model = None


class Builder:
    def __init__(self, logger):
        self.logger = logger

    def create_network(self, flags=0):
        assert flags == 1 << NetworkDefinitionCreationFlag.STRONGLY_TYPED
        return Network()

    def create_builder_config(self):
        return IBuilderConfig()

    def create_optimization_profile(self):
        return IOptimizationProfile()

    def build_serialized_network(self, network, config):
        assert config.cache is not None, "an engine takes minutes without a timing cache"
        for value in network.model.graph.input:
            is_open = -1 in _sizes(value)
            if is_open and not any(value.name in each for each in config.profiles):
                error = f"Network has dynamic input {value.name}, but no optimization profile"
                self.logger.log(ILogger.Severity.ERROR, f"Error Code 4:\n {error}")
                return None
        facts = {
            "profiles": config.profiles,
            "is_detailed": config.profiling_verbosity == ProfilingVerbosity.DETAILED,
            "has_tf32": BuilderFlag.TF32 in config.flags,
        }
        body = json.dumps(facts).encode() + b"\n" + network.model.SerializeToString()
        return MAGIC + hashlib.sha256(body).digest() + body


class ParserError:
    def __init__(self, node, text):
        self._node, self._text = node, text

    def desc(self):
        return self._text

    def node_name(self):
        return self._node.name

    def node_operator(self):
        return self._node.op_type


class OnnxParser:
    def __init__(self, network, logger):
        self._network = network
        self._errors = []

    def parse_from_file(self, model):
        self._network.model = found = onnx.load(model)
        known = {schema.name for schema in onnx.defs.get_all_schemas()}
        unknown = [node for node in found.graph.node if node.op_type not in known]
        self._errors = [ParserError(node, "no such operator") for node in unknown]
        return not unknown

    @property
    def num_errors(self):
        return len(self._errors)

    def get_error(self, index):
        return self._errors[index]


class EngineInspector:
    def __init__(self, engine):
        self._engine = engine

    def get_engine_information(self, format):
        assert format == LayerInformationFormat.JSON
        model = onnx.shape_inference.infer_shapes(self._engine.model)
        values = [*model.graph.value_info, *model.graph.output]
        types = {value.name: value.type.tensor_type.elem_type for value in values}
        if not self._engine.facts["is_detailed"]:
            return json.dumps({"Layers": [node.name for node in model.graph.node]})
        layers = [
            {"Outputs": [{"Name": n, "DataType": ONNX_TYPES[types[n]].name} for n in node.output]}
            for node in model.graph.node
        ]
        return json.dumps({"Layers": layers})


class ICudaEngine:
    def __init__(self, logger, facts, model):
        self.logger, self.facts, self.model = logger, facts, model
        self.inputs = {value.name: value for value in model.graph.input}
        self.values = self.inputs | {value.name: value for value in model.graph.output}
        self.evaluator = ReferenceEvaluator(model)

    @property
    def num_io_tensors(self):
        return len(self.values)

    @property
    def num_layers(self):
        return len(self.model.graph.node)

    @property
    def num_optimization_profiles(self):
        return len(self.facts["profiles"])

    @property
    def device_memory_size_v2(self):
        return 4096

    def get_tensor_name(self, index):
        return list(self.values)[index]

    def get_tensor_dtype(self, name):
        return ONNX_TYPES[self.values[name].type.tensor_type.elem_type]

    def get_tensor_shape(self, name):
        return _sizes(self.values[name])

    def get_tensor_mode(self, name):
        return TensorIOMode.INPUT if name in self.inputs else TensorIOMode.OUTPUT

    def get_tensor_location(self, name):
        return TensorLocation.HOST if name == "on_host" else TensorLocation.DEVICE

    def get_tensor_format(self, name):
        return TensorFormat.CHW4 if name == "packed" else TensorFormat.LINEAR

    def is_shape_inference_io(self, name):
        return name == "sizes"

    def get_tensor_profile_shape(self, name, profile_index):
        return self.facts["profiles"][profile_index][name]

    def create_engine_inspector(self):
        return EngineInspector(self)

    def create_execution_context(self, strategy=ExecutionContextAllocationStrategy.STATIC):
        assert strategy == ExecutionContextAllocationStrategy.USER_MANAGED
        calls.append("context")
        return IExecutionContext(self)


class Runtime:
    def __init__(self, logger):
        self.logger = logger

    def deserialize_cuda_engine(self, serialized_engine):
        body = serialized_engine[len(MAGIC) + 32 :]
        digest = serialized_engine[len(MAGIC) : len(MAGIC) + 32]
        if serialized_engine[: len(MAGIC)] != MAGIC or hashlib.sha256(body).digest() != digest:
            error = "The engine plan file is not compatible with this version of TensorRT"
            self.logger.log(ILogger.Severity.ERROR, error)
            return None
        facts, _, model = body.partition(b"\n")
        return ICudaEngine(self.logger, json.loads(facts), onnx.load_from_string(model))


class IExecutionContext:
    def __init__(self, engine):
        self._engine = engine
        self._profile = 0
        self._memory = 0
        self.shapes, self._addresses, self._made = {}, {}, {}

    def set_device_memory(self, memory, size):
        assert size >= self._engine.device_memory_size_v2
        self._memory = memory

    def set_optimization_profile_async(self, profile_index, stream_handle):
        self._profile = profile_index
        return True

    def set_input_shape(self, name, shape):
        profiles = self._engine.facts["profiles"]
        low, _, high = profiles[self._profile].get(name, [shape] * 3) if profiles else [shape] * 3
        if not all(a <= n <= b for n, a, b in zip(shape, low, high, strict=True)):
            self._engine.logger.log(ILogger.Severity.ERROR, f"{name}: shape is out of range")
            return False
        self.shapes[name] = tuple(shape)
        self._made = {}
        return True

    def infer_shapes(self):
        return [name for name in self._engine.inputs if name not in self.shapes]

    def get_tensor_shape(self, name):
        if not self._made:
            zeros = {n: np.zeros(self.shapes[n], _numpy(v)) for n, v in self._engine.inputs.items()}
            self._made = self._run(zeros)
        # NonZero has as many results as there are values.
        is_open = any(node.op_type == "NonZero" for node in self._engine.model.graph.node)
        shape = self._made[name].shape
        return (*shape[:-1], -1) if is_open else shape

    def set_tensor_address(self, name, memory):
        assert memory, "TensorRT takes no null pointers"
        self._addresses[name] = memory
        return name in self._engine.values

    def execute_async_v3(self, stream_handle):
        assert self._memory, "memory of activations is not set"
        feeds = {n: self._at(n, self.shapes[n]).copy() for n in self._engine.inputs}
        for name, value in self._run(feeds).items():
            self._at(name, value.shape)[...] = value
        return True

    def _run(self, feeds):
        names = [value.name for value in self._engine.model.graph.output]
        return dict(zip(names, self._engine.evaluator.run(names, feeds), strict=True))

    def _at(self, name, shape):
        dtype = _numpy(self._engine.values[name])
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        memory = (ctypes.c_char * num_bytes).from_address(self._addresses[name])
        return np.frombuffer(memory, dtype).reshape(shape)


def _numpy(value):
    return np.dtype(helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))

"""ONNX files on ONNX Runtime's GPU providers, if `penstock.gpu_engine` or an accelerator asks.

The session computes on the stream of our GPU pipeline (`torch_cuda`), on the pipeline's memory: no
tensor passes the host. So copies overlap with computation, and slabs are pinned, as for Penstock's
own engine. Graphs are captured by the library, one for each shape that is warmed up.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import onnxruntime as ort
import torch

from penstock.backends import GPU_MEMORY, Batch, Execution, Runner, onnxruntime_install
from penstock.backends.checks import check_signature, log
from penstock.backends.gpu_memory import tells_of_no_memory
from penstock.backends.onnxruntime import (
    ONNX_BFLOAT16,
    open_session,
    providers_of,
    read_settings,
    read_signature,
    session_options,
    shown_error,
)
from penstock.backends.onnxruntime_nodes import RECORD, NodePlacement, describe, read_placement
from penstock.backends.onnxruntime_providers import (
    EngineCache,
    Providers,
    device_index,
    has_graphs,
)
from penstock.backends.rows import rows_to_run, rungs_of
from penstock.backends.torch_cuda import Cuda, Pipeline, Tensors, alias
from penstock.backends.torch_onnx import torch_type
from penstock.config import ModelConfig
from penstock.errors import BackendFailed, ConfigError
from penstock.repository.accelerators import GPU_PROVIDERS, TENSORRT_PROVIDER
from penstock.system import devices
from penstock.types import DATATYPES, TensorSpec

# Run options: the pipeline waits for its own marks; which captured graph to run, -1 for none.
NO_WAIT, GRAPH_ID, NO_GRAPH = "disable_synchronize_execution_providers", "gpu_graph_id", -1
Shape = Sequence[int | str | None]


@dataclass(frozen=True, slots=True)
class BoundGraph:
    """A captured graph: the library replays it on these addresses."""

    binding: ort.IOBinding
    inputs: Tensors
    outputs: Tensors
    run_options: ort.RunOptions


@dataclass(slots=True)
class BoundSession:
    """Runs a session on tensors of one device, without copies; kernels are only launched."""

    session: ort.InferenceSession
    # The library's name of the device, and its number.
    place: tuple[str, int]
    inputs: Sequence[TensorSpec]
    outputs: Sequence[TensorSpec]
    is_batched: bool
    is_captured: bool = False
    # Why shapes run without a graph.
    problems: dict[object, str] = field(default_factory=dict)
    graphs: dict[object, BoundGraph] = field(default_factory=dict)
    _binding: ort.IOBinding = field(init=False)
    _plain: ort.RunOptions = field(init=False)
    _sizes: dict[str, tuple[str, int]] = field(default_factory=dict)
    _declared: dict[str, Shape] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._binding = self.session.io_binding()
        self._plain = run_options(NO_GRAPH)
        for node in self.session.get_inputs():
            for axis, size in enumerate(node.shape):
                if isinstance(size, str):
                    self._sizes.setdefault(size, (node.name, axis))
        self._declared = {node.name: node.shape for node in self.session.get_outputs()}

    def run(self, inputs: Tensors) -> Tensors:
        """Return the outputs, which are valid until the next call."""
        shapes = tuple((name, tuple(each.shape)) for name, each in inputs.items())
        graph = self.graphs.get(shapes)
        if graph is None and self.is_captured and shapes not in self.problems:
            graph = self._capture(shapes, inputs)
        if graph is None:
            outputs = self._bind(self._binding, inputs)
            self.session.run_with_iobinding(self._binding, self._plain)
            return outputs | self._unbound(outputs)
        for name, each in inputs.items():
            graph.inputs[name].copy_(each)
        self.session.run_with_iobinding(graph.binding, graph.run_options)
        return graph.outputs

    def _capture(self, shapes: object, inputs: Tensors) -> BoundGraph | None:
        """Prepare a graph, which the library captures in its first run; None if an output's shape
        is not known before that."""
        if unknown := [spec.name for spec in self.outputs if self._shape(spec, inputs) is None]:
            self.problems[shapes] = f"the shape of output '{unknown[0]}' depends on data"
            return None
        fixed = {name: each.clone() for name, each in inputs.items()}
        binding = self.session.io_binding()
        outputs = self._bind(binding, fixed)
        # 0 is the graph of runs without a number.
        graph = BoundGraph(binding, fixed, outputs, run_options(len(self.graphs) + 1))
        self.graphs[shapes] = graph
        return graph

    def _bind(self, binding: ort.IOBinding, inputs: Tensors) -> dict[str, torch.Tensor]:
        """Bind inputs and outputs; return the outputs whose shapes are known. The library allocates
        the others."""
        for spec in self.inputs:
            # An optional input may be missing.
            if (each := inputs.get(spec.name)) is not None:
                form = element_type(spec), tuple(each.shape)
                binding.bind_input(spec.name, *self.place, *form, each.data_ptr())
        device = next(iter(inputs.values())).device if inputs else None
        outputs: dict[str, torch.Tensor] = {}
        for spec in self.outputs:
            shape = self._shape(spec, inputs)
            if shape is None:
                binding.bind_output(spec.name, *self.place)
                continue
            made = torch.empty(shape, dtype=torch_type(spec.datatype), device=device)
            outputs[spec.name] = made
            kind = element_type(spec)
            binding.bind_output(spec.name, *self.place, kind, shape, made.data_ptr())
        return outputs

    def _unbound(self, bound: Tensors) -> dict[str, torch.Tensor]:
        """Return the outputs that the library allocated, as tensors on their memory."""
        if len(bound) == len(self.outputs):
            return {}
        values = self._binding.get_outputs()
        # DLPack has no booleans: they come as bytes.
        return {
            spec.name: torch.from_dlpack(value).view(torch_type(spec.datatype))
            for spec, value in zip(self.outputs, values, strict=True)
            if spec.name not in bound
        }

    def _shape(self, spec: TensorSpec, inputs: Tensors) -> tuple[int, ...] | None:
        """Return the shape of an output if it follows from the inputs' shapes."""
        declared = self._declared[spec.name]
        configured: list[int] = [*([-1] if self.is_batched else []), *spec.shape]
        if len(declared) != len(configured):
            return None
        sizes: list[int] = []
        for axis, (size, wanted) in enumerate(zip(declared, configured, strict=True)):
            if isinstance(size, int):
                sizes.append(size)
            elif wanted >= 0:
                sizes.append(wanted)
            elif isinstance(size, str) and self._sizes.get(size, ("", 0))[0] in inputs:
                name, at = self._sizes[size]
                sizes.append(inputs[name].shape[at])
            elif axis == 0 and self.is_batched and inputs:
                sizes.append(next(iter(inputs.values())).shape[0])
            else:
                return None
        return tuple(sizes)


def run_options(graph_id: int) -> ort.RunOptions:
    options = ort.RunOptions()
    options.add_run_config_entry(NO_WAIT, "1")
    options.add_run_config_entry(GRAPH_ID, str(graph_id))
    return options


def element_type(spec: TensorSpec) -> object:
    """Return the library's type of a tensor: numpy's, except for BF16, which numpy lacks."""
    return ONNX_BFLOAT16 if spec.datatype == "BF16" else DATATYPES[spec.datatype].numpy


class OnnxCudaRunner(Runner):
    """A session on a GPU. Batches run ahead: `start` launches, another thread waits."""

    runs_ahead = True

    def __init__(
        self,
        config: ModelConfig,
        bound: BoundSession,
        device: Cuda,
        placement: NodePlacement | None = None,
        cache: EngineCache | None = None,
    ) -> None:
        self._config = config
        self._bound = bound
        self._placement = placement
        self._cache = cache
        self.inputs, self.outputs = read_signature(bound.session)
        self._datatypes = {spec.name: spec.datatype for spec in config.inputs}
        self._rungs = rungs_of(config)
        # The library captures graphs, not the pipeline.
        self.pipeline = Pipeline(device, self._compute, config.num_instances, is_captured=False)
        self._memory_before = 0
        self._memory_bytes = 0

    def measure_from(self, used_bytes: int) -> None:
        """Count GPU memory from this use of the process on."""
        self._memory_before = used_bytes

    def built(self) -> Mapping[str, str]:
        built = read_settings(self._bound.session) | self.pipeline.facts()
        built["device"] = self._config.device
        if self._bound.is_captured or self._bound.graphs:
            built["cuda_graphs"] = str(len(self._bound.graphs))
        if self._bound.problems:
            first = next(iter(self._bound.problems.values()))
            built["without_cuda_graph"] = f"{len(self._bound.problems)} shapes: {first}"
        if self._placement is not None:
            built |= self._placement.facts()
        if memory := self._memory():
            built[GPU_MEMORY] = str(memory)
        return built

    def start(self, batch: Batch) -> Execution:
        pieces = [
            {name: self._view(name, alias(array)) for name, array in piece.items()}
            for piece in batch.all_pieces
        ]
        num_rows = batch.num_rows if self._config.max_batch_size else None
        num_run = rows_to_run(self._config, self._rungs, batch)
        try:
            with torch.inference_mode():
                return self.pipeline.start(pieces, num_rows, num_run)
        except Exception as error:  # The library raises its own types and plain Exception.
            raise BackendFailed(shown_error(error, self._config)) from error

    def pin(self, memory: memoryview) -> None:
        self.pipeline.pin(memory)

    def pin_foreign(self, memory: memoryview) -> bool:
        return self.pipeline.pin_foreign(memory)

    def unpin(self, memory: memoryview) -> None:
        self.pipeline.unpin(memory)

    def settle(self) -> None:
        # Other threads wait for batches from now on, and the library's capture does not allow that.
        self._bound.is_captured = False
        self.pipeline.settle()

    def stop_filling(self) -> None:
        self._rungs = []

    @property
    def restart_reason(self) -> str:
        return self.pipeline.restart_reason

    def is_lost(self) -> bool:
        return self.pipeline.device.is_lost()

    def compiled(self) -> Mapping[str, bytes]:
        """Return TensorRT's engines and timings; the CUDA provider has nothing to keep."""
        return self._cache.files() if self._cache is not None else {}

    def close(self) -> None:
        if self._cache is not None:
            self._cache.close()
        del self.pipeline, self._bound
        # The session and its bindings refer to each other.
        gc.collect()

    def _compute(self, inputs: Tensors) -> Tensors:
        try:
            return self._bound.run(inputs)
        except Exception as error:
            if tells_of_no_memory(str(error), None):
                # The pipeline frees its unused memory and tries once more.
                raise torch.OutOfMemoryError(str(error)) from error
            raise

    def _view(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """View BF16 inputs as such: numpy only has their bits."""
        return tensor.view(torch.bfloat16) if self._datatypes[name] == "BF16" else tensor

    def _memory(self) -> int:
        """Return the most GPU memory that this runner was seen to use. The library never gives
        memory back, so that is its peak."""
        used = memory_used(self._config.device) - self._memory_before
        self._memory_bytes = max(self._memory_bytes, used)
        return self._memory_bytes


def memory_used(device: str) -> int:
    """Return the GPU memory of this process or, if the driver does not tell, of all processes; 0
    without a GPU."""
    if not torch.cuda.is_available():
        return 0
    index = torch.device(device).index or 0
    own = devices.memory_of(os.getpid(), index)
    if own is not None:
        return own
    free, total = torch.cuda.mem_get_info(index)
    return int(total - free)


def load(config: ModelConfig) -> OnnxCudaRunner:
    _check_install(config)
    problems: list[str] = []
    options = session_options(config, problems)
    providers = providers_of(config, problems)
    if problems:
        raise ConfigError(problems)
    onnxruntime_install.preload()
    device = _open_device(config)
    used = memory_used(config.device)
    cache = EngineCache(config.folder) if TENSORRT_PROVIDER in dict(providers) else None
    providers = _on_stream(providers, device, cache)
    options.add_session_config_entry(RECORD, "1")
    session = open_session(config, options, providers)
    check_signature(config, *read_signature(session))
    placement = read_placement(session, Path(config.artifact))
    if placement is not None and placement.fallen_back:
        text = "%s: nodes run on the CPU, with copies around them: %s"
        log.warning(text, config.name, describe(placement.fallen_back))
    bound = BoundSession(
        session,
        ("cuda", device_index(config)),
        config.inputs,
        config.outputs,
        is_batched=config.max_batch_size > 0,
        is_captured=has_graphs(config),
    )
    runner = OnnxCudaRunner(config, bound, device, placement, cache)
    runner.measure_from(used)
    return runner


def _check_install(config: ModelConfig) -> None:
    builds, folder = onnxruntime_install.installed(), onnxruntime_install.package_folder()
    available = ort.get_available_providers()
    if problem := onnxruntime_install.gpu_problem(builds, available, folder):
        raise ConfigError(f"device: '{config.device}': {problem}")
    if warning := onnxruntime_install.clash_warning(builds, folder):
        log.warning("%s", warning)


def _open_device(config: ModelConfig) -> Cuda:
    try:
        torch.empty(0, device=config.device)
        # A plain "cuda" then means this worker's GPU too.
        torch.cuda.set_device(device_index(config))
        return Cuda(config.device)
    except Exception as error:  # torch raises RuntimeError, AssertionError and others.
        problem = f"device: '{config.device}' cannot be used: {shown_error(error, config)}"
        advice = "KIND_CPU in instance_group runs the model on the CPU"
        raise ConfigError(f"{problem}; {advice}") from None


def _on_stream(providers: Providers, device: Cuda, cache: EngineCache | None) -> Providers:
    """Return the providers with the pipeline's stream, on which they launch their kernels."""
    with device.lane("compute"):
        stream = {"user_compute_stream": str(torch.cuda.current_stream().cuda_stream)}
    found: Providers = []
    for name, given in providers:
        options = stream | given if name in GPU_PROVIDERS else given
        if name == TENSORRT_PROVIDER and cache is not None:
            options = cache.options(options)
        found.append((name, options))
    return found

"""PyTorch models: `module.py` with `model.safetensors` beside it, `model.pt2`, or config.json of a
Hugging Face folder (`torch_weights`).

`module.py` has a function `factory` that returns the nn.Module; its weights are loaded strictly.
`model.pt2` is written by `torch.export.save`, or it is an AOTInductor package: machine code for
machines like the one that compiled it. `model.pt` is TorchScript (`torch_script`). No pickles:
torch.save's files are refused, whatever their names.

`docs/backends.md` explains the options; the effective settings are read back. `torch_fusion` fuses
convolutions, `torch_packing` runs encoders without padding, `torch_linear` runs linear layers in
FP8, `torch_floats` keeps some in FP32, `torch_cuda` captures CUDA graphs.
"""

from __future__ import annotations

import inspect
import io
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch.nn import Module

from penstock.backends import (
    COMPILED,
    GPU_MEMORY,
    Batch,
    Execution,
    PlacedPieces,
    Runner,
    torch_floats,
    torch_linear,
    torch_packing,
    torch_script,
)
from penstock.backends.checks import (
    check_signature,
    num_threads,
    read_code,
    share_of_cores,
    warn_without_effect,
)
from penstock.backends.finished import Finished
from penstock.backends.onnx_import.elementwise import cast_within
from penstock.backends.python_code import Code
from penstock.backends.rows import rows_to_run, rungs_of
from penstock.backends.torch_cuda import (
    DeviceInputs,
    GatheredRows,
    Pipeline,
    Priority,
    alias,
    has_ranges,
    open_device,
    to_array,
)
from penstock.backends.torch_fusion import (
    EVERYTHING,
    Fusion,
    fuse,
    open_tuner,
)
from penstock.backends.torch_linear import LinearModel
from penstock.backends.torch_onnx import (
    cast_graph,
    limited_inputs,
    load_graph,
    read_fixed,
    torch_type,
    uncast_inputs,
)
from penstock.backends.torch_packing import PackedModel
from penstock.backends.torch_regions import compile_regions
from penstock.backends.torch_tracing import TraceInputs
from penstock.backends.torch_weights import load_network, load_weights
from penstock.config import CPU, GPU_ENGINE, ModelConfig
from penstock.errors import BackendFailed, ConfigError, first_line
from penstock.kernels.convolution import Tuner
from penstock.kernels.gemm import joined
from penstock.repository import onnx_file, parameters, pt2_file, torchscript_file
from penstock.repository.signature import Signature
from penstock.system import devices
from penstock.types import DATATYPES, Array, TensorSpec
from penstock.units import quoted

NAME = "pytorch"
# Configuration of a Hugging Face folder.
PRETRAINED = "config.json"
ONNX = ".onnx"
# Variant of batches that are made on the device: their types and layouts are others.
MADE_THERE = 1
# Rank of a batch of images.
IMAGE_RANK = 4
COLOURS = 3
# Compiles repeated blocks only.
REGIONAL = "regional"
# Options that replace layers, for models that run.
OF_LAYERS = (
    torch_packing.OPTION,
    torch_packing.FP8_OPTION,
    torch_packing.KEEP_OPTION,
    torch_linear.WEIGHTS_OPTION,
)
OF_LINEAR = (torch_packing.FP8_OPTION, torch_linear.WEIGHTS_OPTION)
# Compile modes that also turn on CUDA graphs.
WITH_GRAPHS = ("reduce-overhead", "max-autotune", REGIONAL)
TF32 = "tf32"
# A module is packed on the GPU if this many times its weights are free: for itself and for the
# merged layers.
PACKING_ROOM = 3
DTYPES = {
    "": None,
    "fp32": torch.float32,
    TF32: torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
# Values of options; the empty one is the default.
VALUES: Mapping[str, tuple[str, ...]] = {
    key: ("", *known) for key, known in parameters.VALUES.items() if key != GPU_ENGINE
}
OPTIONS = (*VALUES, "penstock.factory", "penstock.fp8", "penstock.fp8_keep", "penstock.keep_fp32")
ONE_STREAM = (
    "the kernels of penstock.fuse and penstock.pack share memory for partial sums, so their "
    "batches run one after the other; expected 1"
)
ONLY_CODE = "only for module.py; a .pt2 and TorchScript keep what was exported"
# Advice of Inductor to use TF32, which is a separate option here because it changes answers.
ADVICE = "TensorFloat32 tensor cores"
TORCH_TYPES = {name: torch_type(name) for name in DATATYPES if name != "BYTES"}


@dataclass(frozen=True, slots=True)
class Options:
    num_threads: int
    num_interop_threads: int
    # Empty: not compiled.
    compile_mode: str
    # None: as in the module.
    dtype: torch.dtype | None
    factory: str
    is_channels_last: bool
    has_cuda_graphs: bool
    is_fused: bool = False
    is_packed: bool = False
    # Layers that are not cast.
    keep: frozenset[str] = frozenset()
    stream_priority: Priority = "normal"
    num_streams: int = 1
    has_ranges: bool = False


@dataclass(frozen=True, slots=True)
class LoadedModule:
    """A module and how to call it: its inputs by position, and by keyword."""

    module: Module
    positional: Sequence[str]
    keywords: Sequence[str]
    signature: Signature = Signature((), ())
    code: Code | None = None
    # Compiled ahead of time; its weights are not accessible.
    is_compiled: bool = False
    # Set if its layers run without padding.
    packing: PackedModel | None = None
    # Set if its convolutions are fused; it owns the module.
    fusion: Fusion | None = None
    # Inputs that keep their datatype: layers quantise them, or 16 bits would spoil them.
    uncast: frozenset[str] = frozenset()
    # Inputs whose finite numbers stay finite in another datatype, such as masks; None: any may.
    limited: frozenset[str] | None = None
    # Values of inputs that are constants of the module.
    fixed: Mapping[str, Array] = field(default_factory=dict)
    # Set if linear layers are in FP8 and not packed; it owns the module.
    linear: LinearModel | None = None

    def call(self, tensors: Mapping[str, torch.Tensor]) -> object:
        return self.module(
            *(tensors.get(name) for name in self.positional),
            **{name: tensors[name] for name in self.keywords if name in tensors},
        )

    def close(self) -> None:
        if self.code is not None:
            self.code.close()


class TorchRunner(Runner):
    def __init__(self, config: ModelConfig, options: Options, loaded: LoadedModule) -> None:
        self.inputs, self.outputs = loaded.signature.inputs, loaded.signature.outputs
        self._config = config
        self._options = options
        self._loaded = self._run = loaded
        self._device = torch.device(config.device)
        self._datatypes = {spec.name: spec.datatype for spec in config.inputs}
        self._rungs = rungs_of(config)
        self._packing = loaded.packing
        choosers = loaded.fusion, loaded.packing, loaded.linear
        self._choosers = [each for each in choosers if each is not None]
        self._num_tokens = 0
        if self._packing is not None:
            # Padding rows cost next to nothing there, and each rung has graphs of many token
            # counts.
            self._rungs = sorted({*self._rungs[::2], *self._rungs[-1:]})
        # Pipeline to a GPU; None on a CPU.
        self.pipeline: Pipeline | None = None
        num_streams = min(options.num_streams, config.num_instances)
        if num_streams > 1 and self._choosers:
            raise ConfigError(f"parameters.penstock.streams: {ONE_STREAM}")
        device = open_device(config.device)
        self.runs_ahead = device is not None
        if device is not None:
            device.arrange(options.stream_priority, num_streams)
            self.pipeline = Pipeline(
                device,
                self._compute,
                config.num_instances,
                is_captured=options.has_cuda_graphs and _has_few_shapes(config),
                has_empty_rows=self._packing is not None,
                num_streams=num_streams,
                label=config.name if options.has_ranges else "",
            )
        if options.compile_mode:
            self._compile()

    def built(self) -> Mapping[str, str]:
        module = self._loaded.module
        weights = [] if self._loaded.is_compiled else [*module.parameters(), *module.buffers()]
        built = {
            "torch": str(torch.__version__),
            "form": self._form,
            "device": _join({weight.device for weight in weights} or {self._device}),
            "dtype": _join({weight.dtype for weight in weights if weight.is_floating_point()}),
            "intra_op_thread_count": str(torch.get_num_threads()),
            "inter_op_thread_count": str(torch.get_num_interop_threads()),
            "compile": self._options.compile_mode or "off",
        }
        if self._options.is_channels_last:
            images = [weight for weight in weights if weight.ndim == IMAGE_RANK]
            is_done = all(w.is_contiguous(memory_format=torch.channels_last) for w in images)
            built["memory_format"] = "channels_last" if images and is_done else "contiguous"
        if self._loaded.is_compiled:
            built |= _package_facts(module)
        if self._options.keep:
            built["keep_fp32"] = f"{len(self._options.keep)} layers"
        for chooser in self._choosers:
            built |= chooser.facts()
        if self.pipeline is not None:
            built |= self.pipeline.facts()
        if self._device.type == "cuda":
            built["tf32"] = rounded()
            built["mps"] = devices.mps()
            built[GPU_MEMORY] = str(torch.cuda.max_memory_reserved(self._device))
        if self._options.compile_mode:
            built["compiled_graphs"] = str(_num_graphs() - self._num_graphs_before)
            built["compiled_before"] = self._compiled_before
        return built

    @property
    def _form(self) -> str:
        if self._loaded.is_compiled:
            return "AOTInductor package"
        if self._config.artifact.endswith(ONNX):
            return "ONNX"
        if self._config.artifact.endswith(PRETRAINED):
            return "transformers"
        if torchscript_file.is_named(self._config.artifact):
            return "TorchScript"
        return "pt2" if self._loaded.code is None else "module.py"

    def start(self, batch: Batch) -> Execution:
        given = self._variable(batch)
        with torch.inference_mode():
            if self.pipeline is not None:
                if isinstance(batch.pieces, PlacedPieces):
                    return self._start_placed(batch, batch.pieces)
                pieces = [
                    {name: self._view(name, alias(array)) for name, array in piece.items()}
                    for piece in given.all_pieces
                ]
                num_rows = batch.num_rows if self._config.max_batch_size else None
                num_run = rows_to_run(self._config, self._rungs, batch)
                self._num_tokens = self._token_budget(batch, num_run)
                return self.pipeline.start(pieces, num_rows, num_run, self._num_tokens)
            # Copy: a module may write to its inputs, and a batch may have to run again. It costs
            # one pass over the memory, of which a model makes many.
            inputs = {
                name: self._view(name, torch.from_numpy(array.copy()))
                for name, array in given.inputs.items()
            }
            self._num_tokens = self._token_budget(batch, batch.num_rows)
            values = self._compute(inputs)
            return Finished({name: to_array(value) for name, value in values.items()})

    def _start_placed(self, batch: Batch, pieces: PlacedPieces) -> Execution:
        """Launch a batch whose rows the device copies from clients' memory. Its masks are not read:
        packed models do not pin such memory."""
        assert self.pipeline is not None
        forms = {}
        for name, (dtype, shape) in pieces.forms.items():
            is_bf16 = self._datatypes[name] == "BF16"
            of_numpy = torch.from_numpy(np.empty(0, dtype)).dtype
            forms[name] = (torch.bfloat16 if is_bf16 else of_numpy, shape)
        inputs = GatheredRows(self.pipeline.device, pieces, forms, self.pipeline.has_empty_rows)
        num_run = rows_to_run(self._config, self._rungs, batch)
        self._num_tokens = self._token_budget(batch, num_run)
        return self.pipeline.start(inputs, batch.num_rows, num_run, self._num_tokens)

    def start_on_device(self, inputs: DeviceInputs, num_rows: int) -> Execution:
        """Launch a batch whose inputs are made on the device, with `input_form`."""
        assert self.pipeline is not None
        with torch.inference_mode():
            num_run = rows_to_run(self._config, self._rungs, Batch({}, num_rows))
            return self.pipeline.start(inputs, num_rows, num_run, MADE_THERE)

    def input_form(self, name: str) -> tuple[torch.dtype, bool]:
        """Return the type of an input as the module takes it, and whether it takes channels last;
        inputs made like that are not converted again."""
        dtype = TORCH_TYPES[self._datatypes[name]]
        if self._options.dtype is not None and dtype.is_floating_point:
            dtype = self._options.dtype
        return dtype, self._options.is_channels_last or self._options.is_fused

    def pin(self, memory: memoryview) -> None:
        if self.pipeline is not None:
            self.pipeline.pin(memory)

    def pin_foreign(self, memory: memoryview) -> bool:
        # The CPU reads masks, for the lengths of sequences, and inputs that are fixed.
        if self.pipeline is None or self._packing is not None or self._loaded.fixed:
            return False
        return self.pipeline.pin_foreign(memory)

    def unpin(self, memory: memoryview) -> None:
        if self.pipeline is not None:
            self.pipeline.unpin(memory)

    def settle(self) -> None:
        for chooser in self._choosers:
            chooser.settle()
        if self.pipeline is not None:
            self.pipeline.settle()
            if self.pipeline.is_captured and self._device.type == "cuda":
                # Memory of the warm-up is not part of what the model needs.
                torch.cuda.reset_peak_memory_stats(self._device)

    @property
    def restart_reason(self) -> str:
        return "" if self.pipeline is None else self.pipeline.restart_reason

    def close(self) -> None:
        self._loaded.close()
        # Free graphs and packed layers even if this object stays referenced.
        self._packing = self.pipeline = None
        del self._run, self._loaded, self._choosers

    def compiled(self) -> Mapping[str, bytes]:
        """Return the compiled kernels and tuning results, for this GPU and this torch."""
        found = torch.compiler.save_cache_artifacts() if self._options.compile_mode else None
        files = {COMPILED: found[0]} if found is not None else {}
        return files | joined([chooser.files() for chooser in self._choosers])

    def rehearsals(self, batch: Batch) -> Iterator[Batch]:
        """Yield warm-up batches: a packed model needs one for each token count with a graph."""
        batch = replace(batch, inputs=self._with_fixed(batch.inputs))
        if self._packing is None:
            yield batch
            return
        name = self._packing.mask
        is_captured = self.pipeline is not None and self.pipeline.is_captured
        most, full = self._config.batching.max_tokens, self._packing.full
        for mask in torch_packing.rehearsals(
            batch.inputs[name], is_captured=is_captured, max_tokens=most, full=full
        ):
            yield Batch({**batch.inputs, name: mask}, batch.num_rows, batch.requests)

    def _with_fixed(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return {name: self._loaded.fixed.get(name, array) for name, array in inputs.items()}

    def _variable(self, batch: Batch) -> Batch:
        """Return the batch of what the module takes. Raise BackendFailed if an input that is fixed
        has another value."""
        fixed = self._loaded.fixed
        if not fixed:
            return batch
        for name, value in fixed.items():
            got = batch.inputs.get(name, value)
            if not np.array_equal(got, value):
                why = "the model was loaded for that value (parameters.penstock.fixed_inputs)"
                expected = f"{got.tolist()}, expected {value.tolist()}"
                raise BackendFailed(f"input '{name}': {expected}: {why}")
        return batch.without(fixed)

    def _token_budget(self, batch: Batch, num_run: int) -> int:
        """Return the token count to run a packed model's batch as; 0 for other models."""
        if self._packing is None:
            return 0
        num_tokens = self._packing.num_tokens(batch.inputs)
        if self.pipeline is None:
            return num_tokens
        length = batch.inputs[self._packing.mask].shape[1]
        most = self._config.batching.max_tokens
        return torch_packing.budget(num_tokens, num_run * length, most, self._packing.full)

    def stop_filling(self) -> None:
        self._rungs = []

    def is_lost(self) -> bool:
        return self.pipeline is not None and self.pipeline.device.is_lost()

    def _view(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """View BF16 inputs as such: numpy only has their bits."""
        return tensor.view(torch.bfloat16) if self._datatypes[name] == "BF16" else tensor

    def _compute(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        given = {name: self._cast(name, tensor) for name, tensor in tensors.items()}
        if self._packing is not None:
            self._packing.lay_out(given, self._num_tokens)
            self._packing.prepare(self._num_tokens, lambda: self._run.call(given))
        if self._loaded.fusion is not None:
            self._loaded.fusion.prepare(given, lambda: self._run.call(given))
        if self._loaded.linear is not None:
            self._loaded.linear.prepare(given, lambda: self._run.call(given))
        values = by_name(self._run.call(given), [spec.name for spec in self._config.outputs])
        return {
            spec.name: self._check_output(spec, values[spec.name]) for spec in self._config.outputs
        }

    def _cast(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name in self._loaded.uncast:
            return tensor
        if self._options.dtype is not None and tensor.is_floating_point():
            is_limited = tensor.dtype != self._options.dtype and self._is_limited(name, tensor)
            to = self._options.dtype
            tensor = cast_within(tensor, to=to) if is_limited else tensor.to(to)
        if self._options.is_channels_last and tensor.ndim == IMAGE_RANK:
            tensor = tensor.to(memory_format=torch.channels_last)
        return tensor

    def _is_limited(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether finite numbers beyond the range must stay finite, which costs three kernels."""
        if self._loaded.limited is not None:
            return name in self._loaded.limited
        is_image = tensor.ndim == IMAGE_RANK and tensor.shape[1] == COLOURS
        return not is_image

    def _check_output(self, spec: TensorSpec, value: object) -> torch.Tensor:
        where = f"output '{spec.name}'"
        if not isinstance(value, torch.Tensor):
            raise BackendFailed(f"{where}: expected a tensor, got {type(value).__name__}")
        wanted = TORCH_TYPES[spec.datatype]
        if value.dtype != wanted:
            is_float = value.is_floating_point() and wanted.is_floating_point
            if self._options.dtype is None or not is_float:
                raise BackendFailed(f"{where}: {value.dtype}, expected {wanted} ({spec.datatype})")
            value = value.to(wanted)
        return value

    def _compile(self) -> None:
        """Compile the module with a first call on zeros, as torch compiles on the first call. The
        batch dimension is dynamic; sizes 1 and above 1 are compiled separately."""
        config = self._config
        self._compiled_before = _load_compiled(config)
        try:
            mode, module = self._options.compile_mode, self._loaded.module
            options = torch._inductor.list_mode_options("default" if mode == REGIONAL else mode)
            how = {
                # Our CUDA graphs are captured around the compiled code, and both kinds need fixed
                # input addresses.
                "options": {**options, "triton.cudagraphs": False},
                "dynamic": config.max_batch_size > 0 or config.padding is not None,
            }
            if mode == REGIONAL:
                compile_regions(module, lambda block: block.compile(**how))
            else:
                self._run = replace(self._loaded, module=torch.compile(module, **how))
            rows = min(2, config.max_batch_size)
            first = (rows,) if rows else ()
            zeros = {
                spec.name: np.zeros((*first, *shape), DATATYPES[spec.datatype].numpy)
                for spec, shape in zip(config.inputs, _first_shapes(config), strict=True)
            }
            self._num_graphs_before = _num_graphs()
            self.start(Batch(self._with_fixed(zeros), max(1, rows)))
        except ConfigError:
            raise
        except Exception as error:  # The compiler raises many types, and so may the model.
            raise ConfigError(
                f"parameters.penstock.compile: fails on a batch of zeros: {first_line(error)}"
            ) from error
        if _num_graphs() == self._num_graphs_before:
            raise ConfigError("parameters.penstock.compile: torch compiled nothing of the model")


def _has_few_shapes(config: ModelConfig) -> bool:
    """Return whether shapes are few: fixed, or padded to buckets."""
    return all(size >= 0 for shape in _first_shapes(config) for size in shape)


def _first_shapes(config: ModelConfig) -> list[tuple[int, ...]]:
    """Return the shape of one row of each input; that of the first bucket if they are padded."""
    shapes = {spec.name: list(spec.shape) for spec in config.inputs}
    if config.padding is not None:
        for each in config.padding.axes:
            shapes[each.input][each.axis] = config.padding.buckets[0]
    return [tuple(shape) for shape in shapes.values()]


def load(config: ModelConfig) -> TorchRunner:
    options = _options(config)
    if options.stream_priority == "low":
        # Before the first call of CUDA: MPS reads it when a process becomes its client.
        os.environ.setdefault(*devices.MPS_BELOW_NORMAL)
    config = replace(config, device=devices.claim(config.device))
    _check_device(config)
    _set_threads(options)
    if config.device != CPU:
        set_precision(config.options.get("penstock.dtype", ""))
    loaded = _load_any(config, options)
    for key, why in _without_effect(config, loaded):
        warn_without_effect(key, why)
    try:
        return TorchRunner(config, options, loaded)
    except BaseException:
        loaded.close()
        raise


def _without_effect(config: ModelConfig, loaded: LoadedModule) -> Iterator[tuple[str, str]]:
    """Yield options that change nothing for this model, and why."""
    fuse, layout = (config.options.get(f"penstock.{key}") for key in ("fuse", "memory_format"))
    if fuse and loaded.fusion is not None and not loaded.fusion.layers:
        yield "penstock.fuse", f"the model has no layers that '{fuse}' fuses"
    if layout and fuse:
        yield "penstock.memory_format", "penstock.fuse has channels last already"
    elif layout and not any(each.ndim == IMAGE_RANK for each in loaded.module.parameters()):
        yield "penstock.memory_format", "the model has no convolutions of images"
    if config.backend == NAME and config.options.get(GPU_ENGINE):
        why = "is for platform 'onnxruntime_onnx'"
        yield GPU_ENGINE, f"backend '{NAME}' runs the model, and the option {why}"


def check(config: ModelConfig) -> None:
    """Raise ConfigError for options that exclude each other, and for an ONNX file that this engine
    does not read or that lacks a layer to keep. Needs no GPU, and computes nothing."""
    options = _options(config)
    if config.artifact.endswith(ONNX):
        signature = onnx_file.read_signature(Path(config.artifact))
        graph = load_graph(config, None, fixed=read_fixed(config, signature.inputs))
        torch_floats.find_kept(graph.module, options.keep)


def load_module(config: ModelConfig) -> LoadedModule:
    """Return the module alone, without packing, for callers that convert it; they must close it. A
    packed module gives the same answers, but depends on how it is run."""
    options = {key: text for key, text in config.options.items() if key not in OF_LAYERS}
    config = replace(config, options=options)
    return _load_any(config, _options(config))


def _load_any(config: ModelConfig, options: Options) -> LoadedModule:
    if config.artifact.endswith(".py"):
        return _load_module(config, options)
    if config.artifact.endswith(ONNX):
        return _load_onnx(config, options)
    if config.artifact.endswith(PRETRAINED):
        module = load_network(Path(config.artifact).parent)
        names = [spec.name for spec in config.inputs]
        return _place_module(LoadedModule(module, (), names), config, options)
    if torchscript_file.is_named(config.artifact):
        with _labelled(config.label):
            script, order = torch_script.load(config)
        return LoadedModule(script, order.positional, order.keywords)
    if pt2_file.is_compiled(Path(config.artifact)):
        return _load_package(config, options)
    return _load_pt2(config)


def _options(config: ModelConfig) -> Options:
    """Return the options; raise ConfigError with all problems."""
    problems = [
        f"{kind} '{spec.name}': torch has no BYTES; use backend 'python'"
        for kind, specs in (("input", config.inputs), ("output", config.outputs))
        for spec in specs
        if spec.datatype == "BYTES"
    ]
    settings = config.options
    given = {key.removeprefix("penstock."): settings.get(key, "") for key in OPTIONS}
    problems += [
        f"parameters.{key}: '{settings[key]}' is not one of {', '.join(known[1:])}"
        for key, known in VALUES.items()
        if settings.get(key, known[0]) not in known or settings.get(key) == ""
    ]
    wrong = [(key, why) for key, is_wrong, why in _conflicts(config, given) if is_wrong]
    problems += [f"parameters.penstock.{key}: {why}" for key, why in wrong]
    has_graphs = config.device != CPU and given["compile"] in WITH_GRAPHS
    options = Options(
        num_threads(settings, "intra_op_thread_count", share_of_cores(config), problems),
        num_threads(settings, "inter_op_thread_count", torch.get_num_interop_threads(), problems),
        given["compile"],
        DTYPES.get(given["dtype"]),
        given["factory"].rpartition(":")[2] or "factory",
        is_channels_last=bool(given["memory_format"]),
        has_cuda_graphs=(given["cuda_graphs"] or ("on" if has_graphs else "off")) == "on",
        is_fused=bool(given["fuse"]),
        is_packed=bool(given["pack"]),
        keep=frozenset(torch_linear.names_in(given["keep_fp32"])),
        stream_priority=given["stream_priority"] or "normal",  # type: ignore[arg-type]
        num_streams=int(given["streams"] or 1) if not problems else 1,
        has_ranges=has_ranges(given["nvtx"]),
    )
    if problems:
        raise ConfigError(problems)
    return options


def _conflicts(config: ModelConfig, given: Mapping[str, str]) -> Iterator[tuple[str, object, str]]:
    """Yield an option, whether its value is wrong for this model or beside the others, and why."""
    mode, pack, fp8, factory = (given[key] for key in ("compile", "pack", "fp8", "factory"))
    on_cpu = config.device == CPU
    is_code = config.artifact.endswith(".py")
    for key in ("factory", "dtype", "memory_format", "fuse"):
        is_taken = config.artifact.endswith(ONNX) and key != "factory"
        is_taken |= key == "dtype" and config.artifact.endswith(PRETRAINED)
        yield key, given[key] and not (is_code or is_taken), ONLY_CODE
    why = "or requests would wait for the compiler"
    problem = f"needs inputs of fixed shapes or buckets (penstock.pad), {why}"
    yield "compile", mode and not _has_few_shapes(config), problem
    yield "dtype", given["dtype"] == TF32 and on_cpu, "tf32 is of GPUs; the model runs on the CPU"
    why = "not together with penstock.compile, which has kernels of its own for all layers"
    yield "fuse", mode and given["fuse"], why
    why = "needs a GPU; the model runs on the CPU (instance_group kind)"
    yield "cuda_graphs", given["cuda_graphs"] == "on" and on_cpu, why
    for key in ("stream_priority", "streams", "nvtx"):
        yield key, given[key] and on_cpu, why
    is_packable = is_code or config.artifact.endswith(ONNX)
    yield "pack", pack and not is_packable, "only for module.py and ONNX files"
    for key in ("compile", "fuse"):
        yield "pack", pack and given[key], f"not together with penstock.{key}"
    is_open = is_code or config.artifact.endswith((ONNX, PRETRAINED))
    yield "fp8", fp8 and not is_open, ONLY_CODE
    yield "fp8", fp8 and mode, "not together with penstock.compile"
    keep = given["keep_fp32"]
    is_half = given["dtype"] in ("fp16", "bf16")
    yield "keep_fp32", keep and not is_half, "only with penstock.dtype fp16 or bf16"
    for key in ("keep_fp32", "fp8_keep"):
        yield key, torch_linear.has_empty_names(given[key]), f"'{given[key]}' has an empty name"
    for key in ("fuse", "pack"):
        yield "keep_fp32", keep and given[key], f"not together with penstock.{key}"
    weights = given["weights"]
    yield "weights", weights and not is_open, ONLY_CODE
    for key in ("compile", "pack", "fp8"):
        yield "weights", weights and given[key], f"not together with penstock.{key}"
    yield "fp8_keep", given["fp8_keep"] and not fp8, "only with penstock.fp8"
    yield "fp8", Path(fp8).name != fp8, f"'{fp8}' is not a file of the version's folder"
    file, name = factory.rpartition(":")[0], Path(config.artifact).name
    why = f"'{factory}' is not in {name}; default_model_filename says which file is loaded"
    yield "factory", file and file != name, why


def set_precision(dtype: str) -> None:
    """Set the precision of FP32 GEMMs and convolutions on GPUs by `penstock.dtype`: TF32, which has
    ten bits of mantissa instead of 23 and is several times as fast on tensor cores, for both
    (tf32), for neither (fp32), otherwise torch's default, for convolutions only. Always set: torch
    has one setting for all models of a process."""
    torch.set_float32_matmul_precision("high" if dtype == TF32 else "highest")
    torch.backends.cudnn.allow_tf32 = dtype != "fp32"
    warnings.filterwarnings("ignore", ADVICE, UserWarning)


def rounded() -> str:
    """Return what uses TF32: `matrices`, `convolutions`, both, or `off`. A model's own code may
    have changed it."""
    matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    settings = {"matrices": matmul.fp32_precision, "convolutions": conv.fp32_precision}
    return ",".join(name for name, found in settings.items() if found == "tf32") or "off"


def _check_device(config: ModelConfig) -> None:
    try:
        torch.empty(0, device=config.device)
        if torch.device(config.device).index is not None:
            # A plain "cuda" in a model's own code then means its own GPU too.
            torch.cuda.set_device(config.device)
    except Exception as error:  # torch raises RuntimeError, AssertionError and others.
        problem = f"device: '{config.device}' cannot be used: {first_line(error)}"
        advice = "KIND_CPU in instance_group runs the model on the CPU"
        raise ConfigError(f"{problem}; {advice}") from None


def _set_threads(options: Options) -> None:
    torch.set_num_threads(options.num_threads)
    if options.num_interop_threads == torch.get_num_interop_threads():
        return
    try:
        torch.set_num_interop_threads(options.num_interop_threads)
    except RuntimeError:
        raise ConfigError(
            f"parameters.inter_op_thread_count: asked for {options.num_interop_threads}, but "
            f"this process has {torch.get_num_interop_threads()}, and torch sets it only once"
        ) from None


def _load_module(config: ModelConfig, options: Options) -> LoadedModule:
    code = Code(config)
    try:
        module = _make(code, config, options)
        load_weights(module, Path(config.artifact).parent, config.version)
        module = module.eval()
        loaded = LoadedModule(module, *_call_order(code, module, config), code=code)
        if options.is_packed:
            module.to(_where_packed(module, config))
            loaded = replace(loaded, packing=_packed(loaded, config))
        return _ready(_place_module(loaded, config, options), config)
    except BaseException:
        code.close()
        raise


def _ready(loaded: LoadedModule, config: ModelConfig) -> LoadedModule:
    """Choose the kernels of a packed module on its device."""
    if loaded.packing is not None:
        if config.device != CPU:
            # The module took more memory while it was packed.
            torch.cuda.empty_cache()
        torch_packing.on_device(loaded.packing, config)
    return loaded


def _load_onnx(config: ModelConfig, options: Options) -> LoadedModule:
    signature = onnx_file.read_signature(Path(config.artifact))
    fixed = read_fixed(config, signature.inputs)
    declared = {spec.name for spec in config.inputs}
    # Clients send a fixed input only if the configuration declares it.
    inputs = tuple(s for s in signature.inputs if s.name in declared or s.name not in fixed)
    check_signature(config, inputs, signature.outputs)
    signature = replace(signature, inputs=inputs)
    tuner = open_tuner(config)
    dtype = None if options.is_packed else options.dtype
    graph = load_graph(config, dtype, options.keep, fixed, tuner)
    options = replace(options, keep=frozenset(graph.kept))
    if graph.int8:
        # The layers between those in INT8 are fused with the same kernels.
        options = replace(options, is_fused=True)
    loaded = LoadedModule(graph.module, graph.inputs, (), signature, fixed=fixed)
    if options.is_packed:
        graph.module.to(_where_packed(graph.module, config))
        loaded = replace(loaded, packing=_packed(loaded, config))
        if options.dtype is not None:
            cast_graph(graph, options.dtype)
    loaded = replace(loaded, uncast=uncast_inputs(graph), limited=limited_inputs(graph))
    return _ready(_place_module(loaded, config, options, tuner), config)


def _place_module(
    loaded: LoadedModule, config: ModelConfig, options: Options, tuner: Tuner | None = None
) -> LoadedModule:
    """Fuse the module, move it to its device and cast it, as its options say."""
    module = loaded.module
    if options.is_fused:
        sample = _sample(config, module, loaded.positional)
        # A graph in INT8 is fused without being asked; an option may want its linear layers.
        leaves_linear = any(config.options.get(key) for key in OF_LINEAR)
        what = config.options.get("penstock.fuse") or EVERYTHING
        tuner = tuner or open_tuner(config)
        fusion = fuse(module, tuner, sample, what, leaves_linear=leaves_linear)
        loaded = replace(loaded, fusion=fusion)
        assert loaded.fusion is not None
        module = loaded.fusion.module
    if options.keep:
        assert options.dtype is not None
        torch_floats.cast_others(module.to(config.device), options.dtype, options.keep)
    module = module.to(config.device, None if options.keep else options.dtype).eval()
    # It may override `to`.
    found = {weight.dtype for weight in module.parameters() if weight.is_floating_point()}
    found -= {torch.float32} if options.keep else set()
    if options.dtype is not None and found - {options.dtype}:
        got = f"asked for {options.dtype}, the module has {_join(found)}"
        raise ConfigError(f"parameters.penstock.dtype: {got}")
    if options.is_channels_last or options.is_fused:
        # `to` would fail on those of three-dimensional convolutions.
        module._apply(_with_channels_last)
    if config.options.get(torch_linear.WEIGHTS_OPTION):
        return replace(loaded, linear=torch_linear.shrink_weights(module, config), module=module)
    if torch_packing.FP8_OPTION in config.options and not options.is_packed:
        sample = _sample(config, module, loaded.positional)
        linear = torch_linear.quantise_model(module, config, sample)
        return replace(loaded, module=linear.module, linear=linear)
    return replace(loaded, module=module)


def _with_channels_last(tensor: torch.Tensor) -> torch.Tensor:
    is_image = tensor.ndim == IMAGE_RANK
    return tensor.to(memory_format=torch.channels_last) if is_image else tensor


def _where_packed(module: Module, config: ModelConfig) -> str:
    """Return the model's device if it has room for the original module and does not round FP32;
    else the CPU, where packing a large one takes seconds."""
    dtypes = {each.dtype for each in module.parameters() if each.is_floating_point()}
    if config.device == CPU or dtypes != {torch.float32} or "matrices" in rounded():
        return CPU
    num_bytes = sum(each.nbytes for each in module.parameters())
    num_free, _ = torch.cuda.mem_get_info(config.device)
    return config.device if PACKING_ROOM * num_bytes < num_free else CPU


def _packed(loaded: LoadedModule, config: ModelConfig) -> PackedModel:
    """Pack the original module, mostly in FP32, so that differences are not due to rounding."""
    names = [spec.name for spec in config.outputs]

    def call(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return by_name(loaded.call(tensors), names)

    return torch_packing.pack(loaded.module, call, config)


def _sample(config: ModelConfig, module: Module, positional: Sequence[str]) -> TraceInputs | None:
    """Return inputs for the module before it is cast; None if shapes are unknown."""
    if not all(spec.is_fixed and not spec.is_optional for spec in config.inputs):
        return None
    floats = [each.dtype for each in module.parameters() if each.is_floating_point()]
    device = next((each.device for each in module.parameters()), None)
    rows = (2,) if config.max_batch_size else ()
    tensors = {}
    for spec in config.inputs:
        dtype = TORCH_TYPES[spec.datatype]
        dtype = floats[0] if floats and dtype.is_floating_point else dtype
        tensors[spec.name] = torch.zeros((*rows, *spec.shape), dtype=dtype, device=device)
    if positional:
        return TraceInputs([tensors[name] for name in positional], {}, bool(rows))
    return TraceInputs([], tensors, bool(rows))


def _make(code: Code, config: ModelConfig, options: Options) -> Module:
    """Call the factory. It gets the `parameters` if it has a parameter `options`."""
    file, name = code.load(), options.factory
    factory = getattr(file, name, None)
    if not callable(factory):
        raise code.problem(f"no function {name}(); expected one that returns a torch.nn.Module")
    with code.explained(f"{name}(): "):
        wants_options = "options" in inspect.signature(factory).parameters
        module = factory(options=dict(config.options)) if wants_options else factory()
    if not isinstance(module, Module):
        got = type(module).__name__
        raise code.problem(f"{name}(): expected a torch.nn.Module, got {got}")
    return module


def _call_order(
    code: Code, module: Module, config: ModelConfig
) -> tuple[Sequence[str], Sequence[str]]:
    """Return inputs by position and by keyword: the latter if `forward` has all these names."""
    names = [spec.name for spec in config.inputs]
    signature = inspect.signature(module.forward)
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    named = {name for name, each in signature.parameters.items() if each.kind in kinds}
    is_named = named.issuperset(names)
    try:
        if is_named:
            signature.bind(**dict.fromkeys(names))
        else:
            signature.bind(*names)
    except TypeError as error:
        problem = f"forward{signature}: {error}; configured are {quoted(names)}"
        raise code.problem(problem) from None
    return ((), names) if is_named else (names, ())


@contextmanager
def _labelled(label: str) -> Iterator[None]:
    """Name the file in errors of reading it."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError([f"{label}: {problem}" for problem in error.problems]) from None
    except Exception as error:  # torch raises many types for a broken file.
        raise BackendFailed(f"{label}: torch cannot load it: {first_line(error)}") from error


def _load_pt2(config: ModelConfig) -> LoadedModule:
    path, label = Path(config.artifact), config.label
    with _labelled(label):
        program = pt2_file.read_program(path)
    signature = _named(program, config.outputs)
    check_signature(config, signature.inputs, signature.outputs)
    _check_limits(config, program.signature.max_batch)
    _check_pickles(path, label)
    with _labelled(label):
        exported = torch.export.load(path)
        if torch.device(config.device).type != "cpu":
            from torch.export.passes import move_to_device_pass

            exported = move_to_device_pass(exported, config.device)
        module = exported.module()
    names = [spec.name for spec in signature.inputs]
    positional, keywords = names[: program.num_positional], names[program.num_positional :]
    return LoadedModule(module, positional, keywords, signature)


def _load_package(config: ModelConfig, options: Options) -> LoadedModule:
    """Load an AOTInductor package. It does not check its inputs, so its call is compared with the
    configuration; datatypes and shapes are compared by running it."""
    label = config.label
    if options.compile_mode:
        raise ConfigError(f"parameters.penstock.compile: {label} is compiled already")
    index = torch.device(config.device).index
    with _labelled(label):
        package = torch._inductor.aoti_load_package(
            config.artifact, device_index=-1 if index is None else index
        )
    # A package for another device would read GPU memory as host memory, or vice versa.
    made_for = _package_facts(package).get("device", "")
    if made_for not in ("", torch.device(config.device).type):
        raise ConfigError(
            f"{label}: was compiled for {made_for}, and instance_group has it on {config.device}"
        )
    in_spec = torch.utils._pytree.treespec_loads(package.loader.get_call_spec()[0])
    args, kwargs = in_spec.children()
    names = [spec.name for spec in config.inputs]
    keywords = list(kwargs.context or ())
    num_positional = args.num_children
    positional = [name for name in names if name not in keywords][:num_positional]
    if len(names) != num_positional + len(keywords) or not set(keywords) <= set(names):
        takes = f"it takes {num_positional} inputs by position and {keywords or 'none'} by name"
        raise ConfigError(f"{label}: {takes}; configured are {names}")
    return LoadedModule(package, positional, keywords, is_compiled=True)


def _package_facts(package: Module) -> dict[str, str]:
    found = package.get_metadata()
    device = found.get("AOTI_DEVICE_KEY", "")
    return {"device": device, "isa": found.get("AOTI_CPU_ISA", "")} if device else {}


def _named(program: pt2_file.Program, configured: Sequence[TensorSpec]) -> Signature:
    """Return the signature; outputs without names get the configured ones, in their order."""
    signature = program.signature
    if program.has_output_names:
        return signature
    outputs = [
        TensorSpec(wanted.name, found.datatype, found.shape)
        for wanted, found in zip(configured, signature.outputs, strict=False)
    ]
    return Signature(signature.inputs, tuple(outputs))


def _check_limits(config: ModelConfig, max_batch: int | None) -> None:
    why = "a .pt2 needs all its inputs; it cannot be optional"
    problems = [f"input '{spec.name}': {why}" for spec in config.inputs if spec.is_optional]
    if max_batch and config.max_batch_size > max_batch:
        most = f"the model was exported for at most {max_batch} rows"
        problems.append(f"max_batch_size: {config.max_batch_size}, but {most}")
    if problems:
        raise ConfigError(problems)


def _check_pickles(path: Path, label: str) -> None:
    """Check what torch's own reader finds in the file. It reads sample inputs as tensors and, if
    that fails, as a pickle that may run any code."""
    with _labelled(label):
        reader = torch._C.PyTorchFileReader(str(path))
        pt2_file.check_members(reader.get_all_records(), reader.get_record)
        samples = reader.get_record(pt2_file.SAMPLE_INPUTS)
    try:
        torch.load(io.BytesIO(samples), map_location="cpu", weights_only=True)
    except Exception as error:  # Unpickling may raise anything.
        problem = "its sample inputs are not plain tensors, and pickles are not read"
        raise ConfigError(f"{label}: {problem}: {first_line(error)}") from None


def by_name(answer: object, names: Sequence[str]) -> Mapping[str, torch.Tensor]:
    """Return a module's outputs by name. It returns a tensor, a sequence in the order of the
    configured outputs, a mapping, or an object with attributes."""
    if isinstance(answer, torch.Tensor):
        answer = (answer,)
    if isinstance(answer, Mapping):
        found = answer
    elif isinstance(answer, tuple | list):
        fields = getattr(answer, "_fields", ())
        is_named = bool(fields) and set(names) <= set(fields)
        found = dict(zip(fields if is_named else names, answer, strict=False))
    else:
        found = {name: getattr(answer, name) for name in names if hasattr(answer, name)}
    missing = [name for name in names if name not in found]
    if missing:
        gave = type(answer).__name__
        if isinstance(answer, tuple | list):
            gave = f"{len(answer)} outputs"
        elif isinstance(answer, Mapping):
            gave = str(sorted(answer))
        raise BackendFailed(f"the model gave no output '{missing[0]}'; it gave {gave}")
    return found


def _load_compiled(config: ModelConfig) -> str:
    """Load the compiler's cache of this version; return what was found, in words."""
    content = read_code(config, COMPILED)
    if content is None:
        return "nothing"
    try:
        found = torch.compiler.load_cache_artifacts(content)
    except Exception as error:  # From another torch, or truncated: compile again.
        return f"nothing that can be used: {first_line(error)}"
    return f"{sum(map(len, found.artifacts.values()))} parts" if found is not None else "nothing"


def _num_graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def _join(values: Iterable[object]) -> str:
    return ",".join(sorted(str(value).removeprefix("torch.") for value in values)) or "none"

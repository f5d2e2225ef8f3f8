"""Export of torch modules: a wrapper with positional tensors, and examples to trace it with. Import
only where torch is installed."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch

from penstock.backends.pytorch import TORCH_TYPES, LoadedModule, by_name
from penstock.config import ModelConfig
from penstock.errors import BackendFailed, first_line
from penstock.optimizer import onnx_model
from penstock.repository import onnx_file
from penstock.types import TensorSpec

# From this version on LayerNormalization is a single operator, which fusions look for.
OPSET = 17
NUM_ROWS = 2
# Size of variable axes: one that a model is unlikely to have inside.
FREE_SIZE = 11


class Plain(torch.nn.Module):  # type: ignore[misc]
    """Takes inputs by position and returns a tuple, both in the order of the configuration."""

    def __init__(self, loaded: LoadedModule, config: ModelConfig) -> None:
        super().__init__()
        self.module = loaded.module
        self._loaded = loaded
        self._inputs = [spec.name for spec in config.inputs]
        self._outputs = [spec.name for spec in config.outputs]

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        answer = self._loaded.call(dict(zip(self._inputs, tensors, strict=True)))
        values = by_name(answer, self._outputs)
        return tuple(values[name] for name in self._outputs)

    def train(self, mode: bool = True) -> Plain:
        """Keep the mode in which it was loaded; exported programs would even raise."""
        return self


def examples(config: ModelConfig, more: int = 0) -> tuple[torch.Tensor, ...]:
    """Return one batch, with variable sizes increased by `more`. Masks mask something, or the model
    might leave them out of the trace."""
    generator = torch.Generator().manual_seed(0)
    tensors = []
    for spec in config.inputs:
        shape = [FREE_SIZE + more if size < 0 else size for size in spec.shape]
        full = [NUM_ROWS + more, *shape] if config.max_batch_size else shape
        kind = TORCH_TYPES[spec.datatype]
        if kind.is_floating_point:
            tensor = torch.randn(full, generator=generator).to(kind)
        else:
            tensor = torch.ones(full, dtype=kind)
        if "mask" in spec.name.lower() and tensor.ndim:
            tensor[..., -2:] = 0
        tensors.append(tensor)
    return tuple(tensors)


def free_axes(spec: TensorSpec, config: ModelConfig) -> dict[int, str]:
    """Return variable axes, including the batch, with a name each: sequences share one."""
    first = 1 if config.max_batch_size else 0
    axes = {0: "batch"} if first else {}
    for axis, size in enumerate(spec.shape):
        if size < 0:
            axes[axis + first] = f"{'sequence' if axis == 0 else spec.name}_{axis}"
    return axes


def _dynamic_shapes(config: ModelConfig) -> object:
    """Return the variable axes of each input, as torch.export takes them."""
    free = torch.export.Dim.DYNAMIC
    return (tuple(dict.fromkeys(free_axes(spec, config), free) for spec in config.inputs),)


def to_onnx(loaded: LoadedModule, config: ModelConfig, path: Path) -> str:
    """Write the model, by tracing or else by torch.export; return the name of the method."""
    if hasattr(loaded.module, "set_attn_implementation"):
        # Plain attention operators, which fusions recognise.
        loaded.module.set_attn_implementation("eager")
    module = Plain(loaded, config)
    reasons: list[str] = []
    for name, is_dynamo in (("tracing", False), ("torch.export", True)):
        try:
            _export(module, config, path, is_dynamo)
            check_exported(path, config)
            check_sizes(path, module, config)
            return name
        except Exception as error:  # The exporters raise many types, and so may the model.
            reasons.append(f"{name}: {first_line(error)}")
            path.unlink(missing_ok=True)
    raise BackendFailed(f"torch cannot export it to ONNX: {'; '.join(reasons)}")


def _export(module: Plain, config: ModelConfig, path: Path, is_dynamo: bool) -> None:
    options: dict[str, object] = {"input_names": [spec.name for spec in config.inputs]}
    options["output_names"] = [spec.name for spec in config.outputs]
    if is_dynamo:
        shapes = _dynamic_shapes(config)
        options |= {"dynamic_shapes": shapes, "external_data": False, "verbose": False}
    else:
        axes = {spec.name: free_axes(spec, config) for spec in (*config.inputs, *config.outputs)}
        options |= {"dynamic_axes": axes, "opset_version": OPSET}
    with warnings.catch_warnings(), torch.inference_mode(is_dynamo):
        # Tracing warns of values that become constants: answers are compared afterwards.
        warnings.simplefilter("ignore")
        sample = examples(config)
        program = module if is_dynamo else _without_scripts(module, sample)
        torch.onnx.export(program, sample, str(path), dynamo=is_dynamo, **options)


def _without_scripts(module: Plain, sample: tuple[torch.Tensor, ...]) -> torch.nn.Module:
    """Return one trace of a module with TorchScript in it, which the exporter does not enter."""
    if not any(isinstance(each, torch.jit.ScriptModule) for each in module.modules()):
        return module
    traced: torch.nn.Module = torch.jit.trace(module, sample, check_trace=False)
    return traced


def check_exported(path: Path, config: ModelConfig) -> None:
    """Raise BackendFailed if an input is missing or a variable axis became fixed."""
    found = onnx_file.read_signature(path)
    shapes = {spec.name: spec.shape for spec in (*found.inputs, *found.outputs)}
    for spec in (*config.inputs, *config.outputs):
        kind = "input" if spec in config.inputs else "output"
        if spec.name not in shapes:
            raise BackendFailed(f"{kind} '{spec.name}' is not in the exported model")
        fixed = [axis for axis in free_axes(spec, config) if shapes[spec.name][axis] != -1]
        if fixed and kind == "input":
            raise BackendFailed(f"{kind} '{spec.name}': axis {fixed[0]} became fixed")


def check_sizes(path: Path, module: Plain, config: ModelConfig) -> None:
    """Raise BackendFailed if the file does not work for other sizes than it was traced with:
    nothing else reveals a size that became a constant."""
    inputs = examples(config, more=1)
    with torch.inference_mode():
        wanted = [tuple(output.shape) for output in module(*inputs)]
    feeds = {s.name: tensor.numpy() for s, tensor in zip(config.inputs, inputs, strict=True)}
    found = onnx_model.run(onnx_model.session(path), feeds)
    for spec, shape in zip(config.outputs, wanted, strict=True):
        array = found[spec.name]
        if array.shape != shape:
            got = f"has shape {list(array.shape)} where the module gives {list(shape)}"
            raise BackendFailed(f"output '{spec.name}' {got}: a size became a constant")


def to_package(loaded: LoadedModule, config: ModelConfig, path: Path) -> None:
    """Compile to an AOTInductor package; slow, and needs a C++ compiler."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        inputs = tuple(tensor.to(config.device) for tensor in examples(config))
        shapes = _dynamic_shapes(config)
        exported = torch.export.export(Plain(loaded, config), inputs, dynamic_shapes=shapes)
        torch._inductor.aoti_compile_and_package(exported, package_path=str(path))

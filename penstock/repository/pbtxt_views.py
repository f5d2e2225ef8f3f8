"""What the model sees of its tensors in config.pbtxt: `reshape`, ragged inputs, `batch_input` and
`batch_output`.

Reads and writes these fields; `backends.views` applies them. The rules of shapes are Triton's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.config import BatchInput, BatchOutput, ModelConfig
from penstock.repository.pbtxt_fields import Proto, datatype_name
from penstock.types import TensorSpec, num_elements

Problem = Callable[[str, str], None]
BATCH_INPUT_TYPES = ("INT32", "FP32")


def read_reshape(
    item: Proto, path: str, max_batch: int, problem: Problem
) -> tuple[int, ...] | None:
    """Return the shape that the model sees; None if the tensor has no `reshape`."""
    if not item.HasField("reshape"):
        return None
    dims, shape = tuple(item.dims), tuple(item.reshape.shape)
    if found := _shape_problem(dims, shape, max_batch):
        problem(f"{path}.reshape", f"{list(shape)} for '{item.name}': {found}")
        return None
    return shape


def _shape_problem(dims: tuple[int, ...], shape: tuple[int, ...], max_batch: int) -> str:
    if any(size == 0 or size < -1 for size in shape):
        return "each must be positive or -1"
    if not shape and not max_batch:
        return "an empty shape needs a batch dimension (max_batch_size)"
    if dims.count(-1) != shape.count(-1):
        return f"expected as many variable dimensions as dims {list(dims)}"
    # Variable dimensions match in their order, so what lies between them must have equal sizes.
    for seen, own in zip(_between(shape), _between(dims), strict=True):
        if seen != own:
            what = "elements" if -1 not in dims else "elements between variable dimensions"
            return f"has {seen} {what}, dims {list(dims)} have {own}"
    return ""


def _between(shape: tuple[int, ...]) -> list[int]:
    """Return the number of elements of each part of a shape between its variable dimensions."""
    parts: list[list[int]] = [[]]
    for size in shape:
        if size == -1:
            parts.append([])
        else:
            parts[-1].append(size)
    return [num_elements(part) for part in parts]


def read_batch_inputs(
    messages: Sequence[Proto], inputs: Sequence[TensorSpec], problem: Problem
) -> tuple[BatchInput, ...]:
    found: list[BatchInput] = []
    taken = {spec.name for spec in inputs}
    for index, message in enumerate(messages):
        path = f"batch_input[{index}]"
        kind = message.Kind.Name(message.kind)
        datatype = datatype_name(message)
        if datatype not in BATCH_INPUT_TYPES:
            expected = " or ".join(f"TYPE_{name}" for name in BATCH_INPUT_TYPES)
            problem(f"{path}.data_type", f"{datatype or message.data_type}; expected {expected}")
        _check_targets(message, path, taken, problem)
        source = _source(message, kind, path, inputs, problem)
        found.append(BatchInput(kind, tuple(message.target_name), datatype, source))
    return tuple(found)


def read_batch_outputs(
    messages: Sequence[Proto],
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    problem: Problem,
) -> tuple[BatchOutput, ...]:
    found: list[BatchOutput] = []
    taken: set[str] = set()
    specs = {spec.name: spec for spec in outputs}
    sources = {spec.name: spec for spec in inputs}
    for index, message in enumerate(messages):
        path = f"batch_output[{index}]"
        kind = message.Kind.Name(message.kind)
        _check_targets(message, path, taken, problem)
        source = _source(message, kind, path, inputs, problem)
        for name in message.target_name:
            if name not in specs:
                problem(f"{path}.target_name", f"no output '{name}'; outputs are {list(specs)}")
            elif source and len(specs[name].shape) != len(sources[source].shape):
                shapes = f"dims {list(specs[name].shape)} and {list(sources[source].shape)}"
                problem(path, f"'{name}' needs as many dimensions as '{source}': {shapes}")
        found.append(BatchOutput(tuple(message.target_name), source))
    return tuple(found)


def _check_targets(message: Proto, path: str, taken: set[str], problem: Problem) -> None:
    if not message.target_name:
        problem(f"{path}.target_name", "missing")
    for name in message.target_name:
        if name in taken:
            problem(f"{path}.target_name", f"'{name}' is given twice")
        taken.add(name)


def _source(
    message: Proto, kind: str, path: str, inputs: Sequence[TensorSpec], problem: Problem
) -> str:
    names: list[str] = list(message.source_input)
    if len(names) != 1:
        problem(f"{path}.source_input", f"{kind} takes 1 source, got {len(names)}")
        return ""
    spec = next((spec for spec in inputs if spec.name == names[0]), None)
    if spec is None:
        known = ", ".join(spec.name for spec in inputs)
        problem(f"{path}.source_input", f"no input '{names[0]}'; expected one of {known}")
        return ""
    if spec.is_optional or spec.datatype == "BYTES":
        problem(f"{path}.source_input", f"'{names[0]}' is optional or of strings, so has no count")
        return ""
    return names[0]


def conflicts(config: ModelConfig) -> list[tuple[str, str]]:
    """Return fields that do not fit the rest of a configuration, and why."""
    found: list[tuple[str, str]] = []
    before, after = config.preprocess is not None, config.postprocess is not None
    for index, spec in enumerate(config.inputs):
        path = f"input[{index}]"
        if spec.reshape is not None and before:
            found.append((f"{path}.reshape", "the preprocess function gives the model its shapes"))
        if spec.is_ragged and spec.datatype == "BYTES":
            found.append((f"{path}.allow_ragged_batch", "not for TYPE_STRING"))
        if spec.is_ragged and spec.is_optional:
            found.append((f"{path}.allow_ragged_batch", "not for optional inputs"))
    if after:
        reshaped = [n for n, spec in enumerate(config.outputs) if spec.reshape is not None]
        why = "the postprocess function takes the model's own shapes"
        found += [(f"output[{index}].reshape", why) for index in reshaped]
    if not config.joins_requests:
        return found
    what = _joining_field(config)
    if not config.max_batch_size:
        found.append((what, "needs max_batch_size > 0"))
    if config.is_processed or config.padding is not None:
        found.append((what, "not with pre- or postprocessing or penstock.pad"))
    if config.backend == "python":
        fields = (("batch_input", config.batch_inputs), ("batch_output", config.batch_outputs))
        why = "backend 'python' gets each request by itself"
        found += [(field, why) for field, given in fields if given]
    return found


def _joining_field(config: ModelConfig) -> str:
    for index, spec in enumerate(config.inputs):
        if spec.is_ragged:
            return f"input[{index}].allow_ragged_batch"
    return "batch_input" if config.batch_inputs else "batch_output"


def describe_tensor(item: Proto, spec: TensorSpec) -> None:
    item.ClearField("reshape")
    if spec.reshape is not None:
        item.reshape.shape[:] = spec.reshape
        item.reshape.SetInParent()
    if "allow_ragged_batch" in item.DESCRIPTOR.fields_by_name:
        item.allow_ragged_batch = spec.is_ragged


def describe_batch(message: Proto, config: ModelConfig) -> None:
    """Write the batch inputs and outputs of a configuration."""
    del message.batch_input[:], message.batch_output[:]
    for each in config.batch_inputs:
        item = message.batch_input.add()
        item.kind = item.Kind.Value(each.kind)
        item.target_name[:] = each.names
        types = item.DESCRIPTOR.fields_by_name["data_type"].enum_type
        item.data_type = types.values_by_name[f"TYPE_{each.datatype}"].number
        item.source_input[:] = [each.source]
    for output in config.batch_outputs:
        item = message.batch_output.add()
        item.target_name[:] = output.names
        item.source_input[:] = [output.source]

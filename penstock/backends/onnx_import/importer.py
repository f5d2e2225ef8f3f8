"""Turns an ONNX graph into a torch.fx graph that computes the same.

Each operator becomes a call of the torch function of its table, or a module of torch.nn where its
weights are constants, so that fusion finds the layers it knows. What depends on constants alone is
computed here. Shapes, and what is computed of them for a shape, an axis or a count, stay on the
host, so that a GPU never waits for them.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import onnx
import onnx.inliner
import onnx.version_converter
import torch
from onnx import GraphProto, ModelProto, NodeProto, helper
from torch import fx, nn

from penstock.backends.onnx_import import (
    contrib,
    elementwise,
    images,
    indexing,
    layers,
    losses,
    matrices,
    quantised,
    recurrent,
    reductions,
    shapes,
    signal,
)
from penstock.backends.onnx_import.modules import build_module
from penstock.backends.onnx_import.values import DTYPES, Compute, OnnxOperator
from penstock.backends.onnx_import.weights import BrokenFile, read_tensor
from penstock.errors import ConfigError, first_line
from penstock.repository.onnx_file import sort_model

log = logging.getLogger("penstock.onnx")
Tensors = Mapping[str, torch.Tensor]
Sizes = Mapping[str, Sequence[int]]
Attributes = dict[str, object]
# Returns the outputs of a graph that follow from shapes alone, if they are the same for all shapes
# of inputs that may come.
Evaluate = Callable[["ImportedGraph"], Sequence[torch.Tensor] | None]

CONTRIB = "com.microsoft"
STANDARD = ("", "ai.onnx")
# Domain of operators on blocks of channels, for the vector units of one CPU.
CPU_DOMAIN = "com.microsoft.nchwc"
BLOCKED = (
    "ONNX Runtime wrote the file at optimisation level 'all', for one kind of CPU; "
    "use the original file, or level 'extended'"
)
OPERATORS: Mapping[str, Mapping[str, OnnxOperator]] = {
    "": {
        **elementwise.OPERATORS,
        **images.OPERATORS,
        **indexing.OPERATORS,
        **layers.OPERATORS,
        **losses.OPERATORS,
        **matrices.OPERATORS,
        **quantised.OPERATORS,
        **recurrent.OPERATORS,
        **reductions.OPERATORS,
        **shapes.OPERATORS,
        **signal.OPERATORS,
    },
    # ONNX Runtime writes LayerNormalization and Q/DQ in either domain.
    CONTRIB: contrib.OPERATORS
    | {name: quantised.OPERATORS[name] for name in ("DequantizeLinear", "QuantizeLinear")},
}
# Oldest operator set whose meaning the tables have.
OLDEST, NEWEST = 7, onnx.defs.onnx_opset_version()
# Operators that exist in the standard domain under a name of an older ONNX Runtime.
ALIASES = {"SimplifiedLayerNormalization": "RMSNormalization"}
# Operators that make a condition of sizes.
COMPARES = {"And", "Cast", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Not", "Or"}
COMPARES |= {"Reshape", "Squeeze", "Unsqueeze", "Xor"}
NOT_CONSTANT = (
    "its condition is not a constant, nor computed from fixed inputs or from sizes that are always "
    "the same"
)
CONTROL = ("If", "Loop", "Scan", "SequenceMap")
# Constant results larger than this are computed at each run instead of being kept.
MAX_FOLDED_BYTES = 64 << 20
# Weights of this size are no shapes.
LARGE_BYTES = 64 << 10
# Operators on which a constant number stays a number instead of becoming a tensor.
TAKES_NUMBERS: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "Pow", "Greater", "Less", "Equal"), (1,)),
    **dict.fromkeys(("GreaterOrEqual", "LessOrEqual", "Gather"), (1,)),
    "Clip": (1, 2),
}
SWAPPED = ("Add", "Mul")
# Key of a node's positions that take numbers, in its `meta`.
HOST = "penstock_host"
# Attribute of a layer whose weights are INT8 in the file: their scales.
WEIGHT_SCALE = "penstock_weight_scale"
# Keys of whether it runs on the host, and of its result's rank, if that is known.
ON_HOST, RANK = "penstock_on_host", "penstock_rank"
# Key of the names of the file's nodes that it computes.
NODES = "penstock_nodes"
# Key of ONNX's number of its result's datatype, if that is known.
DTYPE = "penstock_dtype"


@dataclass(frozen=True, slots=True)
class GraphStep:
    """One operator with its inputs and outputs by name; an empty name means it is absent."""

    name: str
    op_type: str
    operator: OnnxOperator
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Attributes


@dataclass(frozen=True, slots=True)
class ImportedGraph:
    """A graph that takes its inputs by position and returns a tuple of its outputs."""

    module: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    # Nodes of each operator.
    counts: Counter[str]
    # Names of the sizes of each input, as the file declares them; empty for those without one.
    symbols: Mapping[str, Sequence[str]]
    # Layers that compute in INT8, by kind.
    int8: Counter[str] = field(default_factory=Counter)
    # Layers and functions that are not cast.
    kept: set[str] = field(default_factory=set)


def import_file(
    path: Path,
    fixed: Tensors | None = None,
    sizes: Sizes | None = None,
    evaluate: Evaluate | None = None,
) -> ImportedGraph:
    """Import a file. `fixed` inputs are constants from then on; `sizes` are shapes of inputs that
    will not change, with -1 for sizes that may; `evaluate` decides conditions of If that follow
    from shapes. Raise ConfigError naming each operator that this engine does not have."""
    try:
        model = onnx.load(str(path), load_external_data=False)
    except Exception as error:  # onnx and protobuf raise many types for a broken file.
        raise BrokenFile([f"cannot be read as ONNX: {first_line(error)}"]) from None
    return import_model(model, path.parent, fixed, sizes, evaluate)


def import_model(
    model: ModelProto,
    folder: Path = Path(),
    fixed: Tensors | None = None,
    sizes: Sizes | None = None,
    evaluate: Evaluate | None = None,
) -> ImportedGraph:
    for value in model.graph.input:
        for dim, size in zip(
            value.type.tensor_type.shape.dim, (sizes or {}).get(value.name, ()), strict=False
        ):
            if size >= 0:
                dim.dim_value = size
    try:
        sort_model(model)
    except ConfigError as error:
        raise BrokenFile(error.problems) from None
    flat = _Flattener(folder, evaluate)
    flat.read(_inlined(model), dict(fixed or {}))
    return _Emitter(flat).emit()


def _inlined(model: ModelProto) -> ModelProto:
    """Replace functions of the model, and operators that are known only as functions of others."""
    model = _supported(model)
    if model.functions:
        model = onnx.inliner.inline_local_functions(model)
    unknown = sorted(
        {
            ("" if node.domain in STANDARD else node.domain, node.op_type)
            for node in _all_nodes(model.graph)
            if _find(node) is None and _has_body(node, _opsets(model))
        }
    )
    if not unknown:
        return model
    try:
        expanded: ModelProto = onnx.inliner.inline_selected_functions(
            model, unknown, inline_schema_functions=True
        )
    except Exception as error:  # Unknown operators are reported by name later on.
        log.debug("cannot expand %s: %s", unknown, first_line(error))
        return model
    return expanded


def _supported(model: ModelProto) -> ModelProto:
    """Return the model in an operator set whose meaning the tables have."""
    version = _opsets(model).get("", NEWEST)
    if OLDEST <= version <= NEWEST:
        return model
    problem = f"the model has operator set {version}"
    if version > NEWEST:
        raise ConfigError([f"{problem}; expected at most {NEWEST}"])
    try:
        converted: ModelProto = onnx.version_converter.convert_version(model, OLDEST)
    except Exception as error:  # The converter raises many types.
        # An assertion has its place in the source before the reason.
        reason = first_line(error).rpartition(" failed: ")[2].replace("Version $", "operator set ")
        raise ConfigError([f"{problem}, and onnx cannot convert it: {reason}"]) from None
    return converted


def _without_weights(model: ModelProto) -> tuple[ModelProto, set[str]]:
    """Return the model with inputs in place of its large weights, and their names: inferring shapes
    copies the model several times."""
    graph, bare = model.graph, ModelProto(ir_version=model.ir_version)
    bare.opset_import.extend(model.opset_import)
    bare.functions.extend(model.functions)
    bare.graph.name = graph.name
    bare.graph.node.extend(graph.node)
    bare.graph.input.extend(graph.input)
    bare.graph.output.extend(graph.output)
    declared = {value.name for value in graph.input}
    weights = set()
    for tensor in graph.initializer:
        if tensor.ByteSize() < LARGE_BYTES:
            bare.graph.initializer.append(tensor)
        elif tensor.name not in declared:
            value = helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            bare.graph.input.append(value)
            weights.add(tensor.name)
    return bare, weights


def _opsets(model: ModelProto) -> dict[str, int]:
    return {
        "" if each.domain in STANDARD else each.domain: each.version for each in model.opset_import
    }


def _all_nodes(graph: GraphProto) -> Iterable[NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _all_nodes(inner)


def _find(node: NodeProto) -> OnnxOperator | None:
    domain = "" if node.domain in STANDARD else node.domain
    op_type = ALIASES.get(node.op_type, node.op_type)
    found = OPERATORS.get(domain, {}).get(op_type)
    # ONNX Runtime puts some standard operators into its own domain.
    return found or (OPERATORS[""].get(op_type) if domain == CONTRIB else None)


def _has_body(node: NodeProto, opsets: Mapping[str, int]) -> bool:
    domain = "" if node.domain in STANDARD else node.domain
    try:
        schema = onnx.defs.get_schema(node.op_type, opsets.get(domain, 1), domain)
    except onnx.defs.SchemaError:
        return False
    # The stubs of onnx lack both.
    return any(
        getattr(schema, f"has_{kind}") for kind in ("function", "context_dependent_function")
    )


@cache
def parameter_names(compute: Compute) -> frozenset[str]:
    """Return the names of a function's parameters; `**` if it takes any."""
    try:
        found = inspect.signature(compute).parameters.values()
    except (TypeError, ValueError):  # A function of torch without a signature.
        return frozenset()
    return frozenset("**" if each.kind is each.VAR_KEYWORD else each.name for each in found)


@dataclass(slots=True)
class _Flattener:
    """Reads a graph into steps: constants are computed, branches chosen."""

    folder: Path
    evaluate: Evaluate | None = None
    steps: list[GraphStep] = field(default_factory=list)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    inputs: list[str] = field(default_factory=list)
    # Values by the name of the output.
    outputs: dict[str, str] = field(default_factory=dict)
    # Element types and ranks, as far as ONNX infers them.
    dtypes: dict[str, int] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)
    # Sizes, where they are known; -1 elsewhere. Of tensors, and of what Shape returns for them.
    sizes: dict[str, list[int]] = field(default_factory=dict)
    partial: dict[str, list[int]] = field(default_factory=dict)
    symbols: dict[str, list[str]] = field(default_factory=dict)
    opset: int = NEWEST
    counts: Counter[str] = field(default_factory=Counter)
    # Scales of weights that are INT8 in the file, by the name of their float values.
    weight_scales: dict[str, torch.Tensor] = field(default_factory=dict)
    _problems: dict[str, str] = field(default_factory=dict)
    _num_branches: int = 0
    # Names of outputs of folded branches, by the name of If's own output.
    _names: dict[str, str] = field(default_factory=dict)

    def read(self, model: ModelProto, fixed: dict[str, torch.Tensor]) -> None:
        self.opset = _opsets(model).get("", NEWEST)
        self._infer(model)
        self._read_weights(model.graph)
        unknown = [name for name in fixed if name not in {v.name for v in model.graph.input}]
        if unknown:
            raise ConfigError([f"fixed input '{unknown[0]}': the model has no such input"])
        self.constants |= fixed
        self.inputs = [
            value.name for value in model.graph.input if value.name not in self.constants
        ]
        self.symbols = {
            value.name: [dim.dim_param for dim in value.type.tensor_type.shape.dim]
            for value in model.graph.input
        }
        self._read_nodes(model.graph)
        if self._problems:
            raise ConfigError(list(self._problems.values()))
        self.outputs = {value.name: self._resolve(value.name) for value in model.graph.output}

    def _infer(self, model: ModelProto) -> None:
        # Files declare shapes in between that are left over from other batch sizes.
        del model.graph.value_info[:]
        bare, weights = _without_weights(model)
        try:
            graph = onnx.shape_inference.infer_shapes(bare, data_prop=True).graph
        except Exception as error:  # Only ranks and datatypes are unknown then.
            log.debug("shape inference failed: %s", first_line(error))
            graph = model.graph
        for value in (*graph.input, *graph.value_info, *graph.output):
            if value.name in weights:
                continue
            tensor = value.type.tensor_type
            self.dtypes[value.name] = tensor.elem_type
            if tensor.HasField("shape"):
                self.ranks[value.name] = len(tensor.shape.dim)
                self.sizes[value.name] = [
                    dim.dim_value if dim.HasField("dim_value") else -1 for dim in tensor.shape.dim
                ]

    def _read_weights(self, graph: GraphProto) -> None:
        for tensor in graph.initializer:
            self.constants[tensor.name] = read_tensor(tensor, self.folder)
            self.dtypes[tensor.name] = tensor.data_type
        if graph.sparse_initializer:
            self._problems["sparse"] = "sparse weights are not supported on this engine"

    def _read_nodes(self, graph: GraphProto) -> None:
        for node in graph.node:
            self.counts[node.op_type] += 1
            if node.op_type == "Constant":
                self.constants[node.output[0]] = self._constant(node)
            elif node.op_type == "If":
                self._choose_branch(node)
            elif (operator := _find(node)) is None:
                self._refuse(node)
            else:
                self._add(node, operator)

    def _refuse(self, node: NodeProto, why: str = "") -> None:
        domain = "" if node.domain in STANDARD else f"{node.domain}."
        why = BLOCKED if node.domain == CPU_DOMAIN else why
        kind = "control flow" if node.op_type in CONTROL else "operator"
        text = f"{kind} {domain}{node.op_type} (node '{node.name}') is not supported on this engine"
        key = domain if node.domain == CPU_DOMAIN else f"{domain}{node.op_type}"
        self._problems.setdefault(key, text + (f": {why}" if why else ""))

    def _constant(self, node: NodeProto) -> torch.Tensor:
        (attribute,) = node.attribute
        value = helper.get_attribute_value(attribute)
        match attribute.name:
            case "value":
                return read_tensor(value, self.folder)
            case "value_float" | "value_floats":
                return torch.tensor(value, dtype=torch.float32)
            case "value_int" | "value_ints":
                return torch.tensor(value, dtype=torch.int64)
        self._refuse(node, f"attribute {attribute.name}")
        return torch.empty(0)

    def _choose_branch(self, node: NodeProto) -> None:
        name = self._resolve(node.input[0])
        condition = self.constants.get(name)
        if condition is None:
            condition = self._evaluate(name)
        if condition is None:
            self._refuse(node, NOT_CONSTANT)
            return
        branches = {each.name: each.g for each in node.attribute}
        chosen = branches["then_branch" if bool(condition) else "else_branch"]
        # Two branches may use the same names inside.
        self._num_branches += 1
        _rename(chosen, {}, f"branch{self._num_branches}/")
        self._read_weights(chosen)
        self._read_nodes(chosen)
        for outer, inner in zip(node.output, chosen.output, strict=True):
            self._names[outer] = self._resolve(inner.name)

    def _evaluate(self, condition: str) -> torch.Tensor | None:
        """Return a condition that compares sizes, if these are the same for all shapes of inputs
        that may come; it is not enough that the results are."""
        steps, compared, names = [], [condition], {condition}
        for step in reversed(self.steps):
            if not names & set(step.outputs):
                continue
            steps.append(step)
            names.update(step.inputs)
            if step.op_type in COMPARES and set(compared) & set(step.outputs):
                compared += [name for name in step.inputs if name and name not in self.constants]
        made = {name for step in steps for name in step.outputs}
        is_whole = names <= made | {"", *self.inputs, *self.constants}
        if self.evaluate is None or not is_whole or condition not in made:
            return None
        part = replace(self, steps=steps[::-1], outputs={name: name for name in compared})
        if not set(compared) <= _host_values(part, compared):
            return None
        found = self.evaluate(_Emitter(part, compared).emit())
        return None if found is None else found[0]

    def _resolve(self, name: str) -> str:
        return self._names.get(name, name)

    def _add(self, node: NodeProto, operator: OnnxOperator) -> None:
        try:
            attributes = self._attributes(node, operator)
        except ConfigError as error:
            self._refuse(node, error.problems[0])
            return
        inputs = tuple(map(self._resolve, node.input))
        while inputs and not inputs[-1]:
            inputs = inputs[:-1]
        outputs = tuple(node.output)
        while not outputs[-1]:
            outputs = outputs[:-1]
        step = GraphStep(node.name, node.op_type, operator, inputs, outputs, attributes)
        if node.op_type == "Identity":
            self._names[outputs[0]] = inputs[0]
        elif not self._fold(step):
            self.steps.append(step)

    def _attributes(self, node: NodeProto, operator: OnnxOperator) -> Attributes:
        known = parameter_names(operator.compute)
        found: Attributes = {}
        for attribute in node.attribute:
            value = _attribute_value(attribute)
            if isinstance(value, onnx.TensorProto):
                tensor = read_tensor(value, self.folder)
                # Only ConstantOfShape has one: a number and its type.
                found["dtype"], value = tensor.dtype, tensor.item()
            if attribute.name not in known and "**" not in known:
                raise ConfigError([f"attribute {attribute.name} is not known"])
            found[attribute.name] = value
        if found.get("to", 1) not in DTYPES:
            raise ConfigError([f"datatype {onnx.TensorProto.DataType.Name(found['to'])}"])
        if "types" in known:
            found["types"] = [self.dtypes.get(name, 0) for name in node.input]
        if "opset" in known:
            found["opset"] = self.opset
        if "num_outputs" in known:
            found["num_outputs"] = max(n for n, name in enumerate(node.output, 1) if name)
        return found

    def _fold(self, step: GraphStep) -> bool:
        """Compute a step of constants, or of sizes that are known; return whether it was."""
        if (known := self._known_sizes(step)) is not None:
            self.constants[step.outputs[0]] = known
            return True
        if not all(not name or name in self.constants for name in step.inputs):
            return False
        given = [self.constants.get(name) for name in step.inputs]
        try:
            with torch.no_grad():
                found = wide(step, self.dtypes)(*given, **step.attributes)
        except Exception as error:
            raise ConfigError([f"{step.op_type} '{step.name}': {first_line(error)}"]) from error
        results = found if isinstance(found, tuple) else (found,)
        if sum(each.nbytes for each in results if each is not None) > MAX_FOLDED_BYTES:
            return False
        self.constants |= {
            name: each for name, each in zip(step.outputs, results, strict=False) if name
        }
        if (scale := _weight_scale(step, given)) is not None:
            self.weight_scales[step.outputs[0]] = scale
        return True

    def _known_sizes(self, step: GraphStep) -> torch.Tensor | None:
        """Return the result of Shape, or of choosing from it, if its sizes are known."""
        source = step.inputs[0] if step.inputs else ""
        if step.op_type == "Shape" and source in self.sizes:
            first, last = step.attributes.get("start"), step.attributes.get("end")
            assert isinstance(first, int | None) and isinstance(last, int | None)
            sizes = self.sizes[source][first:last]
            self.partial[step.outputs[0]] = sizes
            return None if -1 in sizes else torch.tensor(sizes, dtype=torch.int64)
        if step.op_type != "Gather" or source not in self.partial:
            return None
        indices = self.constants.get(step.inputs[1])
        if indices is None or not indices.numel():
            return None
        if int(indices.abs().max()) > len(self.partial[source]):
            return None
        found = torch.tensor(self.partial[source], dtype=torch.int64)[indices]
        return None if bool((found < 0).any()) else found


def _weight_scale(step: GraphStep, given: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Return the scale of INT8 weights, a single one or one for each channel, if zero is zero."""
    if step.op_type != "DequantizeLinear" or step.attributes.get("block_size"):
        return None
    values, scale, zero = (*given, None)[:3]
    assert values is not None and scale is not None
    is_plain = zero is None or not bool(zero.any())
    return scale.flatten() if values.dtype == torch.int8 and is_plain else None


def _rename(graph: GraphProto, outer: Mapping[str, str], prefix: str) -> None:
    """Put a prefix before the names that a graph defines, where they are used too."""
    defined = [tensor.name for tensor in graph.initializer]
    defined += [name for node in graph.node for name in node.output if name]
    names = {**outer, **{name: prefix + name for name in defined}}
    for value in (*graph.initializer, *graph.output):
        value.name = names.get(value.name, value.name)
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                _rename(inner, names, prefix)


def _attribute_value(attribute: onnx.AttributeProto) -> object:
    value = helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        return value.decode()
    if attribute.type == onnx.AttributeProto.STRINGS:
        return [each.decode() for each in value]
    is_list = attribute.type in (onnx.AttributeProto.INTS, onnx.AttributeProto.FLOATS)
    return list(value) if is_list else value


def wide(step: GraphStep, dtypes: Mapping[str, int]) -> Compute:
    """Return the function of a step; for wide unsigned integers, one that torch computes."""
    kinds = {DTYPES.get(dtypes.get(name, 0)) for name in step.inputs}
    if kinds & set(elementwise.UNSIGNED) and step.op_type in elementwise.ARITHMETIC:
        return elementwise.widened(step.operator.compute)
    return step.operator.compute


class ToDevice(nn.Module):  # type: ignore[misc]
    """Copies small tensors from the host to the device of an anchor, each value once."""

    MAX_KEPT = 1024

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[object, torch.Tensor] = {}

    def forward(self, value: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        if anchor.device == value.device:
            return value
        key = anchor.device, value.dtype, tuple(value.shape), value.numpy().tobytes()
        if key not in self._kept:
            if len(self._kept) >= self.MAX_KEPT:
                self._kept.clear()
            self._kept[key] = value.to(anchor.device)
        return self._kept[key]


def device_of(anchor: torch.Tensor) -> torch.device:
    return anchor.device


@dataclass(slots=True)
class _Emitter:
    """Writes steps as a graph of torch.fx."""

    flat: _Flattener
    # Values to compute on the host, beside those that operators need there.
    wanted: Sequence[str] = ()
    root: nn.Module = field(default_factory=nn.Module)
    graph: fx.Graph = field(default_factory=fx.Graph)
    _nodes: dict[str, fx.Node] = field(default_factory=dict)
    _moved: dict[str, fx.Node] = field(default_factory=dict)
    _weights: dict[str, fx.Node] = field(default_factory=dict)
    # Values that are computed on the host.
    _on_host: set[str] = field(default_factory=set)
    _num_modules: int = 0

    def emit(self) -> ImportedGraph:
        self._on_host = _host_values(self.flat, self.wanted)
        for name in self.flat.inputs:
            node = self.graph.placeholder(f"input_{len(self._nodes)}")
            node.meta[RANK] = self.flat.ranks.get(name)
            node.meta[DTYPE] = self.flat.dtypes.get(name)
            self._nodes[name] = node
        self.root.register_buffer("anchor", torch.empty(0), persistent=False)
        anchor = self.graph.get_attr("anchor")
        self._nodes[""] = anchor
        for step in self.flat.steps:
            self._emit(step)
        self.graph.output(tuple(map(self._value, self.flat.outputs.values())))
        module = fx.GraphModule(self.root, self.graph)
        module.graph.eliminate_dead_code()
        module.delete_all_unused_submodules()
        module.recompile()
        flat = self.flat
        return ImportedGraph(
            module.eval(), tuple(flat.inputs), tuple(flat.outputs), flat.counts, flat.symbols
        )

    def _emit(self, step: GraphStep) -> None:
        is_host = any(name in self._on_host for name in step.outputs)
        dtype = DTYPES.get(self.flat.dtypes.get(step.inputs[0] if step.inputs else "", 1))
        is_layer = not is_host and dtype is not None and dtype.is_floating_point
        module = None
        if is_layer:
            module = build_module(step.op_type, step.attributes, self._read_constants(step))
        if module is not None:
            scale = self.flat.weight_scales.get(step.inputs[1] if len(step.inputs) > 1 else "")
            # The layer's weights have Gemm's alpha in them.
            alpha = step.attributes.get("alpha", 1.0)
            assert isinstance(alpha, float | int)
            if scale is not None and alpha > 0:
                setattr(module, WEIGHT_SCALE, scale * alpha)
            name = f"layer_{self._num_modules}"
            self._num_modules += 1
            self.root.add_module(name, module)
            made = self.graph.call_module(name, (self._value(step.inputs[0]),))
        else:
            made = self._call(step, is_host)
        made.meta[NODES] = (step.name,) if step.name else ()
        if len(step.outputs) == 1 and not _returns_tuple(step.operator.compute):
            self._nodes[step.outputs[0]] = made
            return
        for number, name in enumerate(step.outputs):
            if name:
                self._nodes[name] = self.graph.call_function(take_item, (made, number))
                self._nodes[name].meta[DTYPE] = self.flat.dtypes.get(name)

    def _read_constants(self, step: GraphStep) -> list[torch.Tensor | int | None]:
        """Return the constants among the inputs; for others their rank, if that is known."""
        constants, ranks = self.flat.constants, self.flat.ranks
        return [constants.get(name, ranks.get(name)) for name in step.inputs]

    def _call(self, step: GraphStep, is_host: bool) -> fx.Node:
        arguments = [self._argument(step, number, is_host) for number in range(len(step.inputs))]
        if step.op_type in SWAPPED and not isinstance(arguments[0], fx.Node):
            arguments.reverse()
        attributes = dict(step.attributes)
        if "device" in parameter_names(step.operator.compute) and not is_host:
            attributes["device"] = self.graph.call_function(device_of, (self._nodes[""],))
        made = self.graph.call_function(wide(step, self.flat.dtypes), tuple(arguments), attributes)
        made.meta[HOST] = () if is_host else step.operator.host
        made.meta[ON_HOST] = is_host
        made.meta[RANK] = self.flat.ranks.get(step.outputs[0])
        made.meta[DTYPE] = self.flat.dtypes.get(step.outputs[0])
        return made

    def _argument(self, step: GraphStep, position: int, is_host: bool) -> object:
        name = step.inputs[position]
        if not name:
            return None
        constant = self.flat.constants.get(name)
        if constant is None:
            is_wanted = is_host or position in step.operator.host
            return self._nodes[name] if is_wanted else self._value(name)
        if position in step.operator.host or self._is_number(step, position, constant):
            return constant.tolist()
        if is_host:
            literal = constant.tolist()
            return self.graph.call_function(torch.tensor, (literal,), {"dtype": constant.dtype})
        return self._value(name)

    def _is_number(self, step: GraphStep, position: int, constant: torch.Tensor) -> bool:
        positions = TAKES_NUMBERS.get(step.op_type, ())
        others = [name for n, name in enumerate(step.inputs) if n != position]
        if step.op_type in SWAPPED:
            positions = (0, 1)
        if position not in positions or constant.dim() or others[0] in self.flat.constants:
            return False
        return constant.dtype not in elementwise.UNSIGNED

    def _value(self, name: str) -> fx.Node:
        """Return the node of a value on the device."""
        if name in self.flat.constants:
            return self._weight(name)
        if name not in self._on_host:
            return self._nodes[name]
        if name not in self._moved:
            if not hasattr(self.root, "to_device"):
                self.root.add_module("to_device", ToDevice())
            self._moved[name] = self.graph.call_module(
                "to_device", (self._nodes[name], self._nodes[""])
            )
        return self._moved[name]

    def _weight(self, name: str) -> fx.Node:
        if name not in self._weights:
            attribute = f"constant_{len(self._weights)}"
            self.root.register_buffer(attribute, self.flat.constants[name])
            self._weights[name] = self.graph.get_attr(attribute)
        return self._weights[name]


@cache
def _returns_tuple(compute: Compute) -> bool:
    """Whether a function returns several values whatever is asked for."""
    found = getattr(compute, "__annotations__", {}).get("return", "")
    return str(found).startswith("tuple[")


def take_item(values: Sequence[torch.Tensor], number: int) -> torch.Tensor:
    return values[number]


def _host_values(flat: _Flattener, also: Iterable[str] = ()) -> set[str]:
    """Return the values to compute on the host: those that follow from shapes alone, and that some
    operator needs there or that are asked for."""
    derived: set[str] = set()
    for step in flat.steps:
        known = (not name or name in flat.constants or name in derived for name in step.inputs)
        if step.op_type in ("Shape", "Size") or all(known):
            derived.update(step.outputs)
    wanted = set(also)
    for step in reversed(flat.steps):
        is_wanted = bool(wanted & derived & set(step.outputs))
        if step.op_type in ("Shape", "Size"):
            continue
        wanted.update(
            name
            for position, name in enumerate(step.inputs)
            if is_wanted or position in step.operator.host
        )
    always = {
        name for step in flat.steps if step.op_type in ("Shape", "Size") for name in step.outputs
    }
    return (derived & wanted) | always

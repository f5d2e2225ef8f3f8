"""Linear layers of any model in e4m3 (`penstock.fp8`) or with integer weights (`penstock.weights`).

Every nn.Linear whose sizes allow it is replaced, by name, but those named in `penstock.fp8_keep`.
Where the module's graph is known (ONNX, or code that can be traced), an input is quantised once for
all layers that read it, in one kernel with the layer norm or GELU before it. Packed encoders have
layers of their own (`torch_packing`).
"""

from __future__ import annotations

import difflib
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from penstock.backends.torch_activations import activation_of
from penstock.backends.torch_aliasing import GraphMemory
from penstock.backends.torch_packing import FP8_OPTION, KEEP_OPTION, ROWWISE, has_fp8, read_ranges
from penstock.backends.torch_tracing import TraceInputs, trace
from penstock.config import ModelConfig
from penstock.errors import ConfigError
from penstock.kernels.activation import GELU, GELU_TANH, Activation
from penstock.kernels.cublaslt import Unavailable
from penstock.kernels.fp8_linear import MULTIPLE, E4m3Linear, Fp8Input, FusedActivation, fits
from penstock.kernels.gemm import Multiplier, open_multiplier
from penstock.kernels.integer_weights import MIN_GROUP, WeightOnlyLinear
from penstock.kernels.packed_encoder import KERNEL_TYPES
from penstock.units import quoted

T = TypeVar("T")
WEIGHTS_OPTION = "penstock.weights"
# Bits by the value of the option.
WEIGHTS = {"int8": 8, "int4": 4}
# Smaller layers take no time to read.
MIN_WEIGHTS = 1 << 14
SEPARATOR = ","
# Names that are listed beside one that is unknown.
NUM_NEAR = 5
LINEAR = "linear layer"
# Modules whose code reads the weights of its linear layers instead of calling them.
CLOSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
FUSED: Mapping[Activation, FusedActivation] = {GELU: "gelu", GELU_TANH: "gelu_tanh"}
Call = Callable[[Mapping[str, torch.Tensor]], object]


@dataclass(slots=True)
class LinearModel:
    """A module with linear layers in e4m3 or with integer weights, and what chooses the GEMMs."""

    module: nn.Module
    layers: Mapping[str, E4m3Linear | WeightOnlyLinear]
    num_layers: int
    # Of integer weights; 0: e4m3.
    bits: int = 0
    multiplier: Multiplier | None = None
    # Why there is no choice of GEMMs, and why inputs are quantised for each layer.
    no_multiplier: str = ""
    not_traced: str = ""
    num_shared: int = 0
    # Residuals that GEMMs add.
    num_added: int = 0
    _seen: set[object] = field(default_factory=set)

    def prepare(self, tensors: Mapping[str, torch.Tensor], call: Callable[[], object]) -> None:
        """Time the GEMMs for inputs of new shapes, as long as the model is warming up."""
        shapes = tuple((name, tuple(each.shape)) for name, each in tensors.items())
        if self.multiplier is None or not self.multiplier.is_open or shapes in self._seen:
            return
        # Layers queue their GEMMs.
        call()
        self.multiplier.tune()
        self._seen.add(shapes)

    def settle(self) -> None:
        if self.multiplier is not None:
            self.multiplier.settle()

    def files(self) -> dict[str, bytes]:
        return {} if self.multiplier is None else self.multiplier.files()

    def facts(self) -> dict[str, str]:
        if self.bits:
            num_bytes = sum(each.weights.num_bytes for each in self.layers.values())
            text = f"{len(self.layers)} of {self.num_layers} linear layers, {num_bytes} bytes"
            return {"weights": f"int{self.bits}: {text}"}
        facts = {"fp8": f"{len(self.layers)} of {self.num_layers} linear layers"}
        if all(each.largest is None for each in self.layers.values()):
            facts["fp8"] += ", each row by its own range"
        facts["fp8_inputs"] = f"{self.num_shared} shared or fused"
        if self.num_added:
            facts["fp8_residuals"] = f"{self.num_added} added by GEMMs"
        if self.not_traced:
            facts["fp8_inputs"] = f"quantised for each layer: {self.not_traced}"
        if self.no_multiplier:
            facts["products"] = f"by torch: {self.no_multiplier}"
        return facts if self.multiplier is None else facts | self.multiplier.facts()


@dataclass(frozen=True, slots=True)
class CastInputs:
    """A hook before a layer that casts the floats it takes."""

    dtype: torch.dtype

    def __call__(self, module: nn.Module, args: object, kwargs: object) -> tuple[object, object]:
        return cast_floats(args, self.dtype), cast_floats(kwargs, self.dtype)


def cast_floats(values: T, dtype: torch.dtype) -> T:
    """Cast the float tensors among some values."""
    found: T = pytree.tree_map(lambda each: each.to(dtype) if is_float(each) else each, values)
    return found


def is_float(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _is_narrowing(hook: object) -> bool:
    return isinstance(hook, CastInputs) and hook.dtype != torch.float32


def find_layers(module: nn.Module, *, takes_casts: bool = False) -> dict[str, nn.Linear]:
    """Return the linear layers that are called as such, by name; with `takes_casts` also those that
    only cast what they take to 16 bits before."""
    closed = [name for name, each in module.named_modules() if isinstance(each, CLOSED)]
    return {
        name: each
        for name, each in module.named_modules()
        if type(each) is nn.Linear
        and not any(name.startswith(f"{other}.") for other in closed)
        and not each._forward_hooks
        and all(takes_casts and _is_narrowing(hook) for hook in each._forward_pre_hooks.values())
    }


def quantise_model(
    module: nn.Module, config: ModelConfig, sample: TraceInputs | None = None
) -> LinearModel:
    """Convert the layers of a module on its device, as the options say. ConfigError if the device
    has no FP8, or if a name is not that of a layer."""
    if not has_fp8(config.device):
        problem = f"'{config.device}' does not multiply in FP8; expected a GPU of capability 8.9"
        raise ConfigError(f"parameters.{FP8_OPTION}: {problem}")
    ranges = chosen_ranges(module, config)
    multiplier, problem = None, ""
    try:
        multiplier = open_multiplier(torch.device(config.device), Path(config.artifact).parent)
    except Unavailable as error:
        problem = str(error)
    model = to_fp8(module, ranges, sample, multiplier)
    model.no_multiplier = problem
    return model


def shrink_weights(module: nn.Module, config: ModelConfig) -> LinearModel:
    """Give the large linear layers of a module integer weights, as the option says. Those that stay
    in FP32 keep theirs."""
    bits = WEIGHTS[config.options[WEIGHTS_OPTION]]
    found = find_layers(module, takes_casts=True)
    chosen = {name: each for name, each in found.items() if _is_large(each)}
    if not chosen:
        depth = f"inputs in a multiple of {MIN_GROUP}"
        problem = f"no linear layer has at least {MIN_WEIGHTS} weights and {depth}"
        raise ConfigError(f"parameters.{WEIGHTS_OPTION}: {problem}")
    made = {id(each): WeightOnlyLinear(each, bits).eval() for each in chosen.values()}
    layers = {name: made[id(each)] for name, each in chosen.items()}
    for each in {id(each): each for each in chosen.values()}.values():
        for hook in each._forward_pre_hooks.values():
            made[id(each)].register_forward_pre_hook(hook, with_kwargs=True)
    for name, layer in layers.items():
        module.set_submodule(name, layer)
    return LinearModel(module, layers, len(found), bits)


def _is_large(linear: nn.Linear) -> bool:
    return bool(linear.weight.numel() >= MIN_WEIGHTS and linear.in_features % MIN_GROUP == 0)


def chosen_ranges(module: nn.Module, config: ModelConfig) -> dict[str, float | None]:
    """Return the layers to convert with their largest inputs; None: a scale per row."""
    known, asked = find_layers(module), config.options[FP8_OPTION]
    kept = names_in(config.options.get(KEEP_OPTION, ""))
    problems = [
        f"parameters.{KEEP_OPTION}: {no_layer(each, known, LINEAR)}" for each in kept - {*known}
    ]
    ranges: dict[str, float | None] = {
        name: None for name, each in known.items() if asked == ROWWISE and fits(each)
    }
    where = f"parameters.{FP8_OPTION}"
    if asked != ROWWISE:
        ranges = {**read_ranges(Path(config.artifact).with_name(asked))}
        problems += [
            f"{where}: {no_layer(each, known, LINEAR)}" for each in ranges if each not in known
        ]
        for name in ranges.keys() & known.keys():
            shape = tuple(known[name].weight.shape)
            if not fits(known[name]):
                size = f"{shape[0]} x {shape[1]} are not multiples of {MULTIPLE}"
                problems.append(f"{where}: layer '{name}': {size}")
    ranges = {name: each for name, each in ranges.items() if name not in kept}
    if not problems and not ranges:
        problems.append(f"{where}: no linear layer has sizes that are multiples of {MULTIPLE}")
    types = {known[name].weight.dtype for name in ranges if name in known}
    if types - set(KERNEL_TYPES):
        found = ", ".join(sorted(map(str, types)))
        problems.append(f"{where}: layers are in {found}; expected penstock.dtype bf16 or fp16")
    if problems:
        raise ConfigError(sorted(problems))
    return ranges


def names_in(text: str) -> set[str]:
    return {name for name in (part.strip() for part in text.split(SEPARATOR)) if name}


def has_empty_names(text: str) -> bool:
    return bool(text) and not all(part.strip() for part in text.split(SEPARATOR))


def check_names(option: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raise ConfigError with each name that is unknown, and the nearest ones."""
    known = list(known)
    if unknown := sorted({*names}.difference(known)):
        raise ConfigError([f"parameters.{option}: {no_layer(name, known)}" for name in unknown])


def no_layer(name: str, known: Iterable[str], kind: str = "layer") -> str:
    known = list(known)
    near = difflib.get_close_matches(name, known, NUM_NEAR, cutoff=0.4)
    some = f"the nearest are {quoted(near)}" if near else f"there are {quoted(known[:NUM_NEAR])}"
    return f"there is no {kind} '{name}'; {some if known else 'the model has none'}"


def to_fp8(
    module: nn.Module,
    ranges: Mapping[str, float | None],
    sample: TraceInputs | None = None,
    multiplier: Multiplier | None = None,
) -> LinearModel:
    """Replace these layers of a module; a range of None: inputs have a scale per row."""
    found = find_layers(module)
    not_traced, places = "", {name: [name] for name in ranges}
    try:
        # Before layers are replaced, which cannot be exported.
        traced = trace(module, sample)
        module, places = traced, _places(traced, found, ranges)
    except ConfigError as error:
        not_traced = str(error).partition("traced: ")[2] or str(error)
    # A layer that is used under two names stays one.
    made = {id(found[name]): E4m3Linear(found[name], ranges[name]) for name in ranges}
    layers = {name: made[id(found[name])] for name in ranges}
    for name, layer in layers.items():
        for place in places[name]:
            module.set_submodule(place, layer.eval())
    for layer in made.values():
        layer.product.multiplier = multiplier
    model = LinearModel(module, layers, len(found), multiplier=multiplier, not_traced=not_traced)
    if isinstance(module, fx.GraphModule):
        # torch's GEMM has no residual: there, it is added with the norm that follows.
        model.num_added = 0 if multiplier is None else _add_residuals(module)
        model.num_shared = _share_inputs(module)
    return model


def _places(
    traced: fx.GraphModule, found: Mapping[str, nn.Linear], names: Iterable[str]
) -> dict[str, list[str]]:
    """Return where a traced module has these layers: under their names or, if it was exported,
    under those of operators with the same weights. ConfigError if it lacks one."""
    by_weights = {_weights(each): name for name, each in found.items()}
    places: dict[str, list[str]] = {name: [] for name in names}
    for place, layer in find_layers(traced).items():
        name = place if place in found else by_weights.get(_weights(layer), "")
        if name in places:
            places[name].append(place)
    for name, where in places.items():
        if not where:
            raise ConfigError(f"the traced module does not call layer '{name}'")
    return places


def _weights(linear: nn.Linear) -> tuple[int, ...]:
    return linear.weight.data_ptr(), 0 if linear.bias is None else linear.bias.data_ptr()


def _add_residuals(traced: fx.GraphModule) -> int:
    """Let a layer add what would be added to its result alone; return how many do."""
    graph, count, memory = traced.graph, 0, GraphMemory(traced)
    for total in list(graph.nodes):
        for layer, residual in itertools.permutations(memory.added(total) or (), 2):
            is_layer = isinstance(_called(traced, layer), E4m3Linear) and len(layer.args) == 1
            if not is_layer or list(layer.users) != [total] or layer is residual:
                continue
            # The layer is called in the place of the sum.
            if memory.is_written(layer.all_input_nodes[0], layer, [total]):
                continue
            with graph.inserting_after(total):
                both = graph.call_module(str(layer.target), (*layer.args, residual))
            total.replace_all_uses_with(both)
            for node in (total, layer):
                graph.erase_node(node)
            count, memory = count + 1, GraphMemory(traced)
            break
    return count


def _share_inputs(traced: fx.GraphModule) -> int:
    """Quantise each input once, with what made it if nothing else reads that; return how many
    inputs are shared or fused."""
    count, memory = 0, GraphMemory(traced)
    for node in list(traced.graph.nodes):
        users = [user for user in node.users if isinstance(_called(traced, user), E4m3Linear)]
        ranges = {_called(traced, user).largest for user in users}
        if not users or len(ranges) != 1:
            continue
        quantiser, source = _quantiser(traced, node, ranges.pop())
        is_fused = source is not node and len(users) == len(node.users)
        if not is_fused and len(users) == 1:
            continue
        if not is_fused:
            quantiser, source = Fp8Input(largest=_called(traced, users[0]).largest), node
        device = next(_called(traced, users[0]).parameters()).device
        name = f"penstock_fp8_input_{count}"
        traced.add_submodule(name, quantiser.to(device).eval())
        added = memory.added(source) if is_fused and quantiser.norm is not None else None
        if added is not None and not memory.is_written(source, source, [node]):
            given = _with_sum(traced, name, source, added)
        else:
            with traced.graph.inserting_after(node):
                given = traced.graph.call_module(name, (source,))
        for user in users:
            user.replace_input_with(node, given)
        if not node.users:
            traced.graph.erase_node(node)
        count += 1
        memory = GraphMemory(traced)
    traced.graph.lint()
    traced.delete_all_unused_submodules()
    traced.recompile()
    return count


def _with_sum(
    traced: fx.GraphModule, name: str, total: fx.Node, added: tuple[fx.Node, fx.Node]
) -> fx.Node:
    """Let a quantiser compute the sum before its norm as well; return its quantised result."""
    graph = traced.graph
    with graph.inserting_after(total):
        both = graph.call_module(name, added)
    with graph.inserting_after(both):
        given = graph.call_function(operator.getitem, (both, 1))
        summed = graph.call_function(operator.getitem, (both, 0))
    total.replace_all_uses_with(summed)
    graph.erase_node(total)
    return given


def _called(traced: fx.GraphModule, node: fx.Node) -> nn.Module:
    return traced.get_submodule(str(node.target)) if node.op == "call_module" else nn.Module()


def _quantiser(
    traced: fx.GraphModule, node: fx.Node, largest: float | None
) -> tuple[Fp8Input, fx.Node]:
    """Return what quantises a node's result, and what it takes: the node's own input if it is a
    layer norm or GELU."""
    module = _called(traced, node)
    source = node.all_input_nodes[0] if len(node.all_input_nodes) == 1 else node
    if type(module) is nn.LayerNorm and module.weight is not None:
        if len(module.normalized_shape) == 1:
            return Fp8Input(module, largest=largest), source
    elif (found := activation_of(traced, node)) in FUSED:
        assert found is not None
        return Fp8Input(activation=FUSED[found], largest=largest), source
    return Fp8Input(largest=largest), node


@contextmanager
def watching(module: nn.Module) -> Iterator[dict[str, float]]:
    """Record the largest input of each linear layer that can be converted, by name."""
    largest: dict[str, float] = {}

    def watch(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        def note(_: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
            if given[0].numel():
                largest[name] = max(largest.get(name, 0.0), float(given[0].abs().amax()))

        return note

    layers = {name: each for name, each in find_layers(module).items() if fits(each)}
    hooks = [each.register_forward_pre_hook(watch(name)) for name, each in layers.items()]
    try:
        yield largest
    finally:
        for hook in hooks:
            hook.remove()

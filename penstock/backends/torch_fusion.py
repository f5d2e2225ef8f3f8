"""Fuse each convolution of a module with the layers after it (`penstock.fuse`).

The module is traced (`torch_tracing`). Batch normalisation is folded into the weights and dropout
is removed; a convolution, a tensor added to it and an activation become one `Convolution`, in
either order. Squeeze-and-excitation becomes one `SqueezeExcite`, or a `GatedConvolution` with the
1x1 convolution after it; group norms become `ImageNorm` (`torch_norms`). Only nodes without other
users are fused, and a convolution moves to the end of its chain only if nothing writes to its
inputs in between: answers stay the same, up to rounding. `torch_transformer` does the same for
linear layers, norms and attention.
"""

from __future__ import annotations

import inspect
import operator
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import fx, nn
from torch.nn import functional

from penstock.backends.checks import read_code
from penstock.backends.torch_activations import activation_of, factors_of, restore
from penstock.backends.torch_aliasing import (
    ADD_IN_PLACE,
    NO_MODULE,
    GraphMemory,
    called_module,
    has_no_hooks,
    operands_of,
    summands_of,
)
from penstock.backends.torch_narrowing import narrow
from penstock.backends.torch_norms import fuse_norms, is_by_channel
from penstock.backends.torch_tracing import TraceInputs, trace
from penstock.backends.torch_transformer import fuse_layers
from penstock.config import ModelConfig
from penstock.kernels import CHOICES, KERNELS, convolution
from penstock.kernels.activation import RELU, Activation
from penstock.kernels.convolution import (
    REFERENCE,
    ConvGeometry,
    Convolution,
    GpuTimer,
    MaxPool,
    Pair,
    TunedLayer,
    Tuner,
)
from penstock.kernels.fused_linear import Attention, FusedLinear, GatedProduct, ResidualNorm
from penstock.kernels.gated import GatedConvolution, SqueezeExcite
from penstock.kernels.image_norm import ImageNorm
from penstock.kernels.int8_layers import Int8Layer

# Values of `penstock.fuse`.
CONVOLUTIONS, TRANSFORMER, EVERYTHING = "convolutions", "transformer", "on"
WHAT = (CONVOLUTIONS, TRANSFORMER, EVERYTHING)
DROPPED = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
# By file, as torchvision may not be installed; its function drops branches in training.
DROPPED_FUNCTIONS = {
    (functional.__name__, "dropout"),
    ("torchvision.ops.stochastic_depth", "stochastic_depth"),
}
POOL_FUNCTIONS = {functional.adaptive_avg_pool2d, torch.ops.aten.adaptive_avg_pool2d.default}
MEAN_FUNCTIONS = {torch.mean, torch.ops.aten.mean.dim, "mean"}
# TunedLayer layers, as facts name them.
KINDS = ("convolutions", "linear layers", "norms", "attentions", "gates", "layers in INT8")
# Sizes of a pool's output that mean one pixel.
ONE_PIXEL = (1, (1, 1))


@dataclass(slots=True)
class Fusion:
    """A fused module, and the tuner of its layers; `tuner` is None if nothing is timed."""

    module: fx.GraphModule
    tuner: Tuner | None
    # Selections of a token that were moved up (`torch_narrowing`).
    num_narrowed: int = 0
    # Whether new shapes are still timed.
    is_open: bool = True
    _seen: set[object] = field(default_factory=set)

    def prepare(self, tensors: Mapping[str, torch.Tensor], call: Callable[[], object]) -> None:
        """Time the implementations for inputs of new shapes, as long as the model is warming up."""
        shapes = tuple((name, tuple(each.shape)) for name, each in tensors.items())
        if self.tuner is None or not self.is_open or shapes in self._seen:
            return
        # Layers queue their cases.
        call()
        self.tuner.tune()
        self._seen.add(shapes)

    def settle(self) -> None:
        """Stop timing new shapes: from now on clients wait for answers."""
        self.is_open = False

    @property
    def layers(self) -> list[TunedLayer]:
        """The fused layer of every call but pools; a module may be called several times."""
        found = (called_module(self.module, node) for node in self.module.graph.nodes)
        return [
            each for each in found if isinstance(each, TunedLayer) and not isinstance(each, MaxPool)
        ]

    def facts(self) -> dict[str, str]:
        """Report the layers and their implementations, for the smallest and largest batch."""
        layers = self.layers
        kinds = Counter(_kind(each) for each in layers)
        # The number of convolutions comes first, also if there are none.
        names = [name for name in KINDS if kinds[name] or name == KINDS[0]]
        text = ", ".join(f"{kinds[name]} {name}" for name in names)
        narrowed = (
            {"first_token": "only that after the last attention"} if self.num_narrowed else {}
        )
        if self.tuner is None:
            defaults = _list(Counter(_default(each) for each in layers))
            return {"fusion": f"{text}: {defaults}"} | narrowed
        counts = convolution.counted(layers)
        for batch in sorted({*sorted(counts)[:1], *sorted(counts)[-1:]}):
            text += f"; batch {batch}: {_list(counts[batch])}"
        facts = {"fusion": text, "fusion_timed": f"{self.tuner.num_tuned} cases"}
        if self.tuner.problems:
            case, problem = next(iter(self.tuner.problems.items()))
            facts["fusion_dropped"] = f"{len(self.tuner.problems)}: {case}: {problem}"
        return facts | narrowed

    def files(self) -> dict[str, bytes]:
        if self.tuner is None or not self.tuner.used():
            return {}
        return convolution.to_remember(self.tuner)


def _kind(layer: TunedLayer) -> str:
    """Return what a layer is, in words; one of KINDS."""
    if isinstance(layer, FusedLinear):
        return KINDS[1]
    if isinstance(layer, Convolution):
        return KINDS[0]
    others = {ResidualNorm: 2, ImageNorm: 2, Attention: 3, SqueezeExcite: 4, GatedProduct: 4}
    return KINDS[5 if isinstance(layer, Int8Layer) else others[type(layer)]]


def _default(layer: TunedLayer) -> str:
    return layer.default if isinstance(layer, Convolution) else REFERENCE


def _list(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "none"


def open_tuner(config: ModelConfig) -> Tuner | None:
    """Return a tuner for a GPU and fixed shapes, which can be timed at load; else None."""
    device = torch.device(config.device)
    if device.type != "cuda" or not all(spec.is_fixed for spec in config.inputs):
        return None
    # cuDNN chooses its algorithm on the first call of a shape.
    torch.backends.cudnn.benchmark = True
    path = Path(config.artifact).parent / CHOICES
    choices = convolution.remembered(path.read_bytes(), device) if path.is_file() else {}
    if choices and (kernels := read_code(config, KERNELS)) is not None:
        convolution.load_kernels(kernels)
    return Tuner(GpuTimer(device), device, choices)


def fuse(
    module: nn.Module,
    tuner: Tuner | None = None,
    sample: TraceInputs | None = None,
    what: str = CONVOLUTIONS,
    *,
    leaves_linear: bool = False,
) -> Fusion:
    """Fuse a module in evaluation mode, before it is cast: weights are folded in their own
    precision. `what` is one of WHAT; linear layers may be left to others. Raise ConfigError if it
    cannot be traced."""
    traced = trace(module, sample)
    with torch.no_grad():
        _drop(traced)
        restore(traced)
        num_narrowed = narrow(traced, sample) if what != CONVOLUTIONS else 0
        if what != TRANSFORMER:
            fuse_norms(traced, tuner)
            _Fuser(traced, tuner).run()
            _move_biases(traced)
            _pools(traced, tuner)
        if what != CONVOLUTIONS:
            fuse_layers(traced, tuner, leaves_linear=leaves_linear)
    traced.graph.lint()
    traced.delete_all_unused_submodules()
    traced.recompile()
    return Fusion(traced.eval(), tuner, num_narrowed)


def _drop(traced: fx.GraphModule) -> None:
    for node in list(traced.graph.nodes):
        module = called_module(traced, node)
        where = getattr(node.target, "__module__", None), getattr(node.target, "__name__", None)
        is_call = node.op == "call_function" and where in DROPPED_FUNCTIONS
        is_off = is_call and not _argument(node, "training")
        if is_off or (isinstance(module, DROPPED) and has_no_hooks(module)):
            source = _argument(node, "input") if is_call else node.all_input_nodes[0]
            node.replace_all_uses_with(source)
            traced.graph.erase_node(node)


def _argument(node: fx.Node, name: str, default: bool = True) -> fx.Node | bool:
    """Return an argument of a call to a Python function, by name."""
    bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
    return bound.arguments.get(name, default)


@dataclass(slots=True)
class _Chain:
    """A convolution and the nodes fused with it, in order."""

    nodes: list[fx.Node]
    conv: nn.Conv2d
    norm: nn.BatchNorm2d | None = None
    residual: fx.Node | None = None
    activation: Activation | None = None
    adds_last: bool = False


@dataclass(slots=True)
class _Fuser:
    traced: fx.GraphModule
    tuner: Tuner | None
    _memory: GraphMemory = field(init=False)
    # Weights by convolution and normalisation: a module called twice shares them.
    _weights: dict[tuple[str, str], tuple[nn.Parameter, nn.Parameter | None]] = field(
        default_factory=dict
    )

    def run(self) -> None:
        graph = self.traced.graph
        self._memory = GraphMemory(self.traced)
        for number, node in enumerate(list(graph.nodes)):
            self._gate(node, f"penstock_gate_{number}")
        for number, node in enumerate(list(graph.nodes)):
            module = called_module(self.traced, node)
            if type(module) is nn.Conv2d and has_no_hooks(module) and _geometry(module) is not None:
                self._replace(self._chain(node, module), f"penstock_convolution_{number}")
        for node in list(graph.nodes):
            self._join(node)

    def _gate(self, node: fx.Node, name: str) -> None:
        """Make one layer of squeeze-and-excitation that ends in this product."""
        for x, gate in _both(factors_of(node)):
            nodes = self._gate_nodes(x, gate)
            if nodes is None or node.target in (operator.imul, "mul_", "__imul__"):
                continue
            pool, first, inner, second, outer = nodes
            chain = _Chain([*nodes, node], called_module(self.traced, first))
            if self._memory.is_written(x, pool, chain.nodes):
                continue
            before, after = (activation_of(self.traced, each) for each in (inner, outer))
            assert before is not None and after is not None
            squeeze, excite = (_linear(called_module(self.traced, n)) for n in (first, second))
            made = SqueezeExcite(squeeze, before, excite, after, self.tuner)
            self.traced.add_submodule(name, made)
            with self.traced.graph.inserting_after(node):
                call = self.traced.graph.call_module(name, (x,))
            self._swap(chain, call)
            return

    def _gate_nodes(self, x: fx.Node, gate: fx.Node) -> list[fx.Node] | None:
        """Return pool, convolution, activation, convolution and activation between x and the gate,
        if that is what the gate is."""
        found = [gate]
        for _ in range(4):
            sources = found[-1].all_input_nodes
            if len(found[-1].users) != 1 or len(sources) != 1:
                return None
            found.append(sources[0])
        pool, first, inner, second, outer = reversed(found)
        is_pool = len(pool.users) == 1 and pool.all_input_nodes == [x]
        is_gate = all(_is_pixelwise(called_module(self.traced, each)) for each in (first, second))
        is_active = all(activation_of(self.traced, each) for each in (inner, outer))
        if not is_pool or not is_gate or not is_active or not _is_mean(self.traced, pool):
            return None
        return [pool, first, inner, second, outer]

    def _join(self, node: fx.Node) -> None:
        """Make one layer of a 1x1 convolution and the squeeze-and-excitation before it."""
        conv = called_module(self.traced, node)
        if type(conv) is not Convolution or not isinstance(node.args[0], fx.Node):
            return
        source = node.args[0]
        gate = called_module(self.traced, source)
        is_flat = conv.weight.shape[2:] == (1, 1) and conv.geometry == ConvGeometry()
        if not isinstance(gate, SqueezeExcite) or len(source.users) != 1 or not is_flat:
            return
        if self._memory.is_written(source.args[0], source, [source, node]):
            return
        self.traced.add_submodule(str(node.target), GatedConvolution(conv, gate, self.tuner))
        node.args = (source.args[0], *node.args[1:])
        self.traced.graph.erase_node(source)
        del self._memory.order[source]

    def _chain(self, node: fx.Node, conv: nn.Conv2d) -> _Chain:
        chain = _Chain([node], conv)
        following = self._only_user(chain)
        if following is not None and _is_norm(module := called_module(self.traced, following)):
            chain.norm = module
            chain.nodes.append(following)
        # An addition and an activation, in either order.
        for _ in range(2):
            longer = self._longer(chain)
            if longer is None or not self._may_move(longer):
                break
            chain = longer
        return chain

    def _longer(self, chain: _Chain) -> _Chain | None:
        """Return the chain with the next addition or activation."""
        following = self._only_user(chain)
        if following is None:
            return None
        nodes = [*chain.nodes, following]
        if chain.residual is None:
            other = _added(following, chain.nodes[-1])
            if other is not None:
                has_activation = chain.activation is not None
                return replace(chain, nodes=nodes, residual=other, adds_last=has_activation)
        if chain.activation is None and following.args[:1] == (chain.nodes[-1],):
            activation = activation_of(self.traced, following)
            if activation is not None:
                return replace(chain, nodes=nodes, activation=activation)
        return None

    def _only_user(self, chain: _Chain) -> fx.Node | None:
        users = list(chain.nodes[-1].users)
        return users[0] if len(users) == 1 else None

    def _may_move(self, chain: _Chain) -> bool:
        """Return whether its inputs are unchanged at the end of the chain."""
        reads = [(chain.nodes[0].all_input_nodes[0], chain.nodes[0])]
        if chain.residual is not None:
            reads += [
                (chain.residual, node) for node in chain.residual.users if node in chain.nodes
            ]
        return not any(self._memory.is_written(each, reader, chain.nodes) for each, reader in reads)

    def _replace(self, chain: _Chain, name: str) -> None:
        first, last = chain.nodes[0], chain.nodes[-1]
        norm_name = chain.nodes[1].target if chain.norm is not None else ""
        key = str(first.target), str(norm_name)
        if key not in self._weights:
            self._weights[key] = _folded(chain.conv, chain.norm)
        weight, bias = self._weights[key]
        if bias is None and chain.activation == RELU:
            # cuDNN's fused kernels have one.
            bias = nn.Parameter(weight.new_zeros(len(weight)), requires_grad=False)
        geometry = _geometry(chain.conv)
        assert geometry is not None
        made = Convolution(*(weight, bias, geometry, chain.activation, self.tuner), chain.adds_last)
        self.traced.add_submodule(name, made)
        residual = () if chain.residual is None else (chain.residual,)
        with self.traced.graph.inserting_after(last):
            call = self.traced.graph.call_module(name, (first.all_input_nodes[0], *residual))
        self._swap(chain, call)

    def _swap(self, chain: _Chain, call: fx.Node) -> None:
        """Put a call in the place of a chain."""
        last = chain.nodes[-1]
        last.replace_all_uses_with(call)
        self._memory.order[call] = self._memory.order[last]
        for node in reversed(chain.nodes):
            self.traced.graph.erase_node(node)
            del self._memory.order[node]


def _both(factors: tuple[object, object] | None) -> list[tuple[fx.Node, fx.Node]]:
    """Return two factors in both orders, if they are nodes."""
    if factors is None or not all(isinstance(each, fx.Node) for each in factors):
        return []
    one, other = factors
    assert isinstance(one, fx.Node) and isinstance(other, fx.Node)
    return [(one, other), (other, one)]


def _is_pixelwise(module: nn.Module) -> bool:
    """Return whether it is a 1x1 convolution with stride 1."""
    is_conv = type(module) is nn.Conv2d and has_no_hooks(module) and module.kernel_size == (1, 1)
    return is_conv and _geometry(module) == ConvGeometry()


def _is_mean(traced: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether the node is the mean over all pixels, as an image of one."""
    module = called_module(traced, node)
    if module is not NO_MODULE:
        is_pool = type(module) is nn.AdaptiveAvgPool2d and has_no_hooks(module)
        return is_pool and module.output_size in ONE_PIXEL
    if node.op not in ("call_function", "call_method"):
        return False
    others = (*node.args[1:], *node.kwargs.values())
    if node.target in POOL_FUNCTIONS:
        return len(others) == 1 and _plain_value(others[0]) in ONE_PIXEL
    if node.target in MEAN_FUNCTIONS and len(others) == len(("axes", "keepdim")):
        return _plain_value(others[0]) in ((2, 3), (-2, -1), (-1, -2)) and others[1] is True
    return False


def _plain_value(value: object) -> object:
    return tuple(value) if isinstance(value, list | tuple) else value


def _linear(conv: nn.Conv2d) -> nn.Linear:
    """Return a 1x1 convolution as a linear layer."""
    with torch.device("meta"):
        linear = nn.Linear(conv.in_channels, conv.out_channels, conv.bias is not None)
    linear.weight = _constant(conv.weight.flatten(1))
    linear.bias = None if conv.bias is None else _constant(conv.bias)
    return linear


def _geometry(conv: nn.Conv2d) -> ConvGeometry | None:
    """Return the geometry; None for padding given by name or with values other than zero."""
    if conv.padding_mode != "zeros" or isinstance(conv.padding, str):
        return None
    return ConvGeometry(conv.stride, conv.padding, conv.dilation, conv.groups)


def _is_norm(module: nn.Module) -> bool:
    """Return whether it is a batch norm with running statistics; without, it uses the batch's."""
    return (
        type(module) is nn.BatchNorm2d and has_no_hooks(module) and module.running_mean is not None
    )


def _added(node: fx.Node, conv: fx.Node) -> fx.Node | None:
    """Return what the node adds to `conv`, or None. An in-place add must write to conv's result."""
    in_place = operands_of(node, ADD_IN_PLACE, ADD_IN_PLACE)
    one, other = in_place or summands_of(node) or (None, None)
    if other is conv and in_place is None:
        one, other = other, one
    is_pair = one is conv and other is not conv and isinstance(other, fx.Node)
    # Kernels add whole images only.
    return other if is_pair and not is_by_channel(other) else None


def _folded(
    conv: nn.Conv2d, norm: nn.BatchNorm2d | None
) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Fold the normalisation into the convolution's weights, channels-last."""
    weight, bias = conv.weight.double(), conv.bias
    if norm is not None:
        factor = (norm.running_var.double() + norm.eps).rsqrt()
        if norm.weight is not None:
            factor = factor * norm.weight.double()
        weight = weight * factor[:, None, None, None]
        bias = (0.0 if bias is None else bias.double()) - norm.running_mean.double()
        bias = bias * factor + (0.0 if norm.bias is None else norm.bias.double())
    weight = weight.to(conv.weight.dtype).contiguous(memory_format=torch.channels_last)
    bias = None if bias is None else _constant(bias.to(conv.weight.dtype))
    return _constant(weight), bias


def _constant(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach().clone(), requires_grad=False)


def _move_biases(traced: fx.GraphModule) -> None:
    """Move the bias of a convolution that is only added to another into that one: cuDNN would take
    another pass over the result for it."""
    for node in traced.graph.nodes:
        layer = called_module(traced, node)
        if not isinstance(layer, Convolution) or len(node.args) < len(("x", "residual")):
            continue
        added = node.args[1]
        other = called_module(traced, added)
        is_alone = isinstance(other, Convolution) and len(added.users) == len(added.args) == 1
        if not is_alone or other.bias is None or layer.bias is None:
            continue
        if other.activation is not None or layer.adds_last:
            continue
        if layer.bias.shape == other.bias.shape:
            layer.bias = _constant(layer.bias + other.bias)
            other.bias = None


def _pools(traced: fx.GraphModule, tuner: Tuner | None) -> None:
    for number, node in enumerate(list(traced.graph.nodes)):
        module = called_module(traced, node)
        if type(module) is not nn.MaxPool2d or not has_no_hooks(module):
            continue
        if module.ceil_mode or module.return_indices or _pair(module.dilation) != (1, 1):
            continue
        sizes = _pair(module.kernel_size), _pair(module.stride), _pair(module.padding)
        name = f"penstock_pool_{number}"
        traced.add_submodule(name, MaxPool(*sizes, tuner))
        node.target = name


def _pair(value: int | tuple[int, int]) -> Pair:
    return (value, value) if isinstance(value, int) else (value[0], value[1])

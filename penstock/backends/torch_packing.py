"""Convert a padded encoder to a packed one: find the model's layers, replace them with a
`packed_encoder`, and prove that the answers stay the same.

Layers of a module are recognised by the names of their parts, those of an imported graph by its
nodes (`torch_packed_graph`); what names do not tell (heads, activation, order of norms) is found by
computing: a layer whose outputs differ from the packed one's is refused.
Embeddings are packed too where that changes nothing; pooling and task heads stay the model's own.
Masked positions are zeros after the layers, where they were arbitrary before.
"""

from __future__ import annotations

import copy
import logging
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import torch
from torch import fx, nn
from torch.nn import functional

from penstock.backends import torch_packed_graph
from penstock.config import ModelConfig
from penstock.errors import BackendFailed, ConfigError, first_line
from penstock.kernels.cublaslt import Unavailable
from penstock.kernels.gemm import open_multiplier
from penstock.kernels.packed_encoder import (
    ACTIVATIONS,
    ADA,
    KERNEL_TYPES,
    PRODUCTS,
    GeluGap,
    GeluToFp8,
    LinearInput,
    PackedEmbeddings,
    PackedFp8Linear,
    PackedLayer,
    PackedLinear,
    PackedStack,
    lay_out,
    to_fp8,
)
from penstock.types import DATATYPES, Array

OPTION, TOKENS = "penstock.pack", "tokens"
FP8_OPTION, KEEP_OPTION = "penstock.fp8", "penstock.fp8_keep"
# Instead of a file of ranges: a scale per token.
ROWWISE = "rowwise"
# Query, key, value and output projection, inner and outer MLP layer, norm after attention, final
# norm; of BERT and its family, and of DistilBERT.
NAMES = (
    "attention.self.query attention.self.key attention.self.value attention.output.dense "
    "intermediate.dense output.dense attention.output.LayerNorm output.LayerNorm",
    "attention.q_lin attention.k_lin attention.v_lin attention.out_lin "
    "ffn.lin1 ffn.lin2 sa_layer_norm output_layer_norm",
)
NUM_LINEARS = 6
SEED = 20
# Random tokens to test a layer with, and length of random sequences to test the model with.
NUM_TOKENS, MAX_LENGTH = 5, 24
# Random tokens to compare GELU on.
NUM_FOR_GELU = 256
# Allowed growth of the error, within the noise of random tokens.
MOST_MORE = 1.02
# Usual sizes first: the search ends at the first that fits.
HEAD_SIZES = (64, 32, 128, *(size for size in range(8, 257, 4) if size not in (32, 64, 128)))
# Tolerance relative to the largest value. Both sides compute in FP32, in another order.
LAYER_TOLERANCE, MODEL_TOLERANCE = 1e-4, 1e-3
# Tolerance of the device's kernels in 16 bits, against plain torch.
KERNEL_TOLERANCE = 5e-2
# Random integers are below these limits, valid for every vocabulary, and for token types.
INTEGERS, KINDS = 100, 2
# Token counts of batches: multiples of STEP, PER_OCTAVE of them between a number and its double.
# More of them mean less padding, but more graphs.
STEP, PER_OCTAVE = 64, 8
# Rows of the largest GEMM tiles, of which each multiprocessor takes one at a time; and the full
# batch if the number of multiprocessors is unknown.
TILE_ROWS, FULL = 256, 32768
# Batches with more than one token in this many places are warmed up at load.
SPARSEST = 4
# Parts of a model's embeddings, by name; the last one is optional.
EMBEDDINGS = ("word_embeddings", "position_embeddings", "LayerNorm", "token_type_embeddings")
log = logging.getLogger("penstock.packing")
Ranges = dict[str, Annotated[float, msgspec.Meta(ge=0)]]
Call = Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]


class NotPackable(Exception):
    """A module cannot be packed; the message says why."""


@dataclass(frozen=True, slots=True)
class PackedModel:
    """A packed model, and the name of its mask input."""

    stack: PackedStack
    mask: str
    largest_difference: float

    def lay_out(self, tensors: Mapping[str, torch.Tensor], num_tokens: int) -> None:
        """Set the layout for the next run of the model, on these inputs."""
        self.stack.layout = lay_out(tensors[self.mask], num_tokens)

    def num_tokens(self, inputs: Mapping[str, Array]) -> int:
        return max(1, int(np.count_nonzero(inputs[self.mask])))

    def prepare(self, num_tokens: int, call: Callable[[], object]) -> None:
        """Time the GEMM algorithms before this token count runs for the first time, as long as the
        model is warming up."""
        if self.stack.multiplier is not None:
            self.stack.multiplier.prepare(num_tokens, call)

    def settle(self) -> None:
        if self.stack.multiplier is not None:
            self.stack.multiplier.settle()

    def files(self) -> dict[str, bytes]:
        multiplier = self.stack.multiplier
        return {} if multiplier is None else multiplier.files()

    @property
    def full(self) -> int:
        """Tokens of a full batch on the model's device."""
        device = self.stack.layers[0].qkv.weight.device
        if device.type != "cuda":
            return FULL
        return full_batch(torch.cuda.get_device_properties(device).multi_processor_count)

    def facts(self) -> dict[str, str]:
        products = self.stack.products()
        num_small = sum(isinstance(each, PackedFp8Linear) for each in products.values())
        facts = {
            "pack": f"{TOKENS}: {'embeddings, ' * bool(self.stack.embeddings)}"
            f"{len(self.stack.layers)} layers",
            "full_batch": f"{self.full} tokens",
            "packed_against_padded": f"{self.largest_difference:.1e} of the largest value",
        }
        if num_small:
            facts["fp8"] = f"{num_small} of {len(products)} products"
            scalings = [each.scaling for each in products.values() if each.scaling is not None]
            if all(each.inverse is None for each in scalings):
                facts["fp8"] += ", each token by its own range"
            num_fused = sum(layer.gelu_to_fp8 is not None for layer in self.stack.layers)
            if num_fused:
                facts["fp8_gelu"] = f"inside the product, where that is faster: {num_fused} layers"
        if self.stack.gelu_gap is not None:
            gap = self.stack.gelu_gap
            facts["gelu"] = f"with tanh: {gap.fast:.1e} away; exact, of what was rounded: "
            facts["gelu"] += f"{gap.exact:.1e}"
        if self.stack.no_multiplier:
            facts["products"] = f"by torch: {self.stack.no_multiplier}"
        return facts if self.stack.multiplier is None else facts | self.stack.multiplier.facts()


def budget(
    num_tokens: int, num_places: int, max_tokens: int | None = None, full: int = FULL
) -> int:
    """Return the token count to run a batch as: the next bucket, so that graphs are few."""
    buckets = token_buckets(num_places, max_tokens, full)
    return buckets[min(bisect_left(buckets, num_tokens), len(buckets) - 1)]


def full_batch(num_processors: int) -> int:
    """Return the tokens of a batch whose GEMMs leave no multiprocessor idle in the last wave: on an
    H200 (132 of them) 33,792 take less time than 32,768."""
    return num_processors * TILE_ROWS or FULL


def token_buckets(num_places: int, max_tokens: int | None = None, full: int = FULL) -> list[int]:
    """Return the token counts to run: multiples of 64 at first, then steps of an eighth of a full
    batch, or of its half, quarter and so on below, so that GEMM tiles fill a GPU. They end with all
    places, and include the largest token budget of batches."""
    octave = float(full)
    while octave > STEP * PER_OCTAVE:
        octave /= 2
    found = set(range(STEP, math.ceil(octave), STEP))
    while octave < num_places:
        steps = (octave * (1 + part / PER_OCTAVE) for part in range(PER_OCTAVE))
        found |= {STEP * math.ceil(each / STEP) for each in steps}
        octave *= 2
    most = num_places if max_tokens is None else min(max_tokens, num_places)
    return sorted(
        {each for each in found if each < num_places} | {max(1, most), max(1, num_places)}
    )


def rehearsals(
    mask: Array, *, is_captured: bool, max_tokens: int | None = None, full: int = FULL
) -> Iterator[Array]:
    """Yield masks like this one, for the token counts to warm up; the fullest comes last."""
    most = mask.size if max_tokens is None else min(mask.size, max_tokens)
    buckets = token_buckets(mask.size, max_tokens, full) if is_captured else []
    for count in [*(each for each in buckets if most < each * SPARSEST < most * SPARSEST), most]:
        filled = np.zeros(mask.shape, mask.dtype)
        share, rest = divmod(count, len(mask))
        filled[:, :share] = 1
        filled[:rest, share : share + 1] = 1
        filled.flags.writeable = False
        yield filled


def mask_of(config: ModelConfig) -> str:
    """Return the mask input; raise ConfigError unless there is exactly one."""
    named = [spec for spec in config.inputs if "mask" in spec.name.lower()]
    found = [spec for spec in named if DATATYPES[spec.datatype].numpy.kind in "iub"]
    problem = ""
    if config.max_batch_size == 0:
        problem = "the model has no batch dimension (max_batch_size)"
    elif len(found) != 1:
        problem = f"expected one integer input with 'mask' in its name, found {len(found)}"
    elif len(found[0].shape) != 1 or found[0].is_optional:
        problem = f"input '{found[0].name}': expected one number for each token, in every request"
    if problem:
        raise ConfigError(f"parameters.{OPTION}: {problem}")
    return found[0].name


def pack(module: nn.Module, call: Call, config: ModelConfig) -> PackedModel:
    """Pack the module in place. Raise ConfigError with the reason if it cannot be packed, or if its
    answers differ from the padded model's."""
    mask = mask_of(config)
    device = next((weight.device for weight in module.parameters()), torch.device("cpu"))
    made = _made_up(config, mask, is_graph=isinstance(module, fx.GraphModule))
    inputs = {name: each.to(device) for name, each in made.items()}
    try:
        with torch.no_grad():
            wanted = call(inputs)
            stack = _replaced(module)
            stack.layout = lay_out(inputs[mask], int(inputs[mask].count_nonzero()))

            def difference() -> float:
                return _difference(wanted, call(inputs), inputs[mask] != 0)

            if not _has_packed_embeddings(module, stack, difference):
                stack.embeddings = ()
            largest = difference()
        if not largest <= MODEL_TOLERANCE:
            raise NotPackable(
                f"packed answers differ from padded ones by {largest:.1e} of the largest value; "
                f"expected at most {MODEL_TOLERANCE:.0e}"
            )
    except NotPackable as reason:
        raise ConfigError(f"parameters.{OPTION}: {reason}") from None
    except BackendFailed:
        raise
    except Exception as error:  # The model's code, called with random inputs.
        text = f"parameters.{OPTION}: the model cannot be tried out: {first_line(error)}"
        raise ConfigError(text) from error
    return PackedModel(stack, mask, largest)


def on_device(packing: PackedModel, config: ModelConfig) -> None:
    """Choose and check kernels once the model is on its device, in its final datatype."""
    if config.device != "cpu":
        choose_gelu(packing)
        choose_products(packing, Path(config.artifact).parent)
        check_kernels(packing)
    if FP8_OPTION not in config.options:
        return
    if not has_fp8(config.device):
        problem = f"'{config.device}' does not multiply in FP8; expected a GPU of capability 8.9"
        raise ConfigError(f"parameters.{FP8_OPTION}: {problem}")
    quantise(packing, config)


def choose_products(packing: PackedModel, folder: Path) -> None:
    """Enable timing of GEMM algorithms in 16 bits; without cuBLASLt only torch's is used."""
    stack = packing.stack
    weight = stack.layers[0].qkv.weight
    if weight.dtype in KERNEL_TYPES:
        try:
            stack.multiply_by(open_multiplier(weight.device, folder))
        except Unavailable as error:
            stack.no_multiplier = str(error)


def choose_gelu(packing: PackedModel) -> None:
    """Replace exact GELU by the tanh form if that is closer to the truth in this datatype: it works
    on sums in FP32, the exact form on a rounded product. Decided on the first layer."""
    layer = packing.stack.layers[0]
    weight = layer.inner.weight
    if layer.activation != "gelu" or weight.dtype not in KERNEL_TYPES:
        return
    with torch.inference_mode():
        given = layer.first_norm(_random_tokens(weight, NUM_FOR_GELU))
        bias = layer.inner.bias
        wanted = functional.gelu(given.double() @ weight.double().t() + bias.double())
        fast = layer.inner.gelu(LinearInput(given)).double()
        exact = functional.gelu(torch.addmm(bias, given, weight.t())).double()
    gap = GeluGap(*(float((each - wanted).norm() / wanted.norm()) for each in (fast, exact)))
    if gap.fast <= gap.exact:
        packing.stack.gelu_gap = gap
        for each in packing.stack.layers:
            each.has_fast_gelu = True


def _random_tokens(weight: torch.Tensor, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(SEED)
    x = torch.randn(count, weight.shape[1], generator=generator)
    return x.to(weight.device, weight.dtype)


def check_kernels(packing: PackedModel) -> None:
    """Check the device's kernels against plain torch, on the first layer."""
    layer = packing.stack.layers[0]
    weight = layer.qkv.weight
    mask = torch.zeros(3, 130, dtype=torch.int64)
    for row, length in enumerate((130, 1, 65)):
        mask[row, :length] = 1
    layout = lay_out(mask.to(weight.device), int(mask.sum()))
    with torch.inference_mode():
        given = _random_tokens(weight, len(layout.places))
        if packing.stack.multiplier is not None:
            # Tune first, so that the chosen algorithms are checked.
            layer(given, LinearInput(given), layout, None)
            packing.stack.multiplier.tune()
        found = layer(given, LinearInput(given), layout, None)[0].float().cpu()
        wanted = copy.deepcopy(layer).float().cpu()
        plain = lay_out(mask, int(mask.sum()))
        exact = given.float().cpu()
        expected = wanted(exact, LinearInput(exact), plain, None)[0]
    gap = _gap(expected, found)
    if not gap <= KERNEL_TOLERANCE:
        raise BackendFailed(
            f"parameters.{OPTION}: kernels on {weight.device} are {gap:.1e} of the largest value "
            f"away from what they should give; expected at most {KERNEL_TOLERANCE}"
        )


def quantise(packing: PackedModel, config: ModelConfig) -> None:
    """Convert to FP8, with the calibrated ranges of the configured file or a scale per token."""
    asked = config.options[FP8_OPTION]
    products = packing.stack.products()
    ranges: Mapping[str, float | None] = dict.fromkeys(products)
    if asked != ROWWISE:
        ranges = read_ranges(Path(config.artifact).with_name(asked))
    kept = {each for each in config.options.get(KEEP_OPTION, "").split(",") if each}
    problems = [f"there is no product '{name}'" for name in ranges if name not in products]
    problems += [f"there is no product '{name}' to keep" for name in kept if name not in products]
    ranges = {name: largest for name, largest in ranges.items() if name not in kept}
    for name in ranges.keys() & products.keys():
        shape = tuple(products[name].weight.shape)
        if any(size % 16 for size in shape):
            problems.append(f"product '{name}': {shape[0]} x {shape[1]} are not multiples of 16")
    weights = packing.stack.layers[0].qkv.weight
    if weights.dtype != torch.bfloat16:
        problems.append(f"computes with {weights.dtype} beside; expected penstock.dtype bf16")
    if problems:
        raise ConfigError([f"parameters.{FP8_OPTION}: {problem}" for problem in problems])
    originals = [layer.inner for layer in packing.stack.layers]
    packing.stack.quantise(ranges)
    if packing.stack.multiplier is not None:
        choose_epilogues(packing, originals)


def choose_epilogues(packing: PackedModel, originals: Sequence[PackedLinear]) -> None:
    """Fuse GELU and the rounding to e4m3 into the GEMM, for layers where that is no less accurate
    than separate steps, whose weights have a scale per channel."""
    for layer, original in zip(packing.stack.layers, originals, strict=True):
        products = layer.inner, layer.outer
        is_small = all(isinstance(each, PackedFp8Linear) for each in products)
        if layer.activation == "relu" or not is_small or None in [p.inverse for p in products]:
            continue
        fused = GeluToFp8(original, layer.inner, layer.outer)
        gap, gap_apart = _epilogue_gaps(layer, original, fused)
        if gap <= gap_apart * MOST_MORE:
            layer.gelu_to_fp8 = fused


def _epilogue_gaps(
    layer: PackedLayer, original: PackedLinear, fused: GeluToFp8
) -> tuple[float, float]:
    """Return the relative error of GELU in e4m3 (in norm, averaged over channels, so that a large
    one does not hide errors of others) of the fused layer and of separate steps."""
    weight, inverse = original.weight, layer.outer.inverse
    with torch.inference_mode():
        given = layer.first_norm(_random_tokens(weight, NUM_FOR_GELU))
        sums = given.double() @ weight.double().t() + original.bias.double()
        wanted = ACTIVATIONS[layer.activation](sums)
        small = to_fp8(given, layer.inner.inverse)
        rounded = layer.inner.plain(small, torch.ones(1, 1, device=weight.device)).float()
        apart = to_fp8(functional.gelu(rounded, approximate="tanh"), inverse)

        def gap(found: torch.Tensor) -> float:
            off = (found.double() / inverse.double() - wanted).norm(dim=0)
            return float((off / wanted.norm(dim=0).clamp(min=1e-12)).clamp(max=1.0).mean())

        return gap(fused.plain(small)), gap(apart)


def has_fp8(device: str) -> bool:
    return device.startswith("cuda") and bool(torch.cuda.get_device_capability(device) >= ADA)


def read_ranges(path: Path) -> dict[str, float]:
    """Read the largest inputs of linear layers, by name: a JSON object of numbers."""
    where = f"parameters.{FP8_OPTION}: {path.name}"
    try:
        return msgspec.json.decode(path.read_bytes(), type=Ranges)
    except msgspec.ValidationError:
        raise ConfigError(
            f"{where}: expected an object of finite numbers, the largest inputs by name"
        ) from None
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{where}: cannot be read: {first_line(error)}") from None


def _replaced(module: nn.Module) -> PackedStack:
    """Replace the module's layers by a packed stack, and return it."""
    if isinstance(module, fx.GraphModule):
        try:
            return torch_packed_graph.replace_layers(module)
        except torch_packed_graph.NoMatch as reason:
            raise NotPackable(str(reason)) from None
    lists = [
        (owner, name, child)
        for owner in module.modules()
        for name, child in owner.named_children()
        if isinstance(child, nn.ModuleList) and len(child) and all(map(_parts, child))
    ]
    if len(lists) != 1:
        expected = "; expected one list of layers with the parts of BERT's or DistilBERT's"
        raise NotPackable(f"found {len(lists)} encoders{expected}")
    ((owner, name, layers),) = lists
    packed: list[PackedLayer] = []
    num_heads, activation, gives_tuple = 0, "", False
    for number, layer in enumerate(layers):
        trial = _Trial(layer)
        if not packed:
            num_heads, activation = trial.kind()
            gives_tuple = trial.gives_tuple
        trial.check(num_heads, activation, number)
        packed.append(_packed_layer(layer, num_heads, activation))
    stack = PackedStack(packed, gives_tuple=gives_tuple)
    stack.eval()
    setattr(owner, name, nn.ModuleList([stack]))
    return stack


def _has_packed_embeddings(
    module: nn.Module, stack: PackedStack, difference: Callable[[], float]
) -> bool:
    """Try to pack the embeddings too, if recognised; keep the model's own if answers change, for
    example because positions do not start at 0."""
    found = [
        (owner, name, child)
        for owner in module.modules()
        for name, child in owner.named_children()
        if _is_embeddings(child)
    ]
    if len(found) != 1:
        return False
    ((owner, name, original),) = found
    words, positions, norm = (getattr(original, each) for each in EMBEDDINGS[:3])
    packed = PackedEmbeddings(words, positions, norm)
    packed.kinds = getattr(original, EMBEDDINGS[3], None)
    packed.eval()
    setattr(owner, name, packed)
    stack.embeddings = (packed,)
    try:
        if difference() <= MODEL_TOLERANCE:
            return True
    except Exception:  # The model's code, with other embeddings than it was written for.
        log.debug("the embeddings cannot be packed", exc_info=True)
    setattr(owner, name, original)
    return False


def _is_embeddings(module: nn.Module) -> bool:
    words, positions, norm, kinds = (getattr(module, name, None) for name in EMBEDDINGS)
    tables: list[nn.Embedding] = [words, positions, *([] if kinds is None else [kinds])]
    if not all(isinstance(each, nn.Embedding) for each in tables):
        return False
    is_normed = isinstance(norm, nn.LayerNorm) and norm.weight is not None
    return is_normed and len({each.embedding_dim for each in tables}) == 1


def _parts(layer: nn.Module) -> list[nn.Module]:
    """Return six linear layers and two norms; empty if any is missing."""
    for names in NAMES:
        try:
            found = [layer.get_submodule(name) for name in names.split()]
        except AttributeError:
            continue
        linears, norms = found[:NUM_LINEARS], found[NUM_LINEARS:]
        if all(isinstance(each, nn.Linear) and each.bias is not None for each in linears) and all(
            isinstance(each, nn.LayerNorm) and each.weight is not None for each in norms
        ):
            return found
    return []


def _packed_layer(layer: nn.Module, num_heads: int, activation: str) -> PackedLayer:
    query, key, value, out, inner, outer, first, last = _parts(layer)
    together = (query, key, value)
    qkv = PackedLinear(
        torch.cat([each.weight.detach() for each in together]),
        torch.cat([each.bias.detach() for each in together]),
    )
    others = [
        PackedLinear(each.weight.detach(), each.bias.detach()) for each in (out, inner, outer)
    ]
    return PackedLayer([qkv, *others], (first, last), num_heads, activation)


class _Trial:
    """One layer, run on random tokens in FP32: the original, and packed."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer = copy.deepcopy(layer).float().eval()
        weight = _parts(self._layer)[0].weight
        self._width = weight.shape[1]
        self._x = _random_tokens(weight, NUM_TOKENS)[None]
        mask = torch.ones(1, 1, NUM_TOKENS, NUM_TOKENS, dtype=torch.bool, device=weight.device)
        answer = self._layer(self._x, mask)
        self.gives_tuple = isinstance(answer, tuple | list)
        self._wanted = answer[0] if self.gives_tuple else answer
        self._layout = lay_out(mask[0, 0, :1], NUM_TOKENS)

    def kind(self) -> tuple[int, str]:
        """Return the number of heads and activation with which the packed layer is closest."""
        found: dict[tuple[int, str], float] = {}
        for size in HEAD_SIZES:
            if self._width % size == 0:
                for activation in ACTIVATIONS:
                    kind = self._width // size, activation
                    found[kind] = self._difference(*kind)
            if found and min(found.values()) <= LAYER_TOLERANCE:
                break
        return min(found, key=lambda kind: found[kind]) if found else (1, "gelu")

    def check(self, num_heads: int, activation: str, number: int) -> None:
        gap = self._difference(num_heads, activation)
        if not gap <= LAYER_TOLERANCE:
            raise NotPackable(
                f"layer {number} has the parts of BERT's and computes something else: {gap:.1e} "
                "of the largest value away (norms before the products, or other positions?)"
            )

    def _difference(self, num_heads: int, activation: str) -> float:
        layer = _packed_layer(self._layer, num_heads, activation)
        x = self._x[0]
        return _gap(self._wanted[0], layer(x, LinearInput(x), self._layout, None)[0])


def _made_up(config: ModelConfig, mask: str, *, is_graph: bool) -> dict[str, torch.Tensor]:
    """Return random inputs: three sequences, one as long as the batch, one of a single token. A
    graph takes the lengths of buckets alone."""
    random = np.random.default_rng(SEED)
    (spec,) = [spec for spec in config.inputs if spec.name == mask]
    longest = min(config.padding.buckets[-1], MAX_LENGTH) if config.padding else MAX_LENGTH
    if is_graph and config.padding:
        longest = config.padding.buckets[0]
    length = spec.shape[0] if spec.shape[0] > 0 else longest
    lengths = np.array([length, 1, length // 2 + 1])[:, None]
    made: dict[str, torch.Tensor] = {}
    for spec in config.inputs:
        dtype = DATATYPES[spec.datatype].numpy
        shape = (3, *(length if size < 0 else size for size in spec.shape))
        if spec.name == mask:
            values: Array = np.arange(length)[None, :] < lengths
        elif dtype.kind in "iu":
            is_kind = any(word in spec.name.lower() for word in ("type", "segment"))
            values = random.integers(0 if is_kind else 1, KINDS if is_kind else INTEGERS, shape)
        else:
            raise ConfigError(
                f"parameters.{OPTION}: input '{spec.name}' is {spec.datatype}; expected integers"
            )
        made[spec.name] = torch.from_numpy(values.astype(dtype))
    return made


def _difference(
    wanted: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor], is_token: torch.Tensor
) -> float:
    """Return the largest gap over all float outputs; per-token outputs are compared at tokens."""
    gaps = []
    for name, one in wanted.items():
        other = found[name]
        if not one.is_floating_point():
            continue
        if one.shape != other.shape:
            return float("inf")
        if one.shape[: is_token.ndim] == is_token.shape:
            one, other = one[is_token], other[is_token]
        gaps.append(_gap(one, other))
    if not gaps:
        raise NotPackable("the model has no float output that packed and padded could differ in")
    return max(gaps)


def _gap(one: torch.Tensor, other: torch.Tensor) -> float:
    one, other = one.double(), other.double()
    return float((one - other).abs().amax() / one.abs().amax().clamp(min=1e-30))


def calibrated(
    packing: PackedModel, call: Call, batches: Iterable[Mapping[str, torch.Tensor]]
) -> dict[str, float]:
    """Return the largest input of each linear layer over these batches."""
    packing.stack.watch()
    with torch.inference_mode():
        for batch in batches:
            packing.lay_out(batch, max(1, int(batch[packing.mask].count_nonzero())))
            call(batch)
    return packing.stack.watched()


assert len(PRODUCTS) == NUM_LINEARS - 2

"""A transformer's layers over tokens laid end to end: what a mask leaves out is not computed.

`Layout` says which token lies where; it is made on the device from the mask alone, in shapes that
depend on the batch's shape and on a number of tokens that the host knows, so that a CUDA graph can
hold all of it. The layers are those of BERT: attention, residual, LayerNorm, two products with an
activation between them, residual, LayerNorm. On GPUs the kernels of `penstock.kernels` run, and
plain torch does elsewhere; a product may multiply in FP8, by the largest value that its inputs are
known to have, or each token by its own. `torch_packing` makes all this of a model.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.backends import torch_products
from penstock.backends.torch_products import Multiplier
from penstock.kernels.cublaslt import Form, Operands

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
# The least that a value's range is taken for: of all zeros there is none.
SMALLEST = 1e-6
# Rows of queries in a block (`kernels.varlen` has the same), and which types and heads it knows.
BLOCK = 64
KERNEL_TYPES = (torch.float16, torch.bfloat16)
KERNEL_HEADS = (16, 32, 64, 128)
# Compute capabilities of BF16, and of FP8.
AMPERE, ADA = (8, 0), (8, 9)
PRODUCTS = ("qkv", "out", "inner", "outer")
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the tokens of a padded batch [rows, length] lie when they are packed."""

    # [tokens]: each one's place in the flattened batch; one behind its end where there is none.
    places: Tensor
    # Of each row and position.
    is_token: Tensor
    # [blocks, 3], in 32 bits: first query, begin and end of its sequence; all that ends at 0 is
    # none.
    blocks: Tensor
    # [tokens, 1]: the scale of rows that have none of their own.
    ones: Tensor


def lay_out(mask: Tensor, num_tokens: int) -> Layout:
    """Of a mask [rows, length] that leaves at most `num_tokens` of them. Nothing is waited for."""
    if mask.is_cuda and has_triton():
        from penstock.kernels import layout

        places, blocks = layout.lay_out(mask, num_tokens, BLOCK)
    else:
        places, blocks = plain_layout(mask, num_tokens)
    return Layout(places, mask != 0, blocks, torch.ones(num_tokens, 1, device=mask.device))


def plain_layout(mask: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Places and blocks, as `kernels.layout` finds them."""
    is_token = mask != 0
    num_rows, device = mask.shape[0], mask.device
    flat = is_token.flatten()
    # What is no token goes to a place that is cut off.
    index = torch.where(flat, flat.cumsum(0) - 1, num_tokens).clamp(max=num_tokens)
    places = torch.full((num_tokens + 1,), flat.numel(), dtype=torch.int64, device=device)
    places.scatter_(0, index, torch.arange(flat.numel(), device=device))
    lengths = is_token.sum(1)
    ends = lengths.cumsum(0)
    counts = (lengths + BLOCK - 1) // BLOCK
    last = counts.cumsum(0)
    numbers = torch.arange(-(-num_tokens // BLOCK) + num_rows, device=device)
    row = torch.searchsorted(last, numbers, right=True).clamp(max=num_rows - 1)
    begins = (ends - lengths)[row]
    first = begins + (numbers - (last - counts)[row]) * BLOCK
    end = torch.where(numbers < last[-1], ends[row], 0)
    blocks = torch.stack((first, begins, end), 1).int()
    return places[:num_tokens], blocks * (blocks[:, 2:] > 0)


def packed(padded: Tensor, layout: Layout) -> Tensor:
    """[rows, length, width] to [tokens, width]; where there is no token, any."""
    flat = padded.flatten(0, 1)
    return flat.index_select(0, layout.places.clamp(max=len(flat) - 1))


def padded(tokens: Tensor, layout: Layout) -> Tensor:
    """[tokens, width] to [rows, length, width], zeros where the mask leaves out."""
    num_places = layout.is_token.numel()
    flat = tokens.new_zeros(num_places + 1, tokens.shape[1])
    flat.index_copy_(0, layout.places, tokens)
    return flat[:num_places].unflatten(0, layout.is_token.shape)


def padded_attention(qkv: Tensor, layout: Layout, num_heads: int) -> Tensor:
    """What `kernels.varlen` computes, by way of the padded batch."""
    heads = padded(qkv, layout).unflatten(2, (3, num_heads, -1)).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(
        heads[0], heads[1], heads[2], attn_mask=layout.is_token[:, None, None, :]
    )
    return packed(mixed.transpose(1, 2).flatten(2), layout)


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def uses_kernels(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in KERNEL_TYPES and _has_kernels(x.device)


@functools.cache
def _has_kernels(device: torch.device) -> bool:
    return has_triton() and bool(torch.cuda.get_device_capability(device) >= AMPERE)


@dataclass(frozen=True, slots=True)
class Scaling:
    """How a product takes its input in e4m3: times a number that is known, or (None) each token
    times its own."""

    inverse: Tensor | None


@dataclass(frozen=True, slots=True)
class Taken:
    """Tokens as a product takes them. [tokens, 1] are the scales of those that have their own."""

    values: Tensor
    scales: Tensor | None = None


def to_fp8(x: Tensor, inverse: Tensor) -> Tensor:
    return (x.float() * inverse).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def taken_of(x: Tensor, scaling: Scaling | None) -> Taken:
    if scaling is None:
        return Taken(x)
    if scaling.inverse is not None:
        return Taken(to_fp8(x, scaling.inverse))
    if uses_kernels(x):
        from penstock.kernels import encoder

        scales = room_for_scales(x)
        return Taken(encoder.quantise_rows(x, scales), scales)
    scales = x.float().abs().amax(1, keepdim=True).clamp(min=SMALLEST) / FP8_MAX
    return Taken(to_fp8(x, 1 / scales), scales)


def room_for_scales(x: Tensor) -> Tensor:
    return torch.empty(len(x), 1, dtype=torch.float32, device=x.device)


def attend(qkv: Tensor, layout: Layout, num_heads: int, scaling: Scaling | None) -> Taken:
    if not uses_kernels(qkv) or qkv.shape[1] // 3 // num_heads not in KERNEL_HEADS:
        return taken_of(padded_attention(qkv, layout, num_heads), scaling)
    from penstock.kernels import varlen

    inverse = None if scaling is None else scaling.inverse
    mixed: Tensor = varlen.attend(qkv, layout.blocks, num_heads, inverse)
    # A head does not know what is largest among the others.
    return Taken(mixed) if inverse is not None else taken_of(mixed, scaling)


def add_norm(
    added: Tensor, residual: Tensor, norm: nn.LayerNorm, scaling: Scaling | None
) -> tuple[Tensor, Taken]:
    """The normalised sum, and what the next product takes of it: itself, or in FP8."""
    if not uses_kernels(added) or norm.bias is None:
        x = norm(added + residual)
        return x, taken_of(x, scaling)
    from penstock.kernels import encoder

    inverse = None if scaling is None else scaling.inverse
    is_by_row = scaling is not None and inverse is None
    scales = room_for_scales(added) if is_by_row else None
    x, small = encoder.add_norm(added, residual, norm, inverse, scales)
    return x, Taken(x if small is None else small, scales)


class Product(nn.Module):
    """x W^T + b."""

    scaling: Scaling | None = None
    # Who chooses how it is computed, where there is a choice.
    multiplier: Multiplier | None = None

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = nn.Parameter(bias, requires_grad=False)
        # The largest input so far, where somebody wants to know.
        self.largest: float | None = None

    def forward(self, taken: Taken, layout: Layout) -> Tensor:
        x = taken.values
        if self.largest is not None:
            is_real = layout.places < layout.is_token.numel()
            self.largest = max(self.largest, float(x[is_real].abs().amax()))
        return self._multiplied(x, has_gelu=False)

    def gelu(self, taken: Taken) -> Tensor:
        """Of the product, in the form with tanh; on GPUs before a sum leaves its registers."""
        return self._multiplied(taken.values, has_gelu=True)

    def _multiplied(self, x: Tensor, *, has_gelu: bool) -> Tensor:
        by_torch = functools.partial(self._by_torch, has_gelu=has_gelu)
        if self.multiplier is None or x.dtype not in KERNEL_TYPES:
            return by_torch(x)
        form = Form(len(x), x.shape[1], len(self.weight), x.dtype, x.dtype, has_gelu)
        operands = Operands(x, self.weight, self.bias)
        return self.multiplier.run(torch_products.Product(form, operands, by_torch))

    def _by_torch(self, x: Tensor, *, has_gelu: bool) -> Tensor:
        if has_gelu and x.is_cuda:
            return torch._addmm_activation(self.bias, x, self.weight.t(), use_gelu=True)
        y = torch.addmm(self.bias, x, self.weight.t())
        return F.gelu(y, approximate="tanh") if has_gelu else y


class Fp8Product(nn.Module):
    """The same in e4m3: inputs by one scale that is known beforehand or (without a largest value)
    each token by its own, weights by one for each channel of the output."""

    multiplier: Multiplier | None = None

    def __init__(self, product: Product, largest: float | None) -> None:
        super().__init__()
        weight = product.weight.float()
        channels = weight.abs().amax(1).clamp(min=SMALLEST) / FP8_MAX
        self.weight = nn.Parameter(to_fp8(weight, 1 / channels[:, None]), requires_grad=False)
        self.bias = product.bias
        scale = 1.0 if largest is None else max(largest, SMALLEST) / FP8_MAX
        inverse = None if largest is None else weight.new_full((1,), 1 / scale)
        self.register_buffer("inverse", inverse)
        # By both, so that rows need none.
        self.register_buffer("scales", (channels * scale)[None, :].contiguous())

    @property
    def scaling(self) -> Scaling:
        return Scaling(self.inverse)

    def forward(self, taken: Taken, layout: Layout) -> Tensor:
        x = taken.values
        rows = layout.ones if taken.scales is None else taken.scales
        by_torch = functools.partial(self._by_torch, rows)
        if self.multiplier is None:
            return by_torch(x)
        sizes = len(x), x.shape[1], len(self.weight)
        form = Form(*sizes, FP8, self.bias.dtype, scaling="rows")
        operands = Operands(x, self.weight, self.bias, rows, self.scales)
        return self.multiplier.run(torch_products.Product(form, operands, by_torch))

    def _by_torch(self, rows: Tensor, x: Tensor) -> Tensor:
        if x.is_cuda:
            return torch._scaled_mm(
                x,
                self.weight.t(),
                scale_a=rows,
                scale_b=self.scales,
                bias=self.bias,
                out_dtype=self.bias.dtype,
                use_fast_accum=True,
            )
        return self.plain(x, rows)

    def plain(self, x: Tensor, rows: Tensor) -> Tensor:
        product = x.float() @ self.weight.t().float() * self.scales * rows
        return (product + self.bias.float()).to(self.bias.dtype)


class GeluToFp8(nn.Module):
    """The first of a layer's two large products with GELU behind it (in the form with tanh), in one
    pass to what the second takes in e4m3. Its weights have one scale: a product that writes e4m3
    knows no other. They are rounded from the original, for those that are rounded twice are
    noticeably worse."""

    def __init__(self, original: Product, inner: Fp8Product, outer: Fp8Product) -> None:
        super().__init__()
        assert inner.inverse is not None and outer.inverse is not None
        weight = original.weight.float()
        scale = weight.abs().amax().clamp(min=SMALLEST).reshape(1) / FP8_MAX
        self.weight = nn.Parameter(to_fp8(weight, 1 / scale), requires_grad=False)
        self.bias = original.bias
        self.multiplier = original.multiplier
        self.register_buffer("weight_scale", scale)
        self.register_buffer("x_scale", 1 / inner.inverse)
        self.register_buffer("factor", outer.inverse)

    def forward(self, x: Tensor, apart: Callable[[Tensor], Tensor]) -> Tensor:
        """`apart` is the same by two passes, which may be faster."""
        if self.multiplier is None:
            return apart(x)
        form = Form(len(x), x.shape[1], len(self.weight), FP8, FP8, True, "one")
        scales = self.x_scale, self.weight_scale, self.factor
        operands = Operands(x, self.weight, self.bias, *scales)
        return self.multiplier.run(torch_products.Product(form, operands, apart))

    def plain(self, x: Tensor) -> Tensor:
        sums = x.float() @ self.weight.t().float() * self.x_scale * self.weight_scale
        return to_fp8(F.gelu(sums + self.bias.float(), approximate="tanh"), self.factor)


class PackedLayer(nn.Module):
    def __init__(
        self,
        products: Sequence[Product],
        norms: tuple[nn.LayerNorm, nn.LayerNorm],
        num_heads: int,
        activation: str,
    ) -> None:
        super().__init__()
        self.qkv, self.out, self.inner, self.outer = products
        self.first_norm, self.last_norm = norms
        self.num_heads = num_heads
        self.activation = activation
        # Whether the form with tanh may stand for GELU, in 16 bits.
        self.has_fast_gelu = activation == "gelu_tanh"
        # Both at once in FP8, where that is no less exact.
        self.gelu_to_fp8: GeluToFp8 | None = None

    def forward(
        self, x: Tensor, taken: Taken, layout: Layout, next_scaling: Scaling | None
    ) -> tuple[Tensor, Taken]:
        """`taken` is x as the first product takes it; so is what comes out."""
        qkv = self.qkv(taken, layout)
        mixed = attend(qkv, layout, self.num_heads, self.out.scaling)
        x, taken = add_norm(self.out(mixed, layout), x, self.first_norm, self.inner.scaling)
        bent = self._bent(taken, layout)
        return add_norm(self.outer(bent, layout), x, self.last_norm, next_scaling)

    def _bent(self, taken: Taken, layout: Layout) -> Taken:
        """The activation of the first of the two products, as the second takes it."""
        if self.gelu_to_fp8 is None:
            return self._bent_apart(taken, layout)

        def apart(x: Tensor) -> Tensor:
            return self._bent_apart(Taken(x), layout).values

        return Taken(self.gelu_to_fp8(taken.values, apart))

    def _bent_apart(self, taken: Taken, layout: Layout) -> Taken:
        scaling, product = self.outer.scaling, self.inner
        is_half = taken.values.dtype in KERNEL_TYPES
        if is_half and self.has_fast_gelu and scaling is None and product.largest is None:
            return Taken(product.gelu(taken))
        x = product(taken, layout)
        if self.activation == "relu" or not uses_kernels(x):
            return taken_of(ACTIVATIONS[self.activation](x), scaling)
        from penstock.kernels import encoder

        is_fast = scaling is not None or self.has_fast_gelu
        if scaling is None or scaling.inverse is not None:
            inverse = None if scaling is None else scaling.inverse
            return Taken(encoder.gelu(x, inverse, is_fast=is_fast))
        scales = room_for_scales(x)
        return Taken(encoder.quantise_rows(x, scales, has_gelu=True, is_fast=is_fast), scales)


class PackedEmbeddings(nn.Module):
    """Stands for a model's embeddings (words, positions, kinds of sequence if there are any, norm)
    before a stack that asks for those of the tokens only: what it gives is a shape."""

    def __init__(self, words: nn.Embedding, positions: nn.Embedding, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.words, self.positions, self.norm = words, positions, norm
        self.kinds: nn.Embedding | None = None
        self._given: tuple[Tensor, Tensor | None] | None = None

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **others: object,
    ) -> Tensor:
        """As Hugging Face calls its own; with positions or embeddings of others, not this one."""
        assert position_ids is None and inputs_embeds is None
        length, most = input_ids.shape[1], self.positions.num_embeddings
        if length > most:
            # A GPU that looks behind the end of a table is lost to its process.
            raise ValueError(f"{length} positions; the model has {most}")
        self._given = input_ids, token_type_ids
        return self.words.weight.new_zeros(1).expand(*input_ids.shape, self.words.embedding_dim)

    def of_tokens(self, layout: Layout, scaling: Scaling | None) -> tuple[Tensor, Taken]:
        """Themselves, and as the first product takes them."""
        assert self._given is not None
        ids, kinds = self._given
        positions = self.positions.weight
        if self.kinds is not None and kinds is None:
            positions = positions + self.kinds.weight[0]
        places = layout.places.clamp(max=ids.numel() - 1)
        added = F.embedding(places % ids.shape[1], positions)
        if self.kinds is not None and kinds is not None:
            added = added + F.embedding(kinds.flatten()[places], self.kinds.weight)
        words = F.embedding(ids.flatten()[places], self.words.weight)
        return add_norm(words, added, self.norm, scaling)


@dataclass(frozen=True, slots=True)
class GeluGap:
    """How far two ways to a product's GELU in 16 bits are from the exact one (of the norm): by the
    form with tanh, and by the exact form of a product that was rounded first."""

    fast: float
    exact: float


class PackedStack(nn.Module):
    """Stands for all layers of a model: called like one of them, with the padded batch. Whoever
    runs the model says first which of it are tokens."""

    def __init__(self, layers: Sequence[PackedLayer], *, gives_tuple: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.gives_tuple = gives_tuple
        self.layout: Layout | None = None
        # How far the form of GELU with tanh is away, where it is used.
        self.gelu_gap: GeluGap | None = None
        # Who chooses how products are computed; or why nobody does.
        self.multiplier: Multiplier | None = None
        self.no_multiplier = ""
        # Of the model, where they are packed too. In a tuple: they are the model's to move.
        self.embeddings: tuple[PackedEmbeddings, ...] = ()

    def forward(self, x: Tensor, *others: object, **options: object) -> Any:
        layout = self.layout
        assert layout is not None, "which of it are tokens has not been said"
        scalings = [layer.qkv.scaling for layer in self.layers] + [None]
        tokens, taken = self._tokens(x, layout, scalings[0])
        for layer, next_scaling in zip(self.layers, scalings[1:], strict=True):
            tokens, taken = layer(tokens, taken, layout, next_scaling)
        found = padded(tokens, layout)
        return (found,) if self.gives_tuple else found

    def _tokens(self, x: Tensor, layout: Layout, scaling: Scaling | None) -> tuple[Tensor, Taken]:
        if self.embeddings:
            return self.embeddings[0].of_tokens(layout, scaling)
        tokens = packed(x, layout)
        return tokens, taken_of(tokens, scaling)

    def products(self) -> dict[str, Any]:
        """By name, in order: `3.inner` is the fourth layer's."""
        return {
            f"{number}.{name}": getattr(layer, name)
            for number, layer in enumerate(self.layers)
            for name in PRODUCTS
        }

    def multiply_by(self, multiplier: Multiplier) -> None:
        """From now on it chooses how products are computed."""
        self.multiplier = multiplier
        for product in self.products().values():
            product.multiplier = multiplier

    def watch(self) -> None:
        """From now on each product keeps its largest input."""
        for product in self.products().values():
            product.largest = 0.0

    def watched(self) -> dict[str, float]:
        """The largest inputs since then, which are kept no longer."""
        found = {name: product.largest for name, product in self.products().items()}
        for product in self.products().values():
            product.largest = None
        return found

    def quantise(self, ranges: Mapping[str, float | None]) -> None:
        """These products multiply in FP8 from now on: by the largest input, or by each token's."""
        for number, layer in enumerate(self.layers):
            for name in PRODUCTS:
                if f"{number}.{name}" in ranges:
                    product = getattr(layer, name)
                    small = Fp8Product(product, ranges[f"{number}.{name}"])
                    small.multiplier = product.multiplier
                    setattr(layer, name, small)

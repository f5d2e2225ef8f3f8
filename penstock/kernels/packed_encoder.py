"""Transformer encoder layers over packed tokens: padding is not computed.

`PackedLayout` says where each token is. It is made on the device from the mask alone; its shapes
depend only on the batch's shape and on a number of tokens that the host knows, so a CUDA graph can
hold all of it. The layers are those of BERT. On GPUs our own kernels run, elsewhere plain torch.
Linear layers can run in FP8. `torch_packing` converts models to this form.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.kernels import has_triton
from penstock.kernels.cublaslt import GemmForm, Operands
from penstock.kernels.gemm import Gemm, Multiplier

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
# Lower bound of a range, for inputs that are all zero.
SMALLEST = 1e-6
# Query rows in a block (same as in `kernels.varlen`), and its supported types and head sizes.
BLOCK = 64
KERNEL_TYPES = (torch.float16, torch.bfloat16)
KERNEL_HEADS = (16, 32, 64, 128)
# Least compute capability for BF16, and for FP8.
AMPERE, ADA = (8, 0), (8, 9)
PRODUCTS = ("qkv", "out", "inner", "outer")
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Positions of the tokens of a padded batch [rows, length] in the packed batch."""

    # [tokens]: place of each in the flattened batch; one past its end for unused entries.
    places: Tensor
    # [rows, length]: whether a position is a token.
    is_token: Tensor
    # [blocks, 3], int32: first query, begin and end of its sequence; blocks with end 0 are unused.
    blocks: Tensor
    # [tokens, 1]: scales of rows without a scale per token.
    ones: Tensor


def lay_out(mask: Tensor, num_tokens: int) -> PackedLayout:
    """Return the layout for a mask [rows, length] of up to `num_tokens` tokens, without waiting."""
    if mask.is_cuda and has_triton():
        from penstock.kernels import layout

        places, blocks = layout.lay_out(mask, num_tokens, BLOCK)
    else:
        places, blocks = plain_layout(mask, num_tokens)
    return PackedLayout(places, mask != 0, blocks, torch.ones(num_tokens, 1, device=mask.device))


def plain_layout(mask: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return places and blocks, as `kernels.layout` computes them."""
    is_token = mask != 0
    num_rows, device = mask.shape[0], mask.device
    flat = is_token.flatten()
    # Padding is scattered to an entry that is cut off.
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


def packed(padded: Tensor, layout: PackedLayout) -> Tensor:
    """Pack [rows, length, width] to [tokens, width]; unused entries are arbitrary."""
    flat = padded.flatten(0, 1)
    return flat.index_select(0, layout.places.clamp(max=len(flat) - 1))


def padded(tokens: Tensor, layout: PackedLayout) -> Tensor:
    """Unpack [tokens, width] to [rows, length, width], with zeros for padding."""
    num_places = layout.is_token.numel()
    flat = tokens.new_zeros(num_places + 1, tokens.shape[1])
    flat.index_copy_(0, layout.places, tokens)
    return flat[:num_places].unflatten(0, layout.is_token.shape)


def padded_attention(qkv: Tensor, layout: PackedLayout, num_heads: int) -> Tensor:
    """Compute the same as `kernels.varlen`, on the padded batch."""
    heads = padded(qkv, layout).unflatten(2, (3, num_heads, -1)).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(
        heads[0], heads[1], heads[2], attn_mask=layout.is_token[:, None, None, :]
    )
    return packed(mixed.transpose(1, 2).flatten(2), layout)


def uses_kernels(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in KERNEL_TYPES and _has_kernels(x.device)


@functools.cache
def _has_kernels(device: torch.device) -> bool:
    return has_triton() and bool(torch.cuda.get_device_capability(device) >= AMPERE)


@dataclass(frozen=True, slots=True)
class Scaling:
    """Quantisation of a linear layer's input to e4m3: by a calibrated factor; None: per token."""

    inverse: Tensor | None


@dataclass(frozen=True, slots=True)
class LinearInput:
    """Input of a linear layer; `scales` [tokens, 1] if it is quantised per token."""

    values: Tensor
    scales: Tensor | None = None


def to_fp8(x: Tensor, inverse: Tensor) -> Tensor:
    return (x.float() * inverse).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def quantise_input(x: Tensor, scaling: Scaling | None) -> LinearInput:
    if scaling is None:
        return LinearInput(x)
    if scaling.inverse is not None:
        return LinearInput(to_fp8(x, scaling.inverse))
    if uses_kernels(x):
        from penstock.kernels import encoder

        scales = room_for_scales(x)
        return LinearInput(encoder.quantise_rows(x, scales), scales)
    scales = x.float().abs().amax(1, keepdim=True).clamp(min=SMALLEST) / FP8_MAX
    return LinearInput(to_fp8(x, 1 / scales), scales)


def room_for_scales(x: Tensor) -> Tensor:
    return torch.empty(len(x), 1, dtype=torch.float32, device=x.device)


def attend(
    qkv: Tensor, layout: PackedLayout, num_heads: int, scaling: Scaling | None
) -> LinearInput:
    if not uses_kernels(qkv) or qkv.shape[1] // 3 // num_heads not in KERNEL_HEADS:
        return quantise_input(padded_attention(qkv, layout, num_heads), scaling)
    from penstock.kernels import varlen

    inverse = None if scaling is None else scaling.inverse
    mixed: Tensor = varlen.attend(qkv, layout.blocks, num_heads, inverse)
    # The kernel sees one head at a time, so it cannot compute a scale over all heads.
    return LinearInput(mixed) if inverse is not None else quantise_input(mixed, scaling)


def add_norm(
    added: Tensor, residual: Tensor, norm: nn.LayerNorm, scaling: Scaling | None
) -> tuple[Tensor, LinearInput]:
    """Return the LayerNorm of the sum, and the same as the input of the next linear layer."""
    if not uses_kernels(added) or norm.bias is None:
        x = norm(added + residual)
        return x, quantise_input(x, scaling)
    from penstock.kernels import encoder

    inverse = None if scaling is None else scaling.inverse
    is_by_row = scaling is not None and inverse is None
    scales = room_for_scales(added) if is_by_row else None
    x, small = encoder.add_norm(added, residual, norm, inverse, scales)
    return x, LinearInput(x if small is None else small, scales)


class PackedLinear(nn.Module):
    """Linear layer x W^T + b."""

    scaling: Scaling | None = None
    # Chooses the GEMM implementation, if there is a choice.
    multiplier: Multiplier | None = None

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = nn.Parameter(bias, requires_grad=False)
        # Largest input so far; None if inputs are not watched.
        self.largest: float | None = None

    def forward(self, given: LinearInput, layout: PackedLayout) -> Tensor:
        x = given.values
        if self.largest is not None:
            is_real = layout.places < layout.is_token.numel()
            self.largest = max(self.largest, float(x[is_real].abs().amax()))
        return self._multiplied(x, has_gelu=False)

    def gelu(self, given: LinearInput) -> Tensor:
        """Return GELU (tanh form) of the product; on GPUs as an epilogue of the GEMM."""
        return self._multiplied(given.values, has_gelu=True)

    def _multiplied(self, x: Tensor, *, has_gelu: bool) -> Tensor:
        by_torch = functools.partial(self._by_torch, has_gelu=has_gelu)
        if self.multiplier is None or x.dtype not in KERNEL_TYPES:
            return by_torch(x)
        form = GemmForm(len(x), x.shape[1], len(self.weight), x.dtype, x.dtype, has_gelu)
        operands = Operands(x, self.weight, self.bias)
        return self.multiplier.run(Gemm(form, operands, by_torch))

    def _by_torch(self, x: Tensor, *, has_gelu: bool) -> Tensor:
        if has_gelu and x.is_cuda:
            return torch._addmm_activation(self.bias, x, self.weight.t(), use_gelu=True)
        y = torch.addmm(self.bias, x, self.weight.t())
        return F.gelu(y, approximate="tanh") if has_gelu else y


class PackedFp8Linear(nn.Module):
    """Linear layer in e4m3: weights with a scale per output channel, inputs with one calibrated
    scale or, without a largest value, with a scale per token."""

    multiplier: Multiplier | None = None

    def __init__(self, product: PackedLinear, largest: float | None) -> None:
        super().__init__()
        # An ONNX file may have it transposed.
        weight = product.weight.float().contiguous()
        channels = weight.abs().amax(1).clamp(min=SMALLEST) / FP8_MAX
        self.weight = nn.Parameter(to_fp8(weight, 1 / channels[:, None]), requires_grad=False)
        self.bias = product.bias
        scale = 1.0 if largest is None else max(largest, SMALLEST) / FP8_MAX
        inverse = None if largest is None else weight.new_full((1,), 1 / scale)
        self.register_buffer("inverse", inverse)
        # Product of channel and input scale, so that rows need none.
        self.register_buffer("scales", (channels * scale)[None, :].contiguous())

    @property
    def scaling(self) -> Scaling:
        return Scaling(self.inverse)

    def forward(self, given: LinearInput, layout: PackedLayout) -> Tensor:
        return self.multiply(given.values, layout.ones if given.scales is None else given.scales)

    def multiply(self, x: Tensor, rows: Tensor, residual: Tensor | None = None) -> Tensor:
        """Multiply e4m3 rows, each with a scale, and add a residual [rows, width]."""
        by_torch = functools.partial(self._by_torch, rows, residual)
        if self.multiplier is None:
            return by_torch(x)
        sizes = len(x), x.shape[1], len(self.weight)
        has_residual = residual is not None
        form = GemmForm(*sizes, FP8, self.bias.dtype, scaling="rows", has_residual=has_residual)
        operands = Operands(x, self.weight, self.bias, rows, self.scales, residual=residual)
        return self.multiplier.run(Gemm(form, operands, by_torch))

    def _by_torch(self, rows: Tensor, residual: Tensor | None, x: Tensor) -> Tensor:
        if x.is_cuda:
            # With a scale per row torch gives BF16 only.
            found = torch._scaled_mm(
                x,
                self.weight.t(),
                scale_a=rows,
                scale_b=self.scales,
                bias=self.bias.to(torch.bfloat16),
                out_dtype=torch.bfloat16,
                use_fast_accum=True,
            ).to(self.bias.dtype)
        else:
            found = self.plain(x, rows)
        return found if residual is None else found.add_(residual)

    def plain(self, x: Tensor, rows: Tensor) -> Tensor:
        product = x.float() @ self.weight.t().float() * self.scales * rows
        return (product + self.bias.float()).to(self.bias.dtype)


class GeluToFp8(nn.Module):
    """The first of a layer's two MLP products with GELU (tanh form) as epilogue, which writes the
    e4m3 input of the second directly. Its weights have one scale, the only form that a GEMM with
    e4m3 output supports. They are rounded from the original, as rounding twice is noticeably
    worse."""

    def __init__(
        self, original: PackedLinear, inner: PackedFp8Linear, outer: PackedFp8Linear
    ) -> None:
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
        """`apart` computes the same in two passes, which may be faster."""
        if self.multiplier is None:
            return apart(x)
        form = GemmForm(len(x), x.shape[1], len(self.weight), FP8, FP8, True, "one")
        scales = self.x_scale, self.weight_scale, self.factor
        operands = Operands(x, self.weight, self.bias, *scales)
        return self.multiplier.run(Gemm(form, operands, apart))

    def plain(self, x: Tensor) -> Tensor:
        sums = x.float() @ self.weight.t().float() * self.x_scale * self.weight_scale
        return to_fp8(F.gelu(sums + self.bias.float(), approximate="tanh"), self.factor)


class PackedLayer(nn.Module):
    def __init__(
        self,
        products: Sequence[PackedLinear],
        norms: tuple[nn.LayerNorm, nn.LayerNorm],
        num_heads: int,
        activation: str,
    ) -> None:
        super().__init__()
        self.qkv, self.out, self.inner, self.outer = products
        self.first_norm, self.last_norm = norms
        self.num_heads = num_heads
        self.activation = activation
        # Whether the tanh form may replace GELU, in 16 bits.
        self.has_fast_gelu = activation == "gelu_tanh"
        # Fused GEMM, GELU and quantisation in FP8, if it is no less accurate.
        self.gelu_to_fp8: GeluToFp8 | None = None

    def forward(
        self, x: Tensor, given: LinearInput, layout: PackedLayout, next_scaling: Scaling | None
    ) -> tuple[Tensor, LinearInput]:
        """Run the layer. `given` is x as input of the first linear layer; returns the same pair."""
        qkv = self.qkv(given, layout)
        mixed = attend(qkv, layout, self.num_heads, self.out.scaling)
        x, given = add_norm(self.out(mixed, layout), x, self.first_norm, self.inner.scaling)
        activated = self._activate(given, layout)
        return add_norm(self.outer(activated, layout), x, self.last_norm, next_scaling)

    def _activate(self, given: LinearInput, layout: PackedLayout) -> LinearInput:
        """Return the activation of the first MLP product, as input of the second."""
        if self.gelu_to_fp8 is None:
            return self._activate_apart(given, layout)

        def apart(x: Tensor) -> Tensor:
            return self._activate_apart(LinearInput(x), layout).values

        return LinearInput(self.gelu_to_fp8(given.values, apart))

    def _activate_apart(self, given: LinearInput, layout: PackedLayout) -> LinearInput:
        scaling, product = self.outer.scaling, self.inner
        is_half = given.values.dtype in KERNEL_TYPES
        if is_half and self.has_fast_gelu and scaling is None and product.largest is None:
            return LinearInput(product.gelu(given))
        x = product(given, layout)
        if self.activation == "relu" or not uses_kernels(x):
            return quantise_input(ACTIVATIONS[self.activation](x), scaling)
        from penstock.kernels import encoder

        is_fast = scaling is not None or self.has_fast_gelu
        if scaling is None or scaling.inverse is not None:
            inverse = None if scaling is None else scaling.inverse
            return LinearInput(encoder.gelu(x, inverse, is_fast=is_fast))
        scales = room_for_scales(x)
        return LinearInput(encoder.quantise_rows(x, scales, has_gelu=True, is_fast=is_fast), scales)


class PackedEmbeddings(nn.Module):
    """Replacement of a model's embeddings (words, positions, token types if any, norm) before a
    stack that embeds packed tokens only: `forward` just returns a placeholder of the right
    shape."""

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
        """Take Hugging Face's arguments; custom positions or embeddings are not supported."""
        assert position_ids is None and inputs_embeds is None
        length, most = input_ids.shape[1], self.positions.num_embeddings
        if length > most:
            # An out-of-range lookup on a GPU breaks it for the whole process.
            raise ValueError(f"{length} positions; the model has {most}")
        self._given = input_ids, token_type_ids
        return self.words.weight.new_zeros(1).expand(*input_ids.shape, self.words.embedding_dim)

    def of_tokens(
        self, layout: PackedLayout, scaling: Scaling | None
    ) -> tuple[Tensor, LinearInput]:
        """Return the embeddings of packed tokens, also as input of the first linear layer."""
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
    """Relative error (in norm) of two ways to compute GELU in 16 bits: the tanh form as epilogue,
    and the exact form after the product was rounded."""

    fast: float
    exact: float


class PackedStack(nn.Module):
    """Replacement of all layers of a model: called like one of them, with the padded batch. The
    caller sets `layout` first."""

    def __init__(self, layers: Sequence[PackedLayer], *, gives_tuple: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.gives_tuple = gives_tuple
        self.layout: PackedLayout | None = None
        # Error of the tanh form of GELU, if it is used.
        self.gelu_gap: GeluGap | None = None
        # Chooses GEMM implementations; or the reason for having no multiplier.
        self.multiplier: Multiplier | None = None
        self.no_multiplier = ""
        # The model's embeddings, if packed too. A tuple does not register them as submodules here.
        self.embeddings: tuple[PackedEmbeddings, ...] = ()

    def forward(self, x: Tensor, *others: object, **options: object) -> Tensor | tuple[Tensor]:
        layout = self.layout
        assert layout is not None, "which of it are tokens has not been said"
        scalings = [layer.qkv.scaling for layer in self.layers] + [None]
        if self.embeddings:
            tokens, given = self.embeddings[0].of_tokens(layout, scalings[0])
        else:
            tokens = packed(x, layout)
            given = quantise_input(tokens, scalings[0])
        for layer, next_scaling in zip(self.layers, scalings[1:], strict=True):
            tokens, given = layer(tokens, given, layout, next_scaling)
        found = padded(tokens, layout)
        return (found,) if self.gives_tuple else found

    def products(self) -> dict[str, PackedLinear | PackedFp8Linear]:
        """Return linear layers by name, in order: `3.inner` is in the fourth layer."""
        return {
            f"{number}.{name}": getattr(layer, name)
            for number, layer in enumerate(self.layers)
            for name in PRODUCTS
        }

    def multiply_by(self, multiplier: Multiplier) -> None:
        self.multiplier = multiplier
        for product in self.products().values():
            product.multiplier = multiplier

    def watch(self) -> None:
        """Start calibration: each linear layer records its largest input."""
        for product in self.products().values():
            product.largest = 0.0

    def watched(self) -> dict[str, float]:
        """End calibration and return the largest inputs."""
        found: dict[str, float] = {}
        for name, product in self.products().items():
            found[name] = product.largest or 0.0
            product.largest = None
        return found

    def quantise(self, ranges: Mapping[str, float | None]) -> None:
        """Convert these linear layers to FP8: scaled by the largest input, or per token (None)."""
        for number, layer in enumerate(self.layers):
            for name in PRODUCTS:
                if f"{number}.{name}" in ranges:
                    product = getattr(layer, name)
                    small = PackedFp8Linear(product, ranges[f"{number}.{name}"])
                    small.multiplier = product.multiplier
                    setattr(layer, name, small)

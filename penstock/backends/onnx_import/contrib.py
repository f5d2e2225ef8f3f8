"""Operators of `com.microsoft`, which ONNX Runtime's own optimiser and quantiser write."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor
from torch.nn import functional

from penstock.backends.onnx_import import quantised, recurrent
from penstock.backends.onnx_import.elementwise import gelu, swish
from penstock.backends.onnx_import.layers import average_pool, convolve
from penstock.backends.onnx_import.matrices import gemm
from penstock.backends.onnx_import.values import (
    ConvAttributes,
    GemmAttributes,
    OnnxOperator,
    PoolAttributes,
)
from penstock.errors import ConfigError
from penstock.kernels import integer_weights


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return functional.gelu(x + bias)


def fast_gelu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    return functional.gelu(x if bias is None else x + bias, approximate="tanh")


def quick_gelu(x: Tensor, *, alpha: float = 1.702) -> Tensor:
    return x * torch.sigmoid(alpha * x)


def skip_layer_norm(
    x: Tensor,
    skip: Tensor,
    gamma: Tensor,
    beta: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    epsilon: float = 1e-12,
    num_outputs: int,
) -> Tensor | tuple[Tensor | None, ...]:
    total = x + skip if bias is None else x + skip + bias
    found = functional.layer_norm(total, total.shape[-1:], gamma, beta, epsilon)
    return found if num_outputs == 1 else (found, None, None, total)


def skip_rms_norm(
    x: Tensor,
    skip: Tensor,
    gamma: Tensor,
    bias: Tensor | None = None,
    *,
    epsilon: float = 1e-12,
    num_outputs: int,
) -> Tensor | tuple[Tensor | None, ...]:
    total = x + skip if bias is None else x + skip + bias
    found = functional.rms_norm(total, total.shape[-1:], gamma, epsilon)
    return found if num_outputs == 1 else (found, None, None, total)


def embed_layer_norm(
    ids: Tensor,
    segments: Tensor | None,
    words: Tensor,
    positions: Tensor,
    segment_table: Tensor | None,
    gamma: Tensor,
    beta: Tensor,
    mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    *,
    epsilon: float = 1e-12,
    mask_index_type: int = 1,
    num_outputs: int,
) -> Tensor | tuple[Tensor, ...]:
    at = torch.arange(ids.shape[1], device=ids.device) if position_ids is None else position_ids
    total = words[ids.long()] + positions[at.long()]
    if segment_table is not None and segments is not None:
        total = total + segment_table[segments.long()]
    return _normed_embedding(total, gamma, beta, epsilon, ids, mask, num_outputs)


def _normed_embedding(
    total: Tensor,
    gamma: Tensor,
    beta: Tensor,
    epsilon: float,
    ids: Tensor,
    mask: Tensor | None,
    num_outputs: int,
) -> Tensor | tuple[Tensor, ...]:
    """Return the norm of summed embeddings, then as asked the lengths by the mask, and the sums."""
    found = functional.layer_norm(total, total.shape[-1:], gamma, beta, epsilon)
    if num_outputs == 1:
        return found
    lengths = ids.new_zeros(len(ids)) if mask is None else mask.sum(1)
    return (found, lengths.to(torch.int32), total)[:num_outputs]


def quantised_embed_layer_norm(
    ids: Tensor,
    segments: Tensor | None,
    words: Tensor,
    positions: Tensor,
    segment_table: Tensor | None,
    gamma: Tensor,
    beta: Tensor,
    mask: Tensor | None,
    *quantisation: Tensor | None,
    epsilon: float = 1e-12,
    num_outputs: int,
) -> Tensor | tuple[Tensor, ...]:
    """Compute EmbedLayerNormalization of integers; only the rows that are looked up become floats.
    `quantisation` has five scales, then five zero points, in the order of the tables."""
    at = torch.arange(ids.shape[1], device=ids.device)
    rows = [words[ids.long()], positions[at], None, gamma, beta]
    if segment_table is not None and segments is not None:
        rows[2] = segment_table[segments.long()]
    floats = [
        quantised.dequantize(each, scale, zero)
        for each, scale, zero in zip(rows, quantisation[:5], quantisation[5:], strict=True)
        if each is not None and scale is not None
    ]
    *embedded, gamma, beta = floats
    total = functools.reduce(torch.add, embedded)
    return _normed_embedding(total, gamma, beta, epsilon, ids, mask, num_outputs)


def attention(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    past: Tensor | None = None,
    added: Tensor | None = None,
    past_length: Tensor | None = None,
    *,
    num_heads: int,
    mask_filter_value: float = -10000.0,
    qkv_hidden_sizes: Sequence[int] = (),
    scale: float = 0.0,
    unidirectional: int = 0,
    num_outputs: int,
) -> Tensor | tuple[Tensor, ...]:
    """Compute Attention: projection, heads, mask and softmax in one operator. Keys and values of
    earlier tokens are one tensor, with both along its first axis."""
    if past_length is not None:
        raise ConfigError("com.microsoft Attention with past_sequence_length is not supported")
    width = weight.shape[1] // 3
    sizes = list(qkv_hidden_sizes) or [width] * 3
    joined = functional.linear(x, weight.t(), bias)
    q, k, v = _split_heads(joined.split(sizes, -1), num_heads, past)
    seen = _mask(mask, k.shape[2], q, mask_filter_value)
    found = _attend((q, k, v), seen, added, scale, is_causal=bool(unidirectional))
    return found if num_outputs == 1 else (found, torch.stack([k, v]))


def quantised_attention(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    mask: Tensor | None = None,
    x_zero: Tensor | None = None,
    weight_zero: Tensor | None = None,
    past: Tensor | None = None,
    *,
    num_heads: int,
    do_rotary: int = 0,
    mask_filter_value: float = -10000.0,
    past_present_share_buffer: int = 0,
    scale: float = 0.0,
    unidirectional: int = 0,
    num_outputs: int,
) -> Tensor | tuple[Tensor, ...]:
    """Compute Attention of integers: only the projection is one of eight bits."""
    if do_rotary or past_present_share_buffer:
        why = "do_rotary and past_present_share_buffer are not supported"
        raise ConfigError(f"QAttention: {why}")
    joined = matmul_integer_to_float(x, weight, x_scale, weight_scale, x_zero, weight_zero, bias)
    q, k, v = _split_heads(joined.chunk(3, -1), num_heads, past)
    seen = _mask(mask, k.shape[2], q, mask_filter_value)
    found = _attend((q, k, v), seen, None, scale, is_causal=bool(unidirectional))
    return found if num_outputs == 1 else (found, torch.stack([k, v]))


def _split_heads(
    parts: Sequence[Tensor], num_heads: int, past: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values by head, with those of earlier tokens."""
    q, k, v = (part.unflatten(-1, (num_heads, -1)).transpose(1, 2) for part in parts)
    if past is not None:
        k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
    return q, k, v


def _attend(
    qkv: tuple[Tensor, Tensor, Tensor],
    seen: Tensor | None,
    added: Tensor | None,
    scale: float,
    *,
    is_causal: bool,
) -> Tensor:
    """Return the attention of heads, side by side. Queries are the last tokens of the keys."""
    q, k, v = qkv
    if added is not None:
        seen = added if seen is None else seen + added
    if is_causal:
        lengths = q.shape[2], k.shape[2]
        later = torch.ones(lengths, dtype=torch.bool, device=q.device)
        later = later.triu(1 + lengths[1] - lengths[0])
        seen = q.new_zeros(lengths) if seen is None else seen
        seen = seen.masked_fill(later, torch.finfo(q.dtype).min)
    found = functional.scaled_dot_product_attention(q, k, v, seen, scale=scale or None)
    return found.transpose(1, 2).flatten(2)


def _mask(mask: Tensor | None, length: int, like: Tensor, fill: float) -> Tensor | None:
    """Return what is added to the products. A mask of one dimension has the lengths of rows, then
    maybe their starts; others are 1 where a token is."""
    if mask is None:
        return None
    if mask.dim() == 1:
        at = torch.arange(length, device=like.device)
        rows = like.shape[0]
        is_there = at < mask[:rows, None]
        if len(mask) == 2 * rows:
            is_there &= at >= mask[rows:, None]
        is_there = is_there[:, None, None]
    else:
        is_there = mask.bool()
        while is_there.dim() < 4:
            is_there = is_there.unsqueeze(1)
    return torch.zeros_like(is_there, dtype=like.dtype).masked_fill(~is_there, fill)


def multi_head_attention(
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    bias: Tensor | None = None,
    padding: Tensor | None = None,
    added: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    past_length: Tensor | None = None,
    *,
    num_heads: int,
    mask_filter_value: float = -10000.0,
    scale: float = 0.0,
    unidirectional: int = 0,
    num_outputs: int,
) -> Tensor | tuple[Tensor, ...]:
    if query.dim() != 3 or past_length is not None:
        why = "packed inputs or past_sequence_length"
        raise ConfigError(f"MultiHeadAttention with {why} is not supported")
    key = query if key is None else key
    value = key if value is None else value
    if bias is not None:
        parts = bias.split([query.shape[-1], key.shape[-1], value.shape[-1]])
        query, key, value = query + parts[0], key + parts[1], value + parts[2]
    q, k, v = (
        each.unflatten(-1, (num_heads, -1)).transpose(1, 2) if each.dim() == 3 else each
        for each in (query, key, value)
    )
    if past_key is not None and past_value is not None:
        k, v = torch.cat([past_key, k], 2), torch.cat([past_value, v], 2)
    seen = _mask(padding, k.shape[2], q, mask_filter_value)
    found = _attend((q, k, v), seen, added, scale, is_causal=bool(unidirectional))
    return found if num_outputs == 1 else (found, k, v)[:num_outputs]


def fused_matmul(
    a: Tensor,
    b: Tensor,
    *,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
    transBatchA: int = 0,
    transBatchB: int = 0,
) -> Tensor:
    if transBatchA or transBatchB:
        raise ConfigError("FusedMatMul: transBatchA and transBatchB are not supported")
    product = (a.mT if transA else a) @ (b.mT if transB else b)
    return product if alpha == 1 else alpha * product


def fused_gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    activation: str = "",
    activation_alpha: float = 0.01,
    **attributes: Unpack[GemmAttributes],
) -> Tensor:
    return _activate(gemm(a, b, c, **attributes), activation, [activation_alpha])


def fused_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    added: Tensor | None = None,
    *,
    activation: str = "",
    activation_params: Sequence[float] = (),
    **attributes: Unpack[ConvAttributes],
) -> Tensor:
    found = convolve(x, weight, bias, **attributes)
    found = found if added is None else found + added
    return _activate(found, activation, activation_params)


def _activate(x: Tensor, name: str, parameters: Sequence[float]) -> Tensor:
    match name:
        case "":
            return x
        case "Relu":
            return torch.relu(x)
        case "LeakyRelu":
            return functional.leaky_relu(x, parameters[0])
        case "Sigmoid":
            return torch.sigmoid(x)
        case "Tanh":
            return torch.tanh(x)
        case "Clip":
            return x.clamp(parameters[0], parameters[1])
        case "HardSigmoid":
            return (parameters[0] * x + parameters[1]).clamp(0, 1)
    raise ConfigError(f"activation '{name}' is not supported")


def _qlinear_binary(is_product: bool) -> OnnxOperator:
    def call(
        a: Tensor,
        a_scale: Tensor,
        a_zero: Tensor | None,
        b: Tensor,
        b_scale: Tensor,
        b_zero: Tensor | None,
        y_scale: Tensor,
        y_zero: Tensor | None = None,
    ) -> Tensor:
        one, other = (
            quantised.dequantize(a, a_scale, a_zero),
            quantised.dequantize(b, b_scale, b_zero),
        )
        return _quantize(one * other if is_product else one + other, y_scale, y_zero, a)

    return OnnxOperator(call)


def _quantize(x: Tensor, scale: Tensor, zero: Tensor | None, like: Tensor) -> Tensor:
    return quantised.quantize(x, scale, like.new_zeros(()) if zero is None else zero)


def _qlinear_unary(compute: str) -> OnnxOperator:
    def call(
        x: Tensor,
        x_scale: Tensor,
        x_zero: Tensor | None,
        y_scale: Tensor,
        y_zero: Tensor | None = None,
        *,
        alpha: float = 0.01,
    ) -> Tensor:
        found = _activate(quantised.dequantize(x, x_scale, x_zero), compute, [alpha])
        return _quantize(found, y_scale, y_zero, x)

    return OnnxOperator(call)


def qlinear_global_average_pool(
    x: Tensor,
    x_scale: Tensor,
    x_zero: Tensor | None,
    y_scale: Tensor,
    y_zero: Tensor | None = None,
    *,
    channels_last: int = 0,
) -> Tensor:
    values = quantised.dequantize(x, x_scale, x_zero)
    axes = range(1, x.dim() - 1) if channels_last else range(2, x.dim())
    return _quantize(values.mean(tuple(axes), keepdim=True), y_scale, y_zero, x)


def qlinear_average_pool(
    x: Tensor,
    x_scale: Tensor,
    x_zero: Tensor | None,
    y_scale: Tensor,
    y_zero: Tensor | None = None,
    *,
    channels_last: int = 0,
    count_include_pad: int = 0,
    **attributes: Unpack[PoolAttributes],
) -> Tensor:
    values = quantised.dequantize(x, x_scale, x_zero)
    values = values.movedim(-1, 1) if channels_last else values
    found = average_pool(values, count_include_pad=count_include_pad, **attributes)
    found = _quantize(found, y_scale, y_zero, x)
    return found.movedim(1, -1) if channels_last else found


def qlinear_where(
    condition: Tensor,
    x: Tensor,
    x_scale: Tensor,
    x_zero: Tensor | None,
    y: Tensor,
    y_scale: Tensor,
    y_zero: Tensor | None,
    z_scale: Tensor,
    z_zero: Tensor | None = None,
) -> Tensor:
    one, other = quantised.dequantize(x, x_scale, x_zero), quantised.dequantize(y, y_scale, y_zero)
    return _quantize(torch.where(condition, one, other), z_scale, z_zero, x)


def qlinear_concat(y_scale: Tensor, y_zero: Tensor, *given: Tensor, axis: int) -> Tensor:
    parts = [
        quantised.dequantize(*given[number : number + 3]) for number in range(0, len(given), 3)
    ]
    return quantised.quantize(torch.cat(parts, axis), y_scale, y_zero)


def qlinear_softmax(
    x: Tensor,
    x_scale: Tensor,
    x_zero: Tensor | None,
    y_scale: Tensor,
    y_zero: Tensor | None = None,
    *,
    axis: int = -1,
    opset: int = 13,
) -> Tensor:
    return _quantize(quantised.dequantize(x, x_scale, x_zero).softmax(axis), y_scale, y_zero, x)


def quantised_gemm(
    a: Tensor,
    a_scale: Tensor,
    a_zero: Tensor,
    b: Tensor,
    b_scale: Tensor,
    b_zero: Tensor,
    bias: Tensor | None = None,
    y_scale: Tensor | None = None,
    y_zero: Tensor | None = None,
    *,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Tensor:
    """Multiply matrices of integers; the result is one of integers if it has a scale."""
    a, b = a.t() if transA else a, b.t() if transB else b
    total = quantised.matmul_integer(a, b, a_zero, b_zero)
    total = total if bias is None else total + bias
    factor = alpha * a_scale.double() * b_scale.double()
    if y_scale is None:
        return (total * factor).to(a_scale.dtype)
    assert y_zero is not None
    return quantised.requantize(total, factor / y_scale.double(), y_zero, -1)


def matmul_integer_to_float(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    a_zero: Tensor | None = None,
    b_zero: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    total = quantised.matmul_integer(a, b, a_zero, b_zero).to(a_scale.dtype)
    total = total * a_scale * b_scale
    return total if bias is None else total + bias


def dynamic_quantize_matmul(
    a: Tensor,
    b: Tensor,
    b_scale: Tensor,
    b_zero: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    values, scale, zero = quantised.dynamic_quantize(a)
    return matmul_integer_to_float(values, b, scale, b_scale, zero, b_zero, bias)


def dynamic_quantize_lstm(
    x: Tensor,
    w: Tensor,
    r: Tensor,
    bias: Tensor | None,
    lengths: Tensor | None,
    state: Tensor | None,
    cell: Tensor | None,
    peepholes: Tensor | None,
    w_scale: Tensor,
    w_zero: Tensor,
    r_scale: Tensor,
    r_zero: Tensor,
    *,
    activations: Sequence[str] = (),
    clip: float = 0.0,
    direction: str = "forward",
    hidden_size: int = 0,
    input_forget: int = 0,
) -> tuple[Tensor, ...]:
    """Compute an LSTM with weights in eight bits. Inputs are rounded to eight bits together, states
    at each step."""
    layer = recurrent.LstmLayer(
        _dequantized(w, w_scale, w_zero),
        _dequantized(r, r_scale, r_zero),
        bias,
        peepholes,
        activations,
        rounded=_rounded,
    )
    if input_forget:
        raise ConfigError("DynamicQuantizeLSTM: input_forget is not supported")
    loop = recurrent.Recurrence(_rounded(x), lengths, direction, 0, clip)
    return layer.run(loop, state, cell)


def _dequantized(weight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Return weights by direction as LSTM has them: transposed. Scales are those of directions, or
    of their columns."""
    shape = (len(weight), 1, -1)
    values = weight.float() - zero.reshape(shape).float()
    return (values * scale.reshape(shape)).transpose(1, 2)


def _rounded(x: Tensor) -> Tensor:
    return quantised.dequantize(*quantised.dynamic_quantize(x))


def matmul_nbits(
    a: Tensor,
    b: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    groups: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    K: int,
    N: int,
    bits: int = 4,
    block_size: int,
    accuracy_level: int = 0,
) -> Tensor:
    """Multiply by weights in blocks of four or eight bits along K, each with a scale. They stay
    packed: the kernel for a few rows reads them as they are."""
    if groups is not None or bits not in integer_weights.BITS:
        raise ConfigError(f"MatMulNBits: g_idx and {bits} bits are not supported")
    scales = scales.reshape(N, -1)
    if zeros is not None and zeros.dtype == torch.uint8:
        zeros = integer_weights.unpacked(zeros.reshape(N, -1), bits)[:, : scales.shape[1]]
    elif zeros is not None:
        zeros = zeros.reshape(N, -1)
    weight = integer_weights.IntegerWeight(b.reshape(N, -1), scales, zeros, K, bits, block_size)
    return integer_weights.multiply(a, weight, bias)


OPERATORS = {
    "Attention": OnnxOperator(attention),
    "BiasGelu": OnnxOperator(bias_gelu),
    "DynamicQuantizeLSTM": OnnxOperator(dynamic_quantize_lstm),
    "DynamicQuantizeMatMul": OnnxOperator(dynamic_quantize_matmul),
    "EmbedLayerNormalization": OnnxOperator(embed_layer_norm),
    "FastGelu": OnnxOperator(fast_gelu),
    "FusedConv": OnnxOperator(fused_conv),
    "FusedGemm": OnnxOperator(fused_gemm),
    "FusedMatMul": OnnxOperator(fused_matmul),
    "Gelu": OnnxOperator(gelu),
    "MatMulIntegerToFloat": OnnxOperator(matmul_integer_to_float),
    "MatMulNBits": OnnxOperator(matmul_nbits),
    "MultiHeadAttention": OnnxOperator(multi_head_attention),
    "QAttention": OnnxOperator(quantised_attention),
    "QEmbedLayerNormalization": OnnxOperator(quantised_embed_layer_norm),
    "QGemm": OnnxOperator(quantised_gemm),
    "QLinearAdd": _qlinear_binary(is_product=False),
    "QLinearAveragePool": OnnxOperator(qlinear_average_pool),
    "QLinearConcat": OnnxOperator(qlinear_concat),
    "QLinearGlobalAveragePool": OnnxOperator(qlinear_global_average_pool),
    "QLinearLeakyRelu": _qlinear_unary("LeakyRelu"),
    "QLinearMul": _qlinear_binary(is_product=True),
    "QLinearSigmoid": _qlinear_unary("Sigmoid"),
    "QLinearSoftmax": OnnxOperator(qlinear_softmax),
    "QLinearWhere": OnnxOperator(qlinear_where),
    "QuickGelu": OnnxOperator(quick_gelu),
    "SkipLayerNormalization": OnnxOperator(skip_layer_norm),
    "SkipSimplifiedLayerNormalization": OnnxOperator(skip_rms_norm),
    "Swish": OnnxOperator(swish),
}

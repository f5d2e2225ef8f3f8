"""Matrix products, attention and rotary embeddings."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from torch.nn import functional

from penstock.backends.onnx_import.values import OnnxOperator


def gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | float | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
    broadcast: int = 0,
) -> Tensor:
    product = (a.t() if transA else a) @ (b.t() if transB else b)
    if alpha != 1:
        product = (alpha * product).to(a.dtype)
    if c is None:
        return product
    return product + (c if beta == 1 else (beta * c))


def einsum(*given: Tensor, equation: str) -> Tensor:
    return torch.einsum(equation, *given)


def determinant(x: Tensor) -> Tensor:
    return torch.linalg.det(x)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    nonpad: Tensor | None = None,
    *,
    is_causal: int = 0,
    kv_num_heads: int = 0,
    left_window_size: int = -1,
    q_num_heads: int = 0,
    right_window_size: int = -1,
    qk_matmul_output_mode: int = 0,
    scale: float = 0.0,
    softcap: float = 0.0,
    softmax_precision: int | None = None,
    num_outputs: int,
) -> Tensor | tuple[Tensor, ...]:
    """Compute ONNX's Attention: by torch's fused kernel if nothing in between is asked for."""
    is_flat = q.dim() == 3
    if is_flat:
        q, k, v = _heads(q, q_num_heads), _heads(k, kv_num_heads), _heads(v, kv_num_heads)
    if past_key is not None and past_value is not None:
        k, v = torch.cat([past_key, k], 2), torch.cat([past_value, v], 2)
    present = k, v
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scale = scale or 1 / math.sqrt(q.shape[-1])
    first = nonpad.to(q.device)[:, None, None, None] - q.shape[2] if nonpad is not None else None
    if first is None:
        first = torch.tensor(0 if past_key is None else past_key.shape[2], device=q.device)
    right = 0 if is_causal else right_window_size
    hidden = _hidden(q, k, first, (left_window_size, right), nonpad)
    bias = _bias(q, k, mask, hidden)
    if not softcap and num_outputs < 4 and softmax_precision is None:
        found = functional.scaled_dot_product_attention(q, k, v, bias, scale=scale)
        if bias is not None:
            # Rows that may attend to nothing are zero.
            empty = torch.isneginf(bias).all(-1, keepdim=True)
            found = found.masked_fill(empty, 0)
        products = None
    else:
        products, found = _attend(q, k, v, bias, (scale, softcap, qk_matmul_output_mode))
    if is_flat:
        found = found.transpose(1, 2).reshape(found.shape[0], found.shape[2], -1)
    if num_outputs == 1:
        return found
    return (found, *present) if products is None else (found, *present, products)


def _heads(x: Tensor, num_heads: int) -> Tensor:
    return x.reshape(*x.shape[:2], num_heads, -1).transpose(1, 2)


def _hidden(
    q: Tensor, k: Tensor, first: Tensor, window: tuple[int, int], nonpad: Tensor | None
) -> Tensor | None:
    """Return which keys a query may not see: outside its window, or padding; None if it sees all.
    A bound of -1 means unbounded; `first` is the position of the first query."""
    keys = torch.arange(k.shape[2], device=q.device)
    queries = torch.arange(q.shape[2], device=q.device)[:, None] + first
    left, right = window
    parts = []
    if right >= 0:
        parts.append(keys > queries + right)
    if left >= 0:
        parts.append(keys < queries - left)
    if nonpad is not None:
        parts.append(keys >= nonpad.to(q.device)[:, None, None, None])
    return functools.reduce(torch.logical_or, parts) if parts else None


def _bias(q: Tensor, k: Tensor, mask: Tensor | None, hidden: Tensor | None) -> Tensor | None:
    """Return what is added to the products."""
    columns = k.shape[2]
    bias = None
    if mask is not None:
        bias = mask
        if mask.dtype == torch.bool:
            bias = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, float("-inf"))
        if bias.shape[-1] < columns:
            missing = columns - bias.shape[-1]
            bias = functional.pad(bias, (0, missing), value=float("-inf"))
    if hidden is None:
        return bias
    bias = q.new_zeros(hidden.shape) if bias is None else bias
    return bias.masked_fill(hidden, float("-inf"))


def _attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, how: tuple[float, float, int]
) -> tuple[Tensor, Tensor]:
    scale, softcap, mode = how
    root = math.sqrt(scale)
    stages = [(q * root) @ (k * root).transpose(-1, -2)]
    stages.append(stages[-1] if bias is None else stages[-1] + bias)
    capped = softcap * torch.tanh(stages[0] / softcap) if softcap else stages[0]
    stages = [stages[0], capped if bias is None else capped + bias, capped]
    weights = torch.softmax(stages[1].float(), -1).nan_to_num(0.0).to(q.dtype)
    shown = [stages[0], stages[2], stages[1], weights][mode]
    return shown, weights @ v


def rotary_embedding(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    *,
    interleaved: int = 0,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
) -> Tensor:
    is_flat = x.dim() == 3
    if is_flat:
        x = _heads(x, num_heads)
    width = rotary_embedding_dim or x.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    if positions is not None:
        cos, sin = cos[positions.long()], sin[positions.long()]
    cos, sin = cos[:, None, :, : width // 2], sin[:, None, :, : width // 2]
    if interleaved:
        one, two = turned[..., 0::2], turned[..., 1::2]
    else:
        one, two = turned.chunk(2, -1)
    parts = one * cos - two * sin, two * cos + one * sin
    joined = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    found = torch.cat([joined, rest], -1)
    return found.transpose(1, 2).flatten(2) if is_flat else found


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor | None = None,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    chunk_size: int = 64,
    kv_num_heads: int,
    q_num_heads: int,
    scale: float = 0.0,
    update_rule: str = "gated_delta",
) -> tuple[Tensor, Tensor]:
    """Run the recurrence token by token."""
    q, k, v = _heads(query, q_num_heads), _heads(key, kv_num_heads), _heads(value, kv_num_heads)
    scale = scale or 1 / math.sqrt(q.shape[-1])
    now = q.new_zeros(len(q), kv_num_heads, k.shape[-1], v.shape[-1]) if state is None else state
    rates = None if beta is None else beta.transpose(1, 2)[..., None, None]
    fade = None
    if decay is not None and "gated" in update_rule:
        fade = _heads(decay, kv_num_heads).exp()[..., None]
    outputs = []
    for time in range(q.shape[2]):
        one, other = k[:, :, time, :, None], v[:, :, time, None]
        now = now if fade is None else now * fade[:, :, time]
        if rates is not None and "delta" in update_rule:
            other = rates[:, :, time] * (other - (one * now).sum(2, keepdim=True))
        now = now + one * other
        seen = now.repeat_interleave(q_num_heads // kv_num_heads, 1)
        outputs.append(scale * (q[:, :, time, :, None] * seen).sum(2))
    return torch.stack(outputs, 1).flatten(2), now


OPERATORS = {
    "Attention": OnnxOperator(attention),
    "Det": OnnxOperator(determinant),
    "Einsum": OnnxOperator(einsum),
    "Gemm": OnnxOperator(gemm),
    "LinearAttention": OnnxOperator(linear_attention),
    "MatMul": OnnxOperator(torch.matmul),
    "RotaryEmbedding": OnnxOperator(rotary_embedding),
}

"""Operations between the linear layers of a decoder, layers made of them, and sampling after the
last one: by the kernels of `penstock.kernels` on GPUs, in plain torch elsewhere. Each takes its
per-step inputs in tensors at fixed addresses, so that a CUDA graph can hold it.

The tokens of a step are rows of an integer batch table: token, position and row of
the block table; for rows that are sampled also the sampling parameters, and the row in which the
next step finds the sampled token.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.kernels import Paged, has_triton
from penstock.kernels.packed_encoder import room_for_scales, uses_kernels
from penstock.llm import sampling
from penstock.llm.cache import Cache, attend_sdpa
from penstock.llm.logits import without
from penstock.llm.models.decoder import Decoder
from penstock.llm.models.experts import ExpertLayer
from penstock.llm.models.feed import SwiGlu
from penstock.llm.models.fp8 import Fp8Linear, in_fp8
from penstock.llm.models.linear import AnyLinear, Linear, Small
from penstock.llm.models.norms import rms_norm
from penstock.llm.models.rope import rotate, widen
from penstock.llm.models.shape import AttentionForm
from penstock.llm.models.swiglu import DecoderLayer

# Columns of the batch table. A token below 0 is the last one sampled in its row of the block table;
# a position below 0 marks a padding row. The sampled token is stored for row `TARGET`, its own or
# the dummy row. TEMPERATURE, TOP_P and MIN_P are the bits of FP32 numbers.
TOKEN, POSITION, ROW, TARGET, KEY, TEMPERATURE, TOP_K, TOP_P, MIN_P = range(9)
NUM_COLUMNS = 9
# Head sizes that `kernels.paged_attention` supports.
KERNEL_HEADS = (16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Places:
    """Tokens of a step and their places in the KV cache. The first `num_ones` belong to sequences
    that compute one token, whose context is read in `num_splits` parts; `lines` are the query tiles
    of the others (see `kernels.paged_attention`)."""

    batch_table: Tensor
    num_ones: int
    num_splits: int
    lines: Tensor | None = None

    @property
    def positions(self) -> Tensor:
        return self.batch_table[:, POSITION]

    @property
    def rows(self) -> Tensor:
        return self.batch_table[:, ROW]


def num_splits(num_tokens: int, num_kv_heads: int) -> int:
    if not has_triton():
        return 1
    from penstock.kernels import paged_attention

    return paged_attention.num_splits(num_tokens, num_kv_heads)


def tokens_of_line(group: int) -> int:
    # Same as in `kernels.paged_attention`, which cannot be imported without Triton.
    return 128 // group


# Layers.


def add_norm(
    added: Tensor | None, residual: Tensor, weight: Tensor, epsilon: float, linear: AnyLinear
) -> tuple[Tensor | Small, Tensor]:
    """Return the RMSNorm of the sum, in the input format of `linear`, and the sum."""
    if not uses_kernels(residual):
        total = residual if added is None else residual + added
        return to_input(rms_norm(total, weight, epsilon), linear), total
    from penstock.kernels import decoding

    scales = room_for_scales(residual) if isinstance(linear, Fp8Linear) else None
    found, total = decoding.add_norm(added, residual, weight, epsilon, scales)
    return (found if scales is None else Small(found, scales)), total


def to_input(x: Tensor, linear: AnyLinear) -> Tensor | Small:
    if not isinstance(linear, Fp8Linear):
        return x
    if not uses_kernels(x):
        return in_fp8(x)
    from penstock.kernels import encoder

    scales = room_for_scales(x)
    return Small(encoder.quantise_rows(x, scales), scales)


def gate(x: Tensor, linear: AnyLinear) -> Tensor | Small:
    """Apply SwiGLU to [tokens, gate and up], in the input format of the linear layer."""
    if not uses_kernels(x):
        one, other = x.chunk(2, 1)
        return to_input(F.silu(one) * other, linear)
    from penstock.kernels import decoding

    scales = room_for_scales(x) if isinstance(linear, Fp8Linear) else None
    found = decoding.gate(x, scales)
    return found if scales is None else Small(found, scales)


def rope_to_cache(
    qkv: Tensor,
    paged: Paged,
    places: Places,
    rope_table: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    epsilon: float,
) -> None:
    """Apply RoPE to queries in place; write rotated keys and values to the KV cache."""
    if uses_kernels(qkv):
        from penstock.kernels import decoding

        decoding.apply_rope(qkv, paged, rope_table, places.positions, places.rows, norms, epsilon)
        return
    num_kv_heads, size = paged.keys.shape[1:]
    heads = qkv.unflatten(1, (-1, size))
    queries, keys, values = heads.split(
        [heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], 1
    )
    is_there = places.positions >= 0
    positions = places.positions.clamp(min=0).long()
    asked, kept = queries, keys
    if norms is not None:
        asked, kept = rms_norm(queries, norms[0], epsilon), rms_norm(keys, norms[1], epsilon)
    table = widen(rope_table[positions])
    queries.copy_(rotate(asked, table))
    slots = slots_of(paged, places.rows, positions)[is_there]
    paged.keys[slots] = rotate(kept, table)[is_there]
    paged.values[slots] = values[is_there]


def slots_of(paged: Paged, rows: Tensor, positions: Tensor) -> Tensor:
    blocks = paged.table[rows.long(), positions // paged.block_size].long()
    return blocks * paged.block_size + positions % paged.block_size


def attend(queries: Tensor, paged: Paged, places: Places) -> Tensor:
    """Return [tokens, heads, size]; each token sees its sequence up to itself."""
    size = queries.shape[2]
    out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    if not uses_kernels(queries) or size not in KERNEL_HEADS:
        _plain_attend(queries, paged, places, out)
        return out
    from penstock.kernels import paged_attention

    num = places.num_ones
    if num:
        where = places.positions[:num], places.rows[:num]
        paged_attention.attend_one(queries[:num], paged, *where, out[:num], places.num_splits)
    if places.lines is not None and len(places.lines):
        paged_attention.attend_many(queries, paged, places.lines, out)
    return out


def _plain_attend(queries: Tensor, paged: Paged, places: Places, out: Tensor) -> None:
    positions, form = places.positions.tolist(), AttentionForm(paged.window, paged.cap)
    for number, row in enumerate(places.rows.tolist()):
        seen = torch.arange(positions[number] + 1, device=queries.device)
        slots = slots_of(paged, torch.full_like(seen, row), seen)
        if len(slots) == 0:
            out[number] = 0
            continue
        own = queries[number : number + 1]
        out[number] = attend_sdpa(own, paged.keys[slots], paged.values[slots], form)[0]


class Fused:
    """Decoder over a paged KV cache; `table` [rows, blocks] is the block table. Computes the same
    model as `Decoder.hidden`, with fewer passes over memory where layers are those of `swiglu`."""

    def __init__(self, decoder: Decoder, cache: Cache, table: Tensor) -> None:
        self._decoder = decoder
        self._paged = [
            Paged(keys, values, table, cache.block_size, form.window, form.cap)
            for keys, values, form in zip(cache.keys, cache.values, cache.forms, strict=True)
        ]
        self._head = Linear(decoder.head, None)
        layers = [each for each in decoder.layers if isinstance(each, DecoderLayer)]
        self._layers = layers if len(layers) == len(decoder.layers) else []
        # RoPE that changes nothing, for heads that are rotated already.
        still = torch.zeros_like(decoder.rope_tables[0])
        still[:, 0] = 1
        self._still = still

    def hidden(self, tokens: Tensor, places: Places) -> Tensor:
        """Return the final hidden states, [tokens, width], after the last norm."""
        decoder = self._decoder
        if not self._layers:
            attend = partial(self._attend_rotated, places)
            return decoder.hidden(tokens, places.positions.clamp(min=0), attend)
        layers, epsilon = self._layers, decoder.shape.epsilon
        x = decoder.embed(tokens, places.positions)
        y, x = add_norm(None, x, layers[0].first_norm, epsilon, layers[0].qkv)
        for number, layer in enumerate(layers):
            mixed = self._mixed(number, layer, layer.qkv(y), places)
            out = layer.out(to_input(mixed, layer.out))
            feed = layer.feed
            first = feed.gate_up if isinstance(feed, SwiGlu) else feed.router
            y, x = add_norm(out, x, layer.last_norm, epsilon, first)
            fed = _fed(feed, y, places)
            after = layers[number + 1] if number + 1 < len(layers) else None
            norm = decoder.norm.weight if after is None else after.first_norm
            linear = self._head if after is None else after.qkv
            y, x = add_norm(fed, x, norm, epsilon, linear)
        assert isinstance(y, Tensor)
        return y

    def _mixed(self, number: int, layer: DecoderLayer, qkv: Tensor, places: Places) -> Tensor:
        shape, paged = self._decoder.shape, self._paged[number]
        rope_table = self._decoder.rope_tables[number]
        rope_to_cache(qkv, paged, places, rope_table, layer.head_norms, shape.epsilon)
        size = shape.head_size
        queries = qkv[:, : shape.num_heads * size].unflatten(1, (shape.num_heads, size))
        return attend(queries, paged, places).flatten(1)

    def _attend_rotated(
        self, places: Places, number: int, queries: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Like `Attend`, over the cache."""
        paged = self._paged[number]
        qkv = torch.cat([queries, keys, values], 1).flatten(1)
        rope_to_cache(qkv, paged, places, self._still, None, self._decoder.shape.epsilon)
        return attend(queries.contiguous(), paged, places)


def _fed(feed: SwiGlu | ExpertLayer, y: Tensor | Small, places: Places) -> Tensor:
    if isinstance(feed, SwiGlu):
        return feed.down(gate(feed.gate_up(y), feed.down))
    assert isinstance(y, Tensor)
    return feed(y, places.positions >= 0)


# Tokens.


def read_tokens(batch_table: Tensor, last: Tensor) -> Tensor:
    """Return the tokens of a batch table, including those that only the device knows."""
    tokens = batch_table[:, TOKEN]
    return torch.where(tokens < 0, last[batch_table[:, ROW].long()], tokens)


def sample_rows(logits: Tensor, batch_table: Tensor, sampled: Tensor, last: Tensor) -> None:
    """Sample a token for each row of logits into `sampled`, and into `last` at the row's target."""
    floats = batch_table.view(torch.float32)
    temperatures = floats[:, TEMPERATURE]
    cuts = batch_table[:, TOP_K], floats[:, TOP_P], floats[:, MIN_P]
    keys, targets = batch_table[:, KEY], batch_table[:, TARGET]
    if uses_kernels(logits):
        from penstock.kernels import token_sampling

        lowest = token_sampling.cut(logits, temperatures, *cuts)
        token_sampling.sample(logits, lowest, temperatures, keys, sampled, last, targets)
        return
    is_warm = temperatures[:, None] > 0
    warm = logits.float() / torch.where(is_warm, temperatures[:, None], 1.0)
    noise = sampling.noise(keys.long() & sampling.MASK, logits.shape[1])
    tokens = torch.where(is_warm, without(warm, *cuts) + noise, warm).argmax(1).int()
    sampled.copy_(tokens)
    last[targets.long()] = tokens

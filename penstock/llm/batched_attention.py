"""Batched decode attention on CPUs: one call for all sequences that compute one token.

Gathering the KV blocks of a sequence costs more than attending to them, so the gathered copy is
kept in a *row*, and each new token's keys and values are written to the row as well as to the
cache. Rows of one length form a KV bucket, over which one call attends; a sequence that
outgrows its row is gathered again into the next longer bucket. Rows are only copies: the cache has
everything, and a sequence that is not in a step loses its row. Tokens without a row, such as
prompts, attend one sequence at a time. So do drafted ones; those that were kept are copied to the
row when one token is computed again.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.llm.cache import Cache, Span, attend_masked, attend_sdpa, slots_of, spans_of
from penstock.llm.exact_attention import attend, attend_prompt, pad_length
from penstock.llm.models.shape import AttentionForm
from penstock.llm.scheduler import BatchStep, Chunk
from penstock.llm.sequence import Sequence

# Tokens in the shortest rows. Lengths grow by at most half, so at most a third of a row is empty.
SHORTEST = 128


@dataclass(frozen=True, slots=True)
class BucketRow:
    owner: Sequence
    # Tokens stored in the row.
    count: int


class KvBucket:
    """KV bucket: rows of `length` tokens; [layers, rows, kv heads, length, head size]."""

    def __init__(self, cache: Cache, length: int) -> None:
        self.length = length
        self.rows: list[BucketRow | None] = []
        layers, _, heads, size = cache.keys.shape
        self.keys = cache.keys.new_zeros(layers, 0, heads, length, size)
        self.values = torch.zeros_like(self.keys)

    def row_of(self, sequence: Sequence, count: int) -> int | None:
        """Return the row with some of the sequence's first `count` tokens; free its other rows."""
        for place, row in enumerate(self.rows):
            if row is not None and row.owner is sequence:
                if row.count <= count:
                    return place
                self.rows[place] = None
        return None

    def catch_up(self, place: int, chunk: Chunk, cache: Cache) -> None:
        """Copy the tokens before a chunk that its row lacks from the cache."""
        row = self.rows[place]
        assert row is not None
        if row.count < chunk.start:
            new = slice(row.count, chunk.start)
            slots = slots_of(chunk.blocks, chunk.start, cache.block_size)[new]
            self.keys[:, place, :, new] = cache.keys[:, slots].transpose(1, 2)
            self.values[:, place, :, new] = cache.values[:, slots].transpose(1, 2)

    def keep(self, sequences: Many[Sequence]) -> None:
        """Free the rows of all other sequences; free every row if over half would lie idle."""
        kept = {id(each) for each in sequences}
        self.rows = [row if row and id(row.owner) in kept else None for row in self.rows]
        used = [place for place, row in enumerate(self.rows) if row]
        if used and used[-1] + 1 > 2 * len(used):
            self.rows = [None] * len(self.rows)

    def grow(self, more: int) -> None:
        layers, _, *sizes = self.keys.shape
        empty = self.keys.new_zeros(layers, more, *sizes)
        # One tensor at a time, so that only one of them is in memory twice.
        self.keys = torch.cat([self.keys, empty], 1)
        self.values = torch.cat([self.values, empty], 1)
        self.rows += [None] * more

    def take(self, sequence: Sequence, count: int, cache: Cache, slots: Tensor) -> int:
        """Fill the first free row with the `count` tokens that the cache has at `slots`."""
        place = self.rows.index(None)
        self.rows[place] = BucketRow(sequence, count)
        self.keys[:, place, :, :count] = cache.keys[:, slots].transpose(1, 2)
        self.values[:, place, :, :count] = cache.values[:, slots].transpose(1, 2)
        # The tail is masked, but a NaN in it would still spoil a sum.
        self.keys[:, place, :, count:] = 0
        self.values[:, place, :, count:] = 0
        return place


@dataclass(frozen=True, slots=True)
class Lot:
    """The tokens of one step that attend in one bucket, for rows up to the last used one."""

    bucket: KvBucket
    # The step's token for each row; unused rows repeat another row's token.
    tokens: Tensor
    # Used rows, and their tokens.
    rows: Tensor
    own: Tensor
    # Slots of the new keys and values, as indices into [rows x kv heads x length].
    slots: Tensor
    # Tokens of the longest sequence.
    length: int
    # By the window of a layer; None if all sequences see all keys.
    masks: dict[int, Tensor | None]
    # Number of tokens that each row sees; only for exact attention.
    ends: Tensor | None = None


@dataclass(slots=True)
class KvBuckets:
    """Buckets of all lengths, kept from step to step; at most as many slots as the cache."""

    cache: Cache
    _buckets: dict[int, KvBucket] = field(default_factory=dict)

    @property
    def num_slots(self) -> int:
        return sum(len(bucket.rows) * length for length, bucket in self._buckets.items())

    def attention(self, step: BatchStep) -> BatchedAttention:
        spans = spans_of(step, self.cache.block_size)
        ones = [place for place, chunk in enumerate(step.chunks) if chunk.count == 1]
        lots, placed = self._lots(step, ones, spans)
        others = [span for place, span in enumerate(spans) if place not in placed]
        return BatchedAttention(self.cache, spans, others, lots)

    def _lots(
        self, step: BatchStep, ones: Many[int], spans: Many[Span]
    ) -> tuple[list[Lot], set[int]]:
        by_length: dict[int, list[int]] = {}
        for place in ones:
            by_length.setdefault(row_length(step.chunks[place].end), []).append(place)
        kept: dict[int, list[Sequence]] = {}
        for chunk in step.chunks:
            if chunk.count == 1 or chunk.draft:
                kept.setdefault(row_length(chunk.end), []).append(chunk.sequence)
        for length, bucket in self._buckets.items():
            bucket.keep(kept.get(length, ()))
        lots: list[Lot] = []
        placed: set[int] = set()
        for length, places in by_length.items():
            rows = self._rows(length, [step.chunks[place] for place in places])
            found = {place: row for place, row in zip(places, rows, strict=True) if row is not None}
            if found:
                lots.append(self._lot(length, found, step, spans))
                placed |= found.keys()
        return lots, placed

    def _rows(self, length: int, chunks: Many[Chunk]) -> list[int | None]:
        """Return the row of each chunk, with all tokens before it; None without room."""
        bucket = self._buckets.setdefault(length, KvBucket(self.cache, length))
        rows = [bucket.row_of(chunk.sequence, chunk.start) for chunk in chunks]
        missing = [number for number, row in enumerate(rows) if row is None]
        free = bucket.rows.count(None)
        if len(missing) > free:
            free += self._grow(bucket, len(missing) - free)
        for number in missing[:free]:
            chunk = chunks[number]
            slots = slots_of(chunk.blocks, chunk.start, self.cache.block_size)
            rows[number] = bucket.take(chunk.sequence, chunk.start, self.cache, slots)
        for row, chunk in zip(rows, chunks, strict=True):
            if row is not None:
                bucket.catch_up(row, chunk, self.cache)
        return rows

    def _grow(self, bucket: KvBucket, more: int) -> int:
        """Drop empty buckets, then add at least `more` rows if there is room; return how many."""
        kept = {n: each for n, each in self._buckets.items() if each is bucket or any(each.rows)}
        self._buckets = kept
        room = (self.cache.keys.shape[1] - self.num_slots) // bucket.length
        # Grow by more than is needed now, so that not every new sequence copies all rows.
        more = max(0, min(max(more, len(bucket.rows) // 2), room))
        if more:
            bucket.grow(more)
        return more

    def _lot(self, length: int, rows: dict[int, int], step: BatchStep, spans: Many[Span]) -> Lot:
        bucket = self._buckets[length]
        by_row = sorted((row, place) for place, row in rows.items())
        own = [spans[place].first for _, place in by_row]
        tokens = [own[0]] * (by_row[-1][0] + 1)
        ends = [1] * len(tokens)
        for (row, place), token in zip(by_row, own, strict=True):
            tokens[row], ends[row] = token, step.chunks[place].end
            bucket.rows[row] = BucketRow(step.chunks[place].sequence, ends[row])
        used = torch.tensor([row for row, _ in by_row])
        num_heads = bucket.keys.shape[2]
        last = torch.tensor([ends[row] - 1 for row, _ in by_row])
        heads = used[:, None] * num_heads + torch.arange(num_heads)
        longest = max(ends)
        slots = (heads * length + last[:, None]).flatten()
        places = torch.tensor(tokens), used, torch.tensor(own), slots
        if self.cache.is_exact:
            return Lot(bucket, *places, pad_length(longest), {}, torch.tensor(ends))
        windows = {form.window for form in self.cache.forms}
        masks = {window: self._mask(ends, window) for window in windows}
        return Lot(bucket, *places, longest, masks)

    def _mask(self, ends: list[int], window: int) -> Tensor | None:
        longest = max(ends)
        if min(ends) == longest and not 0 < window < longest:
            return None
        end, places = torch.tensor(ends)[:, None], torch.arange(longest)
        is_seen = places < end
        if window:
            is_seen &= places >= end - window
        mask = torch.zeros(is_seen.shape, dtype=self.cache.keys.dtype)
        return mask.masked_fill_(~is_seen, float("-inf"))[:, None, None]


class BatchedAttention:
    """Attention of one step: batched for tokens with a row, one sequence at a time for `others`."""

    def __init__(
        self, cache: Cache, spans: Many[Span], others: Many[Span], lots: Many[Lot] = ()
    ) -> None:
        self._cache = cache
        self._slots = torch.cat([span.slots[span.first - span.end :] for span in spans])
        self._others = others
        self._lots = lots
        num_tokens = spans[-1].end
        # If one bucket has all tokens in order, its result needs no reassembly.
        whole = list(range(num_tokens))
        self._is_one = len(lots) == 1 and lots[0].tokens.tolist() == whole

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self._cache.keys[layer].index_copy_(0, self._slots, keys)
        self._cache.values[layer].index_copy_(0, self._slots, values)
        form = self._cache.forms[layer]
        if self._is_one:
            return _attend_rows(self._lots[0], layer, form, queries, keys, values)
        found = torch.empty_like(queries)
        for lot in self._lots:
            parts = queries[lot.tokens], keys[lot.own], values[lot.own]
            found[lot.own] = _attend_rows(lot, layer, form, *parts)[lot.rows]
        attend = attend_prompt if self._cache.is_exact else attend_sdpa
        for span in self._others:
            own = slice(span.first, span.end)
            # A prompt from its first token sees tokens of this step only.
            seen = keys[own], values[own]
            if len(span.slots) > span.end - span.first:
                seen = self._cache.keys[layer][span.slots], self._cache.values[layer][span.slots]
            found[own] = attend(queries[own], *seen, form)
        return found


def row_length(num_tokens: int) -> int:
    length = SHORTEST
    while length < num_tokens:
        # 128, 192, 256, 384, ...
        length = length // 2 * 3 if length & (length - 1) == 0 else length // 3 * 4
    return length


def _attend_rows(
    lot: Lot, layer: int, form: AttentionForm, queries: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """Write the new keys and values to their rows; return the attention of each row."""
    all_keys, all_values = lot.bucket.keys[layer], lot.bucket.values[layer]
    num_heads, size = all_keys.shape[1], all_keys.shape[3]
    all_keys.view(-1, size).index_copy_(0, lot.slots, keys.reshape(-1, size))
    all_values.view(-1, size).index_copy_(0, lot.slots, values.reshape(-1, size))
    num = len(queries)
    if lot.ends is not None:
        rows = queries.reshape(num * num_heads, -1, size)
        seen = lot.ends[:, None].expand(num, num_heads).reshape(-1, 1).expand(-1, rows.shape[1])
        seen_keys = all_keys[:num, :, : lot.length].flatten(0, 1)
        seen_values = all_values[:num, :, : lot.length].flatten(0, 1)
        mixed = attend(rows, seen_keys, seen_values, seen, form)
        return mixed.to(queries.dtype).reshape(num, -1, size)
    # Query heads that share keys are treated as tokens that see the same keys.
    mixed = attend_masked(
        queries.reshape(num, num_heads, -1, size),
        all_keys[:num, :, : lot.length],
        all_values[:num, :, : lot.length],
        lot.masks[form.window],
        form.cap,
    )
    return mixed.reshape(num, -1, size)

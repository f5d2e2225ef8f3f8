"""Run steps on a GPU asynchronously: the next step is planned while the last one runs.

Small steps replay a CUDA graph, captured for a set of batch sizes, with sampling inside: decode
steps, and steps with short remainders of prompts, each of whose tokens attends as if it were a
sequence of its own that shares the blocks. Longer prompts use the same kernels without a graph.
Sampled tokens stay on the device, where the next step reads them; the host gets a copy when it
asks. A token is sampled after each drafted one too. The inputs of a step are a batch table at a
fixed address (see `operations`), filled by one H2D copy from pinned memory. Rows with penalties, a
bias or logprobs are sampled again after the graph.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from penstock.backends.torch_cuda import Cuda
from penstock.errors import first_line
from penstock.llm import operations
from penstock.llm.cache import Cache
from penstock.llm.constrained import TokenMasks
from penstock.llm.logits import forbid_rows, prompt_logprobs, wants_prompts
from penstock.llm.messages import Logprobs, PromptLogprobsChunk
from penstock.llm.models.decoder import Decoder
from penstock.llm.operations import KEY, NUM_COLUMNS, POSITION, ROW, TARGET, TOKEN, Fused, Places
from penstock.llm.runner import SampledStep, row_of
from penstock.llm.sampling import MASK, STEPS, key_of, sample
from penstock.llm.scheduler import BatchStep, Chunk, SampledPlace, StepLimits
from penstock.llm.sequence import Sequence
from penstock.llm.table_rows import Changes, TableRows
from penstock.sampling_params import SamplingParams
from penstock.types import Array

log = logging.getLogger("penstock.engine")
# Steps launched ahead, before the previous one is committed.
NUM_AHEAD = 1
# Batch sizes with a graph: powers of two up to FEW, then steps of 8, 16 and 32.
FEW, STEP_SIZES = 8, ((128, 8), (256, 16), (1 << 30, 32))
# Limit of keys that all prompt tokens of a graph step read together. Each token reads its own, and
# above this limit the reads take longer than launching a step without a graph.
MOST_SEEN = 1 << 18
# Sampling columns of the batch table; see `operations`.
NUM_PARAMETERS = NUM_COLUMNS - KEY
NO_LINES: Array = np.empty((0, 4), np.int64)


def buckets(most: int) -> list[int]:
    """Return the batch sizes, in tokens, that get a graph."""
    found, size = [], 1
    while size < most:
        found.append(size)
        step = next(step for limit, step in STEP_SIZES if size < limit)
        size = size * 2 if size < FEW else size + step
    return [*found, most]


@dataclass(slots=True)
class Staged:
    """Pinned host memory of one step: its inputs and its sampled tokens."""

    batch_table: Tensor
    extras: Tensor
    sampled_tokens: Tensor
    mark: torch.cuda.Event | None = None
    # How much of `extras` the step uses.
    num_used: int = 0


@dataclass(frozen=True, slots=True)
class SampledChunks:
    """What a step samples, each with its row of the logits, of the block table and of the batch
    table."""

    chunks: list[SampledPlace]
    places: list[int]
    rows: Array
    lines: Array


@dataclass(frozen=True, slots=True)
class Resampled:
    """Chunks that were sampled again, by their place among the sampled ones."""

    places: list[int]
    step: SampledStep


@dataclass(slots=True)
class LaunchedStep:
    """A launched step. Tokens and logprobs are those of its sampled places, in order."""

    begin: torch.cuda.Event
    end: torch.cuda.Event
    sampled_tokens: Tensor
    # Index into `sampled_tokens` for each sampled place.
    places: list[int]
    resampled: list[Resampled] = field(default_factory=list)
    prompt_logprobs: Many[PromptLogprobsChunk] = ()
    # Samples the constrained chunks, of which there are some.
    sample_masked: Callable[[LaunchedStep, TokenMasks], None] | None = None
    _tokens: list[int] | None = None

    def constrain(self, masks: TokenMasks) -> None:
        assert self.sample_masked is not None, "a sequence of the step is constrained"
        self.sample_masked(self, masks)

    @property
    def tokens(self) -> list[int]:
        """Sampled tokens; waits for the device."""
        if self._tokens is None:
            self.end.synchronize()
            sampled_tokens = self.sampled_tokens.tolist()
            self._tokens = [sampled_tokens[place] for place in self.places]
        return self._tokens

    @property
    def logprobs(self) -> list[Logprobs | None]:
        found: list[Logprobs | None] = [None] * len(self.places)
        for again in self.resampled:
            for place, each in zip(again.places, again.step.logprobs, strict=True):
                found[place] = each
        return found

    @property
    def device_s(self) -> float:
        """Seconds that the device took, once the step is done."""
        return float(self.begin.elapsed_time(self.end)) / 1e3


@dataclass(frozen=True, slots=True)
class StepLayout:
    """The device inputs of a step; the first `num_ones` rows are chunks of one token."""

    num_tokens: int
    num_ones: int
    is_graph: bool
    # The last row of each chunk; drafted tokens are in it and in the rows before.
    ends: Array
    # Work items of prompt attention (see `kernels.paged_attention`).
    lines: Array
    changes: Changes


class CudaRunner:
    """Runner for one thread. All work goes to one compute stream of the device, in order."""

    num_ahead = NUM_AHEAD

    def __init__(
        self, decoder: Decoder, cache: Cache, device: Cuda, limits: StepLimits, *, has_graphs: bool
    ) -> None:
        self._decoder, self._device, self._limits = decoder, device, limits
        self._has_graphs = has_graphs
        self._block_size = cache.block_size
        # One row for each sequence of a step; sequences of earlier steps keep theirs for a while.
        self._num_rows = 2 * limits.max_sequences
        max_blocks = -(-limits.max_length // cache.block_size)
        # The largest graph has room for remainders of prompts too.
        most = limits.max_sampled
        self._rows = TableRows(self._num_rows, max_blocks)
        # Zeroed on the stream that reads it.
        with device.lane("compute"):
            # The last row is a dummy that belongs to no sequence.
            self._table = self._zeros(self._num_rows + 1, max_blocks)
            self._last = self._zeros(self._num_rows + 1)
            self._batch_table = self._zeros(limits.max_tokens, NUM_COLUMNS)
            self._sampled_tokens = self._zeros(most)
            shape = most, decoder.shape.vocabulary
            self._logits = torch.zeros(shape, dtype=decoder.dtype, device=decoder.device)
        self._fused = Fused(decoder, cache, self._table)
        self._parameters = np.zeros((self._num_rows + 1, NUM_PARAMETERS), np.int32)
        self._staged = [self._stage() for _ in range(NUM_AHEAD + 2)]
        self._turn = 0
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._buckets = buckets(most)
        # Why steps of a given size run without a graph.
        self.problems: dict[int, str] = {}
        self.num_replayed = 0
        self.num_eager = 0

    def prepare(self) -> None:
        """Compile and capture everything that steps need; overwrites the content of the cache."""
        self._warm_up()
        with torch.inference_mode():
            for size in reversed(self._buckets):
                with self._device.lane("compute"):
                    self._batch_table[:size] = torch.from_numpy(self._padding_rows(size)).to(
                        self._batch_table.device
                    )
                    # Warm-up: initialises the libraries.
                    self._generate(size)
                if self._has_graphs:
                    self._capture(size)
        self._device.mark("compute").synchronize()

    def facts(self) -> dict[str, str]:
        found = {"cuda_graphs": str(len(self._graphs)) if self._has_graphs else "off"}
        if self.problems:
            size, problem = next(iter(self.problems.items()))
            found["without_cuda_graph"] = f"{len(self.problems)} sizes, {size} first: {problem}"
        return found

    def run(self, step: BatchStep) -> LaunchedStep:
        """Launch a step without waiting for it. A token that the host does not know yet must be the
        last that its sequence sampled in the step before."""
        staged = self._next_staged()
        order = _ordered(step.chunks)
        chunks = [step.chunks[number] for number in order]
        held, new, changes = self._rows.take(chunks)
        for place in new:
            params = chunks[place].sequence.params
            self._parameters[held[place].row] = parameters_of(params)
        rows = np.array([each.row for each in held], np.int32)
        layout = self._lay_out(chunks, rows, staged, changes)
        # Back to the order of the step.
        where = np.argsort(order)
        sampled = [n for n, chunk in enumerate(step.chunks) if chunk.is_sampled]
        num_drafted = [len(step.chunks[n].draft) for n in sampled]
        lines = _ending_at(layout.ends[where[sampled]], num_drafted)
        places: list[int] = lines.tolist()
        with torch.inference_mode(), self._device.lane("compute"):
            begin = self._device.mark("compute")
            self._send(staged, layout)
            prompts: Many[PromptLogprobsChunk] = ()
            if layout.is_graph:
                self._replay(layout)
            else:
                hidden = self._run_eagerly(layout, staged, places)
                places = list(range(len(places)))
                prompts = prompt_logprobs(BatchStep(chunks), hidden, self._decoder.logits)
            own = rows[where[sampled]].repeat([count + 1 for count in num_drafted])
            chosen = SampledChunks(step.sampled, places, own, lines)
            others = [n for n, each in enumerate(chosen.chunks) if is_other(each)]
            again = [self._sample_again(chosen, others)] if others else []
            end = self._copy_tokens(staged, places)
        num = max(places, default=-1) + 1
        found = LaunchedStep(begin, end, staged.sampled_tokens[:num], places, again, prompts)
        if any(is_constrained(place.chunk) for place in chosen.chunks):
            found.sample_masked = partial(self._sample_masked, staged, chosen)
        return found

    def _copy_tokens(self, staged: Staged, places: list[int]) -> torch.cuda.Event:
        """Copy the sampled tokens to the host; return the event that follows."""
        num = max(places, default=-1) + 1
        if num:
            staged.sampled_tokens[:num].copy_(self._sampled_tokens[:num], non_blocking=True)
        staged.mark = self._device.mark("compute")
        return staged.mark

    # Inputs of a step.

    def _lay_out(
        self, chunks: Many[Chunk], rows: Array, staged: Staged, changes: Changes
    ) -> StepLayout:
        """Write the batch table of a step. Graphs cannot return prompt logprobs."""
        counts = np.array([chunk.count for chunk in chunks])
        ends = counts.cumsum()
        num_tokens = int(ends[-1])
        starts = np.array([chunk.start for chunk in chunks])
        batch_table: Array = staged.batch_table.numpy()[:num_tokens]
        batch_table[:, ROW] = rows.repeat(counts)
        # Offset of each token within its chunk.
        offsets = np.arange(num_tokens) - (ends - counts).repeat(counts)
        batch_table[:, POSITION] = starts.repeat(counts) + offsets
        batch_table[:, TOKEN] = _tokens(chunks, num_tokens)
        last = ends - 1
        # Earlier rows of a chunk may be sampled too: greedily, into the dummy row.
        batch_table[:, TARGET], batch_table[:, KEY:] = self._num_rows, 0
        batch_table[last, TARGET] = rows
        sampled = _ending_at(last, [len(chunk.draft) for chunk in chunks])
        batch_table[sampled, KEY:] = self._parameters[batch_table[sampled, ROW]]
        # Like `key_of` for the number of tokens up to each.
        factor = np.uint32(STEPS[0])
        moved = (batch_table[sampled, POSITION] + 1).astype(np.uint32) * factor
        batch_table[sampled, KEY] += moved.view(np.int32)
        num_ones = int((counts == 1).sum())
        num_seen = int((batch_table[num_ones:, POSITION] + 1).sum())
        is_graph = num_ones == num_tokens or (
            num_seen <= MOST_SEEN and self._bucket(num_tokens) in self._graphs
        )
        is_graph = is_graph and not wants_prompts(chunks)
        lines = NO_LINES if is_graph else self._lines(chunks, rows, ends, num_ones)
        return StepLayout(num_tokens, num_ones, is_graph, last, lines, changes)

    def _lines(self, chunks: Many[Chunk], rows: Array, ends: Array, num_ones: int) -> Array:
        """Return the work items of prompt attention, the longest ones first."""
        size = operations.tokens_of_line(self._decoder.shape.group)
        found: list[Array] = [NO_LINES]
        for place in range(num_ones, len(chunks)):
            chunk, end = chunks[place], int(ends[place])
            at = np.arange(0, chunk.count, size)
            line = np.empty((len(at), 4), np.int64)
            line[:, 0], line[:, 2] = rows[place], end
            line[:, 1], line[:, 3] = end - chunk.count + at, chunk.start + at
            found.append(line)
        lines = np.concatenate(found)
        return lines[np.argsort(-lines[:, 3], kind="stable")]

    def _send(self, staged: Staged, layout: StepLayout) -> None:
        num = layout.num_tokens
        if layout.is_graph:
            num = self._bucket(num)
            staged.batch_table.numpy()[layout.num_tokens : num] = self._padding_rows(1)
        self._batch_table[:num].copy_(staged.batch_table[:num], non_blocking=True)
        changes = layout.changes
        if changes.entries:
            flat = np.array([changes.entries, changes.blocks], np.int64)
            entries, blocks = self._sent(staged, [flat], 0).view(2, -1)
            self._table.view(-1).scatter_(0, entries, blocks.int())

    def _sent(self, staged: Staged, arrays: list[Array], at: int) -> Tensor:
        """Copy arrays to the device through pinned memory, from `at` on; grow it if needed."""
        flat = np.concatenate([each.ravel() for each in arrays])
        if at + len(flat) > len(staged.extras):
            self._device.mark("compute").synchronize()
            staged.extras = self._pinned(2 * (at + len(flat)), torch.int64)
        staged.num_used = at + len(flat)
        part = staged.extras[at : at + len(flat)]
        part.numpy()[:] = flat
        return part.to(self._batch_table.device, non_blocking=True)

    # Device work.

    def _replay(self, layout: StepLayout) -> None:
        size = self._bucket(layout.num_tokens)
        graph = self._graphs.get(size)
        if graph is None:
            self.num_eager += 1
            self._generate(size)
        else:
            self.num_replayed += 1
            graph.replay()

    def _generate(self, size: int) -> dict[str, Tensor]:
        """Compute the first `size` rows of the batch table and sample a token for each."""
        batch_table = self._batch_table[:size]
        splits = operations.num_splits(size, self._decoder.shape.num_kv_heads)
        tokens = operations.read_tokens(batch_table, self._last)
        hidden = self._fused.hidden(tokens, Places(batch_table, size, splits))
        self._sample_rows(hidden, batch_table)
        # Outputs are in preallocated tensors.
        return {}

    def _capture(self, size: int) -> None:
        try:
            self._graphs[size], _ = self._device.capture(partial(self._generate, size))
        except Exception as error:  # Many types; these steps run without a graph.
            self.problems[size] = first_line(error)
            log.warning("no CUDA graph for %d tokens: %s", size, self.problems[size])

    def _run_eagerly(self, layout: StepLayout, staged: Staged, places: list[int]) -> Tensor:
        """Run a step without a graph and sample the rows `places`, in order; return the final
        hidden states of all rows."""
        self.num_eager += 1
        batch_table = self._batch_table[: layout.num_tokens]
        flat = np.array(places, np.int64)
        extras = self._sent(staged, [layout.lines, flat], 2 * len(layout.changes.entries))
        num_lines = len(layout.lines)
        lines = extras[: 4 * num_lines].view(num_lines, 4).int()
        ones = layout.num_ones
        splits = operations.num_splits(self._bucket(ones), self._decoder.shape.num_kv_heads)
        tokens = operations.read_tokens(batch_table, self._last)
        hidden = self._fused.hidden(tokens, Places(batch_table, ones, splits, lines))
        if places:
            chosen = extras[4 * num_lines :]
            self._sample_rows(hidden[chosen], batch_table[chosen])
        return hidden

    def _sample_rows(self, hidden: Tensor, batch_table: Tensor) -> None:
        num = len(hidden)
        logits = self._logits[:num]
        torch.mm(hidden, self._decoder.head.t(), out=logits)
        self._decoder.cap(logits)
        operations.sample_rows(logits, batch_table, self._sampled_tokens[:num], self._last)

    def _sample_again(
        self, chosen: SampledChunks, others: list[int], masks: TokenMasks | None = None
    ) -> Resampled:
        """Sample again, from the same logits, the chunks that need more than the graph does."""
        asked = [row_of(chosen.chunks[number]) for number in others]
        device = self._batch_table.device
        where = torch.tensor([chosen.places[number] for number in others], device=device)
        sampled = sample(self._logits[where], asked, masks)
        tokens = sampled.tokens.int()
        self._sampled_tokens[where] = tokens
        self._last[torch.from_numpy(chosen.rows[others]).to(device).long()] = tokens
        return Resampled(others, SampledStep(sampled, [row.params.num_logprobs for row in asked]))

    def _sample_masked(
        self, staged: Staged, chosen: SampledChunks, launched: LaunchedStep, masks: TokenMasks
    ) -> None:
        """Sample the constrained chunks of a launched step, from the same logits."""
        plain: list[int] = []
        others: list[int] = []
        for number, place in enumerate(masks.places):
            (others if has_extras(chosen.chunks[place].chunk) else plain).append(number)
        with torch.inference_mode(), self._device.lane("compute"):
            if plain:
                found = [masks.places[number] for number in plain]
                self._sample_plain(staged, chosen, found, masks.words[plain])
            if others:
                found = [masks.places[number] for number in others]
                own = TokenMasks(masks.words[others], range(len(others)), {})
                launched.resampled.append(self._sample_again(chosen, found, own))
            launched.end = self._copy_tokens(staged, launched.places)

    def _sample_plain(
        self, staged: Staged, chosen: SampledChunks, found: list[int], words: Array
    ) -> None:
        """Sample masked chunks as the graph does, without waiting for the device."""
        places = np.array([chosen.places[number] for number in found], np.int64)
        flat = np.zeros(-(-words.size // 2), np.int64)
        flat.view(np.int32)[: words.size] = words.ravel()
        index = [places, chosen.lines[found].astype(np.int64), flat]
        sent = self._sent(staged, index, staged.num_used)
        num = len(found)
        where, lines = sent[:num], sent[num : 2 * num]
        masked = sent[2 * num :].view(torch.int32)[: words.size].view(num, -1)
        logits = forbid_rows(self._logits[where], masked)
        tokens = torch.empty(num, dtype=torch.int32, device=logits.device)
        operations.sample_rows(logits, self._batch_table[lines], tokens, self._last)
        self._sampled_tokens[where] = tokens

    # Memory.

    def _warm_up(self) -> None:
        """Run a prefill step of the largest size."""
        limits, left = self._limits, self._limits.max_tokens
        step, params = BatchStep(), SamplingParams(max_tokens=1)
        while left > 0 and len(step.chunks) < limits.max_sequences:
            number, count = -1 - len(step.chunks), min(left, limits.max_length)
            sequence = Sequence(number, [0] * count, params)
            blocks = [0] * -(-count // self._block_size)
            step.chunks.append(Chunk(sequence, 0, count, True, 0, blocks))
            left -= count
        self.run(step).end.synchronize()
        self.num_eager = 0

    def _next_staged(self) -> Staged:
        self._turn += 1
        staged = self._staged[self._turn % len(self._staged)]
        if staged.mark is not None:
            # Wait until all copies from and to it are done.
            staged.mark.synchronize()
        staged.num_used = 0
        return staged

    def _stage(self) -> Staged:
        batch_table = self._pinned(self._batch_table.numel(), torch.int32).view(-1, NUM_COLUMNS)
        extras = self._pinned(1 << 14, torch.int64)
        return Staged(batch_table, extras, self._pinned(len(self._sampled_tokens), torch.int32))

    def _pinned(self, size: int, dtype: torch.dtype) -> Tensor:
        return self._device.pinned(size * dtype.itemsize).view(dtype)

    def _zeros(self, *sizes: int) -> Tensor:
        return torch.zeros(sizes, dtype=torch.int32, device=self._decoder.device)

    def _bucket(self, num: int) -> int:
        """Return the smallest batch size that has room, or `num` itself if none has."""
        return next((size for size in self._buckets if size >= num), num)

    def _padding_rows(self, num: int) -> Array:
        rows = np.zeros((num, NUM_COLUMNS), np.int32)
        rows[:, POSITION], rows[:, ROW], rows[:, TARGET] = -1, self._num_rows, self._num_rows
        return rows


def is_other(place: SampledPlace) -> bool:
    """Return whether the place needs more sampling features than a graph has. Those of constrained
    sequences are sampled when their masks are known."""
    chunk = place.chunk
    params = chunk.sequence.params
    if is_constrained(chunk):
        return False
    if has_extras(chunk):
        return True
    is_held = place.end - chunk.sequence.num_prompt < params.min_tokens
    return is_held and bool(params.stop_token_ids)


def has_extras(chunk: Chunk) -> bool:
    """Return whether the chunk has penalties, a bias or logprobs."""
    params = chunk.sequence.params
    return bool(params.has_penalties or params.logit_bias or params.num_logprobs is not None)


def is_constrained(chunk: Chunk) -> bool:
    return chunk.sequence.params.constraint is not None


def parameters_of(params: SamplingParams) -> Array:
    """Return the batch-table columns from KEY on; the key is that of zero tokens."""
    found = np.zeros(NUM_PARAMETERS, np.int32)
    found[:1] = np.array([key_of(params.seed or 0, 0) & MASK], np.uint32).view(np.int32)
    temperature = 0.0 if params.is_greedy else params.temperature
    found[1:2] = np.array([temperature], np.float32).view(np.int32)
    found[2] = params.top_k
    found[3:] = np.array([params.top_p, params.min_p], np.float32).view(np.int32)
    return found


def _ordered(chunks: Many[Chunk]) -> list[int]:
    """Order chunks: those of one token first, longest context first (`kernels.paged_attention` says
    why); then prompts in their order."""
    ones = [number for number, chunk in enumerate(chunks) if chunk.count == 1]
    ones.sort(key=lambda number: -chunks[number].start)
    return ones + [number for number, chunk in enumerate(chunks) if chunk.count > 1]


def _ending_at(rows: Array, num_before: Many[int]) -> Array:
    """Return each row after the given number of rows before it."""
    if not any(num_before):
        return rows
    pairs = zip(rows.tolist(), num_before, strict=True)
    return np.array([each for row, num in pairs for each in range(row - num, row + 1)])


def _tokens(chunks: Many[Chunk], num_tokens: int) -> list[int]:
    """Return the input tokens, with -1 for those that only the device knows."""
    found: list[int] = []
    for chunk in chunks:
        known = chunk.known
        found += known
        found += [-1] * (chunk.count - len(known))
    assert len(found) == num_tokens
    return found

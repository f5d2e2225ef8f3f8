"""Keys and values in blocks, and who sees whom."""

import pytest

torch = pytest.importorskip("torch")

import tiny_llm as tiny  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from penstock.llm.batched_attention import BatchedAttention  # noqa: E402
from penstock.llm.blocks import BlockPool  # noqa: E402
from penstock.llm.cache import Cache, bytes_of_block, spans_of  # noqa: E402
from penstock.llm.models.families import LLAMA  # noqa: E402
from penstock.llm.scheduler import Scheduler, StepLimits  # noqa: E402
from penstock.llm.sequence import Sequence  # noqa: E402
from penstock.sampling_params import SamplingParams  # noqa: E402

SHAPE = LLAMA.shape_of_config(tiny.CONFIG)
SIZE = 4


def test_a_block_holds_keys_and_values_of_all_layers():
    assert bytes_of_block(SHAPE, SIZE, torch.float16) == 2 * 2 * 4 * (2 * 8) * 2
    cache = Cache(SHAPE, 3, SIZE, "cpu", torch.float16)
    total = cache.keys.nbytes + cache.values.nbytes
    assert total == 3 * bytes_of_block(SHAPE, SIZE, torch.float16)


def test_chunks_of_several_sequences_see_their_own_past_and_nobody_else():
    """Whatever the chunks, each token's answer is that of attention over its own sequence."""
    torch.manual_seed(0)
    cache = Cache(SHAPE, 16, SIZE, "cpu", torch.float32)
    scheduler = Scheduler(BlockPool(16, SIZE), StepLimits(4, 6, 64))
    sequences = [
        Sequence(number, [number] * length, SamplingParams(max_tokens=1))
        for number, length in enumerate((9, 5, 1))
    ]
    drawn = {
        each.id: [torch.randn(len(each.tokens), heads, 8) for heads in (6, 2, 2)]
        for each in sequences
    }
    for each in sequences:
        scheduler.add(each)
    found = {each.id: torch.zeros(len(each.tokens), 6, 8) for each in sequences}
    while (step := scheduler.plan()).chunks:
        parts = [
            torch.cat([drawn[c.sequence.id][which][c.start : c.end] for c in step.chunks])
            for which in range(3)
        ]
        spans = spans_of(step, SIZE)
        answer = BatchedAttention(cache, spans, spans)(1, *parts)
        at = 0
        for chunk in step.chunks:
            found[chunk.sequence.id][chunk.start : chunk.end] = answer[at : at + chunk.count]
            at += chunk.count
        scheduler.commit(step, [0] * len(step.sampled))
    for each in sequences:
        queries, keys, values = (part.transpose(0, 1)[None] for part in drawn[each.id])
        wanted = F.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, enable_gqa=True
        )
        torch.testing.assert_close(found[each.id], wanted[0].transpose(0, 1))
    assert not cache.keys[0].any()

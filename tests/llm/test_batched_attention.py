"""All that compute one token at once, beside one sequence after the other."""

import random

import pytest

torch = pytest.importorskip("torch")

import tiny_llm as tiny  # noqa: E402

from penstock.llm.batched_attention import (  # noqa: E402
    SHORTEST,
    BatchedAttention,
    KvBucket,
    KvBuckets,
    row_length,
)
from penstock.llm.blocks import BlockPool  # noqa: E402
from penstock.llm.cache import Cache, spans_of  # noqa: E402
from penstock.llm.models.families import LLAMA  # noqa: E402
from penstock.llm.scheduler import BatchStep, Chunk, Scheduler, StepLimits  # noqa: E402
from penstock.llm.sequence import Sequence  # noqa: E402
from penstock.sampling_params import SamplingParams  # noqa: E402

SHAPE = LLAMA.shape_of_config(tiny.CONFIG)
SIZE = 4
HEADS = SHAPE.num_heads, SHAPE.num_kv_heads, SHAPE.num_kv_heads


def one_by_one(cache, step) -> BatchedAttention:
    spans = spans_of(step, SIZE)
    return BatchedAttention(cache, spans, spans)


class Pair:
    """The same steps on two caches."""

    def __init__(self, num_blocks, max_tokens=40, dtype=torch.float32):
        self.dtype = dtype
        self.caches = [Cache(SHAPE, num_blocks, SIZE, "cpu", dtype) for _ in range(2)]
        self.buckets = KvBuckets(self.caches[0])
        self.scheduler = Scheduler(BlockPool(num_blocks, SIZE), StepLimits(6, max_tokens, 400))
        self.num_mixed = self.num_compared = 0

    def step(self):
        step = self.scheduler.plan()
        if not step.chunks:
            return
        found = self.buckets.attention(step)
        wanted = one_by_one(self.caches[1], step)
        for layer in range(SHAPE.num_layers):
            parts = [torch.randn(step.num_tokens, each, SHAPE.head_size) for each in HEADS]
            parts = [each.to(self.dtype) for each in parts]
            answers = found(layer, *parts), wanted(layer, *parts)
            # BF16 has eight bits, of answers that are about one.
            rounding = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[self.dtype]
            torch.testing.assert_close(*answers, rtol=rounding, atol=rounding)
        assert all(torch.equal(*each) for each in self.kept())
        ones = sum(chunk.count == 1 for chunk in step.chunks)
        self.num_mixed += 0 < ones < len(step.chunks)
        self.num_compared += 1
        # Most drafts are right.
        drafts = [(*chunk.draft, -1)[before] for chunk, before in step.sampled]
        tokens = [
            draft if draft >= 0 and random.random() < 0.7 else random.randrange(50)
            for draft in drafts
        ]
        self.scheduler.commit(step, tokens)

    def kept(self):
        one, other = self.caches
        return (one.keys, other.keys), (one.values, other.values)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_blocks", [64, 96, 400])
def test_whatever_is_in_a_step_the_answers_are_the_plain_ones(num_blocks, dtype):
    """Prompts in chunks beside tokens, prefixes that are shared, sequences that come, end, grow out
    of their rows and give their blocks up; in the smallest cache rows are for few of them."""
    random.seed(num_blocks)
    torch.manual_seed(0)
    pair = Pair(num_blocks, dtype=dtype)
    prefixes = [[random.randrange(50) for _ in range(30)] for _ in range(2)]
    for number in range(14):
        prompt = random.choice(prefixes)[: random.randrange(31)]
        prompt += [random.randrange(50) for _ in range(random.randrange(1, 90))]
        pair.scheduler.add(
            Sequence(number, prompt, SamplingParams(max_tokens=random.randrange(1, 110)))
        )
        for _ in range(random.randrange(12)):
            pair.step()
    while pair.scheduler.running or pair.scheduler.waiting:
        pair.step()
    assert pair.num_mixed > 3 and pair.num_compared > 100
    assert pair.buckets.num_slots <= num_blocks * SIZE
    if num_blocks == 64:
        assert pair.scheduler.num_preemptions


def test_a_sequence_that_is_left_out_of_steps_is_looked_up_again():
    pair = Pair(64)
    for number in range(2):
        pair.scheduler.add(Sequence(number, [number + 1] * 5, SamplingParams(max_tokens=20)))
    for _ in range(3):
        pair.step()
    resting = pair.scheduler.running.pop()
    for _ in range(3):
        pair.step()
    pair.scheduler.running.append(resting)
    for _ in range(3):
        pair.step()
    assert resting.num_generated == 6


class SomeDrafts:
    """Drafts of up to four tokens, in half of the steps."""

    def length(self, sequence) -> int:
        return 0

    def draft(self, sequence, most: int) -> list[int]:
        return [9] * max(0, min(most, random.choice([0, 0, 2, 4])))


def test_drafted_tokens_that_were_kept_are_copied_to_the_row(monkeypatch):
    """Instead of all tokens, and those that were rejected are not."""
    random.seed(1)
    torch.manual_seed(0)
    pair = Pair(64)
    pair.scheduler.speculation = SomeDrafts()
    taken = []
    take = KvBucket.take
    monkeypatch.setattr(KvBucket, "take", lambda *args: taken.append(args[1].id) or take(*args))
    for number in range(3):
        pair.scheduler.add(Sequence(number, [number + 1] * 5, SamplingParams(max_tokens=70)))
    while pair.scheduler.running or pair.scheduler.waiting:
        pair.step()
    scheduler = pair.scheduler
    assert scheduler.num_drafted > scheduler.num_accepted > 20 and pair.num_mixed > 10
    # All tokens are in rows of one length.
    assert sorted(taken) == [0, 1, 2]


def one_token(sequence, start):
    return BatchStep([Chunk(sequence, start, 1, True, 0, [0, 1, 2, 3])])


@pytest.mark.parametrize("start", [7, 10, 11])
@pytest.mark.parametrize("is_other", [False, True])
def test_a_row_is_of_one_sequence_and_of_its_last_token(start, is_other):
    """Whoever has not computed the token before, or is another of the same number, is looked up in
    the cache, which has something else by then."""
    torch.manual_seed(0)
    buckets = KvBuckets(Cache(SHAPE, 64, SIZE, "cpu", torch.float32))
    sequence = Sequence(7, [3] * 16, SamplingParams(max_tokens=4))
    parts = [torch.randn(1, each, SHAPE.head_size) for each in HEADS]
    buckets.attention(one_token(sequence, 10))(0, *parts)
    for kept in (buckets.cache.keys, buckets.cache.values):
        kept.normal_()
    step = one_token(
        Sequence(7, [3] * 16, SamplingParams(max_tokens=4)) if is_other else sequence, start
    )
    found = buckets.attention(step)(0, *parts)
    wanted = one_by_one(buckets.cache, step)(0, *parts)
    # It goes on where it was, by what it has.
    is_next = start == 11 and not is_other
    assert torch.allclose(found, wanted, atol=1e-5) != is_next


def test_those_that_come_have_the_rows_of_those_that_went():
    pair = Pair(256)
    sizes = set()
    for number in range(6):
        pair.scheduler.add(Sequence(number, [number] * 8, SamplingParams(max_tokens=4)))
        while pair.scheduler.running or pair.scheduler.waiting:
            pair.step()
        sizes.add(pair.buckets.num_slots)
    assert sizes == {SHORTEST}


def test_rows_are_at_most_half_as_long_again():
    lengths = [row_length(number) for number in range(1, 5000)]
    assert lengths[0] == SHORTEST and lengths == sorted(lengths)
    assert all(number <= length for number, length in enumerate(lengths, 1))
    assert all(2 * n < 3 * num for num, n in enumerate(lengths, 1) if num > SHORTEST)


def test_a_row_has_nothing_of_who_had_it_before():
    """No number there would make none of all others."""
    cache = Cache(SHAPE, 8, SIZE, "cpu", torch.float32)
    bucket = KvBucket(cache, SHORTEST)
    bucket.grow(2)
    for part in (bucket.keys, bucket.values):
        part.fill_(float("nan"))
    place = bucket.take(
        Sequence(1, [1] * 7, SamplingParams(max_tokens=5)), 6, cache, torch.arange(6)
    )
    for part in (bucket.keys, bucket.values):
        assert torch.equal(part[:, place], torch.zeros_like(part[:, place]))

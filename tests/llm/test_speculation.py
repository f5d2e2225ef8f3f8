"""When tokens are drafted, and that drafts change nothing but the number of steps."""

import random

import pytest
from doubles import FakeClock
from msgspec.structs import replace

torch = pytest.importorskip("torch")

import tiny_llm as tiny  # noqa: E402
from fake_gpu import FakeGpu  # noqa: E402
from free_drafts import FreeDrafts  # noqa: E402

from penstock.llm.blocks import BlockPool  # noqa: E402
from penstock.llm.cache import Cache  # noqa: E402
from penstock.llm.cuda_runner import CudaRunner  # noqa: E402
from penstock.llm.engine import Engine  # noqa: E402
from penstock.llm.messages import GenerateRequest  # noqa: E402
from penstock.llm.models.decoder import Decoder  # noqa: E402
from penstock.llm.pace import StepTimeModel, StepWork, Targets  # noqa: E402
from penstock.llm.runner import CpuRunner  # noqa: E402
from penstock.llm.scheduler import Scheduler, StepLimits  # noqa: E402
from penstock.llm.sequence import Sequence  # noqa: E402
from penstock.llm.speculation import (  # noqa: E402
    MIN_MEASURED,
    PROBE_EVERY,
    PROBE_TOKENS,
    TYPICAL,
    DraftCost,
    Speculation,
    draft_length,
)
from penstock.sampling_params import Constraint, SamplingParams  # noqa: E402

SIZE = 4
FREE = DraftCost(0.0, 0.0)
GREEDY = SamplingParams(temperature=0.0)


class TestLength:
    @pytest.mark.parametrize(
        ("rate", "cost", "num_sequences", "expected"),
        [
            # Guesses that are always wrong never pay.
            (0.0, FREE, 1, 0),
            # Those that are right pay up to the limit.
            (1.0, TYPICAL, 1, 8),
            # 1.9 tokens in 1.15 times the time, 2.71 in 1.2, 3.44 in 1.25 and so on.
            (0.9, TYPICAL, 1, 8),
            # 1.5 / 1.15 = 1.30, 1.75 / 1.2 = 1.46, 1.875 / 1.25 = 1.5, 1.94 / 1.3 = 1.49.
            (0.5, TYPICAL, 1, 3),
            # 1.1 / 1.15 is less than nothing drafted.
            (0.1, TYPICAL, 1, 0),
            # Each drafted token costs as much as another step.
            (0.9, DraftCost(0.0, 1.0), 1, 0),
            # 17 tokens in 1.15 times the time of 16.
            (1.0, TYPICAL, 16, 0),
            # A GPU reads weights once for all of them: 24 tokens in 1.018 times the time.
            (1.0, DraftCost(0.01, 0.001), 16, 8),
            # Beside 199 others: 201.316 tokens in the time of 200, and 201.313 with eight.
            (0.7, DraftCost(0.002, 0.0003), 200, 7),
        ],
    )
    def test_is_where_most_tokens_come_in_the_same_time(self, rate, cost, num_sequences, expected):
        assert draft_length(rate, cost, num_sequences, 8) == expected

    def test_does_not_exceed_the_limit(self):
        assert [draft_length(1.0, FREE, 1, most) for most in (0, 1, 5)] == [0, 1, 5]


def measured(step_s: float, fixed_s: float, token_s: float) -> StepTimeModel:
    pace = StepTimeModel()
    for number in range(40):
        count = number % 4
        drafts_s = (fixed_s + count * token_s) if count else 0.0
        pace.add(StepWork(0, 1, 100 + number, int(count > 0), count), step_s + drafts_s)
    return pace


def repeating() -> Sequence:
    """All its guesses are right."""
    sequence = Sequence(1, [1, 2, 3, 4], SamplingParams(max_tokens=1000))
    sequence.tokens += [1, 2, 3, 4] * 20
    return sequence


def drafts(pace: StepTimeModel, num_sequences: int = 1, num_steps: int = 1) -> list[int]:
    """How many tokens are drafted for one of them, in each step."""
    speculation, sequence = Speculation(8, pace), repeating()
    found = []
    for _ in range(num_steps):
        speculation.begin_step(StepWork(0, num_sequences, 100 * num_sequences))
        found.append(len(speculation.draft(sequence, 100)))
    return found


class TestCost:
    def test_is_assumed_until_it_is_measured(self):
        assert drafts(StepTimeModel()) == [8]
        slow = StepTimeModel()
        for number in range(MIN_MEASURED - 1):
            slow.add(StepWork(0, 1, 100, 1, number + 1), 1.0)
        assert drafts(slow) == [8]

    def test_that_is_low_lets_sequences_draft(self):
        assert drafts(measured(0.1, 0.005, 0.002)) == [8]

    def test_that_is_high_does_not(self):
        assert drafts(measured(0.1, 0.05, 0.12)) == [0]

    def test_is_measured_again_now_and_then(self):
        """It may have been measured while the machine did something else."""
        found = drafts(measured(0.1, 0.05, 0.12), num_steps=2 * PROBE_EVERY + 1)
        assert [n for n, count in enumerate(found) if count] == [
            PROBE_EVERY - 1,
            2 * PROBE_EVERY - 1,
        ]
        assert set(found) == {0, PROBE_TOKENS}

    def test_is_not_measured_with_guesses_that_are_wrong(self):
        speculation, sequence = Speculation(8, measured(0.1, 0.05, 0.12)), repeating()
        speculation.length(sequence)
        for _ in range(2 * PROBE_EVERY):
            speculation.begin_step(StepWork(0, 1, 100))
            if sequence.history is not None:
                sequence.history.rate = 0.4
            assert speculation.draft(sequence, 100) == []

    def test_of_many_sequences_is_that_of_all(self):
        """Nine more tokens of one sequence do not pay for a longer step of sixteen."""
        assert drafts(measured(0.1, 0.005, 0.01), num_sequences=16) == [0]


@pytest.mark.parametrize(
    ("target_s", "num_sequences", "expected"),
    [(0.15, 2, 8), (0.13, 2, 0), (0.13, 1, 8), (None, 2, 8)],
)
def test_the_promised_time_per_token_of_others_is_kept(target_s, num_sequences, expected):
    """100 ms, and 5 ms and 8 times 2 ms for each of two."""
    pace = measured(0.1, 0.005, 0.002)
    pace.targets = Targets(tpot_s=target_s)
    assert drafts(pace, num_sequences) == [expected]


def test_sequences_with_a_grammar_do_not_draft():
    sequence = repeating()
    sequence.params = replace(sequence.params, constraint=Constraint("regex", "a*"))
    speculation = Speculation(8, StepTimeModel())
    speculation.begin_step(StepWork(0, 1, 100))
    assert speculation.draft(sequence, 100) == []


# Engines.


def an_engine(decoder: Decoder, kind: str, max_drafted: int, num_blocks=64) -> Engine:
    limits = StepLimits(max_sequences=4, max_tokens=24, max_length=128)
    cache = Cache(decoder.shape, num_blocks, SIZE, "cpu", decoder.dtype, is_exact=kind == "exact")
    pace, speculation = StepTimeModel(), None
    if max_drafted:
        speculation = FreeDrafts(max_drafted, pace)
    scheduler = Scheduler(BlockPool(num_blocks, SIZE), limits, speculation=speculation)
    if kind in ("cpu", "exact"):
        return Engine(scheduler, CpuRunner(decoder, cache), pace, FakeClock())
    runner = CudaRunner(decoder, cache, FakeGpu(), limits, has_graphs=kind == "graphs")
    runner.prepare()
    return Engine(scheduler, runner, pace, FakeClock(), num_ahead=runner.num_ahead)


def all_of(engine: Engine, requests):
    """Tokens, logprobs and the reasons of each sequence. Requests come one after the other."""
    due, found = list(requests), {}
    while due or not engine.is_idle:
        if due:
            engine.add(due.pop(0))
        for event in engine.step():
            told = found.setdefault((event.request, event.index), ([], [], []))
            for part, value in zip(told, (event.token, event.logprobs, event.reason), strict=True):
                part.append(value)
    pool = engine.scheduler.pool
    assert pool.num_free == pool.num_blocks
    for _, _, reasons in found.values():
        assert reasons[-1] and not any(reasons[:-1])
    return found


def prompt_of(number: int) -> list[int]:
    chance = random.Random(number)
    part = [chance.randrange(50) for _ in range(4)]
    return [*part, *part, chance.randrange(50), *part[: 1 + number % 3]]


@pytest.mark.parametrize("kind", ["cpu", "exact", "graphs", "eager"])
@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        replace(GREEDY, n=2, seed=3, temperature=0.3),
        SamplingParams(temperature=0.2, seed=1, top_p=0.9),
        SamplingParams(temperature=0.4, seed=1, top_k=4, min_p=0.01),
        replace(GREEDY, num_logprobs=2),
        replace(GREEDY, logit_bias={7: 2.0}, min_tokens=9, stop_token_ids=frozenset(range(30))),
        replace(GREEDY, presence_penalty=0.05, frequency_penalty=0.01, repetition_penalty=1.01),
        replace(GREEDY, stop_token_ids=frozenset({3, 17, 31, 42})),
    ],
    ids=["greedy", "n", "top_p", "top_k", "logprobs", "held", "penalties", "stops"],
)
def test_drafts_change_no_token(tmp_path, kind, params):
    """Beside others, and with blocks that do not suffice for all."""
    decoder = tiny.decoder_of(tmp_path, tiny.CONFIG)
    requests = [
        GenerateRequest(n, prompt_of(n), replace(params, max_tokens=30 + n % 3)) for n in range(6)
    ]
    plain = an_engine(decoder, kind, 0, num_blocks=26)
    wanted = all_of(plain, requests)
    drafting = an_engine(decoder, kind, 5, num_blocks=26)
    found = all_of(drafting, requests)
    scheduler = drafting.scheduler
    assert scheduler.num_accepted > 0 and scheduler.num_drafted > scheduler.num_accepted
    assert {key: (told[0], told[2]) for key, told in found.items()} == {
        key: (told[0], told[2]) for key, told in wanted.items()
    }
    for key, (_, logprobs, _) in found.items():
        for one, other in zip(logprobs, wanted[key][1], strict=True):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
                assert one.top_tokens == other.top_tokens


@pytest.mark.parametrize("kind", ["cpu", "graphs"])
def test_fewer_steps_are_taken(tmp_path, kind):
    decoder = tiny.decoder_of(tmp_path, tiny.CONFIG)
    request = GenerateRequest(1, [5, 6, 7] * 3, replace(GREEDY, max_tokens=60))
    num_steps = []
    for max_drafted in (0, 5):
        engine = an_engine(decoder, kind, max_drafted)
        all_of(engine, [request])
        num_steps.append(engine.pace.num_steps)
    assert num_steps[1] < 0.6 * num_steps[0]


@pytest.mark.parametrize("kind", ["cpu", "graphs"])
def test_rejected_tokens_are_in_no_cached_block(tmp_path, kind):
    """Who continues a text that was drafted finds its blocks, and generates what it would have
    alone."""
    decoder = tiny.decoder_of(tmp_path, tiny.CONFIG)
    engine = an_engine(decoder, kind, 5)
    first = all_of(engine, [GenerateRequest(1, prompt_of(1), replace(GREEDY, max_tokens=40))])
    assert engine.scheduler.num_drafted > engine.scheduler.num_accepted > 0
    longer = [*prompt_of(1), *first[1, 0][0], 9]
    second = all_of(engine, [GenerateRequest(2, longer, replace(GREEDY, max_tokens=20))])
    assert engine.scheduler.pool.num_found >= len(longer) // SIZE * SIZE - SIZE
    assert second[2, 0][0] == tiny.continued_alone(decoder, longer, 20)


@pytest.mark.parametrize("kind", ["cpu", "graphs"])
def test_who_leaves_while_drafts_are_computed_disturbs_nobody(tmp_path, kind):
    decoder = tiny.decoder_of(tmp_path, tiny.CONFIG)
    engine = an_engine(decoder, kind, 5)
    for number in (1, 2):
        engine.add(GenerateRequest(number, [5, 6, 7] * 3, replace(GREEDY, max_tokens=50)))
    tokens: list[int] = []
    has_left = False
    while not engine.is_idle:
        tokens += [event.token for event in engine.step() if event.request == 2]
        if not has_left and engine.scheduler.num_accepted > 5:
            engine.give_up(1)
            has_left = True
    assert has_left and tokens == tiny.continued_alone(decoder, [5, 6, 7] * 3, 50)
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks


def test_sampled_tokens_are_distributed_as_without_drafts(tmp_path):
    """Of many seeds, each token is drafted with a fixed guess: the share of accepted ones is its
    probability, and others come as often as the model says."""
    decoder = tiny.decoder_of(tmp_path, tiny.CONFIG)
    prompt = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7]
    params = SamplingParams(temperature=0.7, max_tokens=3)
    counts = []
    for max_drafted in (0, 2):
        engine = an_engine(decoder, "cpu", max_drafted)
        counted: dict[tuple[int, ...], int] = {}
        for seed in range(300):
            request = GenerateRequest(seed, prompt, replace(params, seed=seed))
            tokens = tuple(all_of(engine, [request])[seed, 0][0])
            counted[tokens] = counted.get(tokens, 0) + 1
        counts.append(counted)
        assert bool(engine.scheduler.num_drafted) == bool(max_drafted)
    # Not only as often: the same seed samples the same tokens.
    assert counts[0] == counts[1] and len(counts[0]) > 30

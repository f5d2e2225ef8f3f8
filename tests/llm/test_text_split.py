"""What is counted of the texts of a rollout, and what is mirrored."""

import asyncio
import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest

pytest.importorskip("torch")

from doubles import FakeClock, settle

from penstock.config import LLM, BatchPolicy, ModelConfig
from penstock.errors import BackendFailed, InvalidRequest, NotReady, Overloaded, PenstockError
from penstock.llm import text_split
from penstock.llm.generation import Generation, SequenceOutput
from penstock.llm.messages import GenerateRequest, Logprobs, TokenEvent, pack_tokens
from penstock.llm.text_split import SCORE, max_distance
from penstock.llm.token_bytes import Vocabulary
from penstock.sampling_params import SamplingParams
from penstock.serving.metrics import ModelMetrics
from penstock.serving.split_counts import LATENCY, LENGTH, TOKENS, TPOT, TTFT
from penstock.serving.traffic_split import TrafficSplit
from penstock.wire.frames import SplitRule

CONFIG = ModelConfig(
    name="m",
    version="1",
    backend=LLM,
    artifact="",
    inputs=(),
    outputs=(),
    max_batch_size=0,
    batching=BatchPolicy(0),
)
LIMITS = ((TTFT, 0.1), (TPOT, 0.01), (LATENCY, 1.0))
RULE = SplitRule(7, "canary", "2", header="Penstock-Version", limits=LIMITS, max_kl=0.02)
ALL = {"mirrored_per_s": 1e6}
IDS = itertools.count()


class Version:
    """Generates `num_tokens` at once: the first after `first_s`, the others `token_s` apart. Scores
    each token of a prompt with `logprob`."""

    def __init__(self, version: str, clock: FakeClock) -> None:
        self.config = replace(CONFIG, version=version)
        self.metrics = ModelMetrics("m", version)
        self.vocabulary = Vocabulary(b"ab", b"\1\0\0\0\2\0\0\0")
        self.is_ready = True
        self.num_waiting = 0
        self.max_length = 100
        self.num_tokens, self.first_s, self.token_s = 5, 0.05, 0.002
        self.logprob = -1.0
        self.error: PenstockError | None = None
        self.requests: list[Generation] = []
        self._clock = clock

    def new_generation(self, tokens, params, sink) -> Generation:
        if len(tokens) + (params.max_tokens or 1) > self.max_length:
            raise InvalidRequest("too long")
        return Generation(GenerateRequest(next(IDS), pack_tokens(tokens), params), sink)

    def submit(self, generation: Generation) -> None:
        self.requests.append(generation)
        if self.error is not None:
            generation.sink.failed(self.error)
            return
        params, count = generation.request.params, generation.num_prompt
        generation.outputs = [SequenceOutput(None, None) for _ in range(params.n)]
        if params.num_prompt_logprobs is not None:
            generation.prompt_logprobs = [None, *[Logprobs(self.logprob)] * (count - 1)]
        for number in range(params.max_tokens or self.num_tokens):
            self._clock.advance(self.token_s if number else self.first_s)
            generation.last_at = self._clock()
            generation.first_at = generation.first_at or self._clock()
            for index, output in enumerate(generation.outputs):
                output.num_tokens += 1
                generation.sink.token(TokenEvent(0, index, 50 + number, "", 0))
        generation.sink.finished(generation.totals)

    @property
    def scored(self) -> list[list[int]]:
        scored = [each.request for each in self.requests if is_score(each)]
        return [list(each.tokens) for each in scored]


def is_score(generation: Generation) -> bool:
    return generation.request.params.num_prompt_logprobs is not None


class Sink:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.totals = self.error = None

    def token(self, event: TokenEvent) -> None:
        self.tokens.append(event.token)

    def finished(self, totals) -> None:
        self.totals = totals

    def failed(self, error: PenstockError) -> None:
        self.error = error


class Stage:
    def __init__(self, **changes: object) -> None:
        self.clock = FakeClock()
        self.stable, self.candidate = Version("1", self.clock), Version("2", self.clock)
        fields = {name: getattr(RULE, name) for name in RULE.__struct_fields__}
        rule = SplitRule(**fields | changes)
        self.split = TrafficSplit(rule, self.stable, self.candidate, self.clock)
        self.counts = self.split.counts

    def send(self, to: Version | None = None, prompt=(7, 8, 9), **params: object) -> Generation:
        model, sink = to or self.stable, Sink()
        generation = model.new_generation(prompt, SamplingParams(**params), sink)
        generation.arrived = self.clock()
        text_split.watch(self.split, model, generation)
        self.inner = sink
        model.submit(generation)
        return generation


def run(scenario: Callable[[], object]) -> None:
    asyncio.run(scenario())


def test_both_versions_are_counted_apart():
    stage = Stage()
    for _ in range(3):
        stage.send()
    stage.candidate.first_s, stage.candidate.token_s = 0.3, 0.02
    stage.candidate.num_tokens = 8
    stage.send(stage.candidate)
    stable, candidate = stage.counts.stable, stage.counts.candidate
    assert [stable.count(each) for each in (LATENCY, TTFT, TPOT, LENGTH)] == [3] * 4
    assert (stable.late, candidate.late) == ([0, 0, 0], [1, 1, 0])
    assert candidate.totals[TTFT] == pytest.approx(0.3)
    assert candidate.totals[TPOT] == pytest.approx(0.02)
    assert candidate.totals[LATENCY] == pytest.approx(0.3 + 7 * 0.02)
    assert candidate.totals[LENGTH] == 8
    assert stage.inner.tokens == list(range(50, 58)) and stage.inner.totals.num_generated == 8


def test_one_token_has_no_time_between_tokens():
    stage = Stage()
    stage.send(max_tokens=1)
    assert stage.counts.stable.count(TTFT) == 1 and stage.counts.stable.count(TPOT) == 0


def test_a_request_of_several_texts_counts_once_and_with_each_length():
    stage = Stage()
    stage.send(n=3)
    side = stage.counts.stable
    assert (side.count(TTFT), side.count(TPOT), side.num_requests) == (1, 1, 1)
    assert side.histograms[LENGTH][TOKENS.index(5)] == 3


@pytest.mark.parametrize(
    ("error", "failed", "late"),
    [
        (BackendFailed("x"), 1, []),
        (NotReady("x"), 1, []),
        (Overloaded("x"), 0, [1, 0, 1]),
        (InvalidRequest("x"), 0, []),
    ],
)
def test_failures_and_refusals_are_told_apart_from_faults_of_clients(error, failed, late):
    stage = Stage()
    stage.candidate.error = error
    stage.send(stage.candidate)
    # As one that the renderer has refused.
    text_split.note_refusal(stage.split, stage.candidate, error, stage.clock())
    side = stage.counts.candidate
    assert stage.inner.error is error
    assert (side.num_failed, side.late) == (2 * failed, [2 * each for each in late])
    assert stage.counts.stable.num_requests == 0


@pytest.mark.parametrize(
    ("waited_s", "late"), [(0.05, []), (0.5, [1, 0, 0]), (1.5, [1, 0, 1])], ids=str
)
def test_a_client_that_leaves_is_counted_only_if_it_was_late(waited_s: float, late: list[int]):
    stage = Stage()
    generation = stage.stable.new_generation([1], SamplingParams(), Sink())
    generation.arrived = stage.clock()
    text_split.watch(stage.split, stage.candidate, generation)
    stage.clock.advance(waited_s)
    generation.on_cancel()
    assert stage.counts.candidate.late == late


def test_both_versions_score_the_answer_once_the_client_has_it():
    async def scenario():
        stage = Stage(**ALL)
        for model in (stage.stable, stage.candidate):
            stage.send(model, cache_salt="s")
            assert stage.inner.totals is not None
            assert not any(map(is_score, stage.candidate.requests[-1:]))
            await settle()
        answer = [7, 8, 9, *range(50, 55)]
        assert stage.stable.scored == stage.candidate.scored == [answer] * 2
        score = stage.candidate.requests[-1]
        assert score.is_mirror and score.request.params.priority == text_split.LAST
        assert score.request.params.cache_salt == "s"
        counts = stage.counts
        assert (counts.num_mirrored, counts.num_compared, counts.num_disagreeing) == (2, 2, 0)
        assert counts.outputs[SCORE].num_rows == 2
        # Scores are no requests.
        assert (counts.stable.num_requests, counts.candidate.num_requests) == (1, 1)

    run(scenario)


@pytest.mark.parametrize(
    ("logprob", "wrong"), [(-1.1, 0), (-1.8, 1), (-0.2, 1), (-math.inf, 1), (math.nan, 1)]
)
def test_a_text_disagrees_if_its_likelihood_differs_much(logprob: float, wrong: int):
    async def scenario():
        stage = Stage(**ALL)
        stage.candidate.logprob = logprob
        stage.send()
        await settle()
        counts = stage.counts
        assert (counts.num_compared, counts.num_disagreeing) == (1, wrong)
        assert math.isfinite(counts.outputs[SCORE].distance)

    run(scenario)


def test_short_texts_may_differ_by_more_than_long_ones():
    assert max_distance(1, 0.02) == pytest.approx(0.1 + 0.6)
    assert max_distance(100, 0.02) == pytest.approx(0.1 + 0.06)
    assert max_distance(100, 0.05) > max_distance(100, 0.02)


def test_scores_that_fail():
    async def scenario():
        stage = Stage(**ALL)

        async def send(stable=None, candidate=None):
            stage.send()
            stage.stable.error, stage.candidate.error = stable, candidate
            await settle()
            stage.stable.error = stage.candidate.error = None
            return stage.counts.num_disagreeing, stage.counts.num_dropped

        assert await send(candidate=BackendFailed("no")) == (1, 0)
        assert await send(candidate=Overloaded("busy")) == (1, 1)
        assert await send(stable=BackendFailed("no")) == (1, 2)
        assert await send(stable=BackendFailed("no"), candidate=BackendFailed("no")) == (1, 3)
        # None is in flight any more.
        for _ in range(6):
            assert await send() == (1, 3)
        assert stage.counts.num_mirrored == 7

    run(scenario)


def test_mirrors_wait_for_nobody():
    async def scenario():
        stage = Stage(**ALL)
        stage.candidate.num_waiting = 1
        stage.send()
        await settle()
        stage.candidate.num_waiting, stage.candidate.is_ready = 0, False
        stage.send()
        await settle()
        assert (stage.counts.num_dropped, stage.candidate.requests) == (2, [])

    run(scenario)


def test_few_are_mirrored():
    async def scenario():
        stage = Stage(mirrored_per_s=2.0)
        for _ in range(200):
            stage.send()
            await settle(2)
        took_s = stage.clock()
        assert 1 <= stage.counts.num_mirrored <= 2 * took_s + 1
        assert stage.counts.stable.num_requests == 200

    run(scenario)


def test_long_answers_are_cut_and_long_prompts_not_scored():
    async def scenario():
        stage = Stage(**ALL)
        stage.send(prompt=range(96))
        await settle()
        assert stage.candidate.scored == [[*range(96), 50, 51, 52]]
        stage.send(prompt=range(99))
        await settle()
        assert (stage.counts.num_compared, stage.counts.num_dropped) == (1, 1)

    run(scenario)


def test_a_shadow_runs_copies_of_prompts_and_answers_nothing():
    async def scenario():
        stage = Stage(mode="shadow", **ALL)
        stage.candidate.first_s = 0.3
        stage.candidate.num_tokens = 9
        assert stage.split.pick({b"penstock-version": b"candidate"}) is stage.stable
        stage.send(temperature=0.7, seed=5, n=2)
        await settle()
        assert stage.inner.tokens == [50, 50, 51, 51, 52, 52, 53, 53, 54, 54]
        copy = stage.candidate.requests[0]
        params = copy.request.params
        assert copy.is_mirror and list(copy.request.tokens) == [7, 8, 9]
        assert (params.temperature, params.seed, params.n) == (0.7, 5, 2)
        counts = stage.counts
        assert (counts.candidate.count(TTFT), counts.candidate.late) == (1, [1, 0, 0])
        assert counts.candidate.totals[LENGTH] == 18
        assert (counts.stable.num_requests, counts.stable.late) == (1, [0, 0, 0])
        # What is compared is the client's answer.
        assert stage.stable.scored == stage.candidate.scored == [[7, 8, 9, *range(50, 55)]]
        assert (counts.num_mirrored, counts.num_compared) == (1, 1)

    run(scenario)


@pytest.mark.parametrize(("error", "failed"), [(BackendFailed("no"), 1), (Overloaded("busy"), 0)])
def test_copies_that_fail(error: PenstockError, failed: int):
    async def scenario():
        stage = Stage(mode="shadow", **ALL)
        stage.candidate.error = error
        for _ in range(6):
            stage.send()
            await settle()
        counts = stage.counts
        assert (counts.candidate.num_failed, counts.candidate.count()) == (6 * failed, 0)
        assert (counts.num_dropped, counts.num_mirrored) == (6, 0)
        assert stage.inner.error is None

    run(scenario)


def test_versions_must_read_texts_alike():
    stage = Stage()
    text_split.check_alike(stage.stable, stage.candidate)
    stage.candidate.max_length = 50
    with pytest.raises(InvalidRequest, match="the context is 50 tokens instead of 100"):
        text_split.check_alike(stage.stable, stage.candidate)
    stage.candidate.vocabulary = Vocabulary(b"ba", b"\1\0\0\0\2\0\0\0")
    with pytest.raises(InvalidRequest, match="versions 1 and 2 cannot share .* tokens differ"):
        text_split.check_alike(stage.stable, stage.candidate)

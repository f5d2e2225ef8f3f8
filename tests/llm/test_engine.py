"""The loop of generation, with a runner that computes nothing and a clock that is told."""

from dataclasses import dataclass, field

import pytest
from doubles import FakeClock
from example_counts import at_most
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InvalidRequest, Overloaded
from penstock.llm.blocks import BlockPool
from penstock.llm.engine import Engine
from penstock.llm.messages import GenerateRequest
from penstock.llm.pace import StepTimeModel, StepWork, Targets
from penstock.llm.scheduler import Scheduler, StepLimits
from penstock.llm.ttft_admission import PROBE_EVERY
from penstock.sampling_params import SamplingParams

SIZE = 4


@dataclass
class Ran:
    tokens: list[int]
    prompt_logprobs: tuple = ()

    @property
    def logprobs(self):
        return [None] * len(self.tokens)


@dataclass
class FakeRunner:
    """The next token is the number of those before it, and the seed in hundreds."""

    clock: FakeClock
    step_s: float = 0.01
    seen: list[int] = field(default_factory=list)

    def run(self, step):
        self.seen.append(step.num_tokens)
        self.clock.advance(self.step_s)
        return Ran(
            [
                chunk.end + 100 * (chunk.sequence.params.seed or 0)
                for chunk in step.chunks
                if chunk.is_sampled
            ]
        )


def an_engine(targets=None, num_blocks=64, max_waiting=1024) -> Engine:
    clock = FakeClock()
    scheduler = Scheduler(BlockPool(num_blocks, SIZE), StepLimits(8, 16, 64))
    pace = StepTimeModel(targets or Targets())
    return Engine(scheduler, FakeRunner(clock), pace, clock, max_waiting)


def asked(number=1, prompt=(1, 2, 3), max_tokens=3, **options) -> GenerateRequest:
    places = {name: options.pop(name) for name in ("leader", "num_following") if name in options}
    params = SamplingParams(max_tokens=max_tokens, **options)
    return GenerateRequest(number, prompt, params, **places)


def all_of(engine: Engine) -> dict[tuple[int, int], list[int]]:
    found: dict[tuple[int, int], list[int]] = {}
    while not engine.is_idle:
        for piece in engine.step():
            found.setdefault((piece.request, piece.index), []).append(piece.token)
    return found


def is_clean(engine: Engine) -> bool:
    pool = engine.scheduler.pool
    return engine.is_idle and pool.num_free == pool.num_blocks and engine.step() == []


def test_a_request_gets_its_tokens_and_the_reason_of_the_last():
    engine = an_engine()
    engine.add(asked())
    pieces = [piece for _ in range(4) for piece in engine.step()]
    assert [(piece.token, piece.reason) for piece in pieces] == [(3, ""), (4, ""), (5, "length")]
    assert is_clean(engine)


def test_several_continuations_draw_differently():
    engine = an_engine()
    engine.add(asked(n=3, seed=5))
    found = all_of(engine)
    assert found == {(1, 0): [503, 504, 505], (1, 1): [603, 604, 605], (1, 2): [703, 704, 705]}
    assert is_clean(engine)


def test_requests_run_together():
    engine = an_engine()
    engine.add(asked(1))
    engine.add(asked(2, prompt=(9,)))
    engine.step()
    assert engine.runner.seen == [4]
    all_of(engine)
    assert is_clean(engine)


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_one_that_is_given_up_is_gone_at_once(num_steps):
    engine = an_engine()
    engine.add(asked(1, n=2, max_tokens=30))
    engine.add(asked(2))
    for _ in range(num_steps):
        engine.step()
    engine.give_up(1)
    engine.give_up(1)
    assert all(piece.request == 2 for _ in range(6) for piece in engine.step())
    assert is_clean(engine)


def test_a_text_ends_one_of_several():
    engine = an_engine()
    engine.add(asked(n=2, max_tokens=6))
    for _ in range(4):
        engine.step()
    engine.end(1, 0)
    engine.end(1, 0)
    assert {piece.index for _ in range(8) for piece in engine.step()} == {1}
    engine.end(1, 1)
    assert is_clean(engine)


def test_a_step_that_fails_ends_all():
    engine = an_engine()
    engine.add(asked(1, n=2))
    engine.add(asked(2))
    engine.step()
    assert engine.fail() == [1, 2]
    assert is_clean(engine)


class TestRefusals:
    def test_what_could_never_run(self):
        engine = an_engine()
        with pytest.raises(
            InvalidRequest, match="60 tokens and 10 are asked for; expected at most 64"
        ):
            engine.add(asked(prompt=range(60), max_tokens=10))
        with pytest.raises(InvalidRequest, match="n is 17; expected at most 16"):
            engine.add(asked(n=17))
        with pytest.raises(InvalidRequest, match="0 tokens are asked for; expected at least 1"):
            engine.add(asked(max_tokens=0))
        assert is_clean(engine)

    def test_a_queue_that_is_full(self):
        engine = an_engine(max_waiting=2)
        engine.add(asked(1))
        engine.add(asked(2))
        with pytest.raises(Overloaded, match="2 requests wait already"):
            engine.add(asked(3))
        engine.step()
        engine.add(asked(3))
        all_of(engine)
        assert is_clean(engine)

    def test_a_first_token_that_would_come_too_late(self):
        engine = an_engine(Targets(ttft_s=0.5))
        for number in range(1, 40):
            engine.pace.add(StepWork(number * 10, 0), 0.01 + number * 0.1)
        engine.add(asked(1, prompt=range(40)))
        text = r"the first token would come after 0\.\d+ s"
        with pytest.raises(Overloaded, match=text) as caught:
            engine.add(asked(2, prompt=range(40)))
        assert caught.value.reason == "predicted_late" and 0 < caught.value.retry_after_s < 1
        engine.give_up(1)
        assert is_clean(engine)

    def test_a_prompt_that_is_too_slow_even_alone(self):
        """Whatever the load: to ask again would not help."""
        engine = an_engine(Targets(ttft_s=0.5))
        for number in range(1, 40):
            engine.pace.add(StepWork(number * 10, 0), 0.01 + number * 0.1)
        engine.add(asked(1, prompt=range(40)))
        engine.give_up(1)
        text = r"60 tokens takes 0\.61 s until its first token, also on an idle server"
        with pytest.raises(InvalidRequest, match=text):
            engine.add(asked(2, prompt=range(60), max_tokens=1))
        # Some are let pass, so that a faster machine is noticed.
        num_refused = 0
        for number in range(2 * PROBE_EVERY):
            try:
                engine.add(asked(number, prompt=range(60), max_tokens=1, cache_salt="x"))
                engine.give_up(number)
            except InvalidRequest:
                num_refused += 1
        assert num_refused == 2 * PROBE_EVERY - 2
        assert is_clean(engine)

    def test_what_is_cached_takes_no_time(self):
        engine = an_engine(Targets(ttft_s=0.5))
        engine.add(asked(1, prompt=range(60), max_tokens=1))
        all_of(engine)
        for number in range(1, 6000):
            engine.pace.add(StepWork(number % 40 * 10, 0), 0.01 + number % 40 * 0.1)
        with pytest.raises(InvalidRequest, match="also on an idle server"):
            engine.add(asked(2, prompt=range(60), max_tokens=1, cache_salt="other"))
        engine.add(asked(3, prompt=range(60), max_tokens=1))
        engine.give_up(3)

    def test_a_short_prompt_is_not_late_behind_a_long_one(self):
        """0.3 s of a long prompt are left; the two share each step."""
        found = []
        for is_shared in (False, True):
            engine = an_engine(Targets(ttft_s=0.35))
            engine.scheduler.shares_prompts = is_shared
            engine.scheduler.limits = StepLimits(8, 32, 64)
            for number in range(1, 40):
                engine.pace.add(StepWork(number * 10, 0), 0.01 + number * 0.1)
            engine.add(asked(1, prompt=range(30), max_tokens=1))
            try:
                engine.add(asked(2, prompt=range(5), max_tokens=1))
                found.append("admitted")
            except Overloaded:
                found.append("refused")
            assert all_of(engine)
        assert found == ["refused", "admitted"]


class TestSeveralPrompts:
    """Of one request, judged as one. A prompt of 10 takes 0.11 s, and each more of 10 0.1 s."""

    def engine(self, ttft_s) -> Engine:
        engine = an_engine(Targets(ttft_s=ttft_s))
        engine.scheduler.limits = StepLimits(4, 16, 2000)
        engine.scheduler.pool = BlockPool(4000, SIZE)
        for number in range(1, 40):
            engine.pace.add(StepWork(number * 10, 0), 0.01 + number * 0.1)
        return engine

    def together(self, count, begin=1, size=10):
        first = asked(begin, prompt=range(size), num_following=(count - 1) * size)
        others = range(begin + 1, begin + count)
        return [first, *(asked(each, prompt=range(size), leader=begin) for each in others)]

    def test_those_who_are_alone_are_not_late_for_each_other(self):
        """There are not even places for all of them."""
        engine = self.engine(ttft_s=0.25)
        for each in self.together(20):
            engine.add(each)
        assert {request for request, _ in all_of(engine)} == set(range(1, 21))
        # Those of different requests are.
        engine = self.engine(ttft_s=0.25)
        engine.add(asked(31, prompt=range(10)))
        engine.add(asked(32, prompt=range(10)))
        with pytest.raises(Overloaded):
            engine.add(asked(33, prompt=range(10)))

    def test_the_others_follow_the_first_even_if_it_has_ended(self):
        engine = self.engine(ttft_s=0.25)
        first, *others = self.together(4)
        engine.add(first)
        engine.give_up(1)
        engine.add(asked(50, prompt=range(10)))
        for each in others:
            engine.add(each)
        assert {request for request, _ in all_of(engine)} == {2, 3, 4, 50}

    def test_behind_others_all_of_them_count(self):
        engine = self.engine(ttft_s=0.55)
        engine.add(asked(50, prompt=range(10)))
        with pytest.raises(Overloaded, match=r"after 0\.6"):
            engine.add(self.together(5)[0])
        # None comes without the first.
        for each in self.together(5)[1:]:
            with pytest.raises(Overloaded, match=r"after 0\.6"):
                engine.add(each)
        for each in self.together(4, begin=11):
            engine.add(each)
        all_of(engine)
        assert is_clean(engine)


def test_steps_hold_as_many_tokens_of_prompts_as_the_promise_allows():
    engine = an_engine(Targets(tpot_s=0.05))
    for number in range(1, 40):
        engine.pace.add(StepWork(number * 10, number % 7), 0.01 + number * 0.1)
    engine.add(asked(1, max_tokens=20))
    engine.step()
    engine.add(asked(2, prompt=range(40)))
    engine.step()
    # 16 are the least that somebody who waits gets; the step's own limit is 16 with the other's.
    assert engine.runner.seen[-1] == 16


@dataclass
class Late:
    """A step on a device that only gets to it when it must."""

    runner: "LateRunner"
    step: object
    found: list[int] | None = None
    prompt_logprobs: tuple = ()

    @property
    def tokens(self):
        self.runner.catch_up(self)
        return self.found

    @property
    def logprobs(self):
        return [None] * len(self.tokens)


@dataclass
class LateRunner:
    """The next token depends on all before it, which are taken from what the device has."""

    most: int
    under_way: list[Late] = field(default_factory=list)
    known: dict[int, list[int]] = field(default_factory=dict)

    def run(self, step):
        for chunk in step.chunks:
            # Penalties are for all tokens before.
            is_known = chunk.end <= len(chunk.sequence.tokens)
            assert is_known or not chunk.sequence.params.has_penalties
        self.under_way.append(Late(self, step))
        assert len(self.under_way) <= self.most + 1
        return self.under_way[-1]

    def catch_up(self, wanted: Late) -> None:
        while wanted.found is None:
            first = self.under_way.pop(0)
            first.found = []
            for chunk in first.step.chunks:
                sequence = chunk.sequence
                tokens = self.known.setdefault(sequence.id, list(sequence.tokens))
                assert tokens[: len(sequence.tokens)] == sequence.tokens[: len(tokens)]
                if chunk.is_sampled:
                    del tokens[chunk.end :]
                    tokens.append(sum(tokens) * 7 % 11 + len(tokens) % 3)
                    first.found.append(tokens[-1])


def late_engine(num_ahead, num_blocks=12) -> Engine:
    scheduler = Scheduler(BlockPool(num_blocks, SIZE), StepLimits(4, 8, 64))
    return Engine(
        scheduler, LateRunner(num_ahead), StepTimeModel(), FakeClock(), num_ahead=num_ahead
    )


prompts = st.lists(st.integers(0, 3), min_size=1, max_size=9)
requests = st.tuples(prompts, st.integers(1, 20), st.integers(0, 14), st.booleans())


@settings(max_examples=at_most(200))
@given(st.lists(requests, min_size=1, max_size=7), st.integers(1, 2), st.integers(0, 12))
def test_law_steps_that_are_begun_early_bring_the_same_tokens(wishes, num_ahead, stop):
    """However many stop by a token, have penalties, or are given up."""
    found = []
    for ahead in (0, num_ahead):
        engine = late_engine(ahead)
        given_up, tokens = set(), {}
        due = sorted(enumerate(wishes), key=lambda each: each[1][2])
        for now in range(600):
            while due and due[0][1][2] <= now:
                number, (prompt, most, _, has_penalty) = due.pop(0)
                params = SamplingParams(
                    max_tokens=most,
                    stop_token_ids=frozenset({stop}),
                    presence_penalty=0.5 if has_penalty else 0.0,
                )
                engine.add(GenerateRequest(number, prompt, params))
            if now == 9 and not due:
                engine.give_up(0)
                given_up.add(0)
            for piece in engine.step():
                assert piece.request not in given_up
                tokens.setdefault(piece.request, []).append(piece.token)
            if not due and engine.is_idle:
                break
        assert is_clean(engine)
        found.append(tokens)
    for number in range(len(wishes)):
        one, other = (each.get(number, []) for each in found)
        if number == 0:
            one, other = one[: len(other)], other[: len(one)]
        assert one == other


def test_a_step_that_fails_ends_those_under_way_too():
    engine = late_engine(1)
    engine.add(asked(1))
    engine.step()
    assert not engine.is_idle
    assert engine.fail() == [1]
    assert is_clean(engine)


def test_who_would_wait_for_a_place_is_refused_in_time():
    """Few places, long texts: prompts are short, and nobody gets to them."""
    engine = an_engine(Targets(ttft_s=0.5), max_waiting=1000)
    engine.scheduler.limits = StepLimits(4, 16, 2000)
    engine.scheduler.pool = BlockPool(4000, SIZE)
    engine.add(asked(0, max_tokens=40))
    while not engine.is_idle:
        engine.step()
    num_refused = 0
    for number in range(1, 30):
        try:
            engine.add(asked(number, max_tokens=500))
        except Overloaded:
            num_refused += 1
        engine.step()
    # Texts were of 40 tokens so far, 0.4 s: those for whom there is no place come later than that.
    assert num_refused >= 20
    assert len(engine.scheduler.running) == 4 and len(engine.scheduler.waiting) <= 4

"""The loop of generation, with a runner that computes nothing and a clock that is told."""

from dataclasses import dataclass, field

import pytest

from penstock.errors import InvalidRequest, Overloaded
from penstock.llm.blocks import BlockPool
from penstock.llm.engine import Asked, Engine, Limits
from penstock.llm.pace import Pace, Targets, Work
from penstock.llm.params import Sampling
from penstock.llm.scheduler import Limits as StepLimits
from penstock.llm.scheduler import Scheduler
from penstock.llm.sequence import Ending
from penstock.testing import FakeClock

SIZE = 4


@dataclass
class Ran:
    tokens: list[int]

    @property
    def likelihoods(self):
        return [None] * len(self.tokens)


@dataclass
class FakeRunner:
    """The next token is the number of those before it, and the seed in hundreds."""

    clock: FakeClock
    step_s: float = 0.01
    seen: list[int] = field(default_factory=list)

    def run(self, step, samplings):
        self.seen.append(step.num_tokens)
        self.clock.advance(self.step_s)
        return Ran(
            [
                chunk.end + 100 * samplings[chunk.sequence.id].seed
                for chunk in step.chunks
                if chunk.is_sampled
            ]
        )


def an_engine(targets=None, num_blocks=64, limits=None) -> Engine:
    clock = FakeClock()
    scheduler = Scheduler(BlockPool(num_blocks, SIZE), StepLimits(8, 16, 64))
    pace = Pace(targets or Targets())
    return Engine(scheduler, FakeRunner(clock), pace, clock, limits or Limits())


def asked(number=1, prompt=(1, 2, 3), max_tokens=3, **options) -> Asked:
    sampling = options.pop("sampling", Sampling())
    return Asked(number, prompt, sampling, Ending(max_tokens), **options)


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
    engine.add(asked(num=3, sampling=Sampling(seed=5)))
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
    engine.add(asked(1, num=2, max_tokens=30))
    engine.add(asked(2))
    for _ in range(num_steps):
        engine.step()
    engine.give_up(1)
    engine.give_up(1)
    assert all(piece.request == 2 for _ in range(6) for piece in engine.step())
    assert is_clean(engine)


def test_a_text_ends_one_of_several():
    engine = an_engine()
    engine.add(asked(num=2, max_tokens=6))
    for _ in range(4):
        engine.step()
    engine.end(1, 0)
    engine.end(1, 0)
    assert {piece.index for _ in range(8) for piece in engine.step()} == {1}
    engine.end(1, 1)
    assert is_clean(engine)


def test_a_step_that_fails_ends_all():
    engine = an_engine()
    engine.add(asked(1, num=2))
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
            engine.add(asked(num=17))
        with pytest.raises(InvalidRequest, match="0 tokens are asked for; expected at least 1"):
            engine.add(asked(max_tokens=0))
        assert is_clean(engine)

    def test_a_queue_that_is_full(self):
        engine = an_engine(limits=Limits(max_waiting=2))
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
            engine.pace.add(Work(number * 10, 0), 0.01 + number * 0.1)
        engine.add(asked(1, prompt=range(40)))
        text = r"the first token would come after 0\.\d+ s"
        with pytest.raises(Overloaded, match=text) as caught:
            engine.add(asked(2, prompt=range(40)))
        assert caught.value.reason == "predicted_late" and 0 < caught.value.retry_after_s < 1
        engine.give_up(1)
        # Whoever is alone would have it no sooner later.
        for number in range(1, 40):
            engine.pace.add(Work(number * 10, 0), 10.0 + number)
        engine.add(asked(3, prompt=range(40)))
        engine.give_up(3)
        assert is_clean(engine)


def test_steps_hold_as_many_tokens_of_prompts_as_the_promise_allows():
    engine = an_engine(Targets(tpot_s=0.05))
    for number in range(1, 40):
        engine.pace.add(Work(number * 10, number % 7), 0.01 + number * 0.1)
    engine.add(asked(1, max_tokens=20))
    engine.step()
    engine.add(asked(2, prompt=range(40)))
    engine.step()
    # 16 are the least that somebody who waits gets; the step's own limit is 16 with the other's.
    assert engine.runner.seen[-1] == 16

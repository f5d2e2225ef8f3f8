"""Which tokens of which sequences a step computes; beside a device that writes down what lies in
every place of the cache."""

import random
from dataclasses import dataclass, field

import pytest
from example_counts import at_most
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.llm.blocks import BlockPool
from penstock.llm.scheduler import BatchStep, Chunk, Scheduler, StepLimits, fair_shares
from penstock.llm.sequence import Sequence
from penstock.sampling_params import SamplingParams

SIZE = 4
VOCABULARY = 5


def next_token(tokens) -> int:
    """A model: the next token depends on all before it."""
    return hash(tuple(tokens)) % VOCABULARY


def alone(prompt, params: SamplingParams) -> list[int]:
    """What a sequence generates."""
    sequence = Sequence(0, list(prompt), params)
    while not sequence.reason:
        token = next_token(sequence.tokens)
        sequence.tokens.append(token)
        sequence.reason = sequence.ends_with(token)
    return sequence.tokens[len(prompt) :]


@dataclass
class Device:
    """Runs steps in order. A place of the cache holds all tokens up to its own, so that whoever
    reads another's notices."""

    places: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    # As the device has them, before anybody was told.
    tokens: dict[int, list[int]] = field(default_factory=dict)

    def run(self, step: BatchStep) -> list[int]:
        sampled = []
        for chunk in step.chunks:
            sequence = chunk.sequence
            if chunk.draft:
                sampled += self._checked(chunk)
                continue
            tokens = self.tokens.setdefault(sequence.id, list(sequence.tokens))
            for at in range(chunk.start, chunk.end):
                place = sequence.blocks[at // SIZE], at % SIZE
                self.places[place] = tuple(tokens[: at + 1])
            for at in range(chunk.end):
                place = sequence.blocks[at // SIZE], at % SIZE
                assert self.places.get(place) == tuple(tokens[: at + 1]), "not what it computed"
            if chunk.is_sampled:
                assert chunk.end == len(tokens)
                tokens.append(next_token(tokens))
                sampled.append(tokens[-1])
        return sampled

    def _checked(self, chunk: Chunk) -> list[int]:
        """The tokens after a chunk's last known one and after each draft."""
        sequence, last = chunk.sequence, chunk.start + 1
        assert self.tokens[sequence.id] == sequence.tokens and last == len(sequence.tokens)
        tokens = [*sequence.tokens, *chunk.draft]
        assert len(tokens) == chunk.end
        for at in range(chunk.end):
            place = sequence.blocks[at // SIZE], at % SIZE
            if at >= chunk.start:
                self.places[place] = tuple(tokens[: at + 1])
            assert self.places.get(place) == tuple(tokens[: at + 1]), "not what it computed"
        sampled = [next_token(tokens[:end]) for end in range(last, chunk.end + 1)]
        wrong = [n for n, token in enumerate(chunk.draft) if token != sampled[n]]
        self.tokens[sequence.id] = [
            *sequence.tokens,
            *sampled[: min(wrong, default=len(sampled)) + 1],
        ]
        return sampled


@dataclass
class SomeDrafts:
    """Drafts of any length, with any number of right tokens first."""

    chance: random.Random

    def length(self, sequence: Sequence) -> int:
        return self.chance.choice([0, 0, 3])

    def draft(self, sequence: Sequence, most: int) -> list[int]:
        tokens = list(sequence.tokens)
        for _ in range(max(0, min(most, self.chance.randrange(7)))):
            is_right = self.chance.random() < 0.7
            tokens.append(next_token(tokens) if is_right else self.chance.randrange(VOCABULARY))
        return tokens[len(sequence.tokens) :]


def scheduler(num_blocks=64, max_sequences=8, max_tokens=16, max_length=256) -> Scheduler:
    return Scheduler(BlockPool(num_blocks, SIZE), StepLimits(max_sequences, max_tokens, max_length))


def a_sequence(
    number=0, prompt=(1, 2, 3), max_tokens=4, leader=None, is_cached=True, **params
) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, **params)
    arrived = float(number)
    return Sequence(number, list(prompt), params, arrived, leader=leader, is_cached=is_cached)


def counts(step: BatchStep) -> dict[int, int]:
    return {chunk.sequence.id: chunk.count for chunk in step.chunks}


def ran(planner: Scheduler, device: Device, num_steps: int = 1) -> BatchStep:
    """The last of so many steps, each committed before the next."""
    for _ in range(num_steps):
        step = planner.plan()
        planner.commit(step, device.run(step))
    return step


class TestSteps:
    def test_a_prompt_is_computed_and_then_one_token_after_the_other(self):
        planner, device, sequence = scheduler(), Device(), a_sequence(max_tokens=3)
        planner.add(sequence)
        assert [counts(ran(planner, device)) for _ in range(4)] == [{0: 3}, {0: 1}, {0: 1}, {}]
        assert sequence.tokens[3:] == alone([1, 2, 3], SamplingParams(max_tokens=3))
        assert (sequence.state, sequence.reason) == ("ended", "length")
        assert planner.pool.num_free == planner.pool.num_blocks

    def test_a_token_may_end_it(self):
        prompt = next(
            p for p in ([1], [2], [3], [4]) if len(set(alone(p, SamplingParams(max_tokens=9)))) > 1
        )
        tokens = alone(prompt, SamplingParams(max_tokens=9))
        stop = next(each for each in tokens if each != tokens[0])
        planner = scheduler()
        sequence = Sequence(
            0, list(prompt), SamplingParams(max_tokens=9, stop_token_ids=frozenset({stop}))
        )
        planner.add(sequence)
        ran(planner, Device(), 12)
        assert sequence.tokens[len(prompt) :] == tokens[: tokens.index(stop) + 1]
        assert sequence.reason == "stop"

    def test_before_the_least_number_of_tokens_none_ends_it(self):
        ending = SamplingParams(
            max_tokens=6, stop_token_ids=frozenset(range(VOCABULARY)), min_tokens=4
        )
        planner, sequence = scheduler(), Sequence(0, [1, 2], ending)
        planner.add(sequence)
        ran(planner, Device(), 8)
        assert (sequence.num_generated, sequence.reason) == (5, "stop")

    def test_a_long_prompt_takes_several_steps_and_holds_nobody_up_who_generates(self):
        planner, device = scheduler(max_tokens=16), Device()
        planner.add(a_sequence(0, [1, 2], 30))
        ran(planner, device, 2)
        planner.add(a_sequence(1, range(40), 2))
        found = [counts(ran(planner, device)) for _ in range(4)]
        assert found == [{0: 1, 1: 15}, {0: 1, 1: 15}, {0: 1, 1: 10}, {0: 1, 1: 1}]

    def test_a_smaller_budget_is_for_prompts(self):
        planner, device = scheduler(), Device()
        for number in range(4):
            planner.add(a_sequence(number, [number], 9))
        ran(planner, device)
        planner.add(a_sequence(4, range(20), 2))
        assert counts(planner.plan(max_tokens=6)) == {0: 1, 1: 1, 2: 1, 3: 1, 4: 2}

    def test_those_who_generate_get_theirs_whatever_the_budget(self):
        planner, device = scheduler(), Device()
        for number in range(4):
            planner.add(a_sequence(number, [number], 9))
        ran(planner, device)
        planner.add(a_sequence(4, range(20), 2))
        assert counts(planner.plan(max_tokens=2)) == {0: 1, 1: 1, 2: 1, 3: 1}

    def test_no_more_run_together_than_may(self):
        planner, device = scheduler(max_sequences=2), Device()
        for number in range(3):
            planner.add(a_sequence(number, [number], 2))
        assert counts(ran(planner, device)) == {0: 1, 1: 1}
        ran(planner, device)
        assert counts(ran(planner, device)) == {2: 1}

    def test_a_lower_priority_number_comes_first(self):
        planner = scheduler(max_sequences=1)
        planner.add(a_sequence(0, priority=1))
        planner.add(a_sequence(1, priority=0))
        assert counts(planner.plan()) == {1: 3}


class TestCounts:
    def test_tokens_are_those_of_committed_steps(self):
        planner, device = scheduler(max_tokens=8), Device()
        planner.add(a_sequence(prompt=range(10), max_tokens=2))
        planner.plan()
        assert planner.num_computed == 0
        planner = scheduler(max_tokens=8)
        planner.add(a_sequence(prompt=range(10), max_tokens=2))
        ran(planner, device, 3)
        assert planner.num_computed == 11

    def test_a_request_waits_until_its_first_step_and_once(self):
        planner = scheduler(max_sequences=2)
        leader = a_sequence(1)
        for each in (leader, a_sequence(2, leader=leader), a_sequence(3)):
            planner.add(each)
        step = planner.plan()
        planner.note_begun(step, 12.5)
        planner.note_begun(step, 13.0)
        assert planner.take_waits() == (11.5, 9.5) and planner.take_waits() == ()


class TestAhead:
    def test_a_step_is_planned_while_the_one_before_it_runs(self):
        planner, device, sequence = scheduler(), Device(), a_sequence(max_tokens=3)
        planner.add(sequence)
        first, second, third, fourth = (planner.plan() for _ in range(4))
        assert [counts(each) for each in (first, second, third, fourth)] == [
            {0: 3}, {0: 1}, {0: 1}, {},
        ]  # fmt: skip
        for step in (first, second, third):
            planner.commit(step, device.run(step))
        assert sequence.tokens[3:] == alone([1, 2, 3], SamplingParams(max_tokens=3))

    def test_what_is_computed_after_the_end_is_dropped(self):
        tokens = alone([1, 2, 3], SamplingParams(max_tokens=9))
        planner, device = scheduler(), Device()
        sequence = Sequence(
            0, [1, 2, 3], SamplingParams(max_tokens=9, stop_token_ids=frozenset({tokens[0]}))
        )
        planner.add(sequence)
        first = planner.plan()
        sampled = device.run(first)
        second = planner.plan()
        late = device.run(second)
        assert [new.token for new in planner.commit(first, sampled)] == tokens[:1]
        assert planner.commit(second, late) == []
        assert sequence.tokens == [1, 2, 3, tokens[0]]
        assert planner.pool.num_free == planner.pool.num_blocks


class EagerDrafts:
    """Drafts as much as it may."""

    def length(self, sequence: Sequence) -> int:
        return 9

    def draft(self, sequence: Sequence, most: int) -> list[int]:
        return [0] * max(0, min(9, most))


class TestDrafts:
    def started(self, *sequences: Sequence, **limits) -> tuple[Scheduler, Device]:
        planner, device = scheduler(**limits), Device()
        planner.speculation = EagerDrafts()
        for each in sequences:
            planner.add(each)
        ran(planner, device)
        return planner, device

    def test_they_leave_half_of_a_step_to_prompts(self):
        """Also if a promised time per token lets few prompt tokens into a step."""
        planner, _ = self.started(a_sequence(0, max_tokens=99), max_tokens=24, max_sequences=4)
        planner.add(a_sequence(1, [4] * 40, 9))
        step = planner.plan()
        assert counts(step) == {0: 10, 1: 14}
        planner.commit(step, [1] * len(step.sampled))
        assert counts(planner.plan(3)) == {0: 10, 1: 2}

    def test_they_do_not_exceed_what_is_asked_for(self):
        """The last token is never computed, so the one before it is drafted last."""
        planner, _ = self.started(a_sequence(0, max_tokens=5), max_tokens=64)
        assert [len(chunk.draft) for chunk in planner.plan().chunks] == [3]

    def test_they_take_no_block_that_another_sequence_needs(self):
        """Two sequences of two tokens have one block each; of three others, one is a reserve for
        each of them."""
        both = [a_sequence(number, [number], 11) for number in range(2)]
        planner, device = self.started(*both, num_blocks=5, max_tokens=64, max_length=12)
        step = planner.plan()
        # One has room in two blocks, the other in one.
        assert sorted(len(chunk.draft) for chunk in step.chunks) == [2, 6]
        assert planner.pool.num_free == 2
        planner.commit(step, device.run(step))
        assert planner.num_preemptions == 0

    def test_rejected_ones_are_computed_again_in_the_same_blocks(self):
        planner, device = self.started(a_sequence(0, max_tokens=30), max_tokens=64)
        sequence = planner.running[0]
        while sequence.state != "ended":
            num_computed, num_tokens = sequence.num_computed, len(sequence.tokens)
            step = planner.plan()
            new = planner.commit(step, device.run(step))
            if sequence.state == "running":
                assert sequence.num_planned == sequence.num_computed == num_computed + len(new)
                assert len(sequence.tokens) == num_tokens + len(new)
                assert len(sequence.blocks) <= planner.pool.num_needed(num_computed + 10)
        assert sequence.tokens[3:] == alone([1, 2, 3], SamplingParams(max_tokens=30))
        assert planner.num_drafted > planner.num_accepted > 0


class TestCache:
    def test_the_same_beginning_is_not_computed_again(self):
        planner, device = scheduler(), Device()
        planner.add(a_sequence(0, range(10), 1))
        ran(planner, device)
        planner.add(a_sequence(1, [*range(9), 77], 1))
        assert counts(ran(planner, device)) == {1: 2}
        assert planner.pool.num_found == 8

    def test_of_a_prompt_that_is_all_there_one_block_is_computed(self):
        planner, device = scheduler(), Device()
        for number in range(2):
            planner.add(a_sequence(number, range(8), 1))
            step = ran(planner, device)
        assert counts(step) == {1: 4}

    def test_what_was_generated_is_found_too(self):
        planner, device, sequence = scheduler(), Device(), a_sequence(0, range(6), 7)
        planner.add(sequence)
        ran(planner, device, 7)
        planner.add(a_sequence(1, [*sequence.tokens, 1, 2], 1))
        assert counts(planner.plan()) == {1: 3}

    def test_another_salt_finds_nothing(self):
        planner, device = scheduler(), Device()
        planner.add(a_sequence(0, range(8), 1, cache_salt="one"))
        ran(planner, device)
        planner.add(a_sequence(1, range(8), 1, cache_salt="other"))
        assert counts(planner.plan()) == {1: 8}

    def test_whoever_wants_every_position_computes_every_position(self):
        planner, device = scheduler(), Device()
        planner.add(a_sequence(0, range(8), 1))
        ran(planner, device)
        planner.add(a_sequence(1, range(8), 1, is_cached=False))
        assert counts(planner.plan()) == {1: 8}

    def test_those_of_one_prompt_wait_for_the_first_and_share_it(self):
        planner, device = scheduler(max_tokens=16), Device()
        leader = a_sequence(0, range(24), 3)
        planner.add(leader)
        for number in (1, 2):
            planner.add(a_sequence(number, range(24), 3, leader=leader))
        planner.add(a_sequence(3, [9], 3))
        found = [counts(ran(planner, device)) for _ in range(3)]
        assert found == [{0: 16}, {0: 8, 3: 1}, {0: 1, 1: 4, 2: 4, 3: 1}]


class TestRoom:
    def test_the_last_gives_its_blocks_up_and_ends_with_the_same_tokens(self):
        planner, device = scheduler(num_blocks=6), Device()
        sequences = [a_sequence(number, [number] * 4, 12) for number in range(2)]
        for each in sequences:
            planner.add(each)
        ran(planner, device, 60)
        assert planner.num_preemptions > 0
        for each in sequences:
            assert each.tokens[4:] == alone(each.tokens[:4], SamplingParams(max_tokens=12)), each.id
        assert planner.pool.num_free == 6

    def test_whoever_gave_its_blocks_up_begins_again_when_its_token_is_known(self):
        planner, device = scheduler(num_blocks=4, max_sequences=2), Device()
        first, last = a_sequence(0, [0] * 4, 12), a_sequence(1, [1] * 4, 6)
        planner.add(first)
        planner.add(last)
        under_way = []
        while not planner.num_preemptions:
            step = planner.plan()
            # Nobody is admitted by a step for which somebody had to go.
            assert not planner.num_preemptions or counts(step) == {0: 1}
            under_way.append((step, device.run(step)))
        assert last.state == "waiting" and last.num_ahead == 5 and not last.blocks
        planner.end(first, "abort")
        assert planner.plan().chunks == []
        for each in under_way:
            planner.commit(*each)
        step = planner.plan()
        assert counts(step) == {1: len(last.tokens)}
        planner.commit(step, device.run(step))
        ran(planner, device, 6)
        assert last.tokens[4:] == alone([1] * 4, SamplingParams(max_tokens=6))

    def test_what_could_never_run_does_not_fit(self):
        planner = scheduler(num_blocks=4, max_length=100)
        assert planner.fits(10, 7) and not planner.fits(10, 8)
        # The last token is not computed.
        assert scheduler(max_length=16).fits(16, 1) and not scheduler(max_length=16).fits(10, 8)

    def test_whoever_does_not_fit_is_not_passed_by(self):
        planner, device = scheduler(num_blocks=8), Device()
        planner.add(a_sequence(0, range(16), 8))
        ran(planner, device)
        planner.add(a_sequence(1, range(50, 66), 2))
        planner.add(a_sequence(2, [7], 2))
        assert counts(planner.plan()) == {0: 1}

    @pytest.mark.parametrize("num_steps", [0, 1, 3])
    def test_one_that_is_given_up_leaves_nothing_behind(self, num_steps):
        planner, device, sequence = scheduler(), Device(), a_sequence(0, range(9), 9)
        planner.add(sequence)
        ran(planner, device, num_steps) if num_steps else None
        under_way = planner.plan()
        sampled = device.run(under_way)
        planner.end(sequence, "abort")
        planner.end(sequence, "abort")
        assert planner.commit(under_way, sampled) == []
        assert planner.pool.num_free == planner.pool.num_blocks
        assert not planner.waiting and not planner.running


@st.composite
def cases(draw):
    """Sequences with few different tokens, so that many begin alike, which grow beyond the room
    that there is."""
    prompts = st.lists(st.integers(0, 1), min_size=1, max_size=9)
    asked = st.tuples(
        prompts, st.integers(1, 22), st.integers(0, 2), st.booleans(), st.integers(0, 12)
    )
    return draw(st.lists(asked, min_size=2, max_size=9))


@settings(max_examples=at_most(300), deadline=None)
@given(
    cases(),
    st.integers(8, 13),
    st.integers(1, 6),
    st.integers(1, 3),
    st.sets(st.integers(0, 4), max_size=1),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_law_everybody_ends_with_what_it_would_have_generated_alone(
    asked, num_blocks, max_sequences, depth, stops, is_drafting, chance: random.Random
):
    """Also if tokens are drafted, most of them right."""
    num_tokens = 3 * max_sequences + 9 if is_drafting else max_sequences + 3
    planner = scheduler(num_blocks, max_sequences, max_tokens=num_tokens, max_length=64)
    if is_drafting:
        planner.speculation = SomeDrafts(chance)
    device = Device()
    due = []
    for number, (prompt, max_tokens, priority, is_cached, at) in enumerate(asked):
        params = SamplingParams(
            max_tokens=max_tokens, stop_token_ids=frozenset(stops), priority=priority
        )
        sequence = Sequence(number, list(prompt), params, float(at), is_cached=is_cached)
        if planner.fits(len(prompt), max_tokens):
            due.append((at, sequence))
    due.sort(key=lambda each: each[0])
    everybody = [sequence for _, sequence in due]
    aborted: set[int] = set()
    under_way: list[tuple[BatchStep, list[int]]] = []
    new: dict[int, list[int]] = {}
    for now in range(3000):
        while due and due[0][0] <= now:
            planner.add(due.pop(0)[1])
        if chance.random() < 0.03 and (planner.running or planner.waiting):
            victim = chance.choice(planner.running + planner.waiting)
            planner.end(victim, "abort")
            aborted.add(victim.id)
        step = planner.plan(chance.choice([None, 1, 3]))
        assert len(planner.running) <= max_sequences
        if step.chunks:
            under_way.append((step, device.run(step)))
        if under_way and (len(under_way) >= depth or not step.chunks):
            for sequence, token, _, reason in planner.commit(*under_way.pop(0)):
                assert sequence.state == "ended" or not reason
                new.setdefault(sequence.id, []).append(token)
        if not due and not under_way and not planner.running and not planner.waiting:
            break
    else:
        raise AssertionError("somebody never ends")
    for sequence in everybody:
        wanted = alone(sequence.tokens[: sequence.num_prompt], sequence.params)
        found = sequence.tokens[sequence.num_prompt :]
        assert sequence.state == "ended" and new.get(sequence.id, []) == found
        if sequence.id in aborted:
            assert found == wanted[: len(found)]
        else:
            assert found == wanted
    assert planner.pool.num_free == num_blocks


class TestSharedSteps:
    @pytest.mark.parametrize(
        ("wanted", "budget", "expected"),
        [
            ([], 8, []),
            ([5], 8, [5]),
            ([100, 3], 8, [5, 3]),
            ([100, 100], 9, [5, 4]),
            ([1, 100, 2], 30, [1, 27, 2]),
            ([4, 4, 4], 2, [1, 1, 0]),
        ],
    )
    def test_what_one_does_not_want_is_for_the_others(self, wanted, budget, expected):
        assert fair_shares(wanted, budget) == expected

    def test_a_short_prompt_ends_before_a_long_one_that_came_first(self):
        planner = scheduler(num_blocks=64, max_tokens=64, max_length=400)
        planner.shares_prompts = True
        long, short = a_sequence(0, range(200), 2), a_sequence(1, range(300, 340), 2)
        planner.add(long)
        planner.commit(planner.plan(), [])
        planner.add(short)
        step = planner.plan()
        assert counts(step) == {0: 32, 1: 32}
        planner.commit(step, [])
        step = planner.plan()
        # What the short one needs no more the long one has.
        assert counts(step) == {0: 56, 1: 8}

    def test_in_order_unless_it_is_asked_for(self):
        planner = scheduler(num_blocks=64, max_tokens=64, max_length=400)
        planner.add(a_sequence(0, range(200), 2))
        planner.add(a_sequence(1, range(300, 340), 2))
        assert counts(planner.plan()) == {0: 64}

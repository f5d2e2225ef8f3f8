"""Guesses from a sequence's own tokens."""

import random

from example_counts import at_most
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.llm.ngrams import FIRST_RATE, MAX_PROMPT, SIZE, NgramHistory


def history_of(prompt, generated=()) -> NgramHistory:
    found = NgramHistory(len(prompt))
    found.note(list(prompt))
    found.note([*prompt, *generated])
    return found


def guess(prompt, generated, count) -> list[int]:
    return history_of(prompt, generated).guess([*prompt, *generated], count)


def test_what_followed_the_last_three_tokens_is_guessed():
    assert guess([1, 2, 3, 4, 5, 6, 7, 1, 2, 3], [], 3) == [4, 5, 6]
    assert guess([1, 2, 3, 4, 5, 6, 7], [1, 2, 3], 9) == [4, 5, 6, 7, 1, 2, 3, 4, 5]


def test_the_latest_of_several_places_counts():
    assert guess([1, 2, 3, 8, 1, 2, 3, 9, 1, 2], [3], 1) == [9]


def test_the_place_is_kept_while_it_is_right():
    """At its end, 2, 3, 4 was followed by 7 last, but 1, 2, 3, 4 by 5."""
    prompt = [1, 2, 3, 4, 5, 6, 0, 2, 3, 4, 7, 9, 1, 2, 3]
    assert guess([*prompt[:-3], 6, 0, 2, 3], [], 2) == [4, 7]
    found = history_of([1, 1, 1, 2, 3, 4, 5, 9, 1, 1], [1, 2])
    assert found.guess([1, 1, 1, 2, 3, 4, 5, 9, 1, 1, 1, 2], 3) == [3, 4, 5]


def test_nothing_is_guessed_from_few_or_new_tokens():
    for prompt in ([1], [1, 1], [1, 1, 1], [1, 2, 3, 4, 5], [1, 2, 9, 1, 2]):
        assert guess(prompt, [], 4) == []


def test_a_token_that_repeats_is_guessed_on():
    assert guess([7, 7, 7, 7], [], 5) == [7, 7, 7, 7, 7]


def test_the_share_of_right_guesses_is_of_generated_tokens_only():
    same = [1, 2, 3, 4] * 30
    assert history_of(same).rate == FIRST_RATE
    assert history_of(same[:20], same[20:]).rate > 0.99
    # Each of the other tokens ends a guess.
    wrong = [token for number in range(40) for token in (1, 2, 3, 100 + number)]
    found = history_of(wrong[:8], wrong[8:])
    assert found.rate < 0.5


def test_only_the_end_of_a_long_prompt_is_looked_at():
    prompt = [5, 6, 7, 8, *range(100, 100 + MAX_PROMPT), 5, 6, 7]
    assert guess(prompt, [], 1) == []
    assert guess([*range(100, 100 + MAX_PROMPT), 5, 6, 7, 8, 5, 6, 7], [], 1) == [8]


@settings(max_examples=at_most(200))
@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.randoms(use_true_random=False))
def test_law_a_guess_follows_the_last_tokens_as_somewhere_before(tokens, chance: random.Random):
    """However many tokens are told at a time."""
    found, told = NgramHistory(chance.randint(1, len(tokens))), 0
    while told < len(tokens):
        told = max(found.num_prompt, chance.randint(told + 1, len(tokens)))
        found.note(tokens[:told])
    guessed = found.guess(tokens, 4)
    last = tokens[-SIZE:]
    before = [n for n in range(len(tokens) - SIZE) if tokens[n : n + SIZE] == last]
    assert bool(guessed) == bool(before and len(last) == SIZE)
    if guessed:
        follows = [[*tokens, *guessed][n + SIZE : n + SIZE + 4] for n in before]
        assert guessed in follows

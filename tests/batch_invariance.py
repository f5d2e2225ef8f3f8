"""The law that a sequence's tokens depend on its prompt and seed, not on others in the batch."""

import random

from msgspec.structs import replace

from penstock.llm.messages import GenerateRequest
from penstock.sampling_params import SamplingParams

SAMPLINGS = [
    SamplingParams(temperature=0.0, num_logprobs=0),
    SamplingParams(temperature=1.0, seed=77, num_logprobs=0),
    SamplingParams(temperature=0.8, seed=5, top_p=0.9, top_k=40, num_logprobs=0),
]


def generated(engine, asked, due=()):
    """Tokens and logprobs of one request; the others join while it runs."""
    due, found, chance = list(due), [], random.Random(len(due))
    engine.add(asked)
    while not engine.is_idle or due:
        if due and chance.random() < 0.5:
            engine.add(due.pop())
        for piece in engine.step():
            if piece.request == asked.id:
                found.append((piece.token, piece.logprobs.logprob))
    return found


def differences(engine, vocabulary, num_tokens=40, num_others=8):
    """Requests whose answers change next to others: their prompts' lengths, and where."""
    chance = random.Random(7)

    def prompt(length):
        return [chance.randrange(vocabulary) for _ in range(length)]

    wrong = []
    for number, length in enumerate((1, 3, 17, 40, 90)):
        params = replace(SAMPLINGS[number % len(SAMPLINGS)], max_tokens=num_tokens)
        tokens = prompt(length)
        # A salt of its own: cached blocks must not hide what would be computed.
        alone = generated(
            engine, GenerateRequest(0, tokens, replace(params, cache_salt=f"{number}a"))
        )
        others = [
            GenerateRequest(
                1 + n, prompt(chance.randrange(1, 60)), SamplingParams(seed=n, max_tokens=30 + n)
            )
            for n in range(num_others)
        ]
        asked = GenerateRequest(0, tokens, replace(params, cache_salt=f"{number}b"))
        among = generated(engine, asked, others)
        place = next((n for n, (a, b) in enumerate(zip(alone, among, strict=True)) if a != b), None)
        if place is not None:
            wrong.append((length, place, alone[place], among[place]))
    return wrong

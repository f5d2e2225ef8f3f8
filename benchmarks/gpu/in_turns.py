"""Does this tree compute as fast on a GPU as another one? Both, in turns, on one GPU:

    git archive --prefix=old/ COMMIT penstock benchmarks | tar x -C .bench
    python benchmarks/gpu/in_turns.py .bench/old                 about ten minutes on an H200
    python benchmarks/gpu/in_turns.py .bench/old --device cpu    does it run? tiny, no figures

Each case is `run.py` or `llm.py` of either tree. Prints the median of the new tree's rates over the
old one's, and exits with 1 if one is more than 3 % slower. Interrupted, it prints what it has.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAX_LOSS = 0.03
LIMIT_S = 200.0


@dataclass(frozen=True)
class Case:
    name: str
    script: str
    arguments: tuple[str, ...]
    # Where the rate is in the file that the script writes.
    path: tuple[str, ...]


RESNET, BERT = "bf16 fused, graphs", "packed FP8, CUDA graphs"
CASES = [
    Case("Qwen3-0.6B, tokens/s", "llm.py", ("--case", "qwen3-0.6b"), ("qwen3-0.6b",)),
    Case("Llama-8B, tokens/s", "llm.py", ("--case", "llama-8b"), ("llama-8b",)),
    Case(
        "ResNet-50, images/s", "run.py", ("--model", "resnet50", "--only", RESNET), (RESNET, "256")
    ),
    Case("BERT-large, sequences/s", "run.py", ("--model", "bert-large", "--only", BERT), (BERT,)),
]


def measure(tree: Path, case: Case, device: str) -> float:
    tiny = ["--tiny"] if device == "cpu" and case.script == "llm.py" else []
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, str(tree / "benchmarks" / "gpu" / case.script)]
        command += [*case.arguments, "--again", "--device", device, *tiny]
        run = subprocess.run(
            command,
            env={**os.environ, "OUT": out, "PYTHONPATH": path_of(tree)},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        files = list(Path(out).glob("*.json"))
        if run.returncode or not files:
            sys.exit(f"{tree.name}: {case.name}: {run.stdout[-500:]}{run.stderr[-1500:]}")
        return rate(json.loads(files[0].read_text()), case)


def path_of(tree: Path) -> str:
    return os.pathsep.join([str(tree), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])


def rate(found: dict, case: Case) -> float:
    if case.script == "llm.py":
        return float(found.get("cases", found)[case.path[0]]["output_tokens_per_s"])
    batches = found["techniques"][case.path[0]]["batches"]
    # A CPU gives no figures.
    rates = {name: float(row.get("device_per_s", 1.0)) for name, row in batches.items()}
    return rates.get(case.path[-1], max(rates.values()))


def show(rates: dict[str, list[tuple[float, float]]]) -> bool:
    """Print a row for each case; return whether none is slower."""
    is_kept = True
    for name, pairs in rates.items():
        if not pairs:
            continue
        old, new = (statistics.median(each) for each in zip(*pairs, strict=True))
        ratios = sorted(after / before for before, after in pairs)
        is_kept &= statistics.median(ratios) > 1 - MAX_LOSS
        shown = ", ".join(f"{each:.3f}" for each in ratios)
        print(f"{name}: old {old:,.0f}, new {new:,.0f}, new/old {shown}", flush=True)
    return is_kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("old", type=Path, help="folder of the other tree")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no round after it")
    parser.add_argument("--only", default="", help="cases with this in their name")
    args = parser.parse_args()
    began = time.monotonic()
    cases = [case for case in CASES if args.only in case.name]
    rates: dict[str, list[tuple[float, float]]] = {case.name: [] for case in cases}
    for number in range(args.rounds):
        for case in cases:
            if time.monotonic() - began > args.seconds:
                continue
            # The tree that goes first changes, as the GPU gets warm.
            trees = [args.old.resolve(), ROOT]
            order = trees if number % 2 == 0 else trees[::-1]
            measured = {tree: measure(tree, case, args.device) for tree in order}
            rates[case.name].append((measured[trees[0]], measured[trees[1]]))
            print(f"round {number + 1}, {time.monotonic() - began:.0f} s", flush=True)
            show({case.name: rates[case.name]})
    print()
    sys.exit(0 if show(rates) else 1)


if __name__ == "__main__":
    main()

"""The cost of batch-invariant attention on a CPU: `exact_attention` against torch's SDPA.

    python benchmarks/llm/exact_attention.py          about a minute on two cores

Prefill attention of one layer with the heads of SmolLM2-135M (9 query heads, 3 KV heads of 64), for
whole prompts and for a last chunk of 64 tokens. Both sides run in turns in one process, with as
many threads as cores; medians of 15 rounds after one that does not count. Ratios above 1:
the exact one is slower.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from penstock.llm.cache import attend_sdpa
from penstock.llm.exact_attention import attend_prompt

HEADS, KV_HEADS, SIZE = 9, 3, 64
CHUNK = 64
# Tokens of the sequence, and how many of the last ones are computed.
CASES = [(64, 64), (256, 256), (512, 512), (2048, 2048), (2048, CHUNK)]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def measure(attend: Attend, tensors: tuple[Tensor, Tensor, Tensor]) -> float:
    began = time.perf_counter()
    attend(*tensors)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    table = Table("dtype", "prompt", "computed", "SDPA ms", "exact ms", "ratio")
    for dtype in (torch.float32, torch.bfloat16):
        for length, num in CASES:
            shapes = (num, HEADS), (length, KV_HEADS), (length, KV_HEADS)
            queries, keys, values = (torch.randn(*each, SIZE).to(dtype) for each in shapes)
            tensors = queries, keys, values
            times: dict[str, list[float]] = {"sdpa": [], "exact": []}
            for _ in range(rounds + 1):
                times["sdpa"].append(measure(attend_sdpa, tensors))
                times["exact"].append(measure(attend_prompt, tensors))
            sdpa, exact = (statistics.median(each[1:]) * 1e3 for each in times.values())
            figures = f"{sdpa:.2f}", f"{exact:.2f}", f"{exact / sdpa:.2f}"
            table.add_row(str(dtype).removeprefix("torch."), str(length), str(num), *figures)
    Console().print(table)


if __name__ == "__main__":
    main()

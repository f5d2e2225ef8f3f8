"""Penstock's language-model engine and vLLM on one GPU: the same shapes, prompts and lengths.

    python benchmarks/gpu/beside_vllm.py                         all cases
    python benchmarks/gpu/beside_vllm.py --case qwen3-0.6b
    python benchmarks/gpu/beside_vllm.py --vllm-site DIR         vLLM is installed in DIR

Each side runs in its own process, in turns: ours, vLLM, ours. Weights are random, of the true
shape. Workloads are those of `llm.py`; both sides sample at 0.6 with a seed per request and ignore
stop tokens, and vLLM has its CUDA graphs, chunked prefill and the same limit on sequences. Prefix
caching is off there: no two prompts begin alike. The figure of a case is output tokens a second, or
the time between tokens for `itl`; the ratio compares vLLM with the slower of our two runs.
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
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
RESULT = "gpu_beside_vllm.json"
# By case: the figure, and whether more is better.
CASES = {
    "qwen3-0.6b": ("output_tokens_per_s", True),
    "llama-8b": ("output_tokens_per_s", True),
    "itl": ("itl_ms", False),
}
TIMEOUT_S = 400.0
MEMORY = 0.9


def run_ours(name: str) -> dict[str, Any]:
    import llm

    cases = {"qwen3-0.6b": llm.qwen3, "llama-8b": llm.llama, "itl": llm.itl}
    with tempfile.TemporaryDirectory() as folder:
        return cases[name](llm.Bench("cuda:0", False, False, Path(folder)))


def run_vllm(name: str) -> dict[str, Any]:
    import llm
    import vllm
    from vllm import LLM

    values = llm.QWEN3 if name == "qwen3-0.6b" else llm.LLAMA
    pairs = [(128, 512)] if name == "itl" else llm.uniform(llm.FULL)
    with tempfile.TemporaryDirectory() as folder:
        kind = {"model_type": "llama", "dtype": "bfloat16", **values}
        Path(folder, "config.json").write_text(json.dumps(kind))
        began = time.perf_counter()
        engine = LLM(
            model=folder, load_format="dummy", dtype="bfloat16", max_model_len=2560,
            max_num_seqs=2 if name == "itl" else llm.FULL.max_sequences, seed=0,
            gpu_memory_utilization=MEMORY, enable_prefix_caching=False, skip_tokenizer_init=True,
            generation_config="vllm",
        )  # fmt: skip
        asked = llm.requests(pairs, values["vocab_size"])
        # Compile what is compiled on first use: few sequences, then all of them.
        for count in (3, len(asked)):
            generate(engine, asked[:count], max_tokens=16)
        ready_s = time.perf_counter() - began
        if name == "itl":
            one_s = statistics.median(generate(engine, asked, max_tokens=1)[0] for _ in range(3))
            took_s = min(generate(engine, asked)[0] for _ in range(2))
            found = {"itl_ms": 1e3 * (took_s - one_s) / (pairs[0][1] - 1)}
        else:
            took_s, num_tokens = generate(engine, asked)
            found = {"output_tokens_per_s": num_tokens / took_s, "took_s": took_s}
        return {**found, "ready_s": ready_s, "vllm": vllm.__version__}


def generate(engine: Any, asked: Any, max_tokens: int = 1 << 30) -> tuple[float, int]:
    """Return the seconds it took and the number of tokens."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": list(each.tokens)} for each in asked]
    params = [
        SamplingParams(
            temperature=0.6,
            seed=each.id,
            max_tokens=min(each.ending.max_tokens, max_tokens),
            ignore_eos=True,
            detokenize=False,
        )
        for each in asked
    ]
    began = time.perf_counter()
    answers = engine.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - began, sum(len(each.outputs[0].token_ids) for each in answers)


def run_side(side: str, name: str, vllm_site: str) -> dict[str, Any]:
    """Run one side in its own process, so that each has the GPU to itself."""
    environment = dict(os.environ)
    if side == "vllm" and vllm_site:
        environment["PYTHONPATH"] = vllm_site
        environment |= {"HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        command = [sys.executable, __file__, "--side", side, "--case", name, "--out", str(out)]
        subprocess.run(command, env=environment, timeout=TIMEOUT_S, check=True)
        return json.loads(out.read_text())


def compare(name: str, vllm_site: str) -> dict[str, Any]:
    ours = [run_side("ours", name, vllm_site)]
    theirs = run_side("vllm", name, vllm_site)
    ours.append(run_side("ours", name, vllm_site))
    figure, is_more_better = CASES[name]
    slower = (min if is_more_better else max)(each[figure] for each in ours)
    ratio = slower / theirs[figure] if is_more_better else theirs[figure] / slower
    return {"figure": figure, "ours": ours, "vllm": theirs, "times_vllm": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", choices=list(CASES), help="default: all")
    parser.add_argument("--vllm-site", default="", metavar="DIR", help="where vLLM is installed")
    parser.add_argument("--side", choices=["ours", "vllm"], help=argparse.SUPPRESS)
    results = Path(__file__).resolve().parents[1] / "results"
    folder = Path(os.environ.get("OUT", results))
    parser.add_argument("--out", type=Path, default=folder / RESULT)
    given = parser.parse_args()
    if given.side:
        run = run_ours if given.side == "ours" else run_vllm
        given.out.write_text(json.dumps(run(given.case[0]), default=str))
        return
    found = json.loads(given.out.read_text()) if given.out.is_file() else {}
    for name in given.case or CASES:
        found[name] = compare(name, given.vllm_site)
        given.out.write_text(json.dumps(found, indent=1))
    for name, each in found.items():
        ours = " and ".join(f"{run[each['figure']]:,.2f}" for run in each["ours"])
        theirs = each["vllm"][each["figure"]]
        print(f"{name}, {each['figure']}: {ours}; vLLM {theirs:,.2f}; {each['times_vllm']:.2f}x")


if __name__ == "__main__":
    main()

"""Language models on one GPU: tokens a second, time per token, and what a prefix hit saves. Random
weights of the true shape; in process, without a server.

    python benchmarks/gpu/llm.py                              all cases, each under 100 s on an H200
    python benchmarks/gpu/llm.py --case llama-8b --profile    and what a step is made of
    python benchmarks/gpu/llm.py --tiny --device cpu          does it run?

    qwen3-0.6b, llama-8b  256 requests at once, inputs and outputs of 100 to 1024 tokens (uniform,
                          seeded; the workload of nano-vllm's benchmark), sampled at 0.6, no stops
    llama-8b-fp8          1,000 requests of 1000 tokens in and out, queued at once
    itl                   one sequence of the 8B shape: time between its tokens
    prefix                4,096 tokens of prompt, 8B shape: time to the first token, new and known
    transformers          64 requests x 256 tokens, 0.6B shape, beside `generate_batch` of
                          transformers (continuous batching, paged SDPA): a weak baseline, whose
                          attention grows with the square of the number of requests
    structured-8b, structured-0.6b
                          64 sequences whose text is JSON of a schema, beside the same without: what
                          is left of the tokens a second (not run on a GPU yet)
    attention             the kernel of one token for each sequence alone, by tile, warps and stages

Output tokens a second are over all the time from the first request to the last token; loading and
capturing are told apart. `busy` is the share of that time in which the GPU computed steps, by its
own marks. `$OUT` or benchmarks/results/gpu_llm.json, written after each case; a case that is there
is not measured again (`--again` does).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import presence
import torch
from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


from penstock.kernels import has_triton
from penstock.llm.engine import Engine
from penstock.llm.engine_loading import load
from penstock.llm.messages import EngineSettings, GenerateRequest, pack_tokens
from penstock.sampling_params import Constraint, SamplingParams

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
SEED = 7
# No case takes longer, whatever is left of it.
MAX_SECONDS = 100.0
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32, "hidden_size": 4096,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 28,
    "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 3072, "vocab_size": 151936, "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": True,
}  # fmt: skip
TINY = {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 64, "vocab_size": 100, "max_position_embeddings": 512,
}  # fmt: skip
# What was set as the goal, and what the best of others reach; output tokens a second, or ms.
GOALS = {
    "qwen3-0.6b": (14_000, 20_700), "llama-8b": (7_000, 10_000), "llama-8b-fp8": (10_000, 17_700),
    "structured-8b": (0.95, 1.0), "structured-0.6b": (0.8, 1.0),
    "itl": (6.0, 4.6), "prefix": (0.15, 0.05), "transformers": (20.0, 40.0),
}  # fmt: skip


@dataclass(frozen=True)
class Scale:
    """Sizes of workloads."""

    num_requests: int = 256
    least: int = 100
    most: int = 1024
    num_queued: int = 1000
    length: int = 1000
    num_itl: int = 512
    num_prefix: int = 4096
    num_tries: int = 5
    num_beside: int = 64
    length_beside: int = 256
    max_sequences: int = 256
    max_queued: int = 500
    max_tokens: int = 16_384
    block_size: int = 16
    num_structured: int = 64
    length_structured: int = 256


FULL = Scale()
SMALL = Scale(6, 4, 12, 8, 10, 12, 64, 2, 3, 6, 4, 4, 32, 4, 64, 32)


@dataclass
class Bench:
    device: str
    is_tiny: bool
    is_profiled: bool
    folder: Path

    @property
    def scale(self) -> Scale:
        return SMALL if self.is_tiny else FULL

    def config(self, values: dict[str, Any]) -> Path:
        """The configuration's file."""
        values = {**values, **TINY} if self.is_tiny else values
        path = self.folder / values["architectures"][0] / "config.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
        return path

    def engine(self, values: dict[str, Any], dtype: str = "bfloat16", **changes: int) -> Engine:
        if self.device == "cpu" and dtype != "fp8":
            dtype = "float32"
        scale = self.scale
        settings = EngineSettings(
            path=str(self.config(values)), device=self.device, dtype=dtype,
            num_threads=max(1, (os.cpu_count() or 2) // 2), block_size=scale.block_size,
            cache_bytes=(1 << 22) if self.is_tiny else 0, max_sequences=scale.max_sequences,
            max_tokens=scale.max_tokens, max_length=128 if self.is_tiny else 2560,
            max_waiting=1 << 20, is_made_up=True,
        )  # fmt: skip
        for name, value in changes.items():
            setattr(settings, name, value)
        engine, _ = load(settings)
        return engine


class Watch:
    """A runner that keeps what it began, to ask afterwards how long the device took."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.steps: list[tuple[bool, int, Any]] = []

    def run(self, step: Any) -> Any:
        ran = self.runner.run(step)
        is_generating = all(chunk.count == 1 for chunk in step.chunks)
        self.steps.append((is_generating, step.num_tokens, ran))
        return ran

    def figures(self, took_s: float) -> dict[str, Any]:
        if torch.cuda.is_available():
            # The last may be under way.
            torch.cuda.synchronize()
        found: dict[str, Any] = {"steps": len(self.steps)}
        busy_s = 0.0
        for name, wanted in (("generating", True), ("prompt", False)):
            chosen = [each for each in self.steps if each[0] == wanted]
            times = [ran.device_s for _, _, ran in chosen if hasattr(ran, "device_s")]
            busy_s += sum(times)
            found[f"{name}_steps"] = len(chosen)
            found[f"{name}_tokens"] = sum(each[1] for each in chosen)
            if times:
                found[f"{name}_ms"] = 1e3 * statistics.mean(times)
                found[f"{name}_share"] = sum(times) / took_s
        if busy_s:
            found["busy"] = busy_s / took_s
        for name in ("num_replayed", "num_eager"):
            found[name] = getattr(self.runner, name, 0)
        return found


def drawn(chance: random.Random, count: int, vocabulary: int) -> list[int]:
    return [chance.randrange(vocabulary) for _ in range(count)]


def requests(pairs: Sequence[tuple[int, int]], vocabulary: int) -> list[GenerateRequest]:
    """Of so many tokens in and out each."""
    chance = random.Random(SEED)
    return [
        GenerateRequest(
            number,
            pack_tokens(drawn(chance, num_in, vocabulary)),
            SamplingParams(temperature=0.6, seed=number, max_tokens=num_out),
        )
        for number, (num_in, num_out) in enumerate(pairs)
    ]


def finish(engine: Engine, seconds: float = MAX_SECONDS) -> tuple[float, int]:
    """Until nothing is left or the time is up: how long it took, and tokens that came out."""
    began, num_tokens = time.perf_counter(), 0
    while not engine.is_idle and time.perf_counter() - began < seconds:
        num_tokens += len(engine.step())
    return time.perf_counter() - began, num_tokens


def warm_up(engine: Engine, vocabulary: int) -> None:
    """All that is compiled when it is first met: prompts of several lengths, and generating."""
    size = engine.scheduler.limits.max_length // 4
    wishes = requests([(size, 4), (size // 2, 8), (3, 4)], vocabulary)
    for asked in wishes:
        engine.add(replace(asked, id=-1 - asked.id))
    finish(engine)


def throughput(
    bench: Bench, values: dict[str, Any], pairs: list[tuple[int, int]], **options: Any
) -> dict[str, Any]:
    began = time.perf_counter()
    engine = bench.engine(values, **options)
    vocabulary = TINY["vocab_size"] if bench.is_tiny else values["vocab_size"]
    warm_up(engine, vocabulary)
    ready_s = time.perf_counter() - began
    # Nothing of the warm-up is to be found.
    engine.scheduler.pool.clear()
    watch = Watch(engine.runner)
    for name in ("num_replayed", "num_eager"):
        if hasattr(watch.runner, name):
            setattr(watch.runner, name, 0)
    engine.runner = watch
    # As an engine's process does.
    gc.collect()
    gc.freeze()
    for asked in requests(pairs, vocabulary):
        engine.add(asked)
    if bench.is_profiled:
        return profiled(bench, engine)
    took_s, num_tokens = finish(engine)
    gc.unfreeze()
    done = engine.is_idle
    found = {
        "output_tokens_per_s": num_tokens / took_s,
        "total_tokens_per_s": sum(each[1] for each in watch.steps) / took_s,
        "output_tokens": num_tokens,
        "took_s": took_s,
        "ready_s": ready_s,
        "is_whole": done,
        "preemptions": engine.scheduler.num_preemptions,
        "blocks": engine.scheduler.pool.num_blocks,
    }
    return found | watch.figures(took_s)


def profiled(bench: Bench, engine: Engine, num_steps: int = 8) -> dict[str, Any]:
    """What a step that only generates is made of, with as many sequences as there are."""
    from torch.profiler import ProfilerActivity, profile

    while engine.scheduler.waiting and len(engine.scheduler.running) < (
        engine.scheduler.limits.max_sequences
    ):
        engine.step()
    for _ in range(4):
        engine.step()
    is_cuda = bench.device != "cpu"
    activities = [ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]
    with profile(activities=activities) as told:
        for _ in range(num_steps):
            engine.step()
        if is_cuda:
            torch.cuda.synchronize()
    name = "self_device_time_total" if is_cuda else "self_cpu_time_total"
    rows = sorted(told.key_averages(), key=lambda each: -getattr(each, name))
    total = sum(getattr(each, name) for each in rows)
    if not total:
        raise RuntimeError("the profiler tells of no kernels on this machine")
    num, each_ms = len(engine.scheduler.running), total / num_steps / 1e3
    # How long steps take is not said here: the profiler takes longer than they do.
    print(f"{num} sequences, {each_ms:.2f} ms in kernels a step")
    kernels = []
    for each in rows[:16]:
        spent = getattr(each, name)
        kernels.append({"name": each.key, "share": spent / total, "count": each.count})
        print(f"{spent / total:6.1%} {spent / num_steps:9.1f} us a step "
              f"{spent / each.count:8.1f} us each {each.count:6d} x {each.key[:70]}")  # fmt: skip
    engine.fail()
    return {"profile": kernels, "kernels_ms": each_ms}


# Cases.


def uniform(scale: Scale) -> list[tuple[int, int]]:
    chance = random.Random(SEED)
    span = scale.least, scale.most
    return [(chance.randint(*span), chance.randint(*span)) for _ in range(scale.num_requests)]


def qwen3(bench: Bench) -> dict[str, Any]:
    return throughput(bench, QWEN3, uniform(bench.scale))


def llama(bench: Bench) -> dict[str, Any]:
    return throughput(bench, LLAMA, uniform(bench.scale))


def llama_fp8(bench: Bench) -> dict[str, Any]:
    scale = bench.scale
    pairs = [(scale.length, scale.length)] * scale.num_queued
    return throughput(bench, LLAMA, pairs, dtype="fp8", max_sequences=scale.max_queued)


def itl(bench: Bench) -> dict[str, Any]:
    scale = bench.scale
    engine = bench.engine(LLAMA, max_sequences=2, max_tokens=min(scale.max_tokens, 2048))
    vocabulary = TINY["vocab_size"] if bench.is_tiny else LLAMA["vocab_size"]
    warm_up(engine, vocabulary)
    if bench.is_profiled:
        engine.add(requests([(scale.num_itl // 4, scale.num_itl)], vocabulary)[0])
        return profiled(bench, engine, 4)
    watch = Watch(engine.runner)
    engine.runner = watch
    engine.add(requests([(scale.num_itl // 4, scale.num_itl)], vocabulary)[0])
    times: list[float] = []
    while not engine.is_idle:
        if engine.step():
            times.append(time.perf_counter())
    gaps = sorted(1e3 * (after - before) for before, after in zip(times, times[1:], strict=False))
    found = {"itl_ms": statistics.median(gaps), "itl_p99_ms": gaps[int(0.99 * len(gaps))]}
    return found | watch.figures(times[-1] - times[0])


def first_token_s(engine: Engine, asked: GenerateRequest) -> float:
    began = time.perf_counter()
    engine.add(asked)
    while not engine.step():
        pass
    took_s = time.perf_counter() - began
    finish(engine)
    return took_s


def prefix(bench: Bench) -> dict[str, Any]:
    scale = bench.scale
    longest = 128 if bench.is_tiny else scale.num_prefix + 256
    engine = bench.engine(
        LLAMA, max_sequences=4, max_tokens=min(scale.max_tokens, 8192), max_length=longest
    )
    vocabulary = TINY["vocab_size"] if bench.is_tiny else LLAMA["vocab_size"]
    warm_up(engine, vocabulary)
    chance = random.Random(SEED)
    params = SamplingParams(temperature=0.0, max_tokens=4)
    new, known = [], []
    for number in range(scale.num_tries):
        prompt = drawn(chance, scale.num_prefix, vocabulary)
        for times, which in ((new, 0), (known, 1)):
            # The last tokens are another question about the same text.
            tokens = [*prompt[:-2], which, number]
            asked = GenerateRequest(2 * number + which, pack_tokens(tokens), params)
            times.append(first_token_s(engine, asked))
    return {
        "miss_ms": 1e3 * statistics.median(new[1:]),
        "hit_ms": 1e3 * statistics.median(known[1:]),
        "ratio": statistics.median(known[1:]) / statistics.median(new[1:]),
    }


# Strings of any text, more of them than there are tokens: no sequence ends early.
SCHEMA = {"type": "array", "items": {"type": "string"}, "minItems": 10_000}


def structured(bench: Bench, values: dict[str, Any]) -> dict[str, Any]:
    """Tokens a second with a schema and without, on one engine in turns."""
    scale = bench.scale
    num = scale.num_structured
    engine = bench.engine(values, max_sequences=num, max_tokens=max(scale.max_tokens, num))
    vocabulary = TINY["vocab_size"] if bench.is_tiny else values["vocab_size"]
    warm_up(engine, vocabulary)
    constraint = Constraint("json_schema", json.dumps(SCHEMA))
    pairs = [(scale.length_structured, scale.length_structured)] * num
    rates: dict[str, list[float]] = {"free": [], "structured": []}
    began = time.perf_counter()
    structured_rate(engine, requests(pairs[:1], vocabulary), constraint)
    first_s = time.perf_counter() - began
    for _ in range(scale.num_tries):
        for name, wanted in (("free", None), ("structured", constraint)):
            engine.scheduler.pool.clear()
            rates[name].append(structured_rate(engine, requests(pairs, vocabulary), wanted))
    free, with_schema = (statistics.median(each) for each in rates.values())
    return {
        "free_per_s": free,
        "structured_per_s": with_schema,
        "ratio": with_schema / free,
        "first_s": first_s,
    }


def structured_rate(
    engine: Engine, wishes: list[GenerateRequest], constraint: Constraint | None
) -> float:
    for asked in wishes:
        engine.add(replace(asked, params=replace(asked.params, constraint=constraint)))
    took_s, num_tokens = finish(engine)
    if engine.failures:
        raise RuntimeError(f"a grammar failed: {engine.failures}")
    wanted = sum(asked.params.max_tokens or 0 for asked in wishes)
    if engine.is_idle and num_tokens != wanted:
        raise RuntimeError(f"{num_tokens} tokens came; expected {wanted}")
    return num_tokens / took_s


def beside_transformers(bench: Bench) -> dict[str, Any]:
    scale = bench.scale
    pairs = [(scale.length_beside, scale.length_beside)] * scale.num_beside
    ours = throughput(bench, QWEN3, pairs)
    if bench.is_profiled:
        return ours
    freed(bench)
    theirs = transformers_rate(bench, requests(pairs, 100))
    rate = ours["output_tokens_per_s"]
    return {"ours_per_s": rate, **theirs, "ratio": rate / theirs["transformers_per_s"]}


def transformers_rate(bench: Bench, wishes: list[GenerateRequest]) -> dict[str, Any]:
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    config = AutoConfig.from_pretrained(bench.config(QWEN3).parent)
    dtype = torch.float32 if bench.device == "cpu" else torch.bfloat16
    with torch.device(bench.device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="paged|sdpa"
        ).eval()
    num_out = wishes[0].params.max_tokens
    # Nothing ends a sequence but its length.
    asked = GenerationConfig(
        max_new_tokens=num_out, do_sample=False, eos_token_id=-1, pad_token_id=0, use_cache=True
    )
    inputs = [list(each.tokens) for each in wishes]

    # By itself it takes nearly all memory that is free, which must not be this machine's.
    sizes = {"block_size": 32, "num_blocks": 64, "max_batch_tokens": 64} if bench.is_tiny else {}
    batching = ContinuousBatchingConfig(**sizes)

    def timed(some: list[list[int]], num: int) -> tuple[float, dict[str, Any]]:
        began = time.perf_counter()
        found = model.generate_batch(
            inputs=some,
            generation_config=asked,
            continuous_batching_config=batching,
            max_new_tokens=num,
        )
        return time.perf_counter() - began, found

    timed(inputs, 2)
    # Each call makes its cache anew, which is not counted.
    start_s, _ = timed(inputs[:1], 1)
    whole_s, found = timed(inputs, num_out)
    # Of a small workload it is more than all the rest.
    took_s = whole_s - start_s if whole_s > 2 * start_s else whole_s
    num_tokens = sum(len(each.generated_tokens) for each in found.values())
    if num_tokens != num_out * len(wishes):
        raise RuntimeError(f"{num_tokens} tokens came; expected {num_out * len(wishes)}")
    return {
        "transformers": transformers.__version__,
        "transformers_per_s": num_tokens / took_s,
        "transformers_tokens": num_tokens,
        "transformers_s": took_s,
        "transformers_start_s": start_s,
    }


def attention(bench: Bench) -> dict[str, Any]:
    """Needs Triton; without a GPU it is interpreted (TRITON_INTERPRET=1), and only told whether it
    runs."""
    if not has_triton():
        return {"skipped": "Triton is not installed"}
    from penstock.kernels import paged_attention

    rows: dict[str, Any] = {}
    small = bench.is_tiny
    for label, num, group, most in (("256 x 8B", 256, 4, 2048), ("256 x 0.6B", 256, 2, 2048),
                                    ("1 x 8B", 1, 4, 1024), ("64 x 8B", 64, 4, 2048)):  # fmt: skip
        case = attention_case(bench, 3 if small else num, group, 40 if small else most)
        num_bytes = 2 * 2 * 128 * 8 * case[-1]
        for keys, warps, stages in ((64, 4, 3), (64, 4, 2), (64, 4, 5), (32, 4, 3), (32, 2, 5),
                                    (128, 4, 3), (128, 8, 3), (64, 8, 3), (32, 4, 5)):  # fmt: skip
            paged_attention.ONE_KEYS[128] = keys
            paged_attention.ONE_WARPS, paged_attention.ONE_STAGES = warps, stages
            try:
                took_ms = attention_ms(bench, case)
            except Exception as error:  # A tile may need more shared memory than there is.
                rows[f"{label}: {keys}/{warps}/{stages}"] = f"{type(error).__name__}: {error}"[:80]
                continue
            rows[f"{label}: {keys}/{warps}/{stages}"] = f"{num_bytes / took_ms / 1e6:.0f} GB/s"
            print(f"{label} keys {keys} warps {warps} stages {stages}: {1e3 * took_ms:.1f} us, "
                  f"{num_bytes / took_ms / 1e6:.0f} GB/s", flush=True)  # fmt: skip
            if small:
                break
    for keys, warps, stages in ((64, 8, 3), (64, 8, 2), (64, 8, 4), (128, 8, 2), (32, 8, 4),
                                (64, 4, 3)):  # fmt: skip
        name = f"prompts: {keys}/{warps}/{stages}"
        try:
            rows[name] = prompts_rate(bench, keys, warps, stages)
        except Exception as error:
            rows[name] = f"{type(error).__name__}: {error}"[:80]
        print(name, rows[name], flush=True)
        if small:
            break
    return rows


def prompts_rate(bench: Bench, keys: int, warps: int, stages: int) -> str:
    """Eight prompts of the same length, causal: half of all pairs are computed."""
    from penstock.kernels import paged_attention

    num, length = (2, 40) if bench.is_tiny else (8, 2048)
    _, paged, _, _ = attention_case(bench, num, 4, length)
    dtype = paged.keys.dtype
    queries = torch.randn(num * length, 32, 128, device=bench.device, dtype=dtype)
    size = paged_attention.tokens_of_line(4)
    lines = [
        [row, row * length + at, (row + 1) * length, at]
        for at in reversed(range(0, length, size))
        for row in range(num)
    ]
    table = torch.tensor(lines, dtype=torch.int32, device=bench.device)
    out = torch.empty_like(queries)
    paged_attention.MANY_KEYS, paged_attention.MANY_WARPS = keys, warps
    took_ms = timed_ms(
        bench, lambda: paged_attention.attend_many(queries, paged, table, out, stages)
    )
    return f"{4 * num * length * length / 2 * 32 * 128 / took_ms / 1e9:.0f} TFLOP/s"


def attention_case(bench: Bench, num: int, group: int, most: int) -> tuple[Any, ...]:
    from penstock.kernels import Paged

    device, dtype = bench.device, torch.float16 if bench.device == "cpu" else torch.bfloat16
    chance = random.Random(SEED)
    # As the runner has them: those that see most first.
    lengths = sorted((chance.randint(most // 8, most) for _ in range(num)), reverse=True)
    blocks = -(-most // 16)
    order = list(range(num * blocks))
    chance.shuffle(order)
    table = torch.tensor(order, dtype=torch.int32, device=device).view(num, blocks)
    keys, values = torch.randn(2, num * blocks * 16, 8, 128, device=device, dtype=dtype)
    queries = torch.randn(num, 8 * group, 128, device=device, dtype=dtype)
    batch_table = torch.tensor([[each - 1, n] for n, each in enumerate(lengths)], dtype=torch.int32)
    return queries, Paged(keys, values, table, 16), batch_table.to(device), sum(lengths)


def attention_ms(bench: Bench, case: tuple[Any, ...]) -> float:
    from penstock.kernels import paged_attention

    queries, paged, batch_table, _ = case
    out = torch.empty_like(queries)
    splits = paged_attention.num_splits(len(queries), 8)
    if bench.is_tiny:
        splits = 2

    return timed_ms(
        bench,
        lambda: paged_attention.attend_one(
            queries, paged, batch_table[:, 0], batch_table[:, 1], out, splits
        ),
    )


def timed_ms(bench: Bench, run: Callable[[], None]) -> float:
    if bench.device == "cpu":
        began = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - began)
    from triton.testing import do_bench_cudagraph

    return float(do_bench_cudagraph(run, rep=20, return_mode="median"))


CASES: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "qwen3-0.6b": qwen3,
    "itl": itl,
    "llama-8b": llama,
    "prefix": prefix,
    "llama-8b-fp8": llama_fp8,
    "transformers": beside_transformers,
    "structured-8b": partial(structured, values=LLAMA),
    "structured-0.6b": partial(structured, values=QWEN3),
    "attention": attention,
}
HEADLINES = {
    "itl": "itl_ms", "prefix": "ratio", "transformers": "ratio", "structured-8b": "ratio",
    "structured-0.6b": "ratio",
}  # fmt: skip


def freed(bench: Bench) -> None:
    gc.unfreeze()
    gc.collect()
    if bench.device != "cpu":
        torch.cuda.empty_cache()


def show(name: str, found: dict[str, Any]) -> None:
    figure = found.get(HEADLINES.get(name, "output_tokens_per_s"))
    if figure is not None and name in GOALS:
        goal, reach = GOALS[name]
        print(f"{name}: {figure:,.2f} (goal {goal:,}, reach for {reach:,})")
    for key, value in found.items():
        if key != "profile":
            print(f"    {key}: {value:,.3f}" if isinstance(value, float) else f"    {key}: {value}")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", choices=CASES, help="default: all, one by one")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tiny", action="store_true", help="a small model: does it run?")
    parser.add_argument("--profile", action="store_true", help="the top kernels instead of rates")
    parser.add_argument("--again", action="store_true", help="measure what the file has already")
    parser.add_argument("--out", type=Path, help="default: $OUT, or benchmarks/results")
    args = parser.parse_args()
    presence.require_gpu(args.device)
    scratch = ROOT / ".bench" / "gpu" / "llm"
    is_real = args.device != "cpu" and not args.tiny
    results = Path(os.environ.get("OUT", RESULTS if is_real else scratch))
    out = args.out or results / "gpu_llm.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    kept = json.loads(out.read_text()) if out.is_file() else {}
    bench = Bench(args.device, args.tiny, args.profile, scratch)
    for name in args.case or CASES:
        key = f"{name} (profile)" if args.profile else name
        if key in kept and "error" not in kept[key] and not args.again:
            print(f"{key}: measured already")
            continue
        began = time.perf_counter()
        try:
            kept[key] = CASES[name](bench)
        except Exception as error:  # The other cases are worth having.
            kept[key] = {"error": f"{type(error).__name__}: {error}"}
            if not is_real:
                raise
            import traceback

            traceback.print_exc()
        kept[key]["whole_s"] = time.perf_counter() - began
        is_cpu = args.device == "cpu"
        kept[key]["machine"] = "CPU, no figures" if is_cpu else torch.cuda.get_device_name()
        out.write_text(json.dumps(kept, indent=1))
        show(key, kept[key])
        freed(bench)


if __name__ == "__main__":
    main()

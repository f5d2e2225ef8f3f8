"""BERT-large on one GPU, technique by technique: what padding costs and what packing, CUDA graphs
and FP8 give back. Random weights of the true shape; sequences as long as SQuAD's (seeded, 177
tokens on average, at most 384).

    python benchmarks/gpu/bert.py                    # about three minutes; JSON to bert.json
    python benchmarks/gpu/bert.py --tiny --device cpu  # every row, tiny, without a GPU

Each row is one technique through the backend that serves it, host-fed: inputs in the host's memory,
two batches on their way. Rows called resident replay one batch that stays on the device. `error` is
the relative distance from the padded model in FP32 on other sequences.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from penstock.backends import Batch, backend, torch_packing
from penstock.backends.pytorch import load_module
from penstock.config import BatchPolicy, ModelConfig, PadAxis, Padding
from penstock.types import TensorSpec

MODULE = '''
import torch
from torch import nn
from torch.nn import functional as F

WIDTH, HEADS, INNER, LAYERS, WORDS, POSITIONS = {sizes}


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x, mask):
        heads = [
            each(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        ]
        return F.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2).flatten(2)


class Output(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.dense, self.LayerNorm = nn.Linear(width, WIDTH), nn.LayerNorm(WIDTH, 1e-12)

    def forward(self, x, residual):
        return self.LayerNorm(self.dense(x) + residual)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.self, self.output = SelfAttention(), Output(WIDTH)

    def forward(self, x, mask):
        return self.output(self.self(x, mask), x)


class Intermediate(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(WIDTH, INNER)

    def forward(self, x):
        return F.gelu(self.dense(x))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.intermediate = Attention(), Intermediate()
        self.output = Output(INNER)

    def forward(self, x, mask):
        x = self.attention(x, mask)
        return self.output(self.intermediate(x), x)


class Embeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(WORDS, WIDTH)
        self.position_embeddings = nn.Embedding(POSITIONS, WIDTH)
        self.LayerNorm = nn.LayerNorm(WIDTH, 1e-12)

    def forward(self, input_ids):
        positions = self.position_embeddings.weight[: input_ids.shape[1]]
        return self.LayerNorm(self.word_embeddings(input_ids) + positions)


class Bert(nn.Module):
    """For questions about a text: where an answer begins and ends."""

    def __init__(self):
        super().__init__()
        self.embeddings = Embeddings()
        self.layer = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.qa_outputs = nn.Linear(WIDTH, 2)

    def forward(self, input_ids, attention_mask):
        x = self.embeddings(input_ids)
        mask = attention_mask.bool()[:, None, None, :]
        for layer in self.layer:
            x = layer(x, mask)
        return {{"logits": self.qa_outputs(x)}}


def factory():
    with torch.device("meta"):
        module = Bert()
    return module.to_empty(device="cpu")
'''


@dataclass(frozen=True)
class Scale:
    """Width, heads, inner width, layers, words, positions; what is sent."""

    sizes: tuple[int, int, int, int, int, int]
    mean_length: int
    max_length: int
    # Rows of a padded batch, tokens of a packed one.
    num_rows: int
    num_tokens: int
    alone: tuple[int, ...]


LARGE = Scale((1024, 16, 4096, 24, 30522, 512), 177, 384, 128, 32768, (384, 128))
TINY = Scale((64, 2, 128, 2, 500, 64), 12, 24, 4, 64, (24, 8))
SPREAD = 0.42
# Sequences that errors are measured on, and that ranges are found on.
NUM_CHECKED, SEED, CHECK_SEED, RANGE_SEED = 8, 7, 17, 99
PACKED = {"penstock.pack": "tokens"}
GRAPHS = {"penstock.cuda_graphs": "on"}
BF16 = {"penstock.dtype": "bf16"}
FP8 = {"penstock.fp8": "fp8.json"}
BY_ROW = {"penstock.fp8": "rowwise"}
# Name, options, whether batches are made for packing.
TECHNIQUES: tuple[tuple[str, Mapping[str, str], bool], ...] = (
    ("padded FP32", {}, False),
    ("padded BF16", BF16, False),
    ("padded BF16, CUDA graphs", BF16 | GRAPHS, False),
    ("packed BF16", BF16 | PACKED, True),
    ("packed BF16, CUDA graphs", BF16 | PACKED | GRAPHS, True),
    ("packed FP8, CUDA graphs", BF16 | PACKED | FP8 | GRAPHS, True),
    ("packed FP8 by row, CUDA graphs", BF16 | PACKED | BY_ROW | GRAPHS, True),
)


def draw_lengths(scale: Scale, count: int, seed: int) -> np.ndarray:
    """Log-normal, cut off at the longest, moved to the mean by bisection."""
    noise = np.random.default_rng(seed).standard_normal(count)
    low, high = 0.0, 8.0
    for _ in range(40):
        middle = (low + high) / 2
        lengths = np.exp(middle + SPREAD * noise).clip(scale.mean_length / 6, scale.max_length)
        lengths = lengths.round().astype(int)
        low, high = (middle, high) if lengths.mean() < scale.mean_length else (low, middle)
    return lengths


def batch_of(scale: Scale, lengths: np.ndarray, seed: int) -> dict[str, np.ndarray]:
    mask = np.arange(scale.max_length)[None, :] < lengths[:, None]
    ids = np.random.default_rng(seed).integers(1, scale.sizes[4], mask.shape) * mask
    return {"input_ids": ids, "attention_mask": mask.astype(np.int64)}


def write_model(folder: Path, scale: Scale) -> ModelConfig:
    from safetensors.torch import save_file

    source = MODULE.format(sizes=scale.sizes)
    (folder / "module.py").write_text(source)
    space: dict[str, Any] = {}
    exec(source, space)
    module = space["factory"]()
    generator = torch.Generator().manual_seed(3)
    for name, weight in module.named_parameters():
        is_norm = "LayerNorm" in name
        weight.data.normal_(0.0, 0.1 if is_norm else 0.03, generator=generator)
        if is_norm and name.endswith("weight"):
            weight.data += 1
    save_file(module.state_dict(), folder / "model.safetensors")
    most = max(scale.num_rows, 2 * scale.num_tokens // scale.mean_length)
    axes = (PadAxis("input_ids", 0), PadAxis("attention_mask", 0))
    return ModelConfig(
        name="bert",
        version="1",
        backend="pytorch",
        artifact=str(folder / "module.py"),
        inputs=tuple(TensorSpec(each.input, "INT64", (-1,)) for each in axes),
        outputs=(TensorSpec("logits", "FP32", (-1, 2)),),
        max_batch_size=most,
        batching=BatchPolicy(most, is_dynamic=True),
        num_instances=2,
        padding=Padding(axes, (scale.max_length,)),
    )


class Bench:
    def __init__(self, config: ModelConfig, scale: Scale, device: str, seconds: float) -> None:
        self.config = replace(config, device=device)
        # As many as make this GPU's batches full.
        if device != "cpu" and scale is not TINY:
            properties = torch.cuda.get_device_properties(device)
            full = torch_packing.full_batch(properties.multi_processor_count)
            scale = replace(scale, num_tokens=full)
        self.scale = scale
        self.device = device
        self.seconds = seconds
        self.checked = batch_of(scale, draw_lengths(scale, NUM_CHECKED, CHECK_SEED), CHECK_SEED)
        self.is_token = self.checked["attention_mask"] != 0
        self.wanted: np.ndarray | None = None

    def rows(self) -> Iterator[dict[str, Any]]:
        """One measurement after the other; what fails is one too."""
        yield {"name": "calibration", **self.attempt(self.calibrate)}
        for name, options, is_packed in TECHNIQUES:
            if self.device == "cpu":
                options = {k: v for k, v in options.items() if k != "penstock.cuda_graphs"}
                if "penstock.fp8" in options:
                    continue

            def measure(options=options, is_packed=is_packed):
                return self.technique(options, is_packed)

            yield {"name": name, **self.attempt(measure)}
        if self.device != "cpu":
            yield {"name": "packed BF16, resident", **self.attempt(lambda: self.resident({}))}
            yield {"name": "packed FP8, resident", **self.attempt(lambda: self.resident(FP8))}
            by_row = self.attempt(lambda: self.resident(BY_ROW))
            yield {"name": "packed FP8 by row, resident", **by_row}

    def attempt(self, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        began = time.perf_counter()
        try:
            found = measure()
        except Exception as error:
            found = {"failed": f"{type(error).__name__}: {error}"[:300]}
        # A runner and what it computes with know each other.
        gc.collect()
        if self.device != "cpu":
            torch.cuda.empty_cache()
        return found | {"took_s": round(time.perf_counter() - began, 1)}

    def calibrate(self) -> dict[str, Any]:
        packing, call, close = self.module(torch.float32)
        rows = batch_of(self.scale, draw_lengths(self.scale, 32, RANGE_SEED), RANGE_SEED)
        ranges = torch_packing.calibrated(packing, call, [self.on_device(rows)])
        Path(self.config.artifact).with_name("fp8.json").write_text(json.dumps(ranges))
        close()
        return {"largest": max(ranges.values())}

    def module(self, dtype: torch.dtype) -> tuple[torch_packing.Packing, Any, Callable[[], None]]:
        """The packed module by itself."""
        loaded = load_module(replace(self.config, device="cpu"))

        def call(inputs: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
            return loaded.module(**inputs)

        packing = torch_packing.pack(loaded.module, call, self.config)
        loaded.module.to(self.device, dtype)
        return packing, call, loaded.close

    def on_device(self, batch: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(each).to(self.device) for name, each in batch.items()}

    def packed_batch(self, seed: int) -> dict[str, np.ndarray]:
        """As many sequences as fit the tokens."""
        scale = self.scale
        lengths = draw_lengths(scale, scale.num_tokens // scale.mean_length, seed)
        return batch_of(scale, lengths[np.cumsum(lengths) <= scale.num_tokens], seed)

    def technique(self, options: Mapping[str, str], is_packed: bool) -> dict[str, Any]:
        began = time.perf_counter()
        runner = backend("pytorch")(replace(self.config, options=dict(options)))
        found: dict[str, Any] = {"load_s": round(time.perf_counter() - began, 1)}
        found["error"] = self.error(run(runner, self.checked))
        scale = self.scale
        if is_packed:
            batches = [self.packed_batch(SEED + number) for number in range(3)]
        else:
            lengths = [draw_lengths(scale, scale.num_rows, SEED + number) for number in range(3)]
            batches = [batch_of(scale, each, SEED) for each in lengths]
        found |= self.rate(runner, batches)
        for length in scale.alone:
            alone = batch_of(scale, np.array([length]), SEED)
            seconds = median_s(lambda alone=alone: run(runner, alone), self.seconds / 4)
            found[f"ms_at_{length}"] = 1e3 * seconds
        found["built"] = dict(runner.built())
        runner.close()
        return found

    def error(self, logits: np.ndarray) -> float:
        kept = logits[self.is_token]
        if self.wanted is None:
            self.wanted = kept
        return float(np.linalg.norm(kept - self.wanted) / np.linalg.norm(self.wanted))

    def rate(self, runner: Any, batches: list[dict[str, np.ndarray]]) -> dict[str, float]:
        """Two on their way, as two instances of a model are."""
        num_tokens = [int(each["attention_mask"].sum()) for each in batches]
        for each in batches:
            for _ in range(2):
                run(runner, each)
        begun: deque[Any] = deque()
        sequences = tokens = number = 0
        began = time.perf_counter()
        while time.perf_counter() - began < self.seconds or not sequences:
            each = batches[number % len(batches)]
            begun.append(runner.start(Batch(each, len(each["attention_mask"]))))
            if len(begun) == 2:
                list(begun.popleft().wait())
            sequences += len(each["attention_mask"])
            tokens += num_tokens[number % len(batches)]
            number += 1
        for execution in begun:
            list(execution.wait())
        took_s = time.perf_counter() - began
        return {
            "sequences_per_s": sequences / took_s,
            "tokens_per_s": tokens / took_s,
            # Of sequences of just the mean length: batches differ a little.
            "sequences_per_s_at_mean": tokens / took_s / self.scale.mean_length,
        }

    def resident(self, options: Mapping[str, str]) -> dict[str, Any]:
        """One packed batch, replayed from a graph."""
        packing, call, close = self.module(torch.bfloat16)
        torch_packing.on_device(packing, replace(self.config, options=dict(options)))
        batch = self.packed_batch(SEED)
        inputs = self.on_device(batch)
        num_tokens = int(batch["attention_mask"].sum())

        def compute() -> None:
            packing.lay_out(inputs, self.scale.num_tokens)
            call(inputs)

        with torch.inference_mode():
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                compute()
                packing.prepare(self.scale.num_tokens, compute)
                compute()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                compute()

        def replay() -> None:
            graph.replay()
            torch.cuda.synchronize()

        took_s = median_s(replay, self.seconds)
        close()
        return {
            "ms": 1e3 * took_s,
            "sequences_per_s": len(batch["input_ids"]) / took_s,
            "tokens_per_s": num_tokens / took_s,
            "sequences_per_s_at_mean": num_tokens / took_s / self.scale.mean_length,
        }


def run(runner: Any, batch: Mapping[str, np.ndarray]) -> np.ndarray:
    (outputs,) = runner.start(Batch(batch, len(batch["attention_mask"]))).wait()
    return np.array(outputs["logits"])


def median_s(run: Callable[[], object], seconds: float) -> float:
    for _ in range(3):
        run()
    times: list[float] = []
    began = time.perf_counter()
    while time.perf_counter() - began < seconds or len(times) < 3:
        before = time.perf_counter()
        run()
        times.append(time.perf_counter() - before)
    return statistics.median(times)


def measurements(device: str, scale: Scale, seconds: float) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        config = write_model(Path(folder), scale)
        yield from Bench(config, scale, device, seconds).rows()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda", help="cpu to try it out without a GPU")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to see that it runs")
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="of each rate; more for less noise"
    )
    parser.add_argument("--json", default="bert.json", help="where the rows go")
    asked = parser.parse_args()
    on = torch.cuda.get_device_name() if asked.device != "cpu" else "CPU"
    found: list[dict[str, Any]] = []
    for row in measurements(asked.device, TINY if asked.tiny else LARGE, asked.seconds):
        found.append(row)
        shown = {k: round(v, 4) for k, v in row.items() if isinstance(v, float)}
        print(row["name"], shown, row.get("failed", ""), flush=True)
        document = {"device": on, "torch": torch.__version__, "rows": found}
        Path(asked.json).write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()

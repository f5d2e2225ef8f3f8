"""What an engine is made of, from its settings: the decoder, room for keys and values, and what
runs steps. `engine_main` and whoever measures it call this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from penstock.backends.packed_encoder import uses_kernels
from penstock.config import CPU
from penstock.errors import ConfigError
from penstock.llm import operations
from penstock.llm.cache import Cache, bytes_of_block
from penstock.llm.checkpoint import made_up, open_checkpoint
from penstock.llm.engine import Runs
from penstock.llm.messages import Settings
from penstock.llm.models.decoder import ON_CPU, Decoder
from penstock.llm.models.int4 import Int4Product
from penstock.llm.models.int8 import check_int8
from penstock.llm.models.shape import Shape
from penstock.llm.runner import Runner
from penstock.llm.scheduler import Limits

# Where nothing says how much of a CPU's memory keys and values may take.
DEFAULT_CACHE_BYTES = 1 << 30
# Of a GPU's memory that is free; the rest is for fragments, and for what others may need.
SHARE = 0.94
# For CUDA graphs and libraries.
SPARE_BYTES = 2 << 30
# Products of layers in e4m3, all else in this.
FP8, BESIDE_FP8 = "fp8", torch.bfloat16
# Those by what torch has on CPUs, of which all that is no product is FP32.
INT4 = "int4"
# Products in e4m3 take sizes that are multiples of this.
FP8_MULTIPLE = 16
ADA = (8, 9)


def open_decoder(settings: Settings) -> Decoder:
    """With its weights, on its device."""
    is_fp8 = settings.dtype == FP8
    on_cpu = settings.dtype if settings.dtype in ON_CPU else ""
    dtype = _dtype_beside(settings.dtype)
    path = Path(settings.path)
    if settings.is_made_up:
        # Drawn as they will be, where they will be: files of that size would take minutes.
        on_device = settings.device.startswith("cuda")
        checkpoint = made_up(path, settings.device, dtype) if on_device else made_up(path)
    else:
        checkpoint = open_checkpoint(path)
    try:
        if is_fp8:
            _check_fp8(settings.device, checkpoint.shape)
        if on_cpu:
            check_int8(settings.device, settings.dtype)
        shape, weights = checkpoint.shape, checkpoint.weight
        return Decoder(shape, weights, settings.device, dtype, is_fp8=is_fp8, on_cpu=on_cpu)
    finally:
        checkpoint.close()


def _dtype_beside(name: str) -> torch.dtype:
    """Of all that is not multiplied in small types."""
    beside = {FP8: BESIDE_FP8, **dict.fromkeys(ON_CPU, torch.float32)}
    found: torch.dtype = beside.get(name) or getattr(torch, name)
    return found


def _check_fp8(device: str, shape: Shape) -> None:
    problems = []
    if device.startswith("cuda") and torch.cuda.get_device_capability(device) < ADA:
        problems.append(f"dtype fp8: '{device}' has none; expected compute capability 8.9 or more")
    sizes = {"hidden_size": shape.width, "intermediate_size": shape.inner}
    problems += [
        f"dtype fp8: {name} is {size}; expected a multiple of {FP8_MULTIPLE}"
        for name, size in sizes.items()
        if size % FP8_MULTIPLE
    ]
    if problems:
        raise ConfigError(problems)


def room(settings: Settings, decoder: Decoder, limits: Limits) -> tuple[Cache, int]:
    """For keys and values, and how many blocks it has; ConfigError where one sequence would not
    fit."""
    size, dtype = settings.block_size, decoder.dtype
    if size & (size - 1):
        raise ConfigError([f"block_size is {size}; expected a power of two"])
    block_bytes = bytes_of_block(decoder.shape, size, dtype)
    num_bytes = settings.cache_bytes or _left(decoder, limits)
    num_blocks = num_bytes // block_bytes
    needed = -(-limits.max_length // size)
    if num_blocks < needed:
        raise ConfigError(
            [
                f"cache of {num_blocks * block_bytes} bytes: {num_blocks} blocks do not hold one "
                f"sequence of {limits.max_length} tokens; expected at least "
                f"{needed * block_bytes} bytes, or a smaller penstock.max_model_len"
            ]
        )
    is_exact = decoder.rounds and decoder.device.type == CPU
    cache = Cache(decoder.shape, num_blocks, size, settings.device, dtype, is_exact=is_exact)
    return cache, num_blocks


def _left(decoder: Decoder, limits: Limits) -> int:
    """Of the device's memory, without what a step computes in."""
    if decoder.device.type != "cuda":
        return DEFAULT_CACHE_BYTES
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(decoder.device)
    return max(0, int(free * SHARE) - SPARE_BYTES - step_bytes(decoder.shape, limits))


def step_bytes(shape: Shape, limits: Limits) -> int:
    """About as much as the largest step needs, in 16 bits: what goes into a layer's products and
    comes out of them, and logits, which those that are drawn for apart have several times."""
    heads = (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_size
    token = 2 * (4 * shape.width + heads + 4 * shape.inner)
    return limits.max_tokens * token + limits.max_sequences * shape.vocabulary * 16


@dataclass(frozen=True, slots=True)
class Opened:
    runner: Runs
    # Steps that it may begin before the one before them is committed.
    num_ahead: int = 0
    facts: Mapping[str, str] = field(default_factory=dict)


def open_runner(settings: Settings, decoder: Decoder, cache: Cache, limits: Limits) -> Opened:
    if not settings.device.startswith("cuda"):
        facts = _in_int4(decoder) if settings.dtype == INT4 else {}
        return Opened(Runner(decoder, cache), facts=facts)
    from penstock.backends.torch_cuda import Cuda
    from penstock.llm.cuda_runner import CudaRunner

    # What is not computed by kernels waits for the device, which a graph cannot hold.
    has_graphs = uses_kernels(decoder.embeddings)
    has_graphs = has_graphs and decoder.shape.head_size in operations.KERNEL_HEADS
    device = Cuda(settings.device)
    runner = CudaRunner(decoder, cache, device, limits, has_graphs=has_graphs)
    runner.prepare()
    return Opened(runner, runner.num_ahead, runner.facts())


def _in_int4(decoder: Decoder) -> dict[str, str]:
    """Of the products of layers: some have sizes that torch does not take."""
    all_of_them: list[object] = [
        each for n in decoder.layers for each in (n.qkv, n.out, n.gate_up, n.down)
    ]
    num = sum(isinstance(each, Int4Product) for each in all_of_them)
    rest = len(all_of_them) - num
    told = f"{num} of {len(all_of_them)} products"
    return {"int4": f"{told}; {rest} in float32 by their sizes" if rest else told}

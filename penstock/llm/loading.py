"""Build the parts of an engine from its settings: the decoder, the KV cache and the runner."""

from __future__ import annotations

from pathlib import Path

import torch

from penstock.config import CPU
from penstock.errors import ConfigError
from penstock.kernels.packed_encoder import uses_kernels
from penstock.llm import operations
from penstock.llm.cache import Cache, bytes_of_block
from penstock.llm.checkpoint import made_up, open_checkpoint
from penstock.llm.engine import EngineRunner
from penstock.llm.messages import EngineSettings
from penstock.llm.models.decoder import Decoder
from penstock.llm.models.experts import ExpertLayer, ExpertLoad
from penstock.llm.models.int4 import Int4Linear
from penstock.llm.models.int8 import check_int8
from penstock.llm.models.shape import DecoderShape
from penstock.llm.models.swiglu import DecoderLayer
from penstock.llm.runner import CpuRunner
from penstock.llm.scheduler import StepLimits
from penstock.llm.settings import DEFAULT_CACHE_BYTES, ON_CPUS

# Share of the free GPU memory that may be used; the rest is for fragmentation and other processes.
SHARE = 0.94
# Memory for CUDA graphs and libraries.
SPARE_BYTES = 2 << 30
# Linear layers run in e4m3, everything else in this type.
FP8, BESIDE_FP8 = "fp8", torch.bfloat16
# Linear layers by torch's CPU kernels; everything else runs in FP32.
INT4 = "int4"
# Matrix sizes must be multiples of this for e4m3.
FP8_MULTIPLE = 16
ADA = (8, 9)


def open_decoder(settings: EngineSettings) -> Decoder:
    # Everything except low-precision linear layers.
    beside = {FP8: BESIDE_FP8, **dict.fromkeys(ON_CPUS, torch.float32)}
    dtype: torch.dtype = beside.get(settings.dtype) or getattr(torch, settings.dtype)
    path, device = Path(settings.path), settings.device
    if not settings.is_made_up:
        checkpoint = open_checkpoint(path)
    else:
        # Drawn on GPUs in their final type: files of that size would take minutes.
        checkpoint = made_up(path, device, dtype) if device.startswith("cuda") else made_up(path)
    try:
        if settings.dtype == FP8:
            _check_fp8(device, checkpoint.shape)
        if settings.dtype in ON_CPUS:
            check_int8(device, settings.dtype)
        quantised = settings.dtype if settings.dtype in beside else ""
        return Decoder(checkpoint.shape, checkpoint.weight, device, dtype, quantised)
    finally:
        checkpoint.close()


def _check_fp8(device: str, shape: DecoderShape) -> None:
    problems = []
    if device.startswith("cuda") and torch.cuda.get_device_capability(device) < ADA:
        problems.append(f"dtype fp8: '{device}' has none; expected compute capability 8.9 or more")
    if shape.experts is not None:
        problems.append("dtype fp8: not for mixtures of experts; expected bfloat16 or float16")
    sizes = {"hidden_size": shape.width, "intermediate_size": shape.inner}
    problems += [
        f"dtype fp8: {name} is {size}; expected a multiple of {FP8_MULTIPLE}"
        for name, size in sizes.items()
        if size % FP8_MULTIPLE
    ]
    if problems:
        raise ConfigError(problems)


def room(settings: EngineSettings, decoder: Decoder, limits: StepLimits) -> Cache:
    """Return the KV cache; ConfigError if it cannot hold one sequence of the full length."""
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
    return Cache(decoder.shape, num_blocks, size, settings.device, dtype, is_exact=is_exact)


def _left(decoder: Decoder, limits: StepLimits) -> int:
    """Return the device memory left for the cache, without the workspace of a step."""
    if decoder.device.type != "cuda":
        return DEFAULT_CACHE_BYTES
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(decoder.device)
    return max(0, int(free * SHARE) - SPARE_BYTES - step_bytes(decoder.shape, limits))


def step_bytes(shape: DecoderShape, limits: StepLimits) -> int:
    """Estimate the workspace of the largest step in 16 bits: inputs and outputs of a layer's GEMMs,
    and logits, of which rows that are sampled again need several copies."""
    heads = (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_size
    token = 2 * (4 * shape.width + heads + 4 * shape.inner)
    return limits.max_tokens * token + limits.max_sequences * shape.vocabulary * 16


def open_runner(
    settings: EngineSettings, decoder: Decoder, cache: Cache, limits: StepLimits
) -> tuple[EngineRunner, dict[str, str]]:
    """Return the runner, and facts about it."""
    if not settings.device.startswith("cuda"):
        return CpuRunner(decoder, cache), _in_int4(decoder) if settings.dtype == INT4 else {}
    from penstock.backends.torch_cuda import Cuda
    from penstock.llm.cuda_runner import CudaRunner

    # Without the kernels, operations wait for the device, which a CUDA graph cannot hold.
    has_graphs = uses_kernels(decoder.embeddings)
    has_graphs = has_graphs and decoder.shape.head_size in operations.KERNEL_HEADS
    device = Cuda(settings.device)
    runner = CudaRunner(decoder, cache, device, limits, has_graphs=has_graphs)
    runner.prepare()
    return runner, runner.facts()


def expert_load(decoder: Decoder) -> ExpertLoad:
    feeds = [layer.feed for layer in decoder.layers if isinstance(layer, DecoderLayer)]
    return ExpertLoad([feed.load for feed in feeds if isinstance(feed, ExpertLayer)])


def _in_int4(decoder: Decoder) -> dict[str, str]:
    """Report how many linear layers run in int4: torch does not take all sizes."""
    all_of_them = [each for layer in decoder.layers for each in layer.linears]
    num = sum(isinstance(each, Int4Linear) for each in all_of_them)
    rest = len(all_of_them) - num
    told = f"{num} of {len(all_of_them)} linear layers"
    return {"int4": f"{told}; {rest} in float32 by their sizes" if rest else told}

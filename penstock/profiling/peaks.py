"""Measured peaks of this device, cached per number of threads.

FLOP/s come from a large matmul, memory bandwidth from copies larger than any cache, cache bandwidth
from copies that fit, and launch time from a chain of operators that do next to nothing.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from penstock.benchmark import system
from penstock.optimizer import onnx_model, this_machine
from penstock.profiling.results import Peaks
from penstock.types import Array

if TYPE_CHECKING:
    import torch
    from onnx import GraphProto
    from onnxruntime import InferenceSession

# Rounds of all peaks are interleaved, so that a short disturbance does not lower them all.
NUM_ROUNDS = 3
ROUND_S = 0.15
# Rounds that differ by more were disturbed: such peaks are used, but not cached.
STEADY = 1.3
# Matrix sides: matrices of a few times the caches' size, so that edge effects do not matter.
GEMM_SIZE = 1024
CUDA_GEMM_SIZE = 8192
COPY_BYTES = 128 << 20
CHAIN_LENGTH = 200
DEFAULT_CACHE_BYTES = 512 << 10
L2 = Path("/sys/devices/system/cpu/cpu0/cache/index2/size")
HOST_COPY_BYTES = 64 << 20
DATATYPES = ("fp32", "tf32", "fp16", "bf16", "fp8", "int8")
FORMAT = 2


def peaks_of(
    device: str, num_threads: int, folder: Path | None = None, *, is_torch: bool = False
) -> Peaks:
    """Return the peaks of `cpu` or `cuda:N`, cached in `folder` or the user's cache. On CPUs the
    launch time is torch's if `is_torch`, else ONNX Runtime's."""
    if folder is None:
        home = os.environ.get("XDG_CACHE_HOME")
        folder = (Path(home) if home else Path.home() / ".cache") / "penstock"
    path = folder / f"peaks-{_digest(device, num_threads, is_torch)}.json"
    with suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode(path.read_bytes(), type=Peaks)
    if device.startswith("cuda"):
        found, is_steady = _measure_cuda(device)
    else:
        found, is_steady = _measure_cpu(num_threads, is_torch)
    if is_steady:
        with suppress(OSError):  # Measured again next time.
            folder.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(f".{os.getpid()}")
            unfinished.write_bytes(msgspec.json.encode(found))
            unfinished.replace(path)
    return found


def _digest(device: str, num_threads: int, is_torch: bool) -> str:
    """Hash of the machine, libraries and threads, which determine the peaks."""
    seen = system.environment("")
    facts: list[object] = [FORMAT, device, num_threads, is_torch, seen.host_cpu, seen.num_cores]
    facts += [seen.gpus, seen.versions]
    return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()[:16]


@dataclass(slots=True)
class PeakProbe:
    """Does `amount` per run. The shortest time counts: other load can only slow it down."""

    run: Callable[[], object]
    amount: float
    # Best time of each round.
    rounds_s: list[float] = field(default_factory=list)

    def repeat(self, seconds: float) -> None:
        self.run()
        best_s = float("inf")
        end = time.perf_counter() + seconds
        while (began := time.perf_counter()) < end:
            self.run()
            best_s = min(best_s, time.perf_counter() - began)
        self.rounds_s.append(best_s)

    @property
    def is_steady(self) -> bool:
        return not self.rounds_s or max(self.rounds_s) <= STEADY * min(self.rounds_s)


def rates(tries: Mapping[str, PeakProbe], round_s: float = ROUND_S) -> dict[str, float]:
    """Return the best rate of each; those that fail are left out."""
    left = dict(tries)
    for _ in range(NUM_ROUNDS):
        for name, each in list(left.items()):
            try:
                each.repeat(round_s)
            except RuntimeError:  # A device without instructions for the type.
                del left[name]
    return {name: each.amount / min(each.rounds_s) for name, each in left.items()}


def _measure_cpu(num_threads: int, is_torch: bool) -> tuple[Peaks, bool]:
    """Return the peaks, and whether the measurement was undisturbed."""
    operations = 2.0 * GEMM_SIZE**3
    small = cache_bytes() // 4
    random, shape = np.random.default_rng(0), (GEMM_SIZE, GEMM_SIZE)
    floats = random.random(shape, np.float32), random.random(shape, np.float32)
    integers = random.integers(0, 128, shape, np.uint8), random.integers(-64, 64, shape, np.int8)
    with ThreadPoolExecutor(num_threads) as pool:
        tries = {
            "fp32": PeakProbe(_session("MatMul", *floats, num_threads), operations),
            "int8": PeakProbe(_session("MatMulInteger", *integers, num_threads), operations),
            "memory": _copy(pool, num_threads, COPY_BYTES),
            "cache": _copy(pool, num_threads, small * num_threads, num_repeats=64),
            "launch": PeakProbe(_torch_chain() if is_torch else _chain(), CHAIN_LENGTH),
        }
        if (bf16 := _torch_product(GEMM_SIZE, num_threads)) is not None:
            tries["bf16"] = PeakProbe(bf16, operations)
        peaks = _measure(system.environment("").host_cpu, num_threads, tries)
    peaks.cache_bytes = cache_bytes() * num_threads
    return peaks, all(each.is_steady for each in tries.values())


def _measure(device: str, num_threads: int, tries: Mapping[str, PeakProbe]) -> Peaks:
    found = rates(tries)
    return Peaks(
        device=device,
        num_threads=num_threads,
        flops={name: found[name] for name in DATATYPES if name in found},
        bytes_per_s=found["memory"],
        launch_s=1 / found["launch"],
        cache_bytes_per_s=found.get("cache", 0.0),
        host_bytes_per_s=found.get("host", 0.0),
    )


def cache_bytes() -> int:
    """Size of one core's L2 cache."""
    with suppress(OSError, ValueError):
        return int(L2.read_text().strip().removesuffix("K")) << 10
    return DEFAULT_CACHE_BYTES


def _copy(
    pool: ThreadPoolExecutor, num_threads: int, total_bytes: int, num_repeats: int = 1
) -> PeakProbe:
    """Copy in `num_threads` threads at once; the amount is bytes read and written."""
    share = total_bytes // num_threads
    pairs = [(np.ones(share, np.uint8), np.empty(share, np.uint8)) for _ in range(num_threads)]

    def copy(pair: tuple[Array, Array]) -> None:
        for _ in range(num_repeats):
            np.copyto(pair[1], pair[0])

    amount = 2.0 * share * num_threads * num_repeats
    return PeakProbe(lambda: list(pool.map(copy, pairs)), amount)


def _session(kind: str, left: Array, right: Array, num_threads: int) -> Callable[[], object]:
    """A matmul in ONNX Runtime; the second matrix is weights."""
    from onnx import helper, numpy_helper

    given = helper.np_dtype_to_tensor_dtype(left.dtype)
    answer = helper.np_dtype_to_tensor_dtype(np.dtype("i4" if left.dtype.kind == "u" else "f4"))
    graph = helper.make_graph(
        [helper.make_node(kind, ["left", "right"], ["product"])],
        "peak",
        [helper.make_tensor_value_info("left", given, left.shape)],
        [helper.make_tensor_value_info("product", answer, left.shape)],
        [numpy_helper.from_array(right, "right")],
    )
    session = _load(graph, num_threads)
    return lambda: session.run(None, {"left": left})


def _chain() -> Callable[[], object]:
    """A chain of operators, each on a single number."""
    from onnx import TensorProto, helper

    nodes = [helper.make_node("Neg", [f"x{n}"], [f"x{n + 1}"]) for n in range(CHAIN_LENGTH)]
    names = ("x0", f"x{CHAIN_LENGTH}")
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (1,)) for name in names]
    session = _load(helper.make_graph(nodes, "chain", ends[:1], ends[1:]), 1)
    number = np.ones(1, np.float32)
    return lambda: session.run(None, {"x0": number})


def _torch_chain() -> Callable[[], object]:
    import torch

    number = torch.ones(1)

    def run() -> None:
        with torch.inference_mode():
            for _ in range(CHAIN_LENGTH):
                torch.neg(number)

    return run


def _load(graph: GraphProto, num_threads: int) -> InferenceSession:
    # Imported first: it sets a switch before the library is loaded.
    from penstock.backends.onnxruntime import GRAPH_LEVELS  # isort: skip
    from onnx import helper

    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    options = {"graph_optimization_level": GRAPH_LEVELS["disabled"]}
    return onnx_model.session(model, intra_op_num_threads=num_threads, **options)


def _torch_product(size: int, num_threads: int) -> Callable[[], object] | None:
    """A BF16 matmul in torch; None without torch or without BF16 instructions."""
    try:
        import torch
    except ModuleNotFoundError:
        return None
    if not {"avx512_bf16", "amx_bf16"}.intersection(this_machine.read_machine().isa):
        return None
    torch.set_num_threads(num_threads)
    left, right = (torch.randn((size, size)).to(torch.bfloat16) for _ in range(2))
    return lambda: torch.mm(left, right)


def cuda_product(device: str, datatype: str, size: int) -> Callable[[], object] | None:
    """Return a synchronous matmul in this datatype; None if the device does not support it."""
    try:
        product = _product(device, datatype, size)
        product()
    except (RuntimeError, NotImplementedError, ValueError):
        return None
    return product if device == "cpu" else _synchronous(product, device)


def _synchronous(run: Callable[[], object], device: str) -> Callable[[], None]:
    import torch

    def finish() -> None:
        run()
        torch.cuda.synchronize(device)

    return finish


def _product(device: str, datatype: str, size: int) -> Callable[[], object]:
    import torch

    shape = (size, size)
    if datatype == "int8":
        whole = torch.ones(shape, dtype=torch.int8, device=device)
        return lambda: torch._int_mm(whole, whole.t())
    numbers = torch.randn(shape, device=device)
    if datatype == "fp8":
        small = numbers.to(torch.float8_e4m3fn)
        one = torch.ones((), device=device)
        # The second matrix is column-major, as the kernels require.
        settings = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
        return lambda: torch._scaled_mm(small, small.t(), one, one, **settings)
    if datatype in ("fp32", "tf32"):
        return lambda: _in_precision("high" if datatype == "tf32" else "highest", numbers)
    half = numbers.to({"fp16": torch.float16, "bf16": torch.bfloat16}[datatype])
    return lambda: torch.mm(half, half)


def _in_precision(precision: str, numbers: torch.Tensor) -> None:
    import torch

    torch.set_float32_matmul_precision(precision)
    torch.mm(numbers, numbers)
    torch.set_float32_matmul_precision("highest")


def _measure_cuda(device: str) -> tuple[Peaks, bool]:
    import torch

    source = torch.ones(COPY_BYTES * 8, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    host = torch.ones(HOST_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    one = torch.ones(1, device=device)

    def copy_in() -> None:
        target[:HOST_COPY_BYTES].copy_(host, non_blocking=True)

    def chain() -> None:
        for _ in range(CHAIN_LENGTH):
            one.neg()

    copy = _synchronous(lambda: target.copy_(source), device)
    tries = {
        "memory": PeakProbe(copy, 2.0 * source.numel()),
        "launch": PeakProbe(_synchronous(chain, device), CHAIN_LENGTH),
        "host": PeakProbe(_synchronous(copy_in, device), float(HOST_COPY_BYTES)),
    }
    for datatype in DATATYPES:
        if (run := cuda_product(device, datatype, CUDA_GEMM_SIZE)) is not None:
            tries[datatype] = PeakProbe(run, 2.0 * CUDA_GEMM_SIZE**3)
    peaks = _measure(torch.cuda.get_device_name(device), 1, tries)
    return peaks, all(each.is_steady for each in tries.values())

"""Options of ONNX Runtime's GPU providers: CUDA, and TensorRT in front of it.

Maps Penstock's and Triton's parameters to provider options; what the user sets as
`provider_options.<provider>.<key>` wins. Pure, except for `EngineCache`. docs/onnx-on-gpus.md lists
the options.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from penstock.config import EACH_GPU, ModelConfig
from penstock.repository.accelerators import CUDA_PROVIDER, GPU_PROVIDERS, TENSORRT_PROVIDER
from penstock.repository.parameters import CUDA_PROVIDER_KEYS

Providers = list[tuple[str, dict[str, str]]]
# Triton's parameters of the CUDA provider, and the names of their values by number.
NUMBERED: Mapping[str, tuple[str, ...]] = {
    "cudnn_conv_algo_search": ("EXHAUSTIVE", "HEURISTIC", "DEFAULT"),
    "arena_extend_strategy": ("kNextPowerOfTwo", "kSameAsRequested"),
}
# Whether FP32 products are rounded to TF32. The library's default is that they are.
TF32 = {"fp32": "0", "tf32": "1"}
# Endings of what TensorRT writes to its cache: engines, their shape ranges, kernel timings.
CACHED = (".engine", ".profile", ".timing")
CACHE_PATHS = ("trt_engine_cache_path", "trt_timing_cache_path")


def has_graphs(config: ModelConfig) -> bool:
    return config.options.get("penstock.cuda_graphs") == "on"


def device_index(config: ModelConfig) -> int:
    return int(config.device.removeprefix(EACH_GPU).removeprefix(":") or 0)


def gpu_providers(config: ModelConfig, problems: list[str]) -> Providers:
    """Return the GPU providers in order of preference, with their options."""
    asked = config.options.get("providers", CUDA_PROVIDER)
    names = [name.strip() for name in asked.split(",")]
    if not set(names) & set(GPU_PROVIDERS):
        advice = "KIND_CPU in instance_group runs the model on the CPU"
        expected = f"expected one that uses a GPU ({', '.join(GPU_PROVIDERS)}); {advice}"
        problems.append(f"parameters.providers: '{asked}'; {expected}")
    if CUDA_PROVIDER not in names:
        # For nodes that TensorRT does not take.
        names.append(CUDA_PROVIDER)
    problems += _problems(config, names)
    own = {CUDA_PROVIDER: _cuda_options(config, problems), TENSORRT_PROVIDER: _profiles(config)}
    device = {"device_id": str(device_index(config))}
    return [
        (name, {**(device | own[name] if name in own else {}), **given_options(config, name)})
        for name in names
    ]


def given_options(config: ModelConfig, provider: str) -> dict[str, str]:
    prefix = f"provider_options.{provider}."
    keys = [key for key in config.options if key.startswith(prefix)]
    return {key.removeprefix(prefix): config.options[key] for key in keys}


def _problems(config: ModelConfig, names: list[str]) -> Iterator[str]:
    options = config.options
    dtype = options.get("penstock.dtype", "")
    if dtype and dtype not in TF32:
        known = f"ONNX Runtime computes in the file's datatypes; expected {' or '.join(TF32)}"
        advice = "penstock optimize converts the file"
        yield f"parameters.penstock.dtype: '{dtype}': {known}; {advice}"
    layout = options.get("penstock.memory_format", "")
    if layout not in ("", "channels_last"):
        yield f"parameters.penstock.memory_format: '{layout}' is not channels_last"
    graphs = options.get("penstock.cuda_graphs", "")
    if graphs not in ("", "on", "off"):
        yield f"parameters.penstock.cuda_graphs: '{graphs}' is not one of on, off"
    is_open = not all(spec.is_fixed for spec in config.inputs) and config.padding is None
    if graphs == "on" and is_open:
        shapes = "inputs of fixed shapes or buckets (penstock.pad)"
        yield f"parameters.penstock.cuda_graphs: needs {shapes}"
    if graphs == "on" and TENSORRT_PROVIDER in names:
        own = f"provider_options.{TENSORRT_PROVIDER}.trt_cuda_graph_enable"
        yield f"parameters.penstock.cuda_graphs: TensorRT captures graphs itself; set {own}"
    texts = [spec.name for spec in (*config.inputs, *config.outputs) if spec.datatype == "BYTES"]
    advice = "KIND_CPU in instance_group runs the model on the CPU"
    yield from (f"tensor '{name}': BYTES are not for GPUs; {advice}" for name in texts)


def _cuda_options(config: ModelConfig, problems: list[str]) -> dict[str, str]:
    given = config.options
    # The arena grows by what is needed: by default it doubles, and other models need memory too.
    options = {"arena_extend_strategy": "kSameAsRequested"}
    if config.gpu_memory_bytes is not None:
        options["gpu_mem_limit"] = str(config.gpu_memory_bytes)
    if given.get("penstock.memory_format"):
        options["prefer_nhwc"] = "1"
    if given.get("penstock.dtype", "") in TF32:
        options["use_tf32"] = TF32[given["penstock.dtype"]]
    if has_graphs(config):
        options["enable_cuda_graph"] = "1"
    for key in CUDA_PROVIDER_KEYS:
        if (text := given.get(key)) is None:
            continue
        known = NUMBERED.get(key, ())
        if key == "gpu_mem_limit" and not (text.isascii() and text.isdigit() and int(text)):
            problems.append(f"parameters.{key}: '{text}' is not a number of bytes")
        if known and text not in known and text not in map(str, range(len(known))):
            numbered = ", ".join(f"{number} ({name})" for number, name in enumerate(known))
            problems.append(f"parameters.{key}: '{text}' is not one of {numbered}")
            continue
        options[key] = known[int(text)] if known and text.isdigit() else text
    return options


def memory_limit(config: ModelConfig) -> int | None:
    """Return the limit of the CUDA provider's memory in bytes; None without one."""
    limit = _cuda_options(config, []) | given_options(config, CUDA_PROVIDER)
    text = limit.get("gpu_mem_limit", "")
    return int(text) if text.isascii() and text.isdigit() else None


def _profiles(config: ModelConfig) -> dict[str, str]:
    """Return the range of shapes of TensorRT's engine. Without it an engine is built again for
    every batch that is larger than all before. Empty if lengths are unknown."""
    least, most = ({spec.name: list(spec.shape) for spec in config.inputs} for _ in range(2))
    if config.padding is not None:
        for axis in config.padding.axes:
            least[axis.input][axis.axis] = config.padding.buckets[0]
            most[axis.input][axis.axis] = config.padding.buckets[-1]
    is_known = all(size > 0 for shapes in (least, most) for sh in shapes.values() for size in sh)
    if not config.inputs or not is_known:
        return {}
    rows = config.max_batch_size
    first, last = ([1], [rows]) if rows else ([], [])
    lower = _shapes({name: [*first, *shape] for name, shape in least.items()})
    upper = _shapes({name: [*last, *shape] for name, shape in most.items()})
    if lower == upper:
        return {}
    keys = "trt_profile_min_shapes", "trt_profile_opt_shapes", "trt_profile_max_shapes"
    # The largest batch is what a server under load runs.
    return dict(zip(keys, (lower, upper, upper), strict=True))


def _shapes(shapes: Mapping[str, list[int]]) -> str:
    return ",".join(f"{name}:{'x'.join(map(str, sizes))}" for name, sizes in shapes.items())


class EngineCache:
    """TensorRT's engines and timings. It reads and writes them in a folder of this process, as a
    version's folder is never written to at load; the version's own files are copied there."""

    def __init__(self, version_folder: Path) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-tensorrt-")
        for path in version_folder.iterdir():
            if path.suffix in CACHED and path.is_file():
                (Path(self._folder.name) / path.name).write_bytes(path.read_bytes())

    def options(self, given: Mapping[str, str]) -> dict[str, str]:
        """Return the provider's options for the cache. A path that the user gave is used as it is:
        it may be shared by several machines of one kind."""
        enabled = {"trt_engine_cache_enable": "1", "trt_timing_cache_enable": "1"}
        return enabled | dict.fromkeys(CACHE_PATHS, self._folder.name) | dict(given)

    def files(self) -> dict[str, bytes]:
        """Return the files for the version's folder, by name."""
        paths = sorted(Path(self._folder.name).iterdir())
        return {path.name: path.read_bytes() for path in paths if path.suffix in CACHED}

    def close(self) -> None:
        self._folder.cleanup()

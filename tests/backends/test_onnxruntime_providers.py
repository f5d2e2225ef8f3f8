"""Options of ONNX Runtime's GPU providers, from Penstock's and Triton's parameters."""

from dataclasses import replace
from pathlib import Path

import pytest
from suites.backend import model_config

from penstock.backends.onnxruntime_providers import EngineCache, gpu_providers, memory_limit
from penstock.config import ModelConfig, PadAxis, Padding
from penstock.types import TensorSpec

CUDA, TENSORRT = "CUDAExecutionProvider", "TensorrtExecutionProvider"
IMAGES = TensorSpec("x", "FP32", (3, 8, 8))
SCORES = TensorSpec("y", "FP32", (10,))
TOKENS = TensorSpec("ids", "INT64", (-1,))


def config(device: str = "cuda:0", inputs=(IMAGES,), **options: str) -> ModelConfig:
    given = {key.replace("__", "."): text for key, text in options.items()}
    return replace(model_config("onnxruntime", "m", inputs, [SCORES], 16, given), device=device)


def options_of(asked: ModelConfig, provider: str = CUDA) -> dict[str, str]:
    problems: list[str] = []
    found = dict(gpu_providers(asked, problems))
    assert problems == []
    return found[provider]


def problems_of(asked: ModelConfig) -> list[str]:
    problems: list[str] = []
    gpu_providers(asked, problems)
    return problems


def test_by_default_cuda_runs_on_the_device_of_the_worker() -> None:
    assert gpu_providers(config("cuda:3"), []) == [
        (CUDA, {"device_id": "3", "arena_extend_strategy": "kSameAsRequested"})
    ]
    assert options_of(config("cuda"))["device_id"] == "0"


@pytest.mark.parametrize(
    ("option", "text", "key", "value"),
    [
        ("penstock.memory_format", "channels_last", "prefer_nhwc", "1"),
        ("penstock.cuda_graphs", "on", "enable_cuda_graph", "1"),
        ("penstock.cuda_graphs", "off", "enable_cuda_graph", None),
        ("penstock.dtype", "fp32", "use_tf32", "0"),
        ("penstock.dtype", "tf32", "use_tf32", "1"),
        # Triton's.
        ("gpu_mem_limit", "4294967200", "gpu_mem_limit", "4294967200"),
        ("cudnn_conv_algo_search", "1", "cudnn_conv_algo_search", "HEURISTIC"),
        ("cudnn_conv_algo_search", "DEFAULT", "cudnn_conv_algo_search", "DEFAULT"),
        ("arena_extend_strategy", "0", "arena_extend_strategy", "kNextPowerOfTwo"),
        ("do_copy_in_default_stream", "0", "do_copy_in_default_stream", "0"),
        # The library's.
        (f"provider_options.{CUDA}.sdpa_kernel", "2", "sdpa_kernel", "2"),
        (f"provider_options.{CUDA}.device_id", "1", "device_id", "1"),
    ],
)
def test_parameters_become_options(option: str, text: str, key: str, value: str | None) -> None:
    asked = replace(config(), options={option: text})
    assert options_of(asked).get(key) == value


def test_memory_of_the_plan_limits_the_arena() -> None:
    assert memory_limit(config()) is None
    planned = replace(config(), gpu_memory_bytes=5 << 30)
    assert options_of(planned)["gpu_mem_limit"] == str(5 << 30)
    assert memory_limit(planned) == 5 << 30
    # What is given for the provider itself wins.
    own = replace(planned, options={f"provider_options.{CUDA}.gpu_mem_limit": "7"})
    assert options_of(own)["gpu_mem_limit"] == "7"
    assert memory_limit(own) == 7


def test_tensorrt_comes_first_with_cuda_for_the_rest() -> None:
    found = gpu_providers(config(providers=TENSORRT), [])
    assert [name for name, _ in found] == [TENSORRT, CUDA]
    assert options_of(config("cuda:2", providers=TENSORRT), TENSORRT) == {
        "device_id": "2",
        "trt_profile_min_shapes": "x:1x3x8x8",
        "trt_profile_opt_shapes": "x:16x3x8x8",
        "trt_profile_max_shapes": "x:16x3x8x8",
    }


def test_shapes_of_an_engine_reach_from_the_first_bucket_to_the_last() -> None:
    padding = Padding((PadAxis("ids", 0),), (16, 64))
    padded = replace(config(inputs=[TOKENS], providers=TENSORRT), padding=padding)
    found = options_of(padded, TENSORRT)
    assert found["trt_profile_min_shapes"] == "ids:1x16"
    assert found["trt_profile_max_shapes"] == "ids:16x64"
    open_length = config(inputs=[TOKENS], providers=TENSORRT)
    assert options_of(open_length, TENSORRT) == {"device_id": "0"}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            {"providers": "CPUExecutionProvider"},
            "parameters.providers: 'CPUExecutionProvider'; exp",
        ),
        ({"penstock.dtype": "fp16"}, "parameters.penstock.dtype: 'fp16': ONNX Runtime computes in"),
        ({"penstock.memory_format": "nhwc"}, "parameters.penstock.memory_format: 'nhwc' is not"),
        ({"penstock.cuda_graphs": "yes"}, "parameters.penstock.cuda_graphs: 'yes' is not one of"),
        (
            {"penstock.cuda_graphs": "on", "providers": TENSORRT},
            "parameters.penstock.cuda_graphs: TensorRT captures graphs itself; set provider_",
        ),
        ({"gpu_mem_limit": "4 GiB"}, "parameters.gpu_mem_limit: '4 GiB' is not a number of bytes"),
        (
            {"cudnn_conv_algo_search": "3"},
            "parameters.cudnn_conv_algo_search: '3' is not one of 0 (EXHAUSTIVE), 1 (HEURISTIC)",
        ),
    ],
)
def test_wrong_options_are_refused(options: dict[str, str], problem: str) -> None:
    (found,) = problems_of(replace(config(), options=options))
    assert found.startswith(problem)


def test_graphs_need_shapes_that_come_again() -> None:
    asked = config(inputs=[TOKENS], penstock__cuda_graphs="on")
    (found,) = problems_of(asked)
    assert "needs inputs of fixed shapes or buckets" in found
    assert problems_of(replace(asked, padding=Padding((PadAxis("ids", 0),), (16,)))) == []


def test_texts_are_refused() -> None:
    (found,) = problems_of(config(inputs=[TensorSpec("words", "BYTES", (1,))]))
    assert found.startswith("tensor 'words': BYTES are not for GPUs")


class TestEngineCache:
    def test_it_starts_with_the_files_of_the_version_and_never_writes_there(
        self, tmp_path: Path
    ) -> None:
        (tmp_path / "kernel_sm90.engine").write_bytes(b"engine")
        (tmp_path / "model.onnx").write_bytes(b"graph")
        cache = EngineCache(tmp_path)
        options = cache.options({"trt_fp16_enable": "1"})
        folder = Path(options["trt_engine_cache_path"])
        assert options == {
            "trt_engine_cache_enable": "1",
            "trt_timing_cache_enable": "1",
            "trt_engine_cache_path": str(folder),
            "trt_timing_cache_path": str(folder),
            "trt_fp16_enable": "1",
        }
        assert folder != tmp_path
        assert {path.name for path in folder.iterdir()} == {"kernel_sm90.engine"}
        # As TensorRT's provider does.
        (folder / "kernel_sm90.engine").write_bytes(b"newer")
        (folder / "cache_sm90.timing").write_bytes(b"timings")
        (folder / "build.log").write_bytes(b"")
        assert cache.files() == {"kernel_sm90.engine": b"newer", "cache_sm90.timing": b"timings"}
        assert (tmp_path / "kernel_sm90.engine").read_bytes() == b"engine"
        cache.close()
        assert not folder.exists()

    def test_a_path_of_the_user_is_used_as_it_is(self, tmp_path: Path) -> None:
        cache = EngineCache(tmp_path)
        given = {"trt_engine_cache_path": "/caches", "trt_timing_cache_path": "/caches"}
        assert cache.options(given)["trt_engine_cache_path"] == "/caches"
        assert cache.options({"trt_engine_cache_enable": "0"})["trt_engine_cache_enable"] == "0"
        assert cache.files() == {}
        cache.close()

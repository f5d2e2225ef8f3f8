"""Two distributions in one folder: which is there, what is wrong, and what to do."""

from pathlib import Path

import pytest

from penstock.backends import onnxruntime_install as install

CUDA = ["CUDAExecutionProvider", "CPUExecutionProvider"]
PLAIN = ["AzureExecutionProvider", "CPUExecutionProvider"]
RECIPE = "run: pip uninstall -y onnxruntime onnxruntime-gpu && pip install --no-deps "


def add_distribution(folder: Path, name: str, version: str) -> None:
    """A dist-info folder, as pip writes it."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text("onnxruntime/__init__.py,,\n")


@pytest.mark.parametrize(
    ("builds", "others"),
    [
        ({}, ["numpy"]),
        ({"onnxruntime": "1.31.1"}, []),
        ({"onnxruntime-gpu": "1.31.1"}, ["onnxruntime-extensions", "onnxruntime-genai"]),
        ({"onnxruntime": "1.31.1", "onnxruntime-gpu": "1.30.0"}, ["onnx"]),
    ],
)
def test_builds_are_found_by_their_metadata(
    builds: dict[str, str], others: list[str], tmp_path: Path
) -> None:
    for name, version in builds.items():
        add_distribution(tmp_path, name, version)
    for name in others:
        # Their files are in folders of their own.
        add_distribution(tmp_path, name, "2.0")
    assert install.installed([str(tmp_path)]) == builds


def test_this_environment_has_one() -> None:
    assert set(install.installed()) & {"onnxruntime", "onnxruntime-gpu"}


def test_the_gpu_build_alone_is_fine() -> None:
    assert install.gpu_problem({"onnxruntime-gpu": "1.31.1"}, CUDA) == ""
    assert install.clash_warning({"onnxruntime-gpu": "1.31.1"}) == ""


def test_a_build_from_source_is_fine() -> None:
    assert install.gpu_problem({}, CUDA) == ""
    assert install.gpu_problem({"onnxruntime": "1.31.1"}, CUDA) == ""


def test_both_work_while_versions_are_equal_and_the_gpu_files_are_there() -> None:
    builds = {"onnxruntime": "1.31.1", "onnxruntime-gpu": "1.31.1"}
    assert install.gpu_problem(builds, CUDA) == ""
    warning = install.clash_warning(builds)
    assert "share one package folder" in warning
    assert warning.endswith(f"{RECIPE}onnxruntime-gpu==1.31.1")


def test_versions_that_differ_are_mixed() -> None:
    builds = {"onnxruntime": "1.32.0", "onnxruntime-gpu": "1.31.1"}
    problem = install.gpu_problem(builds, CUDA)
    assert problem.startswith("onnxruntime-gpu 1.31.1 and onnxruntime 1.32.0 share one package")
    assert "mixed" in problem and problem.endswith(f"{RECIPE}onnxruntime-gpu==1.31.1")


def test_overwritten_files_are_told() -> None:
    builds = {"onnxruntime": "1.31.1", "onnxruntime-gpu": "1.31.1"}
    problem = install.gpu_problem(builds, PLAIN)
    assert "but onnxruntime 1.31.1 has overwritten its files" in problem
    assert problem.endswith(f"{RECIPE}onnxruntime-gpu==1.31.1")


def test_a_missing_build_is_told_with_the_version_that_fits() -> None:
    problem = install.gpu_problem({"onnxruntime": "1.31.1"}, PLAIN)
    assert problem == (
        f"needs onnxruntime-gpu, which is not installed; {RECIPE}onnxruntime-gpu==1.31.1"
    )


def test_a_gpu_build_without_its_provider_is_told() -> None:
    problem = install.gpu_problem({"onnxruntime-gpu": "1.31.1"}, PLAIN)
    assert "has no CUDAExecutionProvider on this platform" in problem


def test_libraries_are_found_in_their_order_and_parts_of_cudnn_are_left_to_it(
    tmp_path: Path,
) -> None:
    names = {
        "cu13": ["libcublas.so.13", "libcublasLt.so.13", "libcudart.so.13", "libcurand.so.10"],
        "cudnn": ["libcudnn.so.9", "libcudnn_graph.so.9"],
        "nvshmem": ["libnvshmem_host.so.3"],
        "cuda_nvrtc": ["libnvrtc.so.13", "libnvrtc-builtins.so.13.0"],
    }
    for package, files in names.items():
        (tmp_path / package / "lib").mkdir(parents=True)
        for name in files:
            (tmp_path / package / "lib" / name).touch()
    found = [path.name for path in install.cuda_libraries([str(tmp_path)])]
    assert found == [
        "libcudart.so.13",
        "libnvrtc.so.13",
        "libcublasLt.so.13",
        "libcublas.so.13",
        "libcurand.so.10",
        "libcudnn.so.9",
    ]


def test_preloading_is_harmless_without_cuda() -> None:
    install.preload()

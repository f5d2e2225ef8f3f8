"""Two distributions in one folder: which is there, what is wrong, and what to do."""

from pathlib import Path

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


def found_in(folder: Path, **builds: str) -> list[install.InstalledBuild]:
    for name, version in builds.items():
        add_distribution(folder, name.replace("_", "-"), version)
    return install.installed([str(folder)])


def problem_of(builds: list[install.InstalledBuild], providers: list[str], folder: Path) -> str:
    return install.gpu_problem(builds, providers, str(folder))


def test_builds_are_found_by_their_metadata(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    add_distribution(first, "onnxruntime", "1.31.1")
    add_distribution(second, "onnxruntime-gpu", "1.30.0")
    for name in ("numpy", "onnx", "onnxruntime-extensions", "onnxruntime-genai"):
        # Their files are in folders of their own.
        add_distribution(first, name, "2.0")
    found = install.installed([str(first), str(second)])
    assert [(each.name, each.version, each.folder) for each in found] == [
        ("onnxruntime", "1.31.1", str(first)),
        ("onnxruntime-gpu", "1.30.0", str(second)),
    ]


def test_this_environment_has_one_where_it_is_imported_from() -> None:
    here = [each for each in install.installed() if each.folder == install.package_folder()]
    assert {each.name for each in here} & {"onnxruntime", "onnxruntime-gpu"}
    assert (Path(install.package_folder()) / "onnxruntime" / "__init__.py").is_file()


def test_the_gpu_build_alone_is_fine(tmp_path: Path) -> None:
    builds = found_in(tmp_path, onnxruntime_gpu="1.31.1")
    assert problem_of(builds, CUDA, tmp_path) == ""
    assert install.clash_warning(builds, str(tmp_path)) == ""


def test_a_build_from_source_is_fine(tmp_path: Path) -> None:
    assert problem_of([], CUDA, tmp_path) == ""
    assert problem_of(found_in(tmp_path, onnxruntime="1.31.1"), CUDA, tmp_path) == ""


def test_both_work_while_versions_are_equal_and_the_gpu_files_are_there(tmp_path: Path) -> None:
    builds = found_in(tmp_path, onnxruntime="1.31.1", onnxruntime_gpu="1.31.1")
    assert problem_of(builds, CUDA, tmp_path) == ""
    warning = install.clash_warning(builds, str(tmp_path))
    assert "share one package folder" in warning
    assert warning.endswith(f"{RECIPE}onnxruntime-gpu==1.31.1")


def test_versions_that_differ_are_mixed(tmp_path: Path) -> None:
    builds = found_in(tmp_path, onnxruntime="1.32.0", onnxruntime_gpu="1.31.1")
    problem = problem_of(builds, CUDA, tmp_path)
    assert problem.startswith("onnxruntime-gpu 1.31.1 and onnxruntime 1.32.0 share one package")
    assert "mixed" in problem and problem.endswith(f"{RECIPE}onnxruntime-gpu==1.31.1")


def test_overwritten_files_are_told(tmp_path: Path) -> None:
    builds = found_in(tmp_path, onnxruntime="1.31.1", onnxruntime_gpu="1.31.1")
    problem = problem_of(builds, PLAIN, tmp_path)
    assert "but onnxruntime 1.31.1 has overwritten its files" in problem
    assert problem.endswith(f"{RECIPE}onnxruntime-gpu==1.31.1")


def test_builds_in_folders_of_their_own_do_not_clash(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    builds = [
        *found_in(first, onnxruntime_gpu="1.31.1"),
        *found_in(second, onnxruntime="1.29.0"),
    ]
    assert problem_of(builds, CUDA, first) == ""
    assert install.clash_warning(builds, str(first)) == ""
    # The other one comes first on sys.path.
    problem = problem_of(builds, PLAIN, second)
    assert problem == (
        f"onnxruntime-gpu 1.31.1 is in {first}, but {second} comes first on sys.path"
    )


def test_a_missing_build_is_told_with_the_version_that_fits(tmp_path: Path) -> None:
    problem = problem_of(found_in(tmp_path, onnxruntime="1.31.1"), PLAIN, tmp_path)
    assert problem == (
        f"needs onnxruntime-gpu, which is not installed; {RECIPE}onnxruntime-gpu==1.31.1"
    )


def test_a_gpu_build_without_its_provider_is_told(tmp_path: Path) -> None:
    problem = problem_of(found_in(tmp_path, onnxruntime_gpu="1.31.1"), PLAIN, tmp_path)
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

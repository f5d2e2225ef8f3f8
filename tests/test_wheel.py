"""The distribution: the wheel holds what the commands need, in an environment with nothing else."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[1]
# What `pip wheel .` reads.
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "penstock")
PIP = ("-m", "pip", "--quiet", "--disable-pip-version-check")


# `optimize` could not judge: others used the machine (docs/exit_codes.md).
DISTURBED = 4


def run(command: Sequence[str | Path], cwd: Path, timeout_s: float = 600, **variables: str) -> str:
    done = attempt(command, cwd, timeout_s, **variables)
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def attempt(
    command: Sequence[str | Path], cwd: Path, timeout_s: float, **variables: str
) -> subprocess.CompletedProcess[str]:
    # PYTHONPATH would lead to the tree instead of the wheel.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: a build writes into the tree it is made from."""
    tree = tmp_path_factory.mktemp("tree")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            unwanted = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, tree / name, ignore=unwanted)
        else:
            shutil.copy(ROOT / name, tree / name)
    built = tmp_path_factory.mktemp("wheel")
    run([sys.executable, *PIP, "wheel", ".", "--no-deps", "--wheel-dir", built], tree)
    [found] = built.iterdir()
    return found


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of an environment with the wheel and its dependencies."""
    folder = tmp_path_factory.mktemp("environment")
    run([sys.executable, "-m", "venv", folder], folder)
    run([folder / "bin" / "python", *PIP, "install", wheel], folder)
    return folder / "bin"


@pytest.fixture(scope="module")
def with_extras(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel with the libraries of the tests' own environment, torch among them: downloading
    them again would take minutes."""
    folder = tmp_path_factory.mktemp("extras")
    run([sys.executable, "-m", "venv", folder], folder)
    run([folder / "bin" / "python", *PIP, "install", "--no-deps", wheel], folder)
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder with one model in it."""
    folder = tmp_path_factory.mktemp("empty")
    shutil.copytree(ROOT / "examples" / "repository" / "digits", folder / "digits")
    return folder


@pytest.fixture(scope="module")
def address(environment: Path, empty: Path) -> Iterator[str]:
    flags = ["--http-port", "0", "--metrics-port", "0", "--no-grpc"]
    process = subprocess.Popen(
        [str(environment / "penstock"), "serve", "digits", *flags],
        cwd=empty,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        found = (re.search(r"http://([\d.]+:\d+)", line) for line in process.stdout)
        yield next(match[1] for match in found if match)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0


def test_the_wheel_has_the_version_of_the_package(wheel: Path) -> None:
    import penstock

    assert wheel.name == f"penstock-{penstock.__version__}-py3-none-any.whl"


def test_it_is_the_wheel_that_runs(environment: Path, empty: Path) -> None:
    where = run([environment / "python", "-c", "import penstock; print(penstock.__file__)"], empty)
    assert Path(where).is_relative_to(environment.parent)


def test_inspect(environment: Path, empty: Path) -> None:
    assert "digits" in run([environment / "penstock", "inspect", "digits"], empty)


def test_serve_and_bench(environment: Path, empty: Path, address: str) -> None:
    """Over HTTP, with a page and JSON: templates are in the wheel too."""
    target = f"http://{address}/v2/models/digits"
    flags = ["--concurrency", "2", "--duration", "2s", "--json", "run.json", "--html", "run.html"]
    run([environment / "penstock", "bench", target, *flags], empty)
    [level] = json.loads((empty / "run.json").read_text())["levels"]
    assert level["summary"]["num_failed"] == 0
    assert level["summary"]["throughput_per_s"]["value"] > 0
    assert "</html>" in (empty / "run.html").read_text()


def test_bench_in_process(environment: Path, empty: Path) -> None:
    flags = ["--concurrency", "2", "--duration", "1s", "--json", "local.json"]
    run([environment / "penstock", "bench", "digits", *flags], empty)
    [level] = json.loads((empty / "local.json").read_text())["levels"]
    assert level["summary"]["num_failed"] == 0


def test_each_module_of_the_tree_is_in_the_wheel(environment: Path, empty: Path) -> None:
    """So is what modules read: templates, scripts, styles."""
    code = "import penstock, pathlib; print(pathlib.Path(penstock.__file__).parent)"
    installed = Path(run([environment / "python", "-c", code], empty).strip())
    names = {
        path.relative_to(ROOT / "penstock")
        for path in (ROOT / "penstock").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    missing = sorted(str(name) for name in names if not (installed / name).is_file())
    assert not missing


@pytest.mark.timeout(2700)
def test_the_first_minutes(with_extras: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    path = f"{with_extras}:{os.environ['PATH']}"
    script = ROOT / "examples" / "first_minutes.sh"
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        done = attempt(["bash", script], folder, 800, PATH=path, PORT=port)
        if done.returncode != DISTURBED:
            break
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "== Done" in done.stdout
    where = run(
        [with_extras / "python", "-c", "import penstock; print(penstock.__file__)"], tmp_path
    )
    assert Path(where).is_relative_to(with_extras.parent)
    assert (folder / "optimize.html").is_file()

"""What the README and the architecture say is true: figures, code, commands and files."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "penstock"
README = (ROOT / "README.md").read_text()
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()


def test_the_first_screen_says_how_to_install_and_try_it():
    screen = "\n".join(README.splitlines()[:30])
    for needed in ("pip install .", "penstock serve ", "curl ", "penstock bench ", "!["):
        assert needed in screen


def test_figures_come_from_the_committed_results():
    command = [sys.executable, "benchmarks/readme_figures.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"`make ([a-z-]+)", README + ARCHITECTURE))
    assert named and named <= targets


def test_files_named_in_the_architecture_exist():
    named = re.findall(r"`((?:protocols|serving|wire|backends|\w+)/\w+\.py)`", ARCHITECTURE)
    assert named
    for path in named:
        assert (PACKAGE / path).is_file() or (ROOT / path).is_file(), path


def folders_and_modules() -> list[str]:
    folders = [f"{path.name}/" for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()]
    modules = [path.stem for path in PACKAGE.glob("*.py") if not path.name.startswith("__")]
    return sorted(folders + modules)


@pytest.mark.parametrize("name", folders_and_modules())
def test_every_folder_and_top_level_module_has_its_place_in_the_architecture(name):
    table = ARCHITECTURE.partition("## Folders")[2].partition("\n## ")[0]
    assert f"`{name}`" in table, f"{name} is not in the table of docs/architecture.md"

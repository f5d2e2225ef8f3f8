"""What the documents say is true: code runs, commands exist, files are where they say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


@pytest.mark.parametrize("code", blocks("python"))
def test_python_blocks_run(code):
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().isdigit()


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"make ([a-z-]+)", README + ARCHITECTURE))
    assert named and named <= targets


def test_commands_exist():
    from penstock.cli import main

    named = set(re.findall(r"^penstock (\w+)", "\n".join(blocks("sh")), re.M))
    assert named and named <= set(main.commands)


def test_relative_links_lead_somewhere():
    for document in [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md")]:
        for target in re.findall(r"\]\((?!http)([^)#]+)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_files_named_in_the_architecture_exist():
    named = re.findall(r"`((?:protocols|serving|wire|backends)/\w+\.py)`", ARCHITECTURE)
    assert named
    for path in named:
        assert (ROOT / "penstock" / path).is_file(), path


def test_every_module_has_its_place_in_the_architecture():
    for path in (ROOT / "penstock").rglob("*.py"):
        if path.name not in ("__init__.py", "__main__.py"):
            assert re.search(rf"\b{path.stem}\b", ARCHITECTURE), f"{path.name} is not mentioned"

"""docs/backends.md says what the code does."""

import ast
import re
from pathlib import Path

import pytest

from penstock import backends
from penstock.backends import null
from penstock.config import GPU_ENGINE
from penstock.repository import parameters, pbtxt

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "backends.md").read_text()
SECTIONS = dict(re.findall(r"^## (\w+)$(.*?)(?=^## |\Z)", TEXT, re.M | re.S))


def options(section: str) -> set[str]:
    """The first column of the tables."""
    rows = re.findall(r"^\| (`.+?) \|", SECTIONS[section], re.M)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def nodes(section: str) -> list[ast.AST]:
    path = ROOT / f"penstock/backends/{section}.py"
    return list(ast.walk(ast.parse(path.read_text())))


def asked_for(section: str) -> set[str]:
    """Options that the code looks up by a name of its own."""
    # The engine takes the names of its options from the table, where they have their values.
    shared = {key for key in parameters.VALUES if key not in (GPU_ENGINE, parameters.ON_DEMAND)}
    found = shared if section == "pytorch" else set()
    for node in nodes(section):
        if isinstance(node, ast.Constant) and re.fullmatch(r"penstock\.\w+", str(node.value)):
            found.add(node.value)
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        at = {"settings.get": 0, "config.options.get": 0, "num_threads": 1, "_flag": 1}.get(called)
        if at is not None and isinstance(node.args[at], ast.Constant):
            found.add(node.args[at].value)
    return found


def test_every_backend_has_a_section_and_a_row():
    assert set(SECTIONS) == set(backends.NAMES)
    rows = re.findall(r"^\| `(\w+)` \|", TEXT.partition("## ")[0], re.M)
    assert set(rows) == set(backends.NAMES)


@pytest.mark.parametrize("section", ["onnxruntime", "openvino", "pytorch", "tensorrt"])
def test_options_are_those_that_the_code_reads(section):
    documented = options(section)
    named = {name for name in documented if "<" not in name}
    assert named == asked_for(section)
    texts = {node.value for node in nodes(section) if isinstance(node, ast.Constant)}
    assert {name.partition("<")[0] for name in documented - named} <= texts


def test_options_of_ours_are_in_the_table_of_their_backend():
    for parameter in parameters.PARAMETERS:
        if parameter.backend in backends.NAMES and parameter.page == "backends.md":
            assert parameter.key in options(parameter.backend)


def test_options_of_null_are_all_there():
    assert options("null") == {f"null.{name}" for name in null.OPTIONS}


def test_files_are_those_that_are_looked_for():
    for section, files in pbtxt.FILES.items():
        for file in files:
            assert f"`{file}`" in TEXT, f"{section}: {file}"

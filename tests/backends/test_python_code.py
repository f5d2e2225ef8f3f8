"""The file of a Python model as a module: what is wrong with it, in one line."""

from pathlib import Path

import pytest
from suites.backend import model_config

from penstock.backends.python_code import Code
from penstock.errors import ConfigError


def code_of(folder: Path, text: str) -> Code:
    path = folder / "1" / "model.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return Code(model_config("python", path, (), ()))


def problem_of(folder: Path, text: str) -> str:
    code = code_of(folder, text)
    with pytest.raises(ConfigError) as caught:
        code.load()
    code.close()
    [problem] = caught.value.problems
    assert problem.startswith("1/model.py: ")
    assert len(problem.splitlines()) == 1
    return problem


def test_syntax_error_names_its_line(tmp_path: Path) -> None:
    assert "line 3: '(' was never closed" in problem_of(tmp_path, "x = 1\n\ny = (2\n")


def test_missing_module_is_named_with_the_line_that_needs_it(tmp_path: Path) -> None:
    problem = problem_of(tmp_path, "import os\nimport no_such_module.part\n")
    assert "line 2: needs the module 'no_such_module'" in problem


def test_error_at_import_names_line_and_kind(tmp_path: Path) -> None:
    problem = problem_of(tmp_path, "def f():\n    return 1 / 0\n\nf()\n")
    assert "line 2: ZeroDivisionError: division by zero" in problem


def test_error_in_a_file_beside_the_model_names_that_file(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "broken_helper.py").write_text("a =\n")
    problem = problem_of(tmp_path, "import broken_helper\n")
    assert "broken_helper.py line 1: invalid syntax" in problem


def test_values_are_awaited_on_one_event_loop(tmp_path: Path) -> None:
    text = "import asyncio\n\nasync def loop():\n    return asyncio.get_running_loop()\n"
    code = code_of(tmp_path, text)
    module = code.load()
    assert code.result(module.loop()) is code.result(module.loop())
    assert code.result(5) == 5
    code.close()

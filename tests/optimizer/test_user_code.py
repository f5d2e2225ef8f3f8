"""Users' functions: found by name, taken along to where the model is served."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.optimizer import user_code


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current folder with a module of its own and a package."""
    (tmp_path / "own_code.py").write_text(
        'FILES = ("words.txt",)\n\ndef double(x):\n    return 2 * x\n'
    )
    (tmp_path / "words.txt").write_text("one\n")
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "__init__.py").write_text("")
    (tmp_path / "own_package" / "part.py").write_text("def triple(x):\n    return 3 * x\n")
    (tmp_path / "broken_code.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name in ("own_code", "own_package", "own_package.part"):
        sys.modules.pop(name, None)


def test_a_module_of_one_file_is_copied_with_its_files(here: Path) -> None:
    function = user_code.find("own_code:double", "preprocess")
    target = here / "target"
    target.mkdir()
    note = user_code.take_along(function, target, "preprocess.py")
    assert note == "own_code.py is taken along"
    assert (target / "preprocess.py").read_text() == (here / "own_code.py").read_text()
    assert (target / "words.txt").read_text() == "one\n"
    assert function.call(2) == 4


def test_a_part_of_a_package_is_imported(here: Path) -> None:
    function = user_code.find("own_package.part:triple", "model")
    assert function.source is None
    note = user_code.take_along(function, here, "preprocess.py")
    assert "'own_package.part' is imported where the model is served" in note
    assert (here / "preprocess.py").read_text() == "from own_package.part import triple as triple\n"


def test_what_is_installed_is_imported() -> None:
    assert user_code.find("json:loads", "model").source is None


def test_files_that_are_missing_are_told(here: Path) -> None:
    (here / "words.txt").unlink()
    function = user_code.find("own_code:double", "preprocess")
    with pytest.raises(ConfigError, match=r"own_code.FILES: .*words.txt: no such file"):
        user_code.take_along(function, here, "preprocess.py")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("own_code", "model: 'own_code': expected package.module:function"),
        ("own code:f", "expected package.module:function"),
        ("own_code:absent", "model: 'own_code' has no function 'absent'"),
        ("own_code:FILES", "has no function 'FILES'"),
        ("no_such_module:f", "'no_such_module' cannot be imported: ModuleNotFoundError"),
        ("broken_code:f", "cannot be imported: ZeroDivisionError: division by zero"),
    ],
)
def test_what_cannot_be_found_is_told(here: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        user_code.find(text, "model")
    assert problem in str(error.value)

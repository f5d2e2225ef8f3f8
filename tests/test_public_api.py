"""What `import penstock` promises."""

import inspect
import re
import tomllib
from pathlib import Path

import pytest

import penstock
from penstock.cli.repo import repo

ROOT = Path(__file__).resolve().parents[1]


def test_public_names_are_these_and_no_others() -> None:
    functions = [
        "asgi",
        "bench",
        "capacity",
        "explain",
        "inspect",
        "load",
        "model",
        "optimize",
        "profile",
        "serve",
    ]
    expected = ["Client", "Tensor", "__version__", *functions, "repo"]
    assert sorted(penstock.__all__) == sorted(expected)
    assert all(hasattr(penstock, name) for name in penstock.__all__)


# A parameter that goes or gets another name breaks callers: say so in CHANGELOG.md.
PARAMETERS = {
    "Client": ["url", "model", "api_key", "timeout_s", "ca_file", "shared_memory"],
    "Tensor": ["datatype", "shape"],
    "asgi": ["model", "options"],
    "bench": ["model", "progress", "options"],
    "capacity": ["model", "options"],
    "explain": ["model", "url", "version", "api_key"],
    "inspect": ["model"],
    "load": ["model", "version"],
    "model": ["inputs", "outputs", "max_batch_size", "batched"],
    "optimize": ["model", "progress", "options"],
    "profile": ["model", "options"],
    "serve": ["model", "options"],
}
# Functions of the module penstock.repo.
REPO_PARAMETERS = {
    "list": ["repository", "api_key"],
    "history": ["repository", "model", "api_key"],
    "diff": ["repository", "model", "a", "b", "api_key"],
    "promote": ["repository", "model", "version", "options"],
    "rollback": ["repository", "model", "reason", "rollout_only", "api_key"],
    "rollout": ["repository", "model", "api_key"],
    "verify": ["repository", "model", "api_key"],
    "prune": ["repository", "model", "keep", "dry_run", "api_key"],
}


def test_public_functions_take_these_parameters() -> None:
    """tests/api/test_options.py knows the options."""
    names = sorted(set(penstock.__all__) - {"__version__", "repo"})
    found = {name: list(inspect.signature(getattr(penstock, name)).parameters) for name in names}
    assert found == PARAMETERS


def test_the_functions_of_repo_are_its_commands() -> None:
    assert set(REPO_PARAMETERS) == set(repo.commands)
    for name, parameters in REPO_PARAMETERS.items():
        function = getattr(penstock.repo, name)
        assert list(inspect.signature(function).parameters) == parameters
        assert function.__doc__


@pytest.mark.parametrize("name", sorted(set(penstock.__all__) - {"__version__"}))
def test_public_names_have_a_contract(name: str) -> None:
    assert getattr(penstock, name).__doc__


def test_the_page_names_every_public_function() -> None:
    """tests/test_docs.py runs its examples."""
    page = (ROOT / "docs" / "python-api.md").read_text()
    for name in set(penstock.__all__) - {"__version__", "repo"}:
        assert f"penstock.{name}(" in page, name
    for name in REPO_PARAMETERS:
        assert f"penstock.repo.{name}(" in page, name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'penstock' has no attribute 'launch'"):
        penstock.launch  # noqa: B018


def test_version_is_the_one_of_the_distribution() -> None:
    """The version is written once, in the package; the distribution reads it from there."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in settings["project"]["dynamic"]
    attribute = settings["tool"]["setuptools"]["dynamic"]["version"]["attr"]
    assert attribute == "penstock.__version__"
    newest = re.search(r"^## (\d\S*)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest and newest[1] == penstock.__version__


def test_package_says_that_it_is_typed() -> None:
    assert (Path(penstock.__file__).parent / "py.typed").is_file()


def test_no_module_hides_a_function() -> None:
    """Importing `penstock.x` sets the attribute `x`, whatever it was before."""
    folder = Path(penstock.__file__).parent
    hidden = [
        name
        for name in penstock.__all__
        if (folder / f"{name}.py").exists() or (folder / name / "__init__.py").exists()
    ]
    assert hidden == []

"""What `import penstock` promises."""

import tomllib
from pathlib import Path

import penstock

ROOT = Path(__file__).resolve().parents[1]


def test_public_names_are_these_and_no_others() -> None:
    assert sorted(penstock.__all__) == ["Tensor", "__version__", "load", "model"]
    assert all(hasattr(penstock, name) for name in penstock.__all__)


def test_version_is_the_one_of_the_distribution() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert penstock.__version__ == project["version"]


def test_package_says_that_it_is_typed() -> None:
    assert (Path(penstock.__file__).parent / "py.typed").is_file()

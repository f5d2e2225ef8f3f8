"""Several repositories as one."""

from pathlib import Path

import pytest

from penstock.errors import ConfigError, InvalidRequest, NotFound
from penstock.repository.repositories import Repositories, check_config_name

CODE = "def f(x: int) -> int:\n    return x\n"
PLAIN = """backend: "null" max_batch_size: {}
input {{ name: "x" data_type: TYPE_FP32 dims: 1 }}
output {{ name: "y" data_type: TYPE_FP32 dims: 1 }}
"""


def add(root: Path, name: str, max_batch: int = 1) -> Path:
    (root / name / "1").mkdir(parents=True)
    (root / name / "config.pbtxt").write_text(PLAIN.format(max_batch))
    return root / name


@pytest.fixture
def two(tmp_path: Path) -> Repositories:
    for repository, names in (("one", "a both"), ("two", "b both")):
        for name in names.split():
            add(tmp_path / repository, name)
    return Repositories((str(tmp_path / "one"), str(tmp_path / "two")))


def test_models_of_all_are_found(two):
    assert two.names() == ["a", "both", "b"]
    found = two.read()
    assert [config.name for config in found.configs] == ["a", "b"]
    assert two.read_one("b").configs[0].name == "b"
    assert two.find("a") == two.paths[0] and two.find("b") == two.paths[1]
    with pytest.raises(NotFound, match="'c' is not in the model repositories; there: a, both, b"):
        two.read_one("c")


def test_a_name_in_two_is_refused_with_both_paths(two):
    [problem] = two.read().problems["both"]
    assert f"both in {two.paths[0]} and in {two.paths[1]}" in problem
    with pytest.raises(InvalidRequest, match="'both' is both in"):
        two.read_one("both")
    assert two.read_named(["both", "a"]).problems["both"] == [problem]


def test_patterns_choose_models(two):
    assert [each.name for each in two.read_named(["?"]).configs] == ["a", "b"]
    assert [each.name for each in two.read_named(["a*", "a", "b"]).configs] == ["a", "b"]
    [problem] = two.read_named(["z*"]).problems["z*"]
    assert "'z*' is not in the model repository; there: a, both, b" in problem


def test_the_folders_of_each_model_are_listed(two):
    one, other = map(Path, two.paths)
    assert two.folders() == {
        "a": [one / "a"],
        "b": [other / "b"],
        "both": [one / "both", other / "both"],
    }


def test_a_file_and_a_repository_can_be_served_together(tmp_path):
    add(tmp_path / "models", "a")
    (tmp_path / "adds.py").write_text(CODE)
    both = Repositories((str(tmp_path / "models"), str(tmp_path / "adds.py")))
    assert both.names() == ["a", "adds"]
    assert both.folders()["adds"] == [tmp_path / "adds.py"]


def test_a_configuration_is_chosen_by_name(tmp_path):
    for name in ("a", "b"):
        (add(tmp_path, name) / "1" / "config.pbtxt").write_text(PLAIN.format(2))
    (tmp_path / "a" / "configs").mkdir()
    (tmp_path / "a" / "configs" / "h100.pbtxt").write_text(PLAIN.format(64))
    chosen = Repositories((str(tmp_path),), "h100")
    assert [each.max_batch_size for each in chosen.read().configs] == [64, 2]
    assert chosen.read_one("a").configs[0].max_batch_size == 64
    assert Repositories((str(tmp_path / "a"),), "h100").read().configs[0].max_batch_size == 64
    assert Repositories((str(tmp_path),)).read().configs[0].max_batch_size == 2
    (tmp_path / "a" / "configs" / "h100.pbtxt").write_text("max_batch_size: many")
    assert "configs/h100.pbtxt" in chosen.read().problems["a"][0]


def test_a_chosen_configuration_is_no_link_out_of_the_repository(tmp_path):
    (tmp_path / "secret").write_text(PLAIN.format(3))
    (add(tmp_path / "models", "a") / "configs").mkdir()
    (tmp_path / "models" / "a" / "configs" / "x.pbtxt").symlink_to(tmp_path / "secret")
    [problem] = Repositories((str(tmp_path / "models"),), "x").read().problems["a"]
    assert "leads out" in problem


@pytest.mark.parametrize("name", ["../x", "a/b", ".x", "a b", "/x"])
def test_names_of_configurations_are_no_paths(name):
    with pytest.raises(ConfigError, match="--model-config-name"):
        check_config_name(name)
    check_config_name("h100")
    check_config_name("")

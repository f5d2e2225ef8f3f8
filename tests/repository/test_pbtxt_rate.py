"""`rate_limiter` of instance groups: what each instance needs."""

from pathlib import Path

import pytest

from penstock.config import ModelConfig, RateLimit
from penstock.errors import ConfigError
from penstock.repository import pbtxt

BASE = """backend: "null" max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: 1 }
output { name: "y" data_type: TYPE_FP32 dims: 1 }
"""
ONE = """rate_limiter {
  resources { name: "R" count: 2 } resources { name: "G" global: true count: 1 }
}"""
NEEDS = (("R", False, 2), ("G", True, 1))


def resolve(tmp_path: Path, text: str) -> ModelConfig:
    folder = tmp_path / "model" / "1"
    folder.mkdir(parents=True, exist_ok=True)
    return pbtxt.resolve(pbtxt.parse(BASE + text), "model", folder)


def test_each_instance_of_a_group_has_its_limit(tmp_path: Path) -> None:
    groups = f"instance_group {{ kind: KIND_CPU count: 2 {ONE} }}"
    groups += "instance_group { kind: KIND_CPU rate_limiter { priority: 3 } }"
    config = resolve(tmp_path, groups)
    first = RateLimit("cpu", NEEDS, 1)
    assert config.rate_limits == (first, first, RateLimit("cpu", (), 3))
    assert config.has_one_owner
    assert any("--rate-limit execution_count" in note for note in config.notes)
    assert config.warnings == ()


@pytest.mark.parametrize("text", ["", "rate_limiter { }", "rate_limiter { priority: 2 }"])
def test_without_resources_nothing_waits(tmp_path: Path, text: str) -> None:
    config = resolve(tmp_path, f"instance_group {{ kind: KIND_CPU {text} }}")
    assert config.rate_limits == () and not config.has_one_owner and config.notes == ()


@pytest.mark.parametrize(
    ("resources", "problem"),
    [
        ("resources { count: 1 }", "resources[0].name: missing"),
        ('resources { name: "R" }', "resources[0].count: 0; expected at least 1"),
        (
            'resources { name: "R" count: 1 } resources { name: "R" count: 2 }',
            "resources: ['R', 'R']; expected each name once",
        ),
    ],
)
def test_what_is_missing_is_a_problem_with_its_place(
    tmp_path: Path, resources: str, problem: str
) -> None:
    text = "instance_group { kind: KIND_CPU } "
    text += f"instance_group {{ kind: KIND_CPU rate_limiter {{ {resources} }} }}"
    with pytest.raises(ConfigError) as caught:
        resolve(tmp_path, text)
    assert f"instance_group[1].rate_limiter.{problem}" in caught.value.problems


def test_the_description_is_read_as_it_was(tmp_path: Path) -> None:
    text = f"instance_group {{ kind: KIND_CPU count: 2 {ONE} }} instance_group {{ kind: KIND_CPU }}"
    config = resolve(tmp_path, text)
    folder = tmp_path / "model" / "1"
    again = pbtxt.resolve(pbtxt.parse(pbtxt.describe(config)), "model", folder)
    assert again.rate_limits == config.rate_limits
    assert again.devices == config.devices

"""Promotions that would break an ensemble."""

from dataclasses import dataclass, replace

import pytest

from penstock.config import BatchPolicy, EnsembleStep, ModelConfig
from penstock.errors import InvalidRequest
from penstock.operate.ensemble_checks import check_ensembles, find_users
from penstock.serving.catalog import Catalog
from penstock.types import TensorSpec

MEMBER = ModelConfig(
    name="member",
    version="1",
    backend="null",
    artifact="",
    inputs=(TensorSpec("x", "INT64", (2,)),),
    outputs=(TensorSpec("y", "INT64", (2,)),),
    max_batch_size=8,
    batching=BatchPolicy(8),
)
TWO = replace(MEMBER, version="2")


def ensemble(*steps: EnsembleStep) -> ModelConfig:
    return replace(
        MEMBER,
        name="whole",
        backend="ensemble",
        inputs=(TensorSpec("IN", "INT64", (2,)),),
        outputs=(TensorSpec("OUT", "INT64", (2,)),),
        num_instances=0,
        steps=steps,
    )


def step(version: str = "") -> EnsembleStep:
    return EnsembleStep("member", version, {"x": "IN"}, {"y": "OUT"})


@dataclass
class Loaded:
    """A model of a table."""

    config: ModelConfig


class Table(Catalog):
    """Has these versions, loaded or not."""

    def __init__(self, *configs: ModelConfig) -> None:
        super().__init__()
        for config in configs:
            self._models.setdefault(config.name, {})[config.version] = Loaded(config)
            self._latest[config.name] = Loaded(config)


def test_a_version_like_the_one_before_breaks_nothing() -> None:
    table = Table(MEMBER, ensemble(step()))
    check_ensembles(table, TWO)
    assert [each.name for each in find_users(table, "member")] == ["whole"]
    assert find_users(table, "whole") == []


@pytest.mark.parametrize(
    ("version", "changed", "text"),
    [
        ("1", {}, r"step\[0\] runs version 1, which would not be served any more"),
        ("", {"max_batch_size": 4}, "max_batch_size 4, less than the ensemble's of 8"),
        ("", {"outputs": ()}, "has no output 'y'"),
    ],
)
def test_one_that_does_not_fit_is_refused(version: str, changed: dict, text: str) -> None:
    table = Table(MEMBER, ensemble(step(version)))
    with pytest.raises(InvalidRequest, match=f"ensemble 'whole': .*{text}.*unload it, first"):
        check_ensembles(table, replace(TWO, **changed))


def test_what_an_ensemble_lacks_already_is_no_reason() -> None:
    """The promotion may be what repairs it."""
    other = EnsembleStep("gone", "", {"x": "IN"}, {"y": "MORE"})
    small = replace(MEMBER, max_batch_size=4)
    check_ensembles(Table(small, ensemble(step(), other)), replace(TWO, max_batch_size=4))
    check_ensembles(Table(small, ensemble(step())), TWO)

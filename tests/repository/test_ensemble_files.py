"""Which models are loaded with an ensemble, and before which."""

from pathlib import Path

from penstock.config import BatchPolicy, EnsembleStep, ModelConfig
from penstock.errors import NotFound
from penstock.repository.ensemble_files import (
    add_members,
    needed_models,
    take_out_cycles,
    unneeded_members,
)
from penstock.repository.layout import RepositoryScan


def model(name, *members):
    steps = tuple(EnsembleStep(member, "", {}, {}) for member in members)
    return ModelConfig(name, "1", "null", "", (), (), 0, BatchPolicy(1), steps=steps)


def scan(*configs):
    return RepositoryScan(list(configs), folders={each.name: Path(each.name) for each in configs})


REPOSITORY = {
    each.name: each
    for each in (model("a"), model("b"), model("ab", "a", "b"), model("abc", "ab", "c"))
}


def read(name):
    if name not in REPOSITORY:
        raise NotFound(f"no such model: '{name}'")
    return scan(REPOSITORY[name])


def names(found):
    return sorted(config.name for config in found.configs)


def test_members_are_read_with_their_ensemble():
    found = read("ab")
    add_members(found, read)
    assert names(found) == ["a", "ab", "b"]
    assert set(found.folders) == {"a", "ab", "b"}
    assert found.members == {"a", "b"}


def test_members_of_members_are_read_and_a_missing_one_is_a_problem():
    found = read("abc")
    add_members(found, read)
    assert found.problems == {"abc": ["ensemble_scheduling.step[1].model_name: no such model: 'c'"]}
    assert names(found) == ["a", "ab", "b"]


def test_loaded_members_stay_as_they_are():
    found = read("ab")
    add_members(found, read, lambda name, version: name == "a")
    assert names(found) == ["ab", "b"]


def test_members_are_loaded_first():
    needed = needed_models([REPOSITORY["ab"], REPOSITORY["a"], model("alone")])
    assert needed == {"ab": {"a"}, "a": set(), "alone": set()}


def test_ensembles_that_need_each_other_cannot_be_loaded():
    needed = needed_models([model("x", "y"), model("y", "x"), model("me", "me"), model("z", "x")])
    problems = take_out_cycles(needed)
    assert sorted(problems) == ["me", "x", "y"]
    assert problems["me"] == ["ensemble_scheduling.step: a cycle of ensembles: me -> me"]
    assert needed == {"z": set()}


def test_members_leave_with_the_last_ensemble_that_needs_them():
    loaded = [*REPOSITORY.values(), model("c"), model("a2", "a")]
    assert unneeded_members("abc", loaded, {"a", "ab", "b", "c"}) == ["ab", "c", "b"]
    assert unneeded_members("abc", loaded, {"a", "c"}) == ["c"]
    assert unneeded_members("a", loaded, {"a", "b"}) == []

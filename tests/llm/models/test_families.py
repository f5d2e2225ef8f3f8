"""Which families are served."""

import pytest

from penstock.errors import ConfigError
from penstock.llm.models.families import FAMILIES, family_of


@pytest.mark.parametrize(
    ("architecture", "name"),
    [("LlamaForCausalLM", "llama"), ("llama", "llama"), ("Qwen3ForCausalLM", "qwen3")],
)
def test_by_architecture(architecture, name):
    assert family_of(architecture).name == name


def test_others_are_refused_with_those_that_there_are():
    with pytest.raises(
        ConfigError, match=r"'GemmaForCausalLM' is not served; expected one of Llama"
    ):
        family_of("GemmaForCausalLM")


def test_no_architecture_is_of_two_families():
    names = [name for family in FAMILIES for name in family.architectures]
    assert len(set(names)) == len(names)

"""Options as keywords: typed, checked, and the same for functions and commands."""

from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest

from penstock.api import keywords
from penstock.api.asgi_options import AsgiOptions
from penstock.api.bench_options import BenchOptions
from penstock.api.capacity_options import CapacityOptions
from penstock.api.export_options import HelmOptions, KserveOptions, KubernetesOptions
from penstock.api.optimize_options import OptimizeOptions
from penstock.api.options import flag_name, from_keywords, options_of
from penstock.api.profile_options import ProfileOptions
from penstock.api.ray_options import RayOptions
from penstock.api.repo_options import PromoteOptions
from penstock.api.serve_options import ServeOptions
from penstock.errors import CommandLineError

MODELS = (AsgiOptions, BenchOptions, OptimizeOptions, ProfileOptions, RayOptions, ServeOptions)
ALL = (*MODELS, CapacityOptions, PromoteOptions)
# Of commands without a function in the public API.
COMMANDS = (*ALL, HelmOptions, KserveOptions, KubernetesOptions)


@pytest.mark.parametrize("kind", ALL)
def test_keywords_of_type_checkers_are_the_fields(kind: type) -> None:
    typed = getattr(keywords, kind.__name__.replace("Options", "Keywords"))
    assert list(get_type_hints(typed)) == [each.name for each in fields(kind)]


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in COMMANDS for name in options_of(kind)]
)
def test_every_option_says_what_it_is_and_when_to_change_it(kind: type, name: str) -> None:
    _, flag = options_of(kind)[name]
    assert 0 < len(flag.summary) < 60 and not flag.summary.endswith(".")
    assert flag.when.endswith("."), flag.when
    assert flag.group
    assert flag_name(name) == "--" + name.replace("_", "-")


def test_options_of_the_same_name_mean_the_same() -> None:
    """Summaries may differ in what they are about, not in metavar and short name. A rollout's steps
    and headers are not those of a load test."""
    seen: dict[str, tuple[str, str]] = {}
    for kind in MODELS:
        for name, (_, flag) in options_of(kind).items():
            form = (flag.metavar, flag.short)
            assert seen.setdefault(name, form) == form, name


def test_numbers_paths_and_lists_are_accepted_where_flags_are_texts() -> None:
    made = from_keywords(
        BenchOptions,
        {"rate": 200, "duration": 2.5, "data": Path("d.npz"), "header": ["a: b"], "cv": 2},
    )
    assert (made.rate, made.duration, made.data) == ("200", "2.5s", "d.npz")
    assert (made.header, made.cv) == (("a: b",), 2.0)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"processes": 0}, "processes: 0 is not in the range 1 to 256"),
        ({"arrivals": "never"}, "arrivals: 'never' is not one of poisson, constant, gamma"),
        ({"max_rate": "yes"}, "max_rate: 'yes' is not of the type bool"),
        ({"processes": True}, "processes: True is not of the type int"),
    ],
)
def test_values_that_are_not_accepted(given: dict[str, object], text: str) -> None:
    with pytest.raises(CommandLineError) as caught:
        from_keywords(BenchOptions, given)
    assert caught.value.problems == (text,)


def test_a_typo_is_a_type_error_that_names_the_option() -> None:
    with pytest.raises(TypeError, match="unknown option duraton; did you mean duration?"):
        from_keywords(BenchOptions, {"duraton": 1})
    with pytest.raises(TypeError, match="unknown option xyzzy; expected one of host, http_port"):
        from_keywords(ServeOptions, {"xyzzy": 1})

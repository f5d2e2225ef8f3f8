"""`--http-restricted-api` and `--grpc-restricted-protocol`, as Triton documents them."""

import pytest

from penstock.api.restriction_options import (
    CATEGORIES,
    GRPC_FLAG,
    GRPC_PREFIX,
    HTTP_FLAG,
    read_restrictions,
)
from penstock.api.serve_options import ServeOptions
from penstock.config import Restriction
from penstock.errors import CommandLineError
from penstock.protocols import restrictions
from penstock.server import check


def test_groups_of_categories_have_a_header_each() -> None:
    given = ["health,metadata:Admin-Key=a=b:c", "inference:infer-key=x"]
    found, problems = read_restrictions(given, HTTP_FLAG)
    admin = Restriction(b"admin-key", b"a=b:c")
    infer = Restriction(b"infer-key", b"x")
    assert not problems
    assert found == {"health": admin, "metadata": admin, "inference": infer}


def test_keys_of_grpc_get_tritons_prefix() -> None:
    [found] = read_restrictions(["trace:k=v"], GRPC_FLAG, GRPC_PREFIX)[0].values()
    assert found == Restriction(b"triton-grpc-protocol-k", b"v")


def test_categories_are_those_of_routes() -> None:
    assert {*restrictions.CATEGORIES.values(), "shared-memory"} == set(CATEGORIES)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (["health"], "expected CATEGORY,...:KEY=VALUE"),
        (["health:key"], "expected CATEGORY,...:KEY=VALUE"),
        (["health:key="], "expected CATEGORY,...:KEY=VALUE"),
        ([":key=value"], "expected CATEGORY,...:KEY=VALUE"),
        (["healthy:key=value"], "'healthy' is not one of health, metadata"),
        (["health,health:key=value"], "'health' can not be specified in multiple groups"),
        (["health:a=b", "health:c=d"], "'health' can not be specified in multiple groups"),
        (["health:a b=c"], "the key is not the name of a header"),
        (["health:a=b\n"], "the value cannot be sent in a header"),
        (["health:a=\u00fc"], "the value cannot be sent in a header"),
    ],
)
def test_other_flags_are_refused_without_their_secret(given: list[str], problem: str) -> None:
    found = read_restrictions(given, HTTP_FLAG)[1]
    assert len(found) == 1 and problem in found[0] and found[0].startswith(HTTP_FLAG)
    assert "=value" not in found[0]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (ServeOptions(http_restricted_api=("x:k=v",)), "--http-restricted-api: 'x' is not one of"),
        (
            ServeOptions(grpc_restricted_protocol=("health",)),
            "--grpc-restricted-protocol: expected",
        ),
        (ServeOptions(grpc_header_forward_pattern="(a+)+"), "--grpc-header-forward-pattern"),
        (ServeOptions(trace_config=("level=ALL",)), "--trace-config level=ALL"),
    ],
)
def test_wrong_flags_stop_the_start(options: ServeOptions, problem: str) -> None:
    with pytest.raises(CommandLineError, match=problem):
        check(options)

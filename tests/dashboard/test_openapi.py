"""The description of the API has every route of the table, and nothing else."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.dashboard.openapi import STATUSES, TAGS, describe, path_of, tag_of
from penstock.protocols.route import Route
from penstock.protocols.route_table import ROUTES
from penstock.wire import statuses
from penstock.wire.documented import GenerateBody, InferFields, InputTensor
from penstock.wire.generate_v2 import BOOLEANS
from penstock.wire.v2_request import InferBody


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, item in document["paths"].items():
        for method, operation in item.items():
            if method != "parameters":
                yield path, method, operation


@pytest.mark.parametrize("needs_key", [False, True])
def test_every_route_is_described_and_nothing_else(needs_key: bool) -> None:
    described = {(path, method) for path, method, _ in operations(describe(needs_key))}
    there = {
        (path_of(route), method.lower())
        for route in ROUTES
        for method in route.methods
        if method != "HEAD"
    }
    assert described == there


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
def test_a_route_says_what_it_does_takes_and_gives(route: Route) -> None:
    item = describe(True)["paths"][path_of(route)]
    names = {each["name"] for each in item.get("parameters", [])}
    assert names == {part.strip("{}") for part in path_of(route).split("/") if "{" in part}
    for method, operation in item.items():
        if method == "parameters":
            continue
        assert 5 <= len(operation["summary"]) <= 60
        assert operation["tags"] == [tag_of(route)] and tag_of(route) in TAGS
        assert operation["x-scope"] == route.scope
        assert ("security" in operation) == ("401" in operation["responses"])
        assert ("security" in operation) == (route.scope != "open")
        takes_body = route.body is not None and method != "get"
        assert ("requestBody" in operation) == takes_body
        assert "200" in operation["responses"]
    assert "security" not in json.dumps(describe(False)["paths"][path_of(route)])


def test_operations_have_names_of_their_own() -> None:
    names = [operation["operationId"] for _, _, operation in operations(describe(True))]
    assert len(names) == len(set(names))


def test_every_status_of_an_error_is_described() -> None:
    # 499 is sent to nobody: the client has gone.
    known = {each.http for each in statuses.STATUSES.values()}
    assert known - {499} <= STATUSES.keys()


def test_references_lead_somewhere() -> None:
    document = describe(True)
    text = json.dumps(document)
    for name in document["components"]["schemas"]:
        assert f'"#/components/schemas/{name}"' in text
    for part in text.split('"$ref": "#/')[1:]:
        found: Any = document
        for name in part.partition('"')[0].split("/"):
            found = found[name]


def test_described_bodies_have_the_fields_that_are_read() -> None:
    assert InferFields.__struct_fields__ == InferBody.__struct_fields__
    assert {"name", "shape", "datatype", "parameters", "data"} == {*InputTensor.__struct_fields__}
    assert set(BOOLEANS) <= set(GenerateBody.__struct_fields__)

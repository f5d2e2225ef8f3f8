"""Any URL: bodies with holes, and a real server behind them."""

import json
from collections.abc import Iterator

import numpy as np
import pytest
from e2e.served import Served, null_model
from hypothesis import given
from hypothesis import strategies as st
from suites.target import NetworkTargetContract, Sent, run

from penstock.benchmark.targets import TargetSpec
from penstock.benchmark.targets.kinds import open_target
from penstock.benchmark.targets.plain import BodyTemplate, PlainHttp
from penstock.data import Sample
from penstock.errors import ConfigError

BODY = '{"inputs": [{"name": "x", "datatype": "INT32", "shape": [1, 1], "data": [{number}]}]}'


@pytest.mark.parametrize(
    "text, values, body",
    [
        # JSON: a text inside quotes is escaped, anything elsewhere is a value.
        ('{"text": "{text}"}', {"text": 'say "hi"\n'}, '{"text": "say \\"hi\\"\\n"}'),
        ('{"text": {text}}', {"text": 'say "hi"'}, '{"text": "say \\"hi\\""}'),
        ('{"a": {a}, "b": [{b}, {a}]}', {"a": 1, "b": None}, '{"a": 1, "b": [null, 1]}'),
        ('{"a": "no. {a}!"}', {"a": 5}, '{"a": "no. 5!"}'),
        ('{"a": "{a}"}', {"a": {"b": "c"}}, '{"a": "{\\"b\\":\\"c\\"}"}'),
        ('{"a": {a}}', {"a": [1.5, "x"]}, '{"a": [1.5,"x"]}'),
        ('{"a": {a}}', {"a": np.arange(3)}, '{"a": [0,1,2]}'),
        ('{"a": {a}}', {"a": np.float32(0.5)}, '{"a": 0.5}'),
        ('{"a": "\\"{a}", "b": {b}}', {"a": '"', "b": 'x"'}, '{"a": "\\"\\"", "b": "x\\""}'),
        # A name in two pairs of braces is no field; braces around no name are braces.
        ('{"a": "{{a}}", "b": {}}', {}, '{"a": "{a}", "b": {}}'),
        ('{"a": {"b": {b}}}', {"b": 1}, '{"a": {"b": 1}}'),
        # Anything else: texts as they are.
        ("name={name}&n={n}", {"name": 'a "b"', "n": 3}, 'name=a "b"&n=3'),
        ("{text}", {"text": "all of it"}, "all of it"),
        ("", {}, ""),
    ],
)
def test_a_body_is_filled(text, values, body):
    template = BodyTemplate(text)
    assert template.fill(values).decode() == body
    assert set(template.fields) == set(values)


def test_raw_bytes_go_into_bodies_that_are_not_json():
    assert BodyTemplate("a {image} b").fill({"image": b"\xff\0"}) == b"a \xff\0 b"
    assert BodyTemplate('{"image": "{image}"}').fill({"image": b"\xff\0"}) == b'{"image": "/wA="}'


@given(st.text(), st.recursive(st.none() | st.integers(-9, 9) | st.text(), st.lists))
def test_a_json_body_stays_json_whatever_goes_in(text, value):
    body = BodyTemplate('{"a": "<{text}>", "b": {value}}').fill({"text": text, "value": value})
    assert json.loads(body) == {"a": f"<{text}>", "b": value}


def test_fields_are_named_once_in_their_order():
    assert BodyTemplate('{"a": {b}, "c": [{a}, {b}, "{{c}}"]}').fields == ("b", "a")


def test_missing_fields_are_told():
    with pytest.raises(ConfigError) as caught:
        BodyTemplate("{a} {b} {c}").fill({"b": "x"})
    assert caught.value.problems == (
        "field 'a': the body needs it; the input has b",
        "field 'c': the body needs it; the input has b",
    )
    with pytest.raises(ConfigError, match="field 'a': cannot be written as JSON: object"):
        BodyTemplate('{"x": {a}}').fill({"a": object()})


def lines(spec: TargetSpec, **fields: object) -> list[bytes]:
    return PlainHttp(spec).encode(Sample(fields=fields)).split(b"\r\n")


def test_method_headers_and_kind_of_body_are_sent():
    url = "http://a:1/path?q=1"
    assert lines(TargetSpec(url, method="get")) == [
        b"GET /path?q=1 HTTP/1.1",
        b"Host: a:1",
        b"",
        b"",
    ]
    assert lines(TargetSpec(url, body='{"x": {x}}', api_key="key"), x=1) == [
        b"POST /path?q=1 HTTP/1.1",
        b"Host: a:1",
        b"Content-Type: application/json",
        b"Authorization: Bearer key",
        b"Content-Length: 8",
        b"",
        b'{"x": 1}',
    ]
    assert b"Content-Type: text/plain; charset=utf-8" in lines(TargetSpec(url, body="x"))
    own = lines(TargetSpec(url, body="x", headers={"content-type": "text/csv"}, method="PUT"))
    assert own[0].startswith(b"PUT ")
    assert [line for line in own if b"ontent-" in line] == [
        b"content-type: text/csv",
        b"Content-Length: 1",
    ]


@pytest.mark.parametrize(
    "spec, problem",
    [
        (TargetSpec("http://a/", method="HEAD"), "method HEAD: expected one of GET, POST"),
        (TargetSpec("http://a/", headers={"Host": "b"}), "header 'Host': cannot be chosen"),
    ],
)
def test_what_cannot_be_sent_is_refused(spec, problem):
    with pytest.raises(ConfigError, match=problem):
        open_target(spec)


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    server = Served(null_model(tmp_path_factory.mktemp("repository"), "null"))
    yield server
    assert server.terminate() == 0


class TestPlainHttp(NetworkTargetContract):
    @pytest.fixture(autouse=True)
    def _served(self, served: Served) -> None:
        self._port = served.port

    def port(self) -> int:
        return self._port

    def spec_at(self, port: int, max_connections: int = 64) -> TargetSpec:
        address = f"http://127.0.0.1:{port}/v2/models/null/infer"
        return TargetSpec(address, body=BODY, max_connections=max_connections, timeout_s=20.0)

    def sample(self) -> Sample:
        return Sample(fields={"number": 3})

    def misfit(self) -> Sample:
        return Sample(fields={"other": 3})


def test_a_get_without_a_body_works_and_404_is_a_failure(served):
    async def scenario() -> None:
        for path, failure in (
            ("/v2/health/live", None),
            ("/nowhere", "status 404: Not Found: there is no /nowhere here"),
        ):
            target = open_target(TargetSpec(f"http://{served.address}{path}", method="GET"))
            _, form = await target.describe()
            assert (form.kind, form.fields) == ("fields", ())
            item = target.encode(Sample())
            assert (await Sent(target, item).end()).failure == failure
            await target.close()

    run(scenario())

"""A running server answers as /openapi.json says, whatever is sent: schemathesis makes requests
from the description, valid and invalid ones, and compares the answers with it."""

import json
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from served import EXAMPLES, Served
from text_server import NAME, write_model

from penstock.dashboard.openapi import describe

schemathesis = pytest.importorskip("schemathesis")
from schemathesis import GenerationMode  # noqa: E402
from schemathesis.checks import load_all_checks  # noqa: E402
from schemathesis.specs.openapi import checks as openapi_checks  # noqa: E402

SECRET = "a-secret-of-all-scopes"
KEYS = f'[[key]]\nsecret = "{SECRET}"\nscopes = ["infer", "metrics", "shared_memory", "admin"]\n'
MODELS = ("digits", "text_length", NAME)
MAX_EXAMPLES = 6
pytestmark = pytest.mark.slow
load_all_checks()
# What is valid for the description may still not fit a model, so valid requests may be refused.
CHECKS = [
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_headers_conformance,
    openapi_checks.response_schema_conformance,
    openapi_checks.ignored_auth,
]
# Numbers may be strings here, as in Triton.
LENIENT = ("generate", "generate_stream")
# It streams until the client leaves.
ENDLESS = "GET /dashboard/events"
API = schemathesis.openapi.from_dict(describe(needs_key=True))
OPERATIONS = {
    found.ok().label: found.ok()
    for found in API.get_all_operations()
    if found.ok() is not None and found.ok().label != ENDLESS
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("conformance")
    repository = root / "repository"
    for name in MODELS[:-1]:
        shutil.copytree(EXAMPLES / name, repository / name)
    write_model(repository)
    keys = root / "keys.toml"
    keys.write_text(KEYS)
    flags = ["--model-control-mode", "explicit", "--load-model", "*", "--api-keys", str(keys)]
    flags.append("--shared-memory")
    with Served(repository, *flags) as running:
        yield running


def test_the_description_is_the_one_that_the_server_gives(server: Served) -> None:
    status, body = server.get("/openapi.json")
    assert status == 200
    assert json.loads(body) == json.loads(json.dumps(describe(needs_key=True)))


def ask(server: Served, case: "schemathesis.Case", checks: list, status: int | None = None) -> None:
    headers = {"Authorization": f"Bearer {SECRET}"}
    response = case.call(base_url=f"http://{server.address}", headers=headers)
    assert response.status_code != 500, response.text
    assert status in (None, response.status_code), response.text
    case.validate_response(response, checks=checks, headers=headers)


def strategy(operation, mode: "GenerationMode", name: str | None) -> st.SearchStrategy:
    names = {each.name for each in operation.path_parameters}
    given_path = {"name": name} if name is not None and "name" in names else None
    if given_path is not None and "version" in names:
        given_path["version"] = "1"
    return operation.as_strategy(mode, path_parameters=given_path)


@pytest.mark.parametrize("label", OPERATIONS)
def test_requests_are_answered_as_described(server: Served, label: str) -> None:
    operation = OPERATIONS[label]
    has_body = bool(operation.body)
    changes = label.startswith("POST /v2/repository/models/")

    @settings(max_examples=MAX_EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def run(data: st.DataObject) -> None:
        # Models are loaded and unloaded by names that do not exist.
        name = None if changes else data.draw(st.sampled_from([*MODELS, None]))
        modes = [GenerationMode.POSITIVE, *([GenerationMode.NEGATIVE] if has_body else [])]
        mode = data.draw(st.sampled_from(modes))
        case = data.draw(strategy(operation, mode, name))
        checks = list(CHECKS)
        if not label.endswith(LENIENT):
            checks.append(openapi_checks.negative_data_rejection)
        ask(server, case, checks)

    run()


def test_examples_are_answered_with_200(server: Served) -> None:
    headers = {"Authorization": f"Bearer {SECRET}"}
    request = urllib.request.Request(f"http://{server.address}/dashboard/state", headers=headers)
    with urllib.request.urlopen(request) as answer:
        state = json.load(answer)
    paths = {"v2": "POST /v2/models/{name}/infer", "v1": "POST /v1/chat/completions"}
    assert {model["name"] for model in state["models"]} == set(MODELS)
    for model in state["models"]:
        operation = OPERATIONS[paths[model["call"]["path"][:2]]]
        names = {"name": model["name"]} if "{name}" in operation.label else {}
        body = json.loads(model["call"]["body"])
        case = operation.Case(path_parameters=names, body=body, media_type="application/json")
        ask(server, case, CHECKS, 200)


BODIES = {
    "POST /v1/completions": {"model": NAME, "prompt": "a", "max_tokens": 2, "n": 2},
    "POST /tokenize": {"model": NAME, "prompt": "a b", "return_token_strs": True},
    "POST /detokenize": {"model": NAME, "tokens": [1, 2]},
    "POST /v2/models/{name}/generate": {"text_input": "a", "max_tokens": 2, "id": "7"},
    "POST /v2/models/{name}/generate_stream": {"text_input": "a", "max_tokens": 2},
    "POST /v2/repository/index": {"ready": True},
    "GET /v1/models/{name}": None,
    "GET /tokenizer_info": None,
}


@pytest.mark.parametrize("label", BODIES)
def test_valid_requests_are_answered_with_200(server: Served, label: str) -> None:
    names = {"name": NAME} if "{name}" in label else {}
    more = {"body": BODIES[label], "media_type": "application/json"} if BODIES[label] else {}
    ask(server, OPERATIONS[label].Case(path_parameters=names, **more), CHECKS, 200)


@pytest.mark.parametrize("label", OPERATIONS)
def test_other_methods_are_refused_with_those_that_work(server: Served, label: str) -> None:
    path = label.partition(" ")[2].replace("{name}", "digits").replace("{version}", "1")
    item = describe(needs_key=True)["paths"][label.partition(" ")[2]]
    taken = {method.upper() for method in item} - {"PARAMETERS"}
    taken |= {"HEAD"} if "GET" in taken else set()
    for method in {"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"} - taken:
        url = f"http://{server.address}{path.replace('{region}', 'r')}"
        headers = {"X-API-Key": SECRET}
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(urllib.request.Request(url, headers=headers, method=method))
        with caught.value as error:
            assert (error.code, set(error.headers["Allow"].split(", "))) == (405, taken)

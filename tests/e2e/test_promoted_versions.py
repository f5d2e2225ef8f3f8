"""Versions of a served model over HTTP: promoted and rolled back under load, refused with reasons,
and a repository that is whole whatever happens meanwhile. With one shard and with two."""

import hashlib
import json
import random
import shutil
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from onnx import TensorProto, helper
from served import Served, is_alive
from waiting import wait_until

from penstock.errors import ConfigError
from penstock.operate import pruning
from penstock.operate.promotion import Grounds
from penstock.optimizer.this_machine import read_machine
from penstock.repository import history, layout, versions

WriteOnnx = Callable[..., Path]
Add = Callable[..., str]
KEYS = (
    '[[key]]\nname = "ada"\nsecret = "for-the-operator"\nscopes = ["infer", "admin"]\n'
    '[[key]]\nname = "app"\nsecret = "only-for-inference"\nscopes = ["infer"]\n'
)
FLAGS = ("--model-control-mode", "explicit", "--load-model", "*")


def good_evidence(**changes: object) -> dict[str, object]:
    hardware = msgspec.to_builtins(read_machine())
    software = hardware.pop("versions")
    found = {"slo": "p99 < 500ms", "outcome": "kept", "hardware": hardware, "versions": software}
    return {key: value for key, value in (found | changes).items() if value is not None}


@pytest.fixture
def add(tmp_path: Path, write_onnx: WriteOnnx) -> Add:
    """Commit a version of `model` that adds this number to its input, with good evidence."""

    def commit(number: float, **changes: object) -> str:
        file = write_onnx(
            tmp_path / "made" / "model" / "1" / "model.onnx",
            [helper.make_node("Add", ["x", "number"], ["y"])],
            {"x": ("FP32", ["batch", 1])},
            {"y": ("FP32", ["batch", 1])},
            [helper.make_tensor("number", TensorProto.FLOAT, [1], [number])],
        )
        [config] = layout.read(tmp_path / "made").configs
        root = tmp_path / "repository"
        root.mkdir(exist_ok=True)
        evidence = good_evidence(**changes)
        return versions.commit(root, "model", {"model.onnx": file}, config, evidence)

    return commit


@pytest.fixture
def root(tmp_path: Path, add: Add) -> Path:
    """Version 1 adds 1 and is served; version 2 adds 2."""
    add(1)
    versions.promote(tmp_path / "repository", "model", "1")
    add(2)
    return tmp_path / "repository"


@pytest.fixture(params=["1", "2"])
def served(request: pytest.FixtureRequest, root: Path) -> Iterator[Served]:
    with Served(root, *FLAGS, "--shards", request.param) as server:
        yield server


def ask(served: Served) -> tuple[str, float]:
    """The version that answered, and what it added to 0.5."""
    status, answer = served.infer("model", "x", "FP32", [0.5])
    assert status == 200, answer
    return answer["model_version"], answer["outputs"][0]["data"][0] - 0.5


def post(served: Served, action: str, **body: object) -> tuple[int, Any]:
    path = f"/v2/repository/models/model/{action}"
    status, answer = served.post(path, json.dumps(body).encode())
    return status, json.loads(answer)


def get(served: Served, what: str) -> Any:
    status, answer = served.get(f"/v2/repository/models/model/{what}")
    assert status == 200, answer
    return json.loads(answer)


def on_disk(root: Path) -> str:
    [config] = layout.read(root).configs
    return config.version


@contextmanager
def clients(served: Served, count: int = 4) -> Iterator[list[tuple[str, float]]]:
    """Ask all the time; the list of answers grows. What one client raises is raised here."""
    answers: list[tuple[str, float]] = []
    errors: list[BaseException] = []
    is_over = threading.Event()

    def run() -> None:
        try:
            while not is_over.is_set():
                answers.append(ask(served))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]


def test_a_promotion_swaps_at_once_and_loses_no_request(served: Served, root: Path) -> None:
    with clients(served) as answers:
        assert ask(served) == ("1", 1.0)
        status, event = post(served, "promote", version="2", reason="it adds more")
        assert status == 200, event
        assert (event["kind"], event["version"], event["previous"]) == ("promoted", "2", ["1"])
        assert (event["actor"], event["reason"]) == ("anonymous", "it adds more")
        assert ask(served) == ("2", 2.0)
        assert on_disk(root) == "2"
        status, event = post(served, "rollback", reason="too much")
        assert (status, event["kind"], event["version"]) == (200, "rolled back", "1")
        assert ask(served) == ("1", 1.0)
        status, _ = post(served, "promote", version=2)
        assert status == 200
        wait_until(lambda: answers[-20:].count(("2", 2.0)) == 20)
    assert set(answers) == {("1", 1.0), ("2", 2.0)}
    assert [each["kind"] for each in get(served, "history")] == [
        *("promoted", "promoted", "rolled back", "promoted"),
    ]


def test_what_evidence_lacks_is_refused_and_force_is_recorded(
    served: Served, root: Path, add: Add
) -> None:
    add(3, outcome="missed")
    add(4, hardware={**msgspec.to_builtins(read_machine()), "cpu": "Pentium"})
    before = history.read(root / "model")
    status, answer = post(served, "promote", version="3")
    assert status == 400 and "evidence.outcome is 'missed'" in answer["error"]
    status, answer = post(served, "promote", version="4")
    assert status == 400 and "CPU Pentium" in answer["error"]
    assert "--force REASON" in answer["error"]
    assert history.read(root / "model") == before and ask(served) == ("1", 1.0)
    status, event = post(served, "promote", version="4", force="the new machines come tomorrow")
    assert (status, event["kind"]) == (200, "forced")
    assert "CPU Pentium" in event["figures"]["problems"][0]
    assert ask(served) == ("4", 4.0)
    assert get(served, "history")[-1] == event


def test_a_version_that_cannot_be_loaded_changes_nothing(served: Served, root: Path) -> None:
    """Its files are what was committed, but they are no model."""
    shutil.copytree(root / "model" / "2", root / "model" / "3")
    (root / "model" / "3" / "model.onnx").write_bytes(b"no model")
    entry = {"size": 8, "sha256": hashlib.sha256(b"no model").hexdigest()}
    raw = json.loads((root / "model" / "3" / "manifest.json").read_text())
    raw["files"]["model.onnx"] = entry
    (root / "model" / "3" / "manifest.json").write_text(json.dumps(raw))
    text = (root / "model" / "config.pbtxt").read_text()
    with clients(served) as answers:
        status, answer = post(served, "promote", version="3")
        assert status == 400 and "failed to load 'model/3'" in answer["error"]
        num_answers = len(answers)
        wait_until(lambda: len(answers) > num_answers + 10)
    assert set(answers) == {("1", 1.0)}
    assert (root / "model" / "config.pbtxt").read_text() == text
    last = history.read(root / "model")[-1]
    assert (last.kind, last.version, last.previous) == ("failed", "3", ("1",))
    assert "failed to load" in last.reason
    assert served.status("/v2/health/ready") == 200
    assert post(served, "promote", version="2")[0] == 200
    assert post(served, "rollback")[1]["version"] == "1"


def test_versions_are_listed_compared_verified_and_pruned(
    served: Served, root: Path, add: Add
) -> None:
    add(3)
    add(4)
    rows = get(served, "versions")
    assert [(row["version"], row["is_served"], row["is_loaded"]) for row in rows] == [
        ("1", True, True),
        ("2", False, False),
        ("3", False, False),
        ("4", False, False),
    ]
    assert rows[0]["outcome"] == "kept" and rows[0]["slo"] == "p99 < 500ms"
    diff = get(served, "diff/1/2")
    assert (diff["a"], diff["b"], diff["config"]) == ("1", "2", [])
    assert [each["name"] for each in diff["files"]] == ["model.onnx"]
    assert {row["state"] for row in post(served, "verify")[1]} == {"whole"}
    assert post(served, "promote", version="2")[0] == 200
    kept = {
        "1": "a rollback goes to it",
        "2": "served, loaded by a server",
        "4": "the newest",
    }
    # Until version 1 is unloaded, that is a reason too.
    wait_until(lambda: post(served, "prune", keep=1, dry_run=True)[1]["kept"] == kept)
    status, planned = post(served, "prune", keep=1, dry_run=True)
    assert (status, planned["removed"]) == (200, ["3"])
    assert layout.version_folders(root / "model") == ["1", "2", "3", "4"]
    assert post(served, "prune", keep=1) == (200, planned | {"dry_run": False})
    assert layout.version_folders(root / "model") == ["1", "2", "4"]
    assert get(served, "history")[-1]["kind"] == "pruned"
    file = root / "model" / "4" / "model.onnx"
    file.write_bytes(file.read_bytes()[::-1])
    bad = [row for row in post(served, "verify")[1] if row["state"] == "damaged"]
    assert [row["version"] for row in bad] == ["4"]


def test_a_loaded_version_is_not_pruned_though_the_disk_serves_another(
    served: Served, root: Path, add: Add
) -> None:
    add(3)
    versions.promote(root, "model", "2")
    versions.promote(root, "model", "3")
    assert post(served, "prune", keep=1)[1]["removed"] == []
    assert ask(served) == ("1", 1.0)


def test_no_other_process_removes_what_a_server_has_loaded(
    served: Served, root: Path, add: Add
) -> None:
    """Version 1 is loaded; on disk it is neither served nor the way back."""
    add(3)
    for version in ("2", "3"):
        versions.promote(root, "model", version)
    found = pruning.prune(root, "model", 1, Grounds())
    assert found.kept["1"] == "loaded by a server" and found.removed == []
    with pytest.raises(ConfigError, match="version 1 is loaded by a server"):
        versions.remove(root, "model", "1", history.Cause(history.PRUNED))
    served.workers()[0].kill()
    # Its files are there for the next worker.
    wait_until(lambda: served.infer("model", "x", "FP32", [0.5])[0] == 200)
    assert ask(served) == ("1", 1.0)
    assert served.post("/v2/repository/models/model/load")[0] == 200
    assert ask(served) == ("3", 3.0)
    wait_until(lambda: pruning.prune(root, "model", 1, Grounds()).removed == ["1"])


@pytest.mark.parametrize(
    "action, body, status, error",
    [
        ("promote", {}, 400, "missing required field `version`"),
        ("promote", {"version": "2", "forse": "x"}, 400, "unknown field `forse`"),
        ("promote", {"version": "0"}, 404, "no version '0'; there: 1, 2"),
        ("promote", {"version": "../model/2"}, 404, "no version"),
        ("promote", {"version": ""}, 404, "no version ''"),
        ("promote", {"version": "2", "canary": "5%"}, 400, "it has no evidence"),
        ("promote", {"version": "2", "canary": "fast"}, 400, "fast"),
        ("promote", {"version": "2", "shadow": True}, 400, "it has no evidence"),
        ("prune", {"keep": 0}, 400, "keep"),
        ("prune", {}, 400, "missing required field `keep`"),
        ("rollback", {"version": "1"}, 400, "unknown field `version`"),
    ],
)
def test_wrong_bodies_are_refused(
    root: Path, one: Served, action: str, body: dict[str, object], status: int, error: str
) -> None:
    found, answer = post(one, action, **body)
    assert (found, error in answer["error"]) == (status, True), answer


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that no request may change."""
    root = tmp_path_factory.mktemp("one")
    for version in ("1", "2"):
        (root / "model" / version).mkdir(parents=True)
    (root / "model" / "config.pbtxt").write_text(
        'backend: "null" input { name: "x" data_type: TYPE_INT32 dims: 1 }'
        'output { name: "y" data_type: TYPE_INT32 dims: 1 }'
    )
    with Served(root, *FLAGS) as server:
        yield server


@pytest.mark.parametrize("name", ["other", "..", "%2e%2e", "..%2fone", "model%00"])
@pytest.mark.parametrize("what", ["versions", "history", "diff/1/2"])
def test_models_that_are_not_there_are_not_found(one: Served, name: str, what: str) -> None:
    status, answer = one.get(f"/v2/repository/models/{name}/{what}")
    assert 400 <= status < 500 and json.loads(answer)["error"]


def test_a_version_made_by_hand_has_no_evidence_and_no_way_back(one: Served) -> None:
    status, answer = post(one, "promote", version="1")
    assert status == 400 and "it was made by hand" in answer["error"]
    status, answer = post(one, "rollback")
    assert status == 400 and "no version that was served before 2" in answer["error"]


def test_without_explicit_mode_versions_are_read_only(root: Path) -> None:
    with Served(root) as server:
        for action, body in (
            ("promote", {"version": "2"}),
            ("rollback", {}),
            ("prune", {"keep": 1}),
        ):
            status, answer = post(server, action, **body)
            assert status == 403 and "--model-control-mode explicit" in answer["error"]
        assert post(server, "prune", keep=1, dry_run=True)[0] == 200
        assert len(get(server, "versions")) == 2
        assert post(server, "verify")[0] == 200
        assert ask(server) == ("1", 1.0)


def test_one_model_by_itself_has_no_versions_to_promote(root: Path) -> None:
    with Served(root / "model", *FLAGS) as server:
        status, answer = post(server, "promote", version="2")
        assert status == 400 and f"give its repository, {root}" in answer["error"]


@pytest.mark.parametrize("shards", ["1", "2"])
def test_only_administrators_change_versions_and_the_audit_log_tells(
    root: Path, tmp_path: Path, shards: str
) -> None:
    (tmp_path / "keys.toml").write_text(KEYS)
    keys = ("--api-keys", str(tmp_path / "keys.toml"))

    def send(server: Served, secret: str, method: str, path: str, body: bytes | None) -> int:
        url = f"http://{server.address}/v2/repository/models/model/{path}"
        headers = {"X-API-Key": secret} if secret else {}
        request = urllib.request.Request(url, body, headers, method=method)
        try:
            with urllib.request.urlopen(request) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            with error:
                return error.code

    paths = [("GET", "versions"), ("GET", "history"), ("GET", "diff/1/2"), ("POST", "promote")]
    paths += [("POST", "rollback"), ("POST", "verify"), ("POST", "prune")]
    with Served(root, *FLAGS, *keys, "--shards", shards) as server:
        for method, path in paths:
            body = b'{"version": "2", "keep": 1}' if method == "POST" else None
            assert send(server, "only-for-inference", method, path, body) == 403
            assert send(server, "", method, path, body) == 401
        assert on_disk(root) == "1"
        assert send(server, "for-the-operator", "POST", "promote", b'{"version": "2"}') == 200
        assert send(server, "for-the-operator", "GET", "history", None) == 200
        lines = [line for line in server.logged().splitlines() if "audit" in line]
        told = "caller=ada action=promote model=model version=2 result=200"
        assert any(told in line for line in lines), lines
        refused = [line for line in lines if "result=403" in line]
        assert len(refused) == len(paths)
        assert all("caller=app" in line for line in refused), lines
    assert history.read(root / "model")[-1].actor == "ada"


# Several at once, and the end in the middle


def test_promotions_loads_and_rollbacks_at_once_leave_disk_and_server_agreed(
    served: Served, root: Path
) -> None:
    def promote(version: str) -> int:
        return post(served, "promote", version=version)[0]

    def load() -> int:
        return served.post("/v2/repository/models/model/load")[0]

    statuses: list[int] = []
    calls = [lambda: promote("1"), lambda: promote("2"), load] * 3
    with clients(served, 2) as answers:
        threads = [
            threading.Thread(target=lambda call=call: statuses.append(call())) for call in calls
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        num_answers = len(answers)
        wait_until(lambda: len(answers) > num_answers + 5)
    assert statuses == [200] * len(calls)
    assert ask(served)[0] == on_disk(root) == history.read(root / "model")[-1].version
    assert not list(root.rglob(".staging-*"))


def test_a_client_that_leaves_while_the_version_loads_changes_nothing_or_all(
    served: Served, root: Path
) -> None:
    for delay in (0.0, 0.05, 0.3, 1.0):
        url = f"http://{served.address}/v2/repository/models/model/promote"
        wanted = "2" if on_disk(root) == "1" else "1"
        body = json.dumps({"version": wanted}).encode()
        with suppress(OSError):
            urllib.request.urlopen(urllib.request.Request(url, body), timeout=delay + 0.01).close()
        # The next change waits for what is left of this one.
        assert served.post("/v2/repository/models/model/load")[0] == 200
        assert ask(served)[0] == on_disk(root)


@pytest.mark.slow
@pytest.mark.parametrize("shards", ["1", "2"])
def test_a_killed_server_leaves_a_repository_that_the_next_one_serves(
    root: Path, shards: str
) -> None:
    rng = random.Random(7)
    for _ in range(4):
        server = Served(root, *FLAGS, "--shards", shards)
        processes = server.processes()
        wanted = "2" if on_disk(root) == "1" else "1"
        sending = threading.Thread(target=try_to_promote, args=(server, wanted))
        sending.start()
        time.sleep(rng.uniform(0, 1.5))
        server.process.send_signal(signal.SIGKILL)
        sending.join()
        psutil.wait_procs(processes, timeout=60)
        server.finish(processes)
        wait_until(lambda processes=processes: not any(map(is_alive, processes)))
        assert on_disk(root) in ("1", "2")
        assert history.unreadable_lines(root / "model") == []
    with Served(root, *FLAGS, "--shards", shards) as server:
        assert ask(server)[0] == on_disk(root)
        assert post(server, "promote", version="2")[0] == 200
        assert not list(root.rglob(".staging-*"))


def try_to_promote(server: Served, version: str) -> None:
    with suppress(OSError, ValueError):
        post(server, "promote", version=version)

"""The response cache of a real server, as Triton's clients see it, with one shard and with two."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from served import Served, null_model
from tritonclient.utils import InferenceServerException
from waiting import wait_until

# Its answer is a count of its own executions, so an answer that comes again was not computed again.
COUNTER = """
class Model:
    def load(self):
        self.count = {first}

    def infer(self, inputs):
        self.count += 1
        return {{"y": inputs["x"] * 0 + self.count}}
"""
CONFIG = """backend: "python" max_batch_size: 0
input { name: "x" data_type: TYPE_INT64 dims: -1 }
output { name: "y" data_type: TYPE_INT64 dims: -1 }
response_cache { enable: true }
"""
CACHED = "response_cache { enable: true }"
SIZE = 1 << 20


def counter(root: Path, first: int = 0, more: str = "") -> None:
    folder = root / "counter" / "1"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.py").write_text(COUNTER.format(first=first))
    (root / "counter" / "config.pbtxt").write_text(CONFIG + more)


@dataclass
class Clients:
    """A server, and a client of each protocol, which stays on its connection and so in its
    shard."""

    server: Served
    root: Path
    num_shards: int
    http: http_client.InferenceServerClient
    grpc: grpc_client.InferenceServerClient

    def ask(self, model: str, *values: int, **more: object) -> list:
        data = np.array(values, np.int64 if model == "counter" else np.int32)
        shape = data if model == "counter" else data.reshape(-1, 1)
        return self._infer(self.http, http_client, model, shape, more)

    def ask_grpc(self, model: str, *values: int, **more: object) -> list:
        data = np.array(values, np.int64 if model == "counter" else np.int32)
        shape = data if model == "counter" else data.reshape(-1, 1)
        return self._infer(self.grpc, grpc_client, model, shape, more)

    @staticmethod
    def _infer(client, kind, model: str, data: np.ndarray, more: dict) -> list:
        datatype = "INT64" if data.dtype == np.int64 else "INT32"
        given = kind.InferInput("x", data.shape, datatype)
        given.set_data_from_numpy(data)
        return client.infer(model, [given], **more).as_numpy("y").ravel().tolist()

    def statistics(self, model: str) -> dict:
        [found] = self.http.get_inference_statistics(model)["model_stats"]
        return found

    def counts(self, model: str) -> tuple[int, int]:
        """Hits and misses."""
        stats = self.statistics(model)["inference_stats"]
        return stats["cache_hit"]["count"], stats["cache_miss"]["count"]


@pytest.fixture(scope="module", params=[1, 2], ids=["core", "shards"])
def clients(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Clients]:
    root = tmp_path_factory.mktemp("cache")
    counter(root)
    null_model(root, "classes", config=CACHED)
    null_model(root, "picky", config=CACHED, fail_on=13)
    null_model(root, "plain")
    flags = ("--cache-config", f"local,size={SIZE}", "--shards", str(request.param))
    explicit = ("--model-control-mode", "explicit", "--load-model", "*")
    with Served(root, *flags, *explicit, grpc=True) as server:
        wait_until(lambda: request.param == 1 or server.has_shards(request.param))
        with (
            http_client.InferenceServerClient(server.address) as http,
            grpc_client.InferenceServerClient(server.grpc_address) as grpc,
        ):
            yield Clients(server, root, request.param, http, grpc)


def values_of(text: str, name: str) -> dict[str, float]:
    lines = re.findall(rf'^{name}{{model="(\w+)",version="1"}} (\S+)$', text, re.M)
    return {model: float(value) for model, value in lines}


def test_the_same_request_gets_the_same_answer_without_being_computed(clients: Clients):
    hits, misses = clients.counts("counter")
    before = clients.statistics("counter")
    first = clients.ask("counter", 1, 2, 3)
    assert clients.ask("counter", 1, 2, 3) == clients.ask("counter", 1, 2, 3) == first
    assert clients.ask("counter", 1, 2) != first[:2]
    assert clients.counts("counter") == (hits + 2, misses + 2)
    after = clients.statistics("counter")
    assert after["execution_count"] - before["execution_count"] == 2
    # As in Triton, hits are successes, but no inferences.
    assert after["inference_count"] - before["inference_count"] == 2
    success = [each["inference_stats"]["success"]["count"] for each in (before, after)]
    assert success[1] - success[0] == 4
    assert after["inference_stats"]["compute_infer"]["count"] == after["inference_count"]
    assert after["inference_stats"]["cache_hit"]["ns"] > 0


def test_parameters_that_the_model_sees_make_another_request(clients: Clients):
    first = clients.ask("counter", 5, parameters={"mode": 1})
    assert clients.ask("counter", 5, parameters={"mode": 2}) != first
    assert clients.ask("counter", 5, parameters={"mode": 1}, request_id="other") == first
    assert clients.ask("counter", 5, parameters={"mode": 1}, priority=1, timeout=10**7) == first


def test_both_protocols_and_all_forms_of_a_body_share_answers(clients: Clients):
    """Within a shard: connections may be in different ones."""
    first = clients.ask("counter", 8, 9)
    body = {"inputs": [{"name": "x", "shape": [2], "datatype": "INT64", "data": [8, 9]}]}
    hits, misses = clients.counts("counter")
    for _ in range(3):
        status, answer = clients.server.post("/v2/models/counter/infer", json.dumps(body).encode())
        assert status == 200
    grpc = clients.ask_grpc("counter", 8, 9)
    assert clients.ask_grpc("counter", 8, 9) == grpc
    found = clients.counts("counter")
    assert sum(found) - hits - misses == 5
    # A miss for each other shard, at most.
    assert found[1] - misses <= clients.num_shards - 1
    if clients.num_shards == 1:
        assert grpc == first == json.loads(answer)["outputs"][0]["data"]


def test_a_long_answer_comes_whole_again_and_again(clients: Clients):
    values = range(10_000)
    first = clients.ask("counter", *values)
    assert len(first) == 10_000
    for _ in range(3):
        assert clients.ask("counter", *values) == first
        assert clients.ask("counter", *values, response_compression_algorithm="gzip") == first
    grpc = clients.ask_grpc("counter", *values)
    assert clients.ask_grpc("counter", *values) == grpc


def test_classes_are_made_of_the_answer_that_is_kept(clients: Clients):
    def classes(count: int) -> list:
        given = http_client.InferInput("x", [1, 1], "INT32")
        given.set_data_from_numpy(np.array([[77]], np.int32))
        wanted = http_client.InferRequestedOutput("y", class_count=count)
        answer = clients.http.infer("classes", [given], outputs=[wanted])
        return answer.as_numpy("y").ravel().tolist()

    plain = clients.ask("classes", 77)
    for _ in range(2):
        assert classes(1) == [b"77:0"]
        assert clients.ask("classes", 77) == plain == [77]


def test_errors_are_computed_again(clients: Clients):
    for _ in range(2):
        with pytest.raises(InferenceServerException, match="fail_on"):
            clients.ask("picky", 13)
    assert clients.counts("picky") == (0, 0)
    assert clients.statistics("picky")["inference_stats"]["fail"]["count"] == 2


def test_what_leaves_the_cache_is_computed_again(clients: Clients):
    first = clients.ask("counter", -1)
    for number in range(3):
        clients.ask("counter", *([number] * (SIZE // 8 // 3)))
    assert clients.ask("counter", -1) != first


def test_other_models_compute_each_request(clients: Clients):
    for _ in range(2):
        assert clients.ask("plain", 4) == [4]
    assert clients.statistics("plain")["execution_count"] == 2
    assert clients.counts("plain") == (0, 0)


def test_metrics_are_tritons_and_agree_with_the_statistics(clients: Clients):
    clients.ask("classes", 3)
    clients.ask("classes", 3)
    text = clients.server.get("/metrics")[1].decode()
    names = ("num_hits", "num_misses", "hit_duration", "miss_duration")
    found = {name: values_of(text, f"nv_cache_{name}_per_model") for name in names}
    assert found["num_hits"].keys() == {"counter", "classes", "picky"}
    hits, misses = clients.counts("classes")
    assert found["num_hits"]["classes"] == hits > 0
    assert found["num_misses"]["classes"] == misses > 0
    assert found["hit_duration"]["classes"] > 0


def reload_changed(clients: Clients) -> None:
    counter(clients.root, first=1000)
    clients.http.load_model("counter")


def reload_with_other_settings(clients: Clients) -> None:
    more = 'parameters { key: "penstock.max_wait_ms" value { string_value: "900" } }'
    counter(clients.root, first=2000, more=more)
    clients.http.load_model("counter")


def unload_and_load(clients: Clients) -> None:
    clients.http.unload_model("counter")
    counter(clients.root, first=3000)
    clients.http.load_model("counter")


@pytest.mark.parametrize("load", [reload_changed, reload_with_other_settings, unload_and_load])
def test_a_model_that_was_loaded_again_never_answers_as_before(
    clients: Clients, load: Callable[[Clients], None]
):
    old = clients.ask("counter", 6)
    assert clients.ask("counter", 6) == old
    load(clients)
    new = clients.ask("counter", 6)
    assert new != old
    assert clients.ask("counter", 6) == new


def test_the_configuration_says_that_it_is_on(clients: Clients):
    assert clients.http.get_model_config("classes")["response_cache"] == {"enable": True}


def test_without_the_flag_the_model_is_served_and_the_log_says_so(tmp_path: Path):
    null_model(tmp_path, "classes", config=CACHED)
    with Served(tmp_path) as server:
        for _ in range(2):
            assert server.infer("classes", "x", "INT32", [1])[0] == 200
        assert "response_cache: every request is computed" in server.logged()
        stats = json.loads(server.get("/v2/models/classes/stats")[1])["model_stats"][0]
        assert stats["execution_count"] == 2
        assert "nv_cache" not in server.get("/metrics")[1].decode()


def test_all_keys_get_the_same_answer_and_hits_count_against_their_rate(tmp_path: Path):
    slow, free = "0123456789abcdef", "fedcba9876543210"
    keys = tmp_path / "keys.toml"
    keys.write_text(
        f'[[key]]\nsecret = "{slow}"\nscopes = ["infer"]\nrequests_per_s = 0.01\n'
        f'[[key]]\nsecret = "{free}"\nscopes = ["infer"]\n'
    )
    counter(tmp_path / "models")
    flags = ("--cache-config", f"local,size={SIZE}", "--api-keys", str(keys))
    with (
        Served(tmp_path / "models", *flags) as server,
        http_client.InferenceServerClient(server.address) as client,
    ):
        given = http_client.InferInput("x", [1], "INT64")
        given.set_data_from_numpy(np.array([1], np.int64))

        def ask(key: str) -> list:
            answer = client.infer("counter", [given], headers={"X-API-Key": key})
            return answer.as_numpy("y").tolist()

        # The second key has its one request in 100 s from the cache.
        assert ask(free) == ask(slow) == ask(free)
        with pytest.raises(InferenceServerException, match="429"):
            ask(slow)

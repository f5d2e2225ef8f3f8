"""The response cache in a real Redis (Debian package redis-server): servers share it, and whatever
becomes of it, every request is answered. Run by `make verify-triton`; without Redis it fails."""

import json
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from served import Served, null_model
from waiting import wait_until

pytestmark = pytest.mark.verify
CACHED = "response_cache { enable: true }"
CODE = """
class Model:
    count = {first}

    def infer(self, inputs):
        self.count += 1
        return {{"y": inputs["x"] * 0 + self.count}}
"""
CONFIG = """backend: "python" max_batch_size: 0
input { name: "x" data_type: TYPE_INT64 dims: -1 }
output { name: "y" data_type: TYPE_INT64 dims: -1 }
response_cache { enable: true }
"""
PASSWORD = "not a secret"


class Redis:
    """A redis-server on a free port; `stop` and `start` keep the port."""

    def __init__(self, folder: Path) -> None:
        found = shutil.which("redis-server")
        assert found, "redis-server is missing: apt-get install redis-server"
        self._command, self._folder = found, folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.start()

    def start(self, *more: str) -> None:
        flags = ("--port", str(self.port), "--save", "", "--requirepass", PASSWORD)
        self.process = subprocess.Popen(
            [self._command, *flags, *more], cwd=self._folder, stdout=subprocess.DEVNULL
        )
        wait_until(lambda: "PONG" in self.ask("PING"))

    def ask(self, *words: str) -> str:
        command = ["redis-cli", "-p", str(self.port), "-a", PASSWORD, "--no-auth-warning", *words]
        return subprocess.run(command, capture_output=True, text=True).stdout

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def connections(self) -> int:
        return int(self.ask("INFO", "clients").split("connected_clients:")[1].split()[0])


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Redis]:
    made = Redis(tmp_path)
    yield made
    made.go_on()
    made.stop()


def counter(root: Path, first: int = 0) -> None:
    (root / "counter" / "1").mkdir(parents=True, exist_ok=True)
    (root / "counter" / "1" / "model.py").write_text(CODE.format(first=first))
    (root / "counter" / "config.pbtxt").write_text(CONFIG)


def flags(redis: Redis, folder: Path, timeout_ms: int = 900) -> list[str]:
    secret = folder / "password"
    secret.write_text(PASSWORD + "\n")
    settings = ("host=127.0.0.1", f"port={redis.port}", f"password_file={secret}")
    found = [each for text in settings for each in ("--cache-config", f"redis,{text}")]
    return [*found, "--cache-config", f"redis,timeout_ms={timeout_ms}"]


def ask(client, kind, model: str, *values: int) -> list[int]:
    dtype, shape = (np.int64, (-1,)) if model == "counter" else (np.int32, (-1, 1))
    data = np.array(values, dtype).reshape(shape)
    given = kind.InferInput("x", data.shape, "INT64" if dtype == np.int64 else "INT32")
    given.set_data_from_numpy(data)
    return client.infer(model, [given]).as_numpy("y").ravel().tolist()


def stats(server: Served, model: str) -> tuple[int, int]:
    """Hits and misses."""
    [found] = json.loads(server.get(f"/v2/models/{model}/stats")[1])["model_stats"]
    counted = found["inference_stats"]
    return counted["cache_hit"]["count"], counted["cache_miss"]["count"]


def fill(server: Served, client, *values: int) -> list[int]:
    """Ask until the answer comes from the cache: it is written behind the client's back."""
    answers = [ask(client, http_client, "counter", *values)]

    def is_hit() -> bool:
        before = stats(server, "counter")[0]
        answers.append(ask(client, http_client, "counter", *values))
        return stats(server, "counter")[0] > before

    wait_until(is_hit)
    return answers[-1]


@pytest.mark.parametrize("shards", ["1", "2"])
def test_servers_and_shards_share_answers_and_a_changed_model_shares_none(
    tmp_path: Path, redis: Redis, shards: str
):
    first, second = tmp_path / "a", tmp_path / "b"
    for root in (first, second):
        counter(root)
    more = flags(redis, tmp_path)
    with (
        Served(first, *more, "--shards", shards, grpc=True) as one,
        http_client.InferenceServerClient(one.address) as client,
        grpc_client.InferenceServerClient(one.grpc_address) as grpc,
    ):
        kept = fill(one, client, 1, 2)
        assert ask(grpc, grpc_client, "counter", 1, 2) == kept
        # Another shard may take another connection; the answer is the same.
        for _ in range(4):
            with http_client.InferenceServerClient(one.address) as other:
                assert ask(other, http_client, "counter", 1, 2) == kept
    explicit = ("--model-control-mode", "explicit", "--load-model", "*")
    with (
        Served(second, *more, *explicit) as two,
        http_client.InferenceServerClient(two.address) as client,
    ):
        # As long as it is not connected, it computes.
        wait_until(lambda: ask(client, http_client, "counter", 1, 2) == kept)
        assert stats(two, "counter")[0] > 0
        counter(second, first=1000)
        client.load_model("counter")
        assert ask(client, http_client, "counter", 1, 2)[0] > 1000
        # The old files again are the old model.
        counter(second)
        client.load_model("counter")
        assert ask(client, http_client, "counter", 1, 2) == kept


def test_no_request_is_lost_or_waits_for_long_while_redis_dies_and_returns(
    tmp_path: Path, redis: Redis
):
    counter(tmp_path / "models")
    null_model(tmp_path / "models", "echo", config=CACHED)
    number = 0

    def ask_some(client) -> None:
        nonlocal number
        for _ in range(30):
            number += 1
            assert ask(client, http_client, "echo", number % 10) == [number % 10]

    with (
        Served(tmp_path / "models", *flags(redis, tmp_path, 50)) as server,
        http_client.InferenceServerClient(server.address) as client,
    ):
        fill(server, client, 1)
        ask_some(client)
        redis.stop()
        ask_some(client)
        wait_until(lambda: "does not answer" in server.logged())
        redis.start()
        wait_until(lambda: "answers again" in server.logged())
        fill(server, client, 2)
        # It hangs: connections are accepted, and nothing comes.
        redis.pause()
        ask_some(client)
        wait_until(lambda: server.logged().count("does not answer") == 2)
        ask_some(client)
        redis.go_on()
        wait_until(lambda: server.logged().count("answers again") == 2)
        fill(server, client, 3)
        # It is full.
        redis.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")
        redis.ask("CONFIG", "SET", "maxmemory", "1")
        ask(client, http_client, "counter", 4, 5)
        wait_until(lambda: "keeps no more answers" in server.logged())
        ask_some(client)
        assert server.logged().count("does not answer") == 2
        # Its values are somebody else's.
        redis.ask("CONFIG", "SET", "maxmemory", "0")
        ask_some(client)
        for key in redis.ask("KEYS", "*").split():
            redis.ask("SET", key, "nonsense")
        ask_some(client)
        assert psutil.pid_exists(server.process.pid)


def test_it_begins_without_redis_and_with_a_wrong_password(tmp_path: Path, redis: Redis):
    counter(tmp_path / "models")
    more = [*flags(redis, tmp_path), "--cache-config", "redis,username=nobody"]
    with (
        Served(tmp_path / "models", *more) as server,
        http_client.InferenceServerClient(server.address) as client,
    ):
        wait_until(lambda: "cannot be reached" in server.logged())
        first = ask(client, http_client, "counter", 1)
        assert ask(client, http_client, "counter", 1) != first
        assert PASSWORD not in server.logged()
    redis.stop()
    with (
        Served(tmp_path / "models", *flags(redis, tmp_path)) as server,
        http_client.InferenceServerClient(server.address) as client,
    ):
        first = ask(client, http_client, "counter", 1)
        assert ask(client, http_client, "counter", 1) != first
        redis.start()
        fill(server, client, 1)


def test_the_server_leaves_no_connection(tmp_path: Path, redis: Redis):
    counter(tmp_path / "models")
    with (
        Served(tmp_path / "models", *flags(redis, tmp_path), "--shards", "2") as server,
        http_client.InferenceServerClient(server.address) as client,
    ):
        fill(server, client, 1)
        assert redis.connections() > 1
    wait_until(lambda: redis.connections() == 1)

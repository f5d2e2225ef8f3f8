"""The rate limiter of a real server, with one shard and with two: models that share a resource do
not compute at the same time, whoever takes their requests."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as http_client
from served import Served, null_model
from waiting import wait_until

# It notes when it computes. The clock is the same in all processes.
CODE = """
import time
from pathlib import Path

class Model:
    def infer(self, inputs):
        began = time.monotonic()
        time.sleep(0.002)
        line = f"{began} {time.monotonic()}\\n"
        with Path(__file__).with_name("spans").open("a") as file:
            file.write(line)
        return {"y": inputs["x"] * 2}
"""
CONFIG = """backend: "python" max_batch_size: 0
input { name: "x" data_type: TYPE_INT64 dims: 1 }
output { name: "y" data_type: TYPE_INT64 dims: 1 }
instance_group { kind: KIND_CPU count: 2 rate_limiter {
  resources { name: "R" global: true count: 1 } } }
"""
NUM_REQUESTS = 40
LIMIT = ("--rate-limit", "execution_count")


def add_model(root: Path, name: str) -> Path:
    folder = root / name / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(CODE)
    (root / name / "config.pbtxt").write_text(CONFIG)
    return folder / "spans"


def ask(address: str, model: str) -> None:
    """Ask on a connection of its own, so that all shards get some."""
    with http_client.InferenceServerClient(address) as client:
        for value in range(NUM_REQUESTS // 4):
            given = http_client.InferInput("x", [1], "INT64")
            given.set_data_from_numpy(np.array([value], np.int64))
            assert client.infer(model, [given]).as_numpy("y").tolist() == [2 * value]


@pytest.mark.parametrize("shards", ["1", "2"])
def test_models_that_share_a_resource_compute_in_turn(tmp_path: Path, shards: str):
    files = [add_model(tmp_path, name) for name in ("a", "b")]
    with Served(tmp_path, "--shards", shards, *LIMIT) as server:
        wait_until(lambda: shards == "1" or server.has_shards(int(shards)))
        for file in files:
            file.unlink(missing_ok=True)  # Warming up needs no resource.
        with ThreadPoolExecutor(8) as pool:
            done = [pool.submit(ask, server.address, name) for name in ("a", "b") * 4]
            for each in done:
                each.result()
    lines = [line.split() for file in files for line in file.read_text().splitlines()]
    spans = sorted((float(began), float(ended)) for began, ended in lines)
    assert len(spans) == 2 * NUM_REQUESTS
    assert all(first[1] <= second[0] for first, second in zip(spans, spans[1:], strict=False))


def test_a_model_that_could_never_run_is_refused_and_others_are_served(tmp_path: Path):
    null_model(tmp_path, "plain")
    add_model(tmp_path, "a")
    config = tmp_path / "a" / "config.pbtxt"
    config.write_text(CONFIG.replace("count: 1 }", "count: 3 }"))
    flags = ("--rate-limit-resource", "R:2", "--no-exit-on-error")
    with Served(tmp_path, *LIMIT, *flags) as server:
        wait_until(lambda: "needs 3 of 'R' (global), and the server has 2" in server.logged())
        assert server.infer("plain", "x", "INT32", [1])[0] == 200


def test_without_the_flag_the_field_has_no_effect_and_the_log_says_so(tmp_path: Path):
    add_model(tmp_path, "a")
    with Served(tmp_path) as server:
        ask(server.address, "a")
        assert "--rate-limit execution_count" in server.logged()

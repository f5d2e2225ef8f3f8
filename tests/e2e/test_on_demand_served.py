"""Models loaded on demand, with memory for only some of them, as tritonclient asks for them."""

import contextlib
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from served import Served, python_model
from tritonclient.utils import InferenceServerException
from waiting import wait_until

# A worker takes 64 MiB for this and about 35 MiB for itself: two fit, three do not.
CODE = """
import numpy as np
HELD = np.ones(64 << 20, np.uint8)
def infer(inputs):
    return {"y": inputs["x"] + %d}
"""
TWO = "230MiB"
SHARDS = pytest.mark.parametrize(
    "shards", ["1", pytest.param("2", marks=pytest.mark.slow)], ids=["core", "shards"]
)
NAMES = "abc"


def add(root: Path, name: str, number: int, *, config: str = "", **parameters: object) -> None:
    python_model(root, name, CODE % number, config=config, **{"on_demand": "true", **parameters})


def serve(root: Path, *flags: str, memory: str = TWO) -> Served:
    explicit = ("--model-control-mode", "explicit", "--load-model", "*")
    return Served(root, "--model-memory", memory, *explicit, *flags, grpc=True)


def send(served: Served, name: str, number: int) -> int:
    """Ask over gRPC; return the answer."""
    values = grpcclient.InferInput("x", [1, 1], "INT32")
    values.set_data_from_numpy(np.array([[number]], np.int32))
    with grpcclient.InferenceServerClient(served.grpc_address) as client:
        return int(client.infer(name, [values], client_timeout=60).as_numpy("y")[0, 0])


def has_answer(served: Served, name: str) -> bool:
    with contextlib.suppress(InferenceServerException):
        send(served, name, 1)
        return True
    return False


def states(served: Served) -> dict[str, tuple[str, str]]:
    with httpclient.InferenceServerClient(served.address) as client:
        rows = client.get_model_repository_index()
    return {row["name"]: (row["state"], row.get("reason", "")) for row in rows}


def figure(served: Served, metric: str, name: str) -> float:
    text = served.get("/metrics")[1].decode()
    [found] = re.findall(rf'^{metric}{{model="{name}",version="\d+".*}} (\S+)$', text, re.M)
    return float(found)


def loaded(served: Served) -> set[str]:
    return {name for name, (_, reason) in states(served).items() if not reason}


@SHARDS
def test_the_first_request_loads_and_the_least_recently_used_goes(
    tmp_path: Path, shards: str
) -> None:
    for number, name in enumerate(NAMES):
        add(tmp_path, name, number)
    with serve(tmp_path, "--shards", shards) as served:
        assert served.status("/v2/health/ready") == 200
        assert served.status("/v2/models/a/ready") == 200
        assert served.workers() == []
        reason = "not in memory (no request has come yet); the next request loads it"
        assert states(served) == dict.fromkeys(NAMES, ("READY", reason))
        assert [send(served, name, 10) for name in "ab"] == [10, 11]
        assert loaded(served) == {"a", "b"}
        wait_until(
            lambda: 64 << 20 < figure(served, "penstock_model_memory_bytes", "b") < 128 << 20
        )
        assert send(served, "c", 10) == 12
        assert loaded(served) == {"b", "c"}
        state, reason = states(served)["a"]
        assert state == "READY" and reason.startswith("not in memory (evicted: others needed its")
        assert served.status("/v2/models/a/ready") == 200
        assert figure(served, "penstock_model_evictions", "a") == 1
        assert figure(served, "penstock_model_memory_bytes", "a") == 0
        explained = json.loads(served.get("/v2/models/a/explain")[1])
        assert explained["scaling"].startswith("0 of 0 to 1 instances: evicted")
        text = served.get("/metrics")[1].decode()
        assert not re.search(r"^penstock_worker_(deaths|restarts){.*} [1-9]", text, re.M)


@SHARDS
@pytest.mark.slow
def test_concurrent_requests_in_turns_lose_nothing(tmp_path: Path, shards: str) -> None:
    for number, name in enumerate(NAMES):
        add(tmp_path, name, number, config="dynamic_batching { }")
    with serve(tmp_path, "--shards", shards) as served:

        def client(first: int) -> list[tuple[int, int]]:
            found = []
            for turn in range(9):
                number = (first + turn) % 3
                value = 100 * first + turn
                found.append((send(served, NAMES[number], value), value + number))
            return found

        # From now on their sizes are known, so that three are never loaded together.
        assert [send(served, name, 0) for name in NAMES] == [0, 1, 2]
        with ThreadPoolExecutor(8) as pool:
            for answers in pool.map(client, range(8)):
                assert all(got == wanted for got, wanted in answers)
        assert sum(figure(served, "penstock_model_loads", name) for name in NAMES) > 4
        assert sum(figure(served, "penstock_model_evictions", name) for name in NAMES) > 2
        assert len(served.workers()) <= 2


@SHARDS
@pytest.mark.slow
def test_a_model_with_requests_stays_and_the_one_that_waits_is_refused_in_time(
    tmp_path: Path, shards: str
) -> None:
    hold = tmp_path / "hold"
    held = (
        CODE % 0
        + f"""
import os, pathlib, time
def infer(inputs, hold=pathlib.Path({str(hold)!r})):
    while hold.exists():
        hold.with_name(f"begun{{os.getpid()}}").touch()
        time.sleep(0.01)
    return {{"y": inputs["x"]}}
"""
    )
    for name in "ab":
        python_model(tmp_path, name, held, on_demand="true")
    add(tmp_path, "c", 7, cold_start_s=2)
    with serve(tmp_path, "--shards", shards) as served, ThreadPoolExecutor(2) as pool:
        assert [send(served, name, 5) for name in "ab"] == [5, 5]
        hold.touch()
        answers = [pool.submit(send, served, name, 5) for name in "ab"]
        wait_until(lambda: len(list(tmp_path.glob("begun*"))) == 2)
        with pytest.raises(InferenceServerException) as refusal:
            send(served, "c", 1)
        assert "no instance of model 'c' was ready in 2 s" in refusal.value.message()
        assert "a/1" in refusal.value.message() and "has requests" in refusal.value.message()
        hold.unlink()
        assert [each.result() for each in answers] == [5, 5]
        # On a busy machine a load takes longer than its limit here.
        wait_until(lambda: has_answer(served, "c"))


@pytest.mark.slow
def test_what_cannot_be_loaded_is_refused_and_the_others_go_on(tmp_path: Path) -> None:
    add(tmp_path, "fine", 1)
    python_model(tmp_path, "broken", "raise RuntimeError('no weights')", on_demand="true")
    add(tmp_path, "pinned", 2, on_demand="keep")
    with serve(tmp_path, memory="100%") as served:
        assert served.status("/v2/health/ready") == 200
        for _ in range(2):
            with pytest.raises(InferenceServerException) as refusal:
                send(served, "broken", 1)
            assert refusal.value.status() == "StatusCode.UNAVAILABLE"
            assert "model 'broken' cannot be loaded now" in refusal.value.message()
            assert "no weights" in refusal.value.message()
        state, reason = states(served)["broken"]
        assert state == "UNAVAILABLE" and "no weights" in reason
        assert served.status("/v2/models/broken/ready") == 503
        assert served.status("/v2/health/ready") == 200
        assert send(served, "fine", 1) == 2
        with httpclient.InferenceServerClient(served.address) as client:
            with pytest.raises(InferenceServerException, match="no weights"):
                client.load_model("broken")
            (tmp_path / "broken" / "1" / "model.py").write_text(CODE % 3)
            client.load_model("broken")
            assert send(served, "broken", 1) == 4
            client.unload_model("fine")
            wait_until(lambda: len(served.workers()) == 1)
            with pytest.raises(InferenceServerException, match="not found"):
                send(served, "fine", 1)
            client.load_model("fine")
            assert len(served.workers()) == 2, "an explicit load loads it"
        assert send(served, "fine", 1) == 2


@pytest.mark.slow
def test_a_model_that_can_never_fit_is_refused_and_evicts_nothing(tmp_path: Path) -> None:
    big = CODE.replace("64 <<", "300 <<") % 5
    add(tmp_path, "small", 1)
    python_model(tmp_path, "big", big, on_demand="true")
    with serve(tmp_path) as served:
        assert send(served, "small", 1) == 2
        # Its size is not known before it is loaded once.
        assert send(served, "big", 1) == 6
        wait_until(lambda: "big" not in loaded(served))
        assert send(served, "small", 1) == 2
        with pytest.raises(InferenceServerException) as refusal:
            send(served, "big", 1)
        assert "models loaded on demand have 230 MiB (--model-memory)" in refusal.value.message()
        assert refusal.value.status() == "StatusCode.UNAVAILABLE"
        assert loaded(served) == {"small"}


ENSEMBLE = """
platform: "ensemble" max_batch_size: 4
input { name: "IN" data_type: TYPE_INT32 dims: 1 }
output { name: "OUT" data_type: TYPE_INT32 dims: 1 }
ensemble_scheduling {
  step { model_name: "a" model_version: -1
    input_map { key: "x" value: "IN" } output_map { key: "y" value: "one" } }
  step { model_name: "b" model_version: -1
    input_map { key: "x" value: "one" } output_map { key: "y" value: "two" } }
  step { model_name: "c" model_version: -1
    input_map { key: "x" value: "two" } output_map { key: "y" value: "OUT" } }
}
"""


@SHARDS
@pytest.mark.slow
def test_the_members_of_an_ensemble_take_turns_in_memory(tmp_path: Path, shards: str) -> None:
    for number, name in enumerate(NAMES):
        add(tmp_path, name, 10**number)
    (tmp_path / "all" / "1").mkdir(parents=True)
    (tmp_path / "all" / "config.pbtxt").write_text(ENSEMBLE)
    with serve(tmp_path, "--shards", shards) as served:
        assert served.status("/v2/models/all/ready") == 200

        def ask(number: int) -> int:
            values = httpclient.InferInput("IN", [1, 1], "INT32")
            values.set_data_from_numpy(np.array([[number]], np.int32))
            with httpclient.InferenceServerClient(served.address, network_timeout=60) as client:
                return int(client.infer("all", [values]).as_numpy("OUT")[0, 0])

        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(ask, range(4))) == [111, 112, 113, 114]
        # Sizes are measured after loading: all three may be there until then.
        wait_until(
            lambda: sum(figure(served, "penstock_model_evictions", name) for name in NAMES) >= 1
        )


@SHARDS
@pytest.mark.slow
def test_an_evicted_model_is_loaded_as_its_files_are_now(tmp_path: Path, shards: str) -> None:
    for number, name in enumerate(NAMES):
        add(tmp_path, name, number)
    with serve(tmp_path, "--shards", shards) as served:
        assert [send(served, name, 10) for name in NAMES] == [10, 11, 12]
        assert "a" not in loaded(served)
        (tmp_path / "a" / "2").mkdir()
        (tmp_path / "a" / "2" / "model.py").write_text(CODE % 50)
        with httpclient.InferenceServerClient(served.address) as client:
            client.load_model("a")
        assert send(served, "a", 10) == 60
        (tmp_path / "a" / "3").mkdir()
        (tmp_path / "a" / "3" / "model.py").write_text("raise RuntimeError('no weights')")
        client = httpclient.InferenceServerClient(served.address)
        with client, pytest.raises(InferenceServerException, match="no weights"):
            client.load_model("a")
        assert send(served, "a", 10) == 60, "a failed load keeps what there was"


@pytest.fixture
def sequences(tmp_path: Path) -> Iterator[Served]:
    python_model(
        tmp_path,
        "talk",
        CODE % 1,
        config="sequence_batching { max_sequence_idle_microseconds: 60000000 }",
        on_demand="true",
    )
    for number, name in enumerate("ab"):
        add(tmp_path, name, number)
    with serve(tmp_path) as served:
        yield served


@pytest.mark.slow
def test_a_live_sequence_keeps_its_model_in_memory(sequences: Served) -> None:
    values = grpcclient.InferInput("x", [1, 1], "INT32")
    values.set_data_from_numpy(np.array([[1]], np.int32))
    with grpcclient.InferenceServerClient(sequences.grpc_address) as client:
        client.infer("talk", [values], sequence_id=5, sequence_start=True)
        assert send(sequences, "a", 10) == 10
        assert send(sequences, "b", 10) == 11
        assert loaded(sequences) == {"talk", "b"}, "although it was used least recently"
        client.infer("talk", [values], sequence_id=5, sequence_end=True)
        assert send(sequences, "a", 10) == 10
    assert len(loaded(sequences)) == 2


@pytest.mark.slow
def test_a_switch_of_the_server_loads_all_on_demand_but_what_says_otherwise(tmp_path: Path) -> None:
    python_model(tmp_path, "plain", CODE % 1)
    python_model(tmp_path, "first", CODE % 2, on_demand="false")
    with Served(tmp_path, "--on-demand") as served:
        assert len(served.workers()) == 1
        assert served.infer("plain", "x", "INT32", [1])[1]["outputs"][0]["data"] == [2]
        assert len(served.workers()) == 2

"""Canary and shadow rollouts of a language model behind a real server, with one shard and two."""

import http.client
import json
import threading
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from child_processes import children_running
from rollout_load import EXPLICIT
from served import Served
from waiting import wait_until

pytest.importorskip("torch")
pytest.importorskip("tokenizers")

import tiny_llm as tiny
import torch
from safetensors.torch import load_file, save_file
from text_server import NAME, TEMPLATE
from tiny_text import TOKENIZER

from penstock.repository import history

SHARDS = pytest.mark.parametrize("shards", ["1", "2"], ids=["1 shard", "2 shards"])
MAX_TOKENS = 12
SIZE = TOKENIZER.get_vocab_size()
CONFIG = """
backend: "llm"
version_policy { specific { versions: 1 } }
parameters { key: "penstock.threads" value { string_value: "1" } }
parameters { key: "penstock.dtype" value { string_value: "float32" } }
parameters { key: "penstock.kv_cache_bytes" value { string_value: "16777216" } }
parameters { key: "penstock.text_timeout_s" value { string_value: "60" } }
"""
# One that no request misses, whatever else the machine does.
SLO = """
parameters { key: "penstock.slo" value { string_value: "p99 ttft < 60s, p99 tpot < 60s" } }
"""
# Layers of the slow candidate: by far slower than two, on any machine.
NUM_SLOW = 80


def write_version(folder: Path) -> None:
    folder.mkdir(parents=True)
    tiny.write_folder(folder, vocab_size=SIZE, max_position_embeddings=256)
    TOKENIZER.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": TEMPLATE, "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def change(folder: Path, kind: str) -> None:
    """Let a version be as the stable one, have other weights, or be slower."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    if kind == "other":
        torch.manual_seed(9)
        noise = {name: torch.randn(each.shape) for name, each in weights.items() if each.ndim > 1}
        weights |= {name: weights[name] + each for name, each in noise.items()}
    if kind == "slow":
        # The layers that are added change nothing: what they add is zero.
        for name, each in list(weights.items()):
            for number in range(2, NUM_SLOW) if ".layers.1." in name else ():
                is_added = "o_proj" in name or "down_proj" in name
                copy = torch.zeros_like(each) if is_added else each.clone()
                weights[name.replace(".layers.1.", f".layers.{number}.")] = copy
        size = {"vocab_size": SIZE, "max_position_embeddings": 256}
        tiny.config_file(folder, num_hidden_layers=NUM_SLOW, **size)
    save_file(weights, path)


def add_versions(root: Path, kind: str) -> None:
    """Write a model of two versions, of which version 1 is served. A slow one is compared with the
    other, as a limit in seconds would depend on the machine."""
    for version in ("1", "2"):
        write_version(root / NAME / version)
    change(root / NAME / "2", kind)
    (root / NAME / "config.pbtxt").write_text(CONFIG + SLO * (kind != "slow"))


def serve(root: Path, shards: str) -> Served:
    served = Served(root, *EXPLICIT, "--shards", shards)
    if shards != "1":
        wait_until(lambda: served.has_shards(int(shards)))
    return served


def call(served: Served, path: str, **body: object) -> dict:
    url = f"/v2/repository/models/{NAME}/{path}"
    status, answer = served.post(url, json.dumps(body).encode()) if body else served.get(url)
    assert status == 200, answer
    return json.loads(answer)


def promote(served: Served, **options: object) -> dict:
    return call(served, "promote", version=2, force="a test", **options)


def wait_for_end(served: Served, patience_s: float = 300.0) -> dict:
    ends = time.monotonic() + patience_s
    while (state := call(served, "rollout"))["decision"] == "running" and time.monotonic() < ends:
        time.sleep(0.2)
    return state


class Clients:
    """Clients in threads, each with one text in flight; every other reads a stream. Texts are
    whole, or else errors."""

    def __init__(self, served: Served, number: int = 4, headers: dict | None = None) -> None:
        self._served = served
        self._headers = headers or {}
        self._is_stopping = False
        self._threads = [
            threading.Thread(target=self._run, args=(n % 2 == 1,)) for n in range(number)
        ]
        # Answers by version.
        self.versions: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()

    @property
    def num_answered(self) -> int:
        return sum(self.versions.values())

    def __enter__(self) -> "Clients":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_stopping = True
        for thread in self._threads:
            thread.join()

    def _run(self, is_stream: bool) -> None:
        number = 0
        while not self._is_stopping:
            number += 1
            # A connection for each text, so that every shard gets some.
            connection = http.client.HTTPConnection(self._served.address, timeout=60)
            try:
                self._ask(connection, is_stream, number)
            except (OSError, http.client.HTTPException) as error:
                self.errors[repr(error)] += 1
            connection.close()

    def _ask(self, connection: http.client.HTTPConnection, is_stream: bool, number: int) -> None:
        body = {"model": NAME, "prompt": [5 + number % 40, 7, 9], "max_tokens": MAX_TOKENS}
        body |= {"ignore_eos": True, "stream": is_stream, "seed": number}
        connection.request("POST", "/v1/completions", json.dumps(body), self._headers)
        with connection.getresponse() as answer:
            data = answer.read()
        is_whole = data.count(b'"finish_reason":"length"') == 1
        if answer.status == 200 and is_whole and (not is_stream or b"data: [DONE]" in data):
            self.versions[answer.headers.get("Penstock-Version", "")] += 1
        else:
            self.errors[f"{answer.status} {data[-300:]!r}"] += 1


def num_engines(served: Served) -> int:
    return len(children_running("penstock.llm.engine_main", psutil.Process(served.process.pid)))


def kinds(root: Path) -> list[str]:
    return [each.kind for each in history.read(root / NAME)]


def broken(state: dict) -> list[str]:
    return [each["name"] for each in state["checks"] if each["state"] == "broken"]


@pytest.mark.slow
@SHARDS
def test_a_canary_gets_its_share_until_it_is_stopped(tmp_path: Path, shards: str) -> None:
    add_versions(tmp_path, "same")
    with serve(tmp_path, shards) as served, Clients(served) as clients:
        promote(served, canary="50%", step_s=3600)
        wait_until(lambda: clients.versions["1"] + clients.versions["2"] >= 200)
        # 0.001 % of all runs are this far from the share.
        answered = clients.versions["1"] + clients.versions["2"]
        assert abs(clients.versions["2"] / answered - 0.5) < 0.17
        for named, version in (("candidate", "2"), ("stable", "1")):
            with Clients(served, 2, {"Penstock-Version": named}) as chosen:
                wait_until(lambda chosen=chosen: chosen.num_answered >= 8)
            assert set(chosen.versions) == {version}
        models = json.loads(served.get("/v1/models")[1])["data"]
        assert [each["id"] for each in models] == [NAME]
        wait_until(lambda: call(served, "rollout")["figures"].get("compared_rows", 0) >= 5)
        state = call(served, "rollout")
        assert (state["decision"], state["figures"]["disagreeing_rows"]) == ("running", 0)
        call(served, "rollback", reason="enough")
        plain = clients.versions[""]
        wait_until(lambda: clients.versions[""] >= plain + 20)
        wait_until(lambda: num_engines(served) == 1)
    assert clients.errors == {}
    assert kinds(tmp_path) == ["canary started", "rollout stopped"]


@pytest.mark.slow
@SHARDS
def test_a_good_candidate_is_promoted_in_steps(tmp_path: Path, shards: str) -> None:
    add_versions(tmp_path, "same")
    with serve(tmp_path, shards) as served, Clients(served) as clients:
        promote(served, canary="40%", steps="60%", step_s=2, mirrored_per_s=40)
        state = wait_for_end(served)
        assert state["decision"] == "promoted", state
        before = clients.num_answered
        wait_until(lambda: clients.num_answered >= before + 20)
        assert call(served, "rollout")["figures"]["disagreeing_rows"] == 0
    assert clients.errors == {}, "no stream is cut"
    assert kinds(tmp_path) == ["canary started", "canary step", "forced"]


@pytest.mark.slow
@SHARDS
@pytest.mark.parametrize(("kind", "checks"), [("other", {"agreement"}), ("slow", {"ttft", "tpot"})])
def test_a_fault_is_rolled_back(tmp_path: Path, shards: str, kind: str, checks: set[str]) -> None:
    add_versions(tmp_path, kind)
    with serve(tmp_path, shards) as served, Clients(served) as clients:
        # What the stable version usually does must be known first.
        wait_until(lambda: clients.num_answered >= 20)
        promote(served, canary="30%", steps="60%", step_s=3600, mirrored_per_s=40)
        state = wait_for_end(served)
        assert state["decision"] == "rolled back", state
        assert checks & set(broken(state)), state
        before = clients.num_answered
        wait_until(lambda: clients.num_answered >= before + 20)
    assert clients.errors == {}, "no stream is cut"
    assert kinds(tmp_path) == ["canary started", "rolled back"]


@pytest.mark.slow
@SHARDS
def test_a_shadow_is_compared_and_answers_nothing(tmp_path: Path, shards: str) -> None:
    add_versions(tmp_path, "other")
    header = {"Penstock-Version": "candidate"}
    with serve(tmp_path, shards) as served, Clients(served, headers=header) as clients:
        assert promote(served, shadow=True)["kind"] == "shadow started"
        state = wait_for_end(served)
        assert state["decision"] == "rolled back", state
        assert "agreement" in broken(state), state
        assert state["figures"]["candidate_requests"] > 0
    assert clients.errors == {} and "2" not in clients.versions
    assert kinds(tmp_path) == ["shadow started", "rolled back"]


@pytest.mark.slow
def test_versions_with_other_contexts_are_refused(tmp_path: Path) -> None:
    add_versions(tmp_path, "same")
    path = tmp_path / NAME / "2" / "config.json"
    path.write_text(
        path.read_text().replace('"max_position_embeddings": 256', '"max_position_embeddings": 128')
    )
    with serve(tmp_path, "1") as served:
        body = json.dumps({"version": 2, "canary": "5%", "force": "a test"}).encode()
        status, answer = served.post(f"/v2/repository/models/{NAME}/promote", body)
        assert status == 400 and b"the context is 128 tokens instead of 256" in answer
        wait_until(lambda: num_engines(served) == 1)

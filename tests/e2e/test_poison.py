"""Requests that kill their worker: refused when they come again, and hardly felt by the others."""

import asyncio
import contextlib
import json
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient
from open_loop import OpenLoop, OpenTally, intended_times, percentile
from served import Served, null_model
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.slow

TWO = "instance_group { count: 2 kind: KIND_CPU }"
SECRETS = {"team-a": "0123456789abcdef", "team-b": "fedcba9876543210"}
KEYS = "".join(
    f'[[key]]\nname = "{name}"\nsecret = "{secret}"\nscopes = ["infer"]\n'
    for name, secret in SECRETS.items()
)
SLO_S = 1.0
POISON = 13


def infer(served: Served, *values: int, key: str = "") -> tuple[int, str]:
    """The rows `values`, as one request; its status and error."""
    tensor = {"name": "x", "datatype": "INT32", "shape": [len(values), 1], "data": list(values)}
    url = f"http://{served.address}/v2/models/two/infer"
    request = urllib.request.Request(url, json.dumps({"inputs": [tensor]}).encode())
    if key:
        request.add_header("Authorization", f"Bearer {SECRETS[key]}")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, ""
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())["error"]


def infer_grpc(served: Served, *values: int, key: str = "") -> tuple[str, str]:
    rows = np.array(values, np.int32).reshape(-1, 1)
    tensor = grpcclient.InferInput("x", rows.shape, "INT32")
    tensor.set_data_from_numpy(rows)
    headers = {"authorization": f"Bearer {SECRETS[key]}"} if key else None
    with grpcclient.InferenceServerClient(served.grpc_address) as client:
        try:
            client.infer("two", [tensor], headers=headers)
        except InferenceServerException as error:
            return error.status(), error.message()
    return "StatusCode.OK", ""


@pytest.fixture(params=["1", "2"], ids=["core", "shards"])
def guarded(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    """A model of two instances that 13 kills, behind keys."""
    (tmp_path / "keys.toml").write_text(KEYS)
    null_model(tmp_path / "models", "two", config=TWO, crash_on=POISON)
    flags = ("--api-keys", str(tmp_path / "keys.toml"), "--shards", request.param)
    served = Served(tmp_path / "models", *flags, grpc=True)
    yield served
    assert served.terminate() == 0


def test_poison_is_quarantined_by_body_and_by_key_over_every_protocol(guarded: Served):
    assert infer(guarded, 1, key="team-a") == (200, "")
    status, error = infer(guarded, POISON, key="team-a")
    assert status == 500 and "twice" in error
    for status, error in (
        infer(guarded, POISON, key="team-b"),
        infer_grpc(guarded, POISON, key="team-b"),
    ):
        assert status in (422, "StatusCode.FAILED_PRECONDITION")
        assert "this request killed its worker of model 'two' 2 times" in error
    # Two deaths so far; of the next bodies each causes two more.
    for ask in (infer, infer_grpc):
        assert infer(guarded, 1, key="team-b") == (200, "")
        ask(guarded, POISON, 100 + len(ask.__name__), key="team-a")
    for status, error in (infer(guarded, 1, key="team-a"), infer_grpc(guarded, 1, key="team-a")):
        assert status in (422, "StatusCode.FAILED_PRECONDITION")
        assert "API key killed workers of model 'two' 5 times" in error
    assert infer(guarded, 1, key="team-b") == (200, "")
    assert infer_grpc(guarded, 1, key="team-b") == ("StatusCode.OK", "")


def test_kills_from_outside_quarantine_no_key(tmp_path: Path):
    (tmp_path / "keys.toml").write_text(KEYS)
    null_model(tmp_path / "models", "two", max_batch=1, a_ms=400)
    served = Served(tmp_path / "models", "--api-keys", str(tmp_path / "keys.toml"))
    with ThreadPoolExecutor(1) as pool:
        for number in range(6):
            slow = pool.submit(infer, served, 100 + number, key="team-a")
            time.sleep(0.2)
            for worker in served.workers():
                with contextlib.suppress(psutil.NoSuchProcess):
                    worker.kill()
            # It runs again; a spare may have been given it just before that was killed too.
            assert slow.result()[0] in (200, 500)
    assert infer(served, 1, key="team-a") == (200, "")
    assert served.terminate() == 0


@pytest.mark.parametrize("num_keys", [1, 2])
def test_keys_that_send_nothing_but_poison_are_quarantined_one_by_one(
    tmp_path: Path, num_keys: int
):
    (tmp_path / "keys.toml").write_text(KEYS)
    null_model(tmp_path / "models", "two", config=TWO, crash_on=POISON)
    served = Served(tmp_path / "models", "--api-keys", str(tmp_path / "keys.toml"))
    keys = list(SECRETS)[:num_keys]
    statuses: dict[str, list[int]] = {key: [] for key in keys}
    for number in range(4):
        for key in keys:
            body = (POISON, 1000 + 10 * number + len(key) + keys.index(key))
            statuses[key].append(infer(served, *body, key=key)[0])
    # Each request kills twice; the fifth death of a key is its last.
    assert [each[-1] for each in statuses.values()] == [422] * num_keys
    assert all(each.count(500) <= 3 for each in statuses.values())
    assert served.terminate() == 0


async def load_with(
    served: Served, times: list[float], poison: Callable[[int], tuple[int, ...]] | None
) -> tuple[OpenTally, Counter[int]]:
    """The load, and one poison request a second beside it if there is one."""
    statuses: Counter[int] = Counter()

    async def send(second: int) -> None:
        assert poison is not None
        statuses[(await asyncio.to_thread(infer, served, *poison(second)))[0]] += 1

    loading = asyncio.ensure_future(OpenLoop(served.port, "two", times).run(num_connections=64))
    senders = []
    second = 0
    while not loading.done():
        if poison is not None:
            senders.append(asyncio.ensure_future(send(second)))
        second += 1
        await asyncio.wait([loading], timeout=1.0)
    await asyncio.gather(*senders)
    return await loading, statuses


@pytest.mark.verify
@pytest.mark.timeout(240)
def test_other_clients_keep_their_goodput_beside_poison(tmp_path: Path):
    null_model(tmp_path, "two", config=TWO, a_ms=2, crash_on=POISON)
    served = Served(tmp_path)
    times = intended_times(rate=200, cv=1, duration_s=40, seed=1)
    goodputs = {}
    for name, poison in (
        ("no poison", None),
        ("the same poison", lambda second: (POISON,)),
        ("new poison", lambda second: (POISON, 1000 + second)),
    ):
        tally, statuses = asyncio.run(load_with(served, times, poison))
        goodputs[name] = tally.goodput(SLO_S)
        print(
            f"\n{name} every second: {goodputs[name]:.1f} good answers/s, "
            f"p99 {percentile(tally.answered_s, 0.99) * 1e3:.0f} ms, statuses {tally.statuses}, "
            f"poison {dict(statuses)}"
        )
        if name == "the same poison":
            assert statuses[500] == 1 and set(statuses) == {500, 422}
        elif poison is not None:
            assert set(statuses) == {500}
    assert served.terminate() == 0
    assert goodputs["no poison"] > 0.99 * 200 * 0.95
    assert goodputs["the same poison"] >= 0.9 * goodputs["no poison"]
    assert goodputs["new poison"] >= 0.5 * goodputs["no poison"]

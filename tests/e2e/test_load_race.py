"""Many threads load and unload one model at the same time. Run by `make verify`.

Each thread makes 256 calls; one in 16 is a load, because loads of one model run one after the other
and each starts a process. The rest unload it.
"""

import json
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from served import Served, null_model

pytestmark = [pytest.mark.verify, pytest.mark.timeout(900)]

NUM_THREADS, NUM_CALLS, CALLS_PER_LOAD = 32, 256, 16
# All 32 threads may wait for a load each, which takes 0.3 s on two cores; no answer after this is a
# deadlock.
DEADLOCK_S = 60.0


@dataclass
class Answers:
    """Statuses by kind of call; appended to by all threads."""

    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    unclear: list[str] = field(default_factory=list)
    longest_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, verb: str, status: int, problem: str, took_s: float) -> None:
        with self.lock:
            self.statuses[verb, status] += 1
            self.longest_s = max(self.longest_s, took_s)
            if problem:
                self.unclear.append(f"{verb}: {status} {problem}")


def change(served: Served, verb: str) -> tuple[int, str]:
    """The status, and why the answer is not a definite one; every load and unload may succeed."""
    try:
        status, body = served.post(f"/v2/repository/models/model/{verb}")
    except OSError as error:
        return 0, str(error)
    return status, "" if status == 200 else body.decode()


def infer(served: Served) -> tuple[int, str]:
    """The model answers correctly, or it is not there."""
    try:
        status, answer = served.infer("model", "x", "INT32", [7])
    except OSError as error:
        return 0, str(error)
    is_definite = (
        answer["outputs"][0]["data"] == [7]
        if status == 200
        else (status == 404 and "'model' is not found" in answer["error"])
        or (status == 503 and answer["error"] == "model 'model' is loading")
    )
    return status, "" if is_definite else str(answer)


def choose_verbs(seed: int) -> list[str]:
    verbs = ["load"] * (NUM_CALLS // CALLS_PER_LOAD)
    verbs += ["unload"] * (NUM_CALLS - len(verbs))
    random.Random(seed).shuffle(verbs)
    return verbs


def race(served: Served) -> Answers:
    answers = Answers()
    is_over = threading.Event()

    def timed(verb: str) -> None:
        began = time.monotonic()
        status, problem = infer(served) if verb == "infer" else change(served, verb)
        answers.add(verb, status, problem, time.monotonic() - began)

    def change_all(seed: int) -> None:
        for verb in choose_verbs(seed):
            timed(verb)

    def keep_asking() -> None:
        while not is_over.is_set():
            timed("infer")
            time.sleep(0.02)

    changers = [threading.Thread(target=change_all, args=(seed,)) for seed in range(NUM_THREADS)]
    client = threading.Thread(target=keep_asking)
    for thread in (*changers, client):
        thread.start()
    for thread in changers:
        thread.join()
    is_over.set()
    client.join()
    return answers


def index_state(served: Served) -> str:
    _, body = served.post("/v2/repository/index")
    (row,) = json.loads(body)
    return row.get("state", "")


def wait_for_workers(served: Served, count: int) -> None:
    """Replaced and unloaded models end in the background."""
    ends = time.monotonic() + 30
    while len(served.workers()) != count:
        assert time.monotonic() < ends, f"{len(served.workers())} workers, expected {count}"
        time.sleep(0.1)


def test_32_threads_that_load_and_unload_one_model(tmp_path: Path):
    null_model(tmp_path, "model")
    served = Served(tmp_path, "--model-control-mode", "explicit", "--load-model", "model")
    core = psutil.Process(served.process.pid)
    num_fds = core.num_fds()
    began = time.monotonic()
    answers = race(served)
    took_s = time.monotonic() - began
    statuses = answers.statuses
    num_changes = sum(count for (verb, _), count in statuses.items() if verb != "infer")
    num_good = statuses["load", 200] + statuses["unload", 200]
    num_inferences = sum(count for (verb, _), count in statuses.items() if verb == "infer")
    print(
        f"\nload race: {num_good} of {num_changes} load and unload calls answered 200 in "
        f"{took_s:.0f} s, the slowest after {answers.longest_s:.1f} s; {len(answers.unclear)} "
        f"unclear answers, also among {num_inferences} inferences meanwhile"
    )
    assert not answers.unclear, answers.unclear[:3]
    assert num_changes == num_good == NUM_THREADS * NUM_CALLS
    assert answers.longest_s < DEADLOCK_S
    # The index, an inference and the processes agree about what is loaded in the end.
    is_loaded = index_state(served) == "READY"
    assert infer(served) == ((200, "") if is_loaded else (404, ""))
    wait_for_workers(served, int(is_loaded))
    assert change(served, "load") == (200, "")
    assert infer(served) == (200, "") and index_state(served) == "READY"
    wait_for_workers(served, 1)
    assert core.num_fds() <= num_fds + 2, "but for what is being closed"
    assert change(served, "unload") == (200, "")
    assert infer(served) == (404, "") and index_state(served) == ""
    wait_for_workers(served, 0)
    assert served.terminate() == 0

"""Loads that take too long or too much memory, and processes that models fork."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from served import Served, python_model
from waiting import wait_until

pytestmark = pytest.mark.slow

ECHO = "def infer(inputs):\n    return {'y': inputs['x']}\n"
SLEEPS = "import time\ntime.sleep(3600)\n"
ALLOCATES = "held = []\nwhile True:\n    held.append(bytearray(32 << 20))\n"
FORKS = """
import os, subprocess
child = os.fork()
if child == 0:
    import time
    time.sleep(3600)
    os._exit(0)
other = subprocess.Popen(["sleep", "3600"])
open(os.path.join(os.path.dirname(__file__), "..", "..", "..", "pids"), "w").write(
    f"{child} {other.pid}"
)
"""


def write_model(root: Path, name: str, code: str, **parameters: object) -> None:
    python_model(root, name, code + ECHO, **parameters)


@pytest.fixture
def explicit(tmp_path: Path) -> Iterator[tuple[Served, Path]]:
    """A server that loads what it is asked to."""
    write_model(tmp_path / "models", "echo", "")
    flags = ("--model-control-mode", "explicit", "--load-model", "echo")
    served = Served(tmp_path / "models", *flags)
    yield served, tmp_path / "models"
    assert served.infer("echo", "x", "INT32", [5])[0] == 200
    assert served.terminate() == 0


def load(served: Served, name: str) -> tuple[int, str]:
    status, answer = served.post(f"/v2/repository/models/{name}/load")
    return status, json.loads(answer)["error"] if answer else ""


def test_a_load_that_takes_too_long_fails_with_the_reason(explicit):
    served, models = explicit
    write_model(models, "slow", SLEEPS, load_timeout_s=0.5)
    status, error = load(served, "slow")
    assert status == 400
    assert "loading took longer than 0.5 s" in error
    assert "parameters.penstock.load_timeout_s" in error
    wait_until(lambda: len(served.workers()) == 1)


def test_a_load_that_takes_too_much_memory_fails_with_the_reason(explicit):
    served, models = explicit
    limit = 400 << 20
    write_model(models, "greedy", ALLOCATES, memory_bytes=limit)
    status, error = load(served, "greedy")
    assert status == 400
    assert "MemoryError" in error
    assert f"parameters.penstock.memory_bytes limits it to {limit} bytes" in error


def test_a_worker_whose_limit_is_below_what_python_takes_says_so(explicit):
    served, models = explicit
    write_model(models, "tiny", "", memory_bytes=1 << 20)
    status, error = load(served, "tiny")
    assert status == 400
    assert "while loading, 3 times" in error
    assert "parameters.penstock.memory_bytes limits it to 1048576 bytes" in error


def test_a_language_model_of_a_billion_layers_fails_and_the_server_lives(explicit):
    served, models = explicit
    folder = models / "deep" / "1"
    folder.mkdir(parents=True)
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": 10**9,
        "vocab_size": 256,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(shape))
    parameters = {"load_timeout_s": 3, "memory_bytes": 4 << 30, "random_weights": "true"}
    (models / "deep" / "config.pbtxt").write_text(
        'backend: "llm"\n'
        + "\n".join(
            f'parameters {{ key: "penstock.{key}" value {{ string_value: "{value}" }} }}'
            for key, value in parameters.items()
        )
    )
    began = time.monotonic()
    status, error = load(served, "deep")
    assert status == 400, error
    assert error
    assert time.monotonic() - began < 60
    assert served.status("/v2/health/live") == 200
    # The worker and its reaper.
    wait_until(lambda: len(served.processes()) == len(served.workers()) + 1)


@pytest.mark.parametrize("end", ["unload", "worker dies", "SIGTERM", "SIGKILL"])
def test_processes_that_a_model_forked_end_with_its_worker(tmp_path: Path, end: str):
    write_model(tmp_path / "models", "forks", FORKS)
    flags = ("--model-control-mode", "explicit", "--load-model", "forks")
    served = Served(tmp_path / "models", *flags)
    children = [psutil.Process(int(pid)) for pid in (tmp_path / "pids").read_text().split()]
    assert all(child.is_running() for child in children)
    everything = served.processes()
    if end == "unload":
        assert served.post("/v2/repository/models/forks/unload")[0] == 200
    elif end == "worker dies":
        # The next worker forks too; the first one's children are gone by then.
        os.kill(served.workers()[0].pid, signal.SIGKILL)
    elif end == "SIGTERM":
        assert served.terminate() == 0
    else:
        served.process.kill()
    gone, alive = psutil.wait_procs(children, timeout=60)
    assert alive == [], "children of the model are left"
    if end in ("unload", "worker dies"):
        assert served.terminate() == 0
    elif end == "SIGKILL":
        _, alive = psutil.wait_procs(everything, timeout=60)
        served.process.wait()
        served.process.stdout.close()
        served.errors.close()
        assert alive == []

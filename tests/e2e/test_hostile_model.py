"""A model folder whose chat template never ends, behind a real server."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import Served

pytest.importorskip("torch")
pytest.importorskip("tokenizers")

from text_server import NAME, write_model

pytestmark = pytest.mark.slow

LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
PROMPT = {"model": NAME, "prompt": "the cat", "max_tokens": 4}
CHAT = {"model": NAME, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    folder = write_model(tmp_path, {"penstock.text_timeout_s": "8"})
    (folder / "chat_template.jinja").write_text(LOOPS)
    served = Served(folder, "--drain-s", "20")
    yield served
    # While a template loops, and without leaving a process behind.
    asker = threading.Thread(target=post, args=(served, "chat/completions", CHAT))
    asker.start()
    time.sleep(0.3)
    assert served.terminate() == 0
    asker.join()


def post(served: Served, path: str, body: dict) -> tuple[int, dict]:
    status, answer = served.post(f"/v1/{path}", json.dumps(body).encode())
    return status, json.loads(answer)


def test_the_others_are_answered_while_it_loops(served: Served):
    found: list[tuple[int, dict]] = []
    asker = threading.Thread(target=lambda: found.append(post(served, "chat/completions", CHAT)))
    asker.start()
    num_live = num_answered = 0
    while asker.is_alive():
        num_live += served.status("/v2/health/live") == 200
        num_answered += post(served, "completions", PROMPT)[0] == 200
    asker.join()
    ((status, answer),) = found
    assert status == 500 and "chat template" in answer["error"]["message"]
    assert num_live > 3 and num_answered > 3
    assert post(served, "completions", PROMPT)[0] == 200

"""A language model's requests in a recording, with one shard and with two."""

import json
import urllib.request
from pathlib import Path

import pytest
from served import Served
from waiting import wait_until

from penstock.data.recordings import open_recording

pytest.importorskip("torch")
pytest.importorskip("tokenizers")

from text_server import NAME, write_model

CHAT = [{"role": "user", "content": "the cat"}]
GREEDY = {"model": NAME, "max_tokens": 12, "temperature": 0, "ignore_eos": True}


def ask(served: Served, path: str, body: object) -> dict:
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"http://{served.address}{path}", data)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


@pytest.mark.slow
@pytest.mark.parametrize("shards", ["1", "2"])
def test_prompts_and_answers_are_recorded(tmp_path: Path, shards: str) -> None:
    limits = {"penstock.record_share": "1", "penstock.dtype": "float32"}
    model = write_model(tmp_path, limits)
    folder = tmp_path / "recordings"
    with Served(model, "--record", str(folder), "--shards", shards) as served:
        said = ask(served, "/v1/completions", {**GREEDY, "prompt": ["the cat", "def f"]})
        chat = ask(served, "/v1/chat/completions", {**GREEDY, "messages": CHAT})
        stream = {**GREEDY, "prompt": "the dog", "stream": True}
        body = json.dumps(stream).encode()
        assert served.post("/v1/completions", body)[0] == 200
        text = "penstock_recorded_requests{"
        wait_until(lambda: f'{text}model="{NAME}",version="1"}} 4' in scrape(served))
    entries = open_recording(folder).entries
    found = {json.dumps(each.record.asked): each.record for each in entries}
    assert len(found) == 4
    for prompt, choice in zip(("the cat", "def f"), said["choices"], strict=True):
        record = found[json.dumps({"prompt": prompt})]
        assert record.texts == (choice["text"],)
        assert record.num_tokens[1] == 12 and record.parameters["max_tokens"] == 12
    record = found[json.dumps({"messages": CHAT})]
    assert record.texts == (chat["choices"][0]["message"]["content"],)
    assert json.dumps({"prompt": "the dog"}) in found


def scrape(served: Served) -> str:
    return served.get("/metrics")[1].decode()

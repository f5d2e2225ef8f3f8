"""A language model among the models of a catalog."""

import asyncio
import json
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("tokenizers")

import tiny_llm as tiny
from prometheus_client.parser import text_string_to_metric_families
from text_server import NAME, served, text_model, write_model
from tiny_text import TOKENIZER

from penstock.config import LLM
from penstock.errors import ConfigError, NotReady
from penstock.llm.language_model import LanguageModel
from penstock.llm.text_files import read_text
from penstock.repository import layout
from penstock.serving.catalog import Catalog


def config_of(folder):
    (config,) = layout.read(folder).configs
    return config


def test_it_is_shown_as_the_others_are(tmp_path):
    async def scenario():
        async with served(tmp_path) as server:
            model = server.model
            (place,) = model.processes
            assert model.is_ready and model.shown_state == "READY" and model.mode == "continuous"
            assert place.is_ready and place.built["dtype"] == "float32" and place.device == "cpu"
            assert model.num_waiting == 0 and model.metrics.load_s > 0
            told = model.explain()
            assert told.mode == "continuous" and told.instances[0].state == "idle"
            assert model.max_length == 256 and model.vocabulary.num_tokens > 0
            await server.catalog.unload(NAME)
            await asyncio.sleep(0)
            assert server.catalog.find_all("") == []

    asyncio.run(scenario())


async def got(server, path):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    return answer.partition(b"\r\n\r\n")[2].decode()


async def asked(server, **body):
    body = json.dumps({"model": NAME, "prompt": "the cat", **body}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    writer.write(head.encode() + b"Connection: close\r\n\r\n" + body)
    answer = await reader.read()
    writer.close()
    return int(answer.split()[1])


def test_a_scrape_and_v2s_statistics_show_what_was_generated(tmp_path):
    async def scenario():
        async with served(tmp_path) as server:
            statuses = [
                await asked(server, max_tokens=3, ignore_eos=True),
                await asked(server, max_tokens=1000),
                await asked(server, prompt=[100_000]),
            ]
            stats = json.loads(await got(server, f"/v2/models/{NAME}/stats"))["model_stats"][0]
            return statuses, await got(server, "/metrics"), stats

    statuses, text, stats = asyncio.run(scenario())
    assert statuses == [200, 400, 400]
    samples = {
        (each.name, each.labels.get("finished_reason", each.labels.get("reason"))): each.value
        for family in text_string_to_metric_families(text)
        for each in family.samples
        if NAME in (each.labels.get("model_name"), each.labels.get("model"))
        and "le" not in each.labels
    }
    assert samples["penstock:generation_tokens_total", None] == 3
    assert samples["penstock:request_success_total", "length"] == 1
    assert samples["penstock:time_to_first_token_seconds_count", None] == 1
    assert samples["penstock:num_requests_running", None] == 0
    assert samples["nv_inference_request_success_total", None] == 1
    assert samples["penstock_rejections_total", "invalid"] == 2
    assert stats["inference_stats"]["success"]["count"] == 1 == stats["inference_count"]
    assert stats["inference_stats"]["success"]["ns"] > 0
    assert stats["inference_stats"]["fail"]["count"] == 2


def test_before_it_is_loaded_it_says_so(tmp_path):
    async def scenario():
        model = text_model(config_of(write_model(tmp_path)))
        assert model.shown_state == "LOADING" and not model.is_ready
        assert model.explain().instances[0].state == "not ready"
        with pytest.raises(NotReady, match="loading"):
            assert model.max_length
        await model.drain()
        await model.close()

    asyncio.run(scenario())


def test_one_that_cannot_be_loaded_disturbs_nobody(tmp_path):
    good = write_model(tmp_path)
    bad = tmp_path / "bad"
    bad.mkdir()
    tiny.write_folder(bad)
    other = {**tiny.CONFIG, "architectures": ["BloomForCausalLM"]}
    (bad / "config.json").write_text(json.dumps(other))
    (bad / "tokenizer.json").write_text((good / "tokenizer.json").read_text())
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    tiny.write_folder(wrong)
    (wrong / "config.pbtxt").write_text(
        'parameters { key: "penstock.max_num_seqs" value { string_value: "no" } }'
    )

    async def scenario():
        catalog = Catalog(makers={LLM: text_model})
        await catalog.load(layout.read(tmp_path))
        reasons = {each.name: "; ".join(each.problems) for each in catalog.failures}
        names = [model.config.name for model in catalog]
        await catalog.close()
        return reasons, names

    reasons, names = asyncio.run(scenario())
    assert names == [NAME] and set(reasons) == {"bad", "wrong"}
    assert "BloomForCausalLM" in reasons["bad"] and "max_num_seqs: 'no'" in reasons["wrong"]


def test_made_up_weights_need_no_tokenizer(tmp_path):
    path = tiny.config_file(tmp_path, vocab_size=300)
    text = read_text(str(path), is_made_up=True)
    tokens = text.encode("né")
    assert len(tokens) == 3 and max(tokens) < 256
    assert all(text.vocabulary.decode([token]) for token in range(300))
    assert text.vocabulary.decode([*b"an ", 255, 299]) == "an <0xFF> w299"
    assert text.encode_chat([{"role": "user", "content": "hi"}]) == [*b"user: hi\nassistant:"]
    folder = write_model(tmp_path)
    own = read_text(str(folder / "config.json"), is_made_up=True)
    assert own.encode("the cat") == TOKENIZER.encode("the cat").ids
    assert all(own.vocabulary.decode([token]) for token in range(TOKENIZER.get_vocab_size()))


def test_a_file_that_is_no_gguf_is_named(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match=r"m\.gguf"):
        read_text(str(path))


@pytest.mark.parametrize("package", ["torch", "tokenizers"])
def test_a_package_that_is_missing_is_named_before_a_process_starts(tmp_path, monkeypatch, package):
    def refuse(*_):
        raise AssertionError("a process was started")

    model = LanguageModel(config_of(write_model(tmp_path)), refuse, refuse)
    monkeypatch.setitem(sys.modules, package, None)
    words = rf"needs the package '{package}', .*pip install \"penstock\[llm\]\""
    with pytest.raises(ConfigError, match=words):
        asyncio.run(model.start())

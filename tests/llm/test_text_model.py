"""A language model among the models of a catalog."""

import asyncio
import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("tokenizers")

import tiny_llm as tiny
from engine_thread import EngineThread
from text_server import NAME, served, write_model

from penstock import repository
from penstock.config import LLM
from penstock.errors import ConfigError, NotReady
from penstock.llm.text_model import TextModel, read_text
from penstock.serving.catalog import Catalog


def config_of(folder):
    (config,) = repository.read(folder).configs
    return config


def test_it_is_shown_as_the_others_are(tmp_path):
    async def scenario():
        async with served(tmp_path) as server:
            model = server.model
            (place,) = model.instances
            assert model.is_ready and model.shown_state == "READY" and model.mode == "continuous"
            assert place.is_ready and "dtype=float32" in place.built and place.device == "cpu"
            assert model.num_waiting == 0 and model.metrics.load_s > 0
            told = model.explain()
            assert told.mode == "continuous" and told.instances[0].state == "idle"
            assert model.max_length == 256 and model.text.num_tokens > 0
            await server.catalog.unload(NAME)
            await asyncio.sleep(0)
            assert server.catalog.find_all("") == []

    asyncio.run(scenario())


def test_before_it_is_loaded_it_says_so(tmp_path):
    async def scenario():
        model = TextModel(config_of(write_model(tmp_path)), EngineThread)
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
    (bad / "config.json").write_text(json.dumps({**tiny.CONFIG, "architectures": ["BertModel"]}))
    (bad / "tokenizer.json").write_text((good / "tokenizer.json").read_text())
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    tiny.write_folder(wrong)
    (wrong / "config.pbtxt").write_text(
        'parameters { key: "penstock.max_num_seqs" value { string_value: "no" } }'
    )

    async def scenario():
        catalog = Catalog(makers={LLM: lambda config: TextModel(config, EngineThread)})
        await catalog.load(repository.read(tmp_path))
        reasons = {each.name: "; ".join(each.problems) for each in catalog.failures}
        names = [model.config.name for model in catalog]
        await catalog.close()
        return reasons, names

    reasons, names = asyncio.run(scenario())
    assert names == [NAME] and set(reasons) == {"bad", "wrong"}
    assert "BertModel" in reasons["bad"] and "max_num_seqs: 'no'" in reasons["wrong"]


def test_made_up_weights_need_no_tokenizer(tmp_path):
    path = tiny.config_file(tmp_path, vocab_size=300)
    text = read_text(str(path), is_made_up=True)
    tokens = text.encode("né")
    assert len(tokens) == 3 and max(tokens) < 256 and text.decode(tokens) == "né"
    # What such a model says may be nothing that a text has.
    assert text.decode([299]) == ""
    folder = write_model(tmp_path)
    assert read_text(str(folder / "config.json"), is_made_up=True).num_tokens > 256


def test_a_file_that_is_no_gguf_is_named(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match=r"m\.gguf"):
        read_text(str(path), is_made_up=False)

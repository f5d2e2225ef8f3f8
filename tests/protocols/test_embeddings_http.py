"""Embeddings as OpenAI's own client sees them, by a real model and a function that reads texts."""

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

openai = pytest.importorskip("openai")

from doubles import settle  # noqa: E402

from penstock.config import BatchPolicy, HttpLimits, ModelConfig, Postprocess  # noqa: E402
from penstock.errors import BackendFailed, InvalidRequest  # noqa: E402
from penstock.protocols.embeddings_http import (  # noqa: E402
    embedder_of,
    vectors_of,
)
from penstock.protocols.gate import Gate  # noqa: E402
from penstock.protocols.http_server import HttpServer  # noqa: E402
from penstock.protocols.key_file import read_keys  # noqa: E402
from penstock.protocols.openai_http import OpenAiHttp  # noqa: E402
from penstock.protocols.v2_http import Models, V2Http  # noqa: E402
from penstock.repository import layout  # noqa: E402
from penstock.serving.catalog import Catalog  # noqa: E402
from penstock.serving.control import Control  # noqa: E402
from penstock.serving.management import ManagementApi  # noqa: E402
from penstock.serving.supervisor import ThreadLife  # noqa: E402
from penstock.types import Response, Tensor, TensorSpec  # noqa: E402

NAME, SIZE = "letters", 4
# A text becomes the numbers of its letters; "bad" is one that cannot be understood.
CODE = """
import numpy as np


def encode(inputs):
    text = inputs["text"][0].decode()
    if text == "bad":
        raise ValueError("a bad text")
    return {"ids": np.array([ord(each) for each in text or " "], np.int64)}
"""
CONFIG = """
backend: "onnxruntime"
max_batch_size: 3
input { name: "text" data_type: TYPE_STRING dims: 1 }
output { name: "vector" data_type: TYPE_FP32 dims: 4 }
output { name: "count" data_type: TYPE_FP32 dims: [-1, 4] }
dynamic_batching { }
parameters { key: "penstock.preprocess" value { string_value: "code.py:encode" } }
parameters { key: "penstock.model_inputs" value { string_value: "ids:INT64[-1]" } }
"""
PLAIN = """
backend: "null"
max_batch_size: 4
input { name: "image" data_type: TYPE_FP32 dims: [3, 2] }
output { name: "logits" data_type: TYPE_FP32 dims: 10 }
"""


def write_model(root):
    """The vector of a text is the sum over its letters of (letter, letter, letter, letter) * W."""
    version = root / NAME / "1"
    version.mkdir(parents=True)
    (version / "code.py").write_text(CODE)
    (root / NAME / "config.pbtxt").write_text(CONFIG)
    value = helper.make_tensor_value_info
    weights = helper.make_tensor("weights", TensorProto.FLOAT, [SIZE], [0.01, -0.02, 0.03, 1.0])
    nodes = [
        helper.make_node("Cast", ["ids"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["floats", "last"], ["columns"]),
        helper.make_node("Mul", ["columns", "weights"], ["count"]),
        helper.make_node("ReduceSum", ["count", "middle"], ["vector"], keepdims=0),
    ]
    graph = helper.make_graph(
        nodes,
        "letters",
        [value("ids", TensorProto.INT64, ["n", "s"])],
        [
            value("vector", TensorProto.FLOAT, ["n", SIZE]),
            value("count", TensorProto.FLOAT, ["n", "s", SIZE]),
        ],
        [
            weights,
            helper.make_tensor("last", TensorProto.INT64, [1], [2]),
            helper.make_tensor("middle", TensorProto.INT64, [1], [1]),
        ],
    )
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), version / "model.onnx")
    (root / "plain" / "1").mkdir(parents=True)
    (root / "plain" / "config.pbtxt").write_text(PLAIN)
    return root


def by_hand(text):
    letters = np.array([ord(each) for each in text or " "], np.float32)
    return (letters[:, None] * np.array([0.01, -0.02, 0.03, 1.0], np.float32)).sum(0)


class Served:
    def __init__(self, catalog, port):
        self.catalog, self.port = catalog, port

    @property
    def model(self):
        return self.catalog.find(NAME)


@asynccontextmanager
async def served(root, gate):
    catalog = Catalog(start_life=ThreadLife)
    if gate.keys is not None:
        catalog.quotas.replace(gate.keys.quotas)
    await catalog.load(layout.read(write_model(root)))
    assert catalog.failures == []
    management = ManagementApi(catalog, Control(catalog, "", is_explicit=False))
    api = OpenAiHttp(catalog, logs_requests=True)
    models = Models(management, handle_openai=api.handle, gate=gate)
    v2 = V2Http(models, HttpLimits(), gate)
    http = HttpServer(v2.handle, HttpLimits())
    try:
        yield Served(catalog, await http.start("127.0.0.1", 0))
    finally:
        await v2.close()
        await http.close()
        await catalog.close()


def run(root, scenario, gate=None, key="none"):
    async def whole():
        async with served(root, gate or Gate()) as server, asyncio.timeout(60):
            client = openai.AsyncOpenAI(
                base_url=f"http://127.0.0.1:{server.port}/v1",
                api_key=key,
                max_retries=0,
                _strict_response_validation=True,
            )
            try:
                return await scenario(client, server)
            finally:
                await client.close()

    return asyncio.run(whole())


def lenient(client):
    """Its types know numbers only, while it asks for base64 by itself."""
    return client.with_options(_extra_kwargs={"_strict_response_validation": False})


class TestList:
    def test_has_models_that_give_vectors_and_no_others(self, tmp_path):
        async def scenario(client, server):
            listed = [each async for each in client.models.list()]
            one = await client.models.retrieve(NAME)
            with pytest.raises(openai.NotFoundError):
                await client.models.retrieve("plain")
            return listed, one

        listed, one = run(tmp_path, scenario)
        assert [each.id for each in listed] == [NAME] and listed[0] == one
        written = (tmp_path / NAME / "1" / "model.onnx").stat().st_mtime
        assert one.created == int(written)


class TestVectors:
    def test_are_the_models_in_order_however_many_texts_there_are(self, tmp_path):
        texts = ["a", "two words", "", "né", "x" * 40, "b", "c"]

        async def scenario(client, server):
            as_bytes = await lenient(client).embeddings.create(model=NAME, input=texts)
            as_numbers = await client.embeddings.create(
                model=NAME, input=texts, encoding_format="float"
            )
            one = await lenient(client).embeddings.create(model=NAME, input="two words")
            return as_bytes, as_numbers, one, server.model.metrics.num_inferences

        as_bytes, as_numbers, one, num_rows = run(tmp_path, scenario)
        expected = np.array([by_hand(each) for each in texts])
        for found in (as_bytes, as_numbers):
            assert [each.index for each in found.data] == list(range(len(texts)))
            vectors = [each.embedding for each in found.data]
            np.testing.assert_allclose(vectors, expected, rtol=1e-5)
            assert found.model == NAME and found.usage.total_tokens == 0
        assert one.data[0].embedding == as_bytes.data[1].embedding
        assert num_rows == 2 * len(texts) + 1

    def test_of_fewer_dimensions_have_length_one_again(self, tmp_path):
        async def scenario(client, server):
            return await client.embeddings.create(
                model=NAME, input=["a", "word"], dimensions=2, encoding_format="float"
            )

        found = [each.embedding for each in run(tmp_path, scenario).data]
        expected = np.array([by_hand("a")[:2], by_hand("word")[:2]])
        expected /= np.linalg.norm(expected, axis=1, keepdims=True)
        np.testing.assert_allclose(found, expected, rtol=1e-5)


class TestProblems:
    @pytest.mark.parametrize(
        ("wrong", "param", "text"),
        [
            ({"input": [1, 2]}, "input", "tokens are not served here; expected texts"),
            ({"input": []}, "input", "expected texts"),
            ({"input": ["a"] * 2049}, "input", "expected at most 2048"),
            ({"dimensions": 5}, "dimensions", "dimensions is 5; expected at most 4"),
            ({"dimensions": 0}, "dimensions", "dimensions is 0"),
            ({"encoding_format": "hex"}, "encoding_format", "hex"),
            ({"model": "plain"}, "model", "takes image FP32 [3, 2] and gives logits FP32 [10]"),
        ],
    )
    def test_a_wrong_field_is_named(self, tmp_path, wrong, param, text):
        async def scenario(client, server):
            with pytest.raises(openai.BadRequestError) as caught:
                await client.post(
                    "/embeddings", body={"model": NAME, "input": "a", **wrong}, cast_to=object
                )
            return caught.value.body

        error = run(tmp_path, scenario)
        assert error["param"] == param and text in error["message"]

    def test_what_fails_fails_once_and_leaves_nothing_behind(self, tmp_path, caplog):
        async def scenario(client, server):
            with pytest.raises(openai.InternalServerError) as bad:
                await client.embeddings.create(model=NAME, input=["a", "b", "c", "bad", "d"])
            with pytest.raises(openai.NotFoundError):
                await client.embeddings.create(model="nobody", input="a")
            await server.model.drain()
            fine = await lenient(client).embeddings.create(model=NAME, input="a")
            return bad.value.body, fine, dict(server.model.metrics.num_failures)

        caplog.set_level("INFO", logger="penstock.requests")
        error, fine, failures = run(tmp_path, scenario)
        assert "a bad text" in error["message"] and error["type"] == "server_error"
        assert len(fine.data) == 1 and failures["BACKEND"] == 1
        lines = [each for each in caplog.records if each.name == "penstock.requests"]
        told = [(each.status, getattr(each, "rows", 0)) for each in lines]
        assert told == [(500, 5), (404, 0), (200, 1)]

    def test_refusals_count_where_the_model_is_known(self, tmp_path):
        async def scenario(client, server):
            for wrong in ({"input": [3]}, {"dimensions": 9}):
                with pytest.raises(openai.BadRequestError):
                    body = {"model": NAME, "input": "a", **wrong}
                    await client.post("/embeddings", body=body, cast_to=object)
            return server.model.metrics.num_refused["invalid"]

        assert run(tmp_path, scenario) == 2

    def test_whoever_leaves_waits_for_nothing(self, tmp_path):
        async def scenario(client, server):
            body = json.dumps({"model": NAME, "input": ["word"] * 200}).encode()
            head = f"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(head.encode() + body)
            await writer.drain()
            writer.transport.abort()
            await settle()
            await server.model.drain()
            return await lenient(client).embeddings.create(model=NAME, input="a")

        assert len(run(tmp_path, scenario).data) == 1


class TestWhoCan:
    @staticmethod
    def config(inputs, outputs, max_batch_size=4):
        policy = BatchPolicy(max(1, max_batch_size))
        return ModelConfig("m", "1", "null", "", inputs, outputs, max_batch_size, policy)

    def test_one_text_and_one_vector_are_enough(self):
        text = TensorSpec("text", "BYTES", (1,))
        vector = TensorSpec("pooled", "FP16", (1, 8))
        others = (TensorSpec("each", "FP32", (-1, 8)), TensorSpec("ids", "INT64", (8,)))
        optional = TensorSpec("top", "INT32", (1,), is_optional=True)
        found = embedder_of(self.config((text, optional), (vector, *others)))
        assert (found.vector, found.size) == ("pooled", 8)
        tensor = found.input("né")
        assert tensor.shape == (1, 1) and tensor.data == b"\x03\0\0\0n\xc3\xa9"
        alone = embedder_of(self.config((text,), (vector,), max_batch_size=0))
        assert alone.input("a").shape == (1,)

    @pytest.mark.parametrize(
        ("inputs", "outputs"),
        [
            ((), ()),
            (("BYTES", (1,)), ("FP32", (-1, 8))),
            (("BYTES", (2,)), ("FP32", (8,))),
            (("BYTES", (1,)), ("INT64", (8,))),
        ],
    )
    def test_others_are_told_what_they_take(self, inputs, outputs):
        inputs = (TensorSpec("a", *inputs),) if inputs else ()
        outputs = (TensorSpec("b", *outputs),) if outputs else ()
        with pytest.raises(InvalidRequest, match="model 'm' takes .* expected one text"):
            embedder_of(self.config(inputs, outputs))

    def test_halves_are_numbers_too(self):
        numbers = np.array([[1.5, -2.0]], np.float32)
        halves = Tensor("v", "FP16", (1, 1, 2), numbers.astype("<f2").tobytes())
        brain = Tensor("v", "BF16", (1, 2), (numbers.view("<u4") >> 16).astype("<u2").tobytes())
        for tensor in (halves, brain):
            assert vectors_of(Response("m", "1", [tensor]), "v").tolist() == [[1.5, -2.0]]

    def test_what_is_no_number_is_the_models_failure(self):
        tensor = Tensor("v", "FP32", (1, 1), np.array([np.nan], np.float32).tobytes())
        with pytest.raises(BackendFailed, match="not finite"):
            vectors_of(Response("m", "1", [tensor]), "v")

    @pytest.mark.parametrize(
        ("head", "kind"),
        [("classifier", "a classifier"), ("token_classifier", "a token classifier")],
    )
    def test_scores_of_a_classifier_are_no_embedding(self, head, kind):
        text, scores = TensorSpec("TEXT", "BYTES", (1,)), TensorSpec("SCORES", "FP32", (2,))
        made = Postprocess(head, (TensorSpec("logits", "FP32", (2,)),))
        config = replace(self.config((text,), (scores,)), postprocess=made)
        with pytest.raises(InvalidRequest, match=f"is {kind}: .*expected an embedding model"):
            embedder_of(config)
        own = replace(made, function="embedding")
        assert embedder_of(replace(config, postprocess=own)).vector == "SCORES"


class TestQuotas:
    SECRET = "sixteen characters!"

    def gate(self, root, quota):
        path = root / "keys.toml"
        path.write_text(f'[[key]]\nsecret = "{self.SECRET}"\nscopes = ["infer"]\n{quota}\n')
        return Gate(read_keys(path))

    def test_a_message_counts_as_one_request_however_many_texts_it_has(self, tmp_path):
        async def scenario(client, server):
            asked = dict(model=NAME, input=["a", "b", "c", "d"], encoding_format="float")
            found = await client.embeddings.create(**asked)
            with pytest.raises(openai.RateLimitError, match="may send 0.01 requests/s"):
                await client.embeddings.create(**asked)
            return found

        gate = self.gate(tmp_path, "requests_per_s = 0.01")
        assert len(run(tmp_path, scenario, gate, self.SECRET).data) == 4

    def test_texts_count_toward_the_keys_share_of_the_queue(self, tmp_path):
        async def scenario(client, server):
            with pytest.raises(openai.RateLimitError, match="its share is 1 of"):
                await client.embeddings.create(model=NAME, input=["a", "b", "c", "d"])
            asked = dict(model=NAME, input=["a"], encoding_format="float")
            return await client.embeddings.create(**asked)

        gate = self.gate(tmp_path, "queue_share = 1e-9")
        assert len(run(tmp_path, scenario, gate, self.SECRET).data) == 1

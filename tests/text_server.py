"""A server of one tiny language model, in this process, over real sockets."""

import asyncio
import json
from contextlib import asynccontextmanager

import tiny_llm as tiny
from engine_thread import EngineThread, RendererThread
from tiny_text import TOKENIZER

from penstock.config import LLM, HttpLimits
from penstock.dashboard.pages import Pages
from penstock.llm.language_model import LanguageModel
from penstock.protocols.gate import Gate
from penstock.protocols.generate_http import GenerateHttp
from penstock.protocols.http_server import HttpServer
from penstock.protocols.openai_http import OpenAiHttp
from penstock.protocols.v2_http import Models, V2Http
from penstock.repository import layout
from penstock.serving.catalog import Catalog
from penstock.serving.control import Control
from penstock.serving.management import ManagementApi

NAME = "smol"
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}: {{ m['content'] }}<|end|>{% endfor %}"
    "<|start|>assistant:"
)

# The same, for a model of the Hermes family with tools.
WITH_TOOLS = (
    "{% if tools %}{{ tools | length }} tools, <tool_call>{% endif %}{% for m in messages %}"
    "<|start|>{{ m['role'] }}: {{ m['content'] }}{% if m.tool_calls %}{{ m.tool_calls[0]"
    ".function.arguments.city }}{% endif %}<|end|>{% endfor %}<|start|>assistant:"
)


def write_model(folder, parameters=None, max_length=256, template=TEMPLATE):
    """A folder as Hugging Face has it, called as the model is."""
    folder = folder / NAME
    folder.mkdir()
    size = TOKENIZER.get_vocab_size()
    tiny.write_folder(folder, vocab_size=size, max_position_embeddings=max_length)
    TOKENIZER.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": template, "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    told = {"penstock.threads": "1", "penstock.kv_cache_bytes": str(1 << 20)}
    # Texts that tests hold back must not be ended on a busy machine.
    told |= {"penstock.text_timeout_s": "60", **(parameters or {})}
    lines = (
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'
        for key, value in told.items()
    )
    (folder / "config.pbtxt").write_text("\n".join(lines))
    return folder


def text_model(config, quotas=None):
    """Its engine and its renderer are threads."""
    return LanguageModel(config, EngineThread, RendererThread, quotas=quotas)


class TextServer:
    def __init__(self, gate=None):
        self.catalog = Catalog(makers={LLM: text_model})
        control = Control(self.catalog, "", is_explicit=False)
        management = ManagementApi(self.catalog, control)
        self.lifecycle = management.lifecycle
        openai = OpenAiHttp(self.catalog, lambda: self.lifecycle.is_draining, True)
        generate = GenerateHttp(self.catalog, lambda: self.lifecycle.is_draining, True)
        gate = gate or Gate()
        if gate.keys is not None:
            self.catalog.quotas.replace(gate.keys.quotas)
        pages = Pages(management, gate).handlers()
        models = Models(management, True, openai.handle, generate.handle, gate, pages)
        self.v2 = V2Http(models, HttpLimits(), gate)
        self.http = HttpServer(self.v2.handle, HttpLimits())
        self.port = 0

    @property
    def model(self):
        return self.catalog.find(NAME)

    @property
    def address(self):
        return f"http://127.0.0.1:{self.port}"


@asynccontextmanager
async def served(folder, gate=None, parameters=None, max_length=256, template=TEMPLATE):
    server = TextServer(gate)
    written = write_model(folder, parameters, max_length, template)
    await server.catalog.load(layout.read(written))
    assert server.catalog.failures == []
    server.port = await server.http.start("127.0.0.1", 0)
    try:
        yield server
    finally:
        await server.v2.close()
        await server.http.close()
        await server.catalog.close()


async def posted(server, path, body, headers="", method="POST"):
    """Status, headers and body, by hand."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n{headers}"
    )
    writer.write(head.encode() + b"Connection: close\r\n\r\n" + data)
    answer = await reader.read()
    writer.close()
    start, _, rest = answer.partition(b"\r\n\r\n")
    return int(start.split()[1]), start.decode(), rest

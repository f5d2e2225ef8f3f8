"""A small OpenAI server with a known law: real sockets, chunked server-sent events, no model.

The first token of an answer leaves `ttft_s` after its request came, each further one `gap_s` after
the one before. An answer has `max_tokens` tokens (16 where none is asked for). A prompt tells what
shall go wrong: "fail:429" answers with that status, "cut:3" closes the connection after three
tokens, "end:3" ends the stream there without [DONE], "error:3" sends an error object there,
"stall:0.5" pauses so long before the second token.

    python tests/benchmark/fake_openai.py --ttft-ms 50 --gap-ms 5      # prints its address
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

DEFAULT_TOKENS = 16
DIRECTIVE = re.compile(r"\b(fail|cut|end|error|stall):(\d+(?:\.\d+)?)")


class Cut(Exception):
    """The connection ends here."""


@dataclass
class FakeOpenAI:
    """`asked` are the requests that came: path, headers and body."""

    ttft_s: float = 0.0
    gap_s: float = 0.0
    models: tuple[str, ...] = ("tiny",)
    api_key: str = ""
    has_usage: bool = True
    # So many of the first tokens are reasoning.
    num_reasoning: int = 0
    line_end: str = "\n"
    # What /version says, as in vLLM; empty: there is no such path.
    version: str = "1.2.3"
    server_header: str = "uvicorn"
    # Other answers, whole, by path.
    answers: dict[str, tuple[int, str, bytes]] = field(default_factory=dict)
    asked: list[tuple[str, dict[str, str], Any]] = field(default_factory=list)
    port: int = 0

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[FakeOpenAI]:
        server = await asyncio.start_server(self._converse, "127.0.0.1", self.port)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()

    @contextlib.contextmanager
    def in_thread(self) -> Iterator[FakeOpenAI]:
        """Beside whatever event loops the caller runs."""
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        listening = self.listening()
        try:
            asyncio.run_coroutine_threadsafe(listening.__aenter__(), loop).result()
            yield self
            asyncio.run_coroutine_threadsafe(_end(listening), loop).result()
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    @property
    def address(self) -> str:
        return f"openai+http://127.0.0.1:{self.port}/v1"

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await self._answer(reader, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, OSError, asyncio.CancelledError):
            pass
        except Cut:
            with contextlib.suppress(OSError):
                await writer.drain()
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        began = asyncio.get_running_loop().time()
        first, *lines = head.rstrip("\r\n").split("\r\n")
        method, path, _ = first.split(" ")
        headers = {
            name.lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)
        }
        data = await reader.readexactly(int(headers.get("content-length", "0")))
        body = json.loads(data) if data else None
        self.asked.append((path, headers, body))
        if path in self.answers:
            self._whole(writer, *self.answers[path])
        elif self.api_key and headers.get("authorization") != f"Bearer {self.api_key}":
            self._error(writer, 401, "invalid api key")
        elif method == "GET" and path == "/v1/models":
            entries = [{"id": name, "object": "model", "owned_by": "fake"} for name in self.models]
            self._json(writer, 200, {"object": "list", "data": entries})
        elif method == "GET" and path == "/version" and self.version:
            self._json(writer, 200, {"version": self.version})
        elif method == "POST" and path in ("/v1/chat/completions", "/v1/completions"):
            await self._generate(writer, body, "chat" in path, began)
        else:
            self._error(writer, 404, "Not Found")

    async def _generate(
        self, writer: asyncio.StreamWriter, body: dict[str, Any], is_chat: bool, began: float
    ) -> None:
        prompt = json.dumps(body["messages"] if is_chat else body["prompt"])
        orders = {name: float(value) for name, value in DIRECTIVE.findall(prompt)}
        if "fail" in orders:
            self._error(writer, int(orders["fail"]), f"refused, request {len(self.asked)}")
            return
        if not body.get("stream") or body["model"] not in self.models:
            self._error(writer, 400, "expected a stream of a model that is there")
            return
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        if is_chat:
            self._event(writer, _chunk(is_chat, role="assistant", content=""))
        num_tokens = body.get("max_tokens", DEFAULT_TOKENS)
        at = began + self.ttft_s
        for index in range(num_tokens):
            if index == 1:
                at += orders.get("stall", 0.0)
            await self._until(at, writer)
            if self._goes_wrong(writer, orders, index):
                return
            field = "reasoning_content" if index < self.num_reasoning else "content"
            self._event(writer, _chunk(is_chat, **{field: f"word{index} "}))
            at += self.gap_s
        if self.has_usage and (body.get("stream_options") or {}).get("include_usage"):
            usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": num_tokens}
            self._event(writer, {"choices": [], "usage": usage})
        self._send(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")

    def _goes_wrong(
        self, writer: asyncio.StreamWriter, orders: dict[str, float], index: int
    ) -> bool:
        if orders.get("cut") == index:
            raise Cut
        if orders.get("error") == index:
            self._event(writer, {"error": {"message": "out of memory", "code": 500}})
        elif orders.get("end") != index:
            return False
        writer.write(b"0\r\n\r\n")
        return True

    async def _until(self, moment: float, writer: asyncio.StreamWriter) -> None:
        """At least: what is late stays late by itself, since every moment is reckoned anew."""
        left = moment - asyncio.get_running_loop().time()
        while left > 0:
            await asyncio.sleep(left)
            left = moment - asyncio.get_running_loop().time()
        await writer.drain()

    def _event(self, writer: asyncio.StreamWriter, value: dict[str, Any]) -> None:
        self._send(writer, json.dumps(value))

    def _send(self, writer: asyncio.StreamWriter, text: str) -> None:
        data = f"data: {text}{self.line_end}{self.line_end}".encode()
        writer.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _error(self, writer: asyncio.StreamWriter, status: int, text: str) -> None:
        self._json(writer, status, {"error": {"message": text, "type": "error"}})

    def _json(self, writer: asyncio.StreamWriter, status: int, value: Any) -> None:
        self._whole(writer, status, "application/json", json.dumps(value).encode())

    def _whole(self, writer: asyncio.StreamWriter, status: int, kind: str, body: bytes) -> None:
        head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
        if self.server_header:
            head += f"Server: {self.server_header}\r\n"
        writer.write(head.encode() + b"\r\n" + body)


def _chunk(is_chat: bool, **delta: str) -> dict[str, Any]:
    if is_chat:
        return {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta}]}
    text = "".join(delta.values())
    return {"object": "text_completion", "choices": [{"index": 0, "text": text}]}


async def _end(listening: contextlib.AbstractAsyncContextManager[FakeOpenAI]) -> None:
    """Stop listening, and let every conversation end."""
    await listening.__aexit__(None, None, None)
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def _main() -> None:
    parser = argparse.ArgumentParser(description="A fake OpenAI server with a known law.")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--ttft-ms", type=float, default=0.0)
    parser.add_argument("--gap-ms", type=float, default=0.0)
    options = parser.parse_args()
    fake = FakeOpenAI(options.ttft_ms / 1e3, options.gap_ms / 1e3, port=options.port)
    async with fake.listening():
        print(fake.address, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_main())

"""Renderer process of one model: `python -m penstock.llm.renderer_main FD PARENT`.

It runs the code of the model folder: the tokenizer with its patterns and the chat template. Jobs
run in threads; the core limits how many it sends and kills this process when one takes too long. An
allocation beyond the memory limit fails, and with it the job or this process.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from penstock.errors import (
    ConfigError,
    InvalidRequest,
    PenstockError,
    TooLarge,
    describe_error,
    error_text,
)
from penstock.llm import messages
from penstock.llm.grammar_check import check_apart
from penstock.llm.text import Text
from penstock.llm.text_files import read_text
from penstock.processes.parts import PART_BYTES, Joiner, split
from penstock.processes.start import begin_life, limit_memory, take_part
from penstock.wire.frames import StartFailed, Stop

if TYPE_CHECKING:
    from penstock.llm.grammars import Grammars

log = logging.getLogger("penstock.text")
# All that the core sends at once: its slots, and the slow jobs that run without one.
NUM_THREADS = 7
MAX_ERROR_CHARS = 500
# Thread switch interval, short so that a long text does not delay short ones.
SWITCH_S = 0.0005
# Switch of the library's own threads: each job is one text, which they cannot share.
PARALLELISM = "TOKENIZERS_PARALLELISM"
KINDS: Mapping[type, messages.Failure] = {TooLarge: "too_large", InvalidRequest: "invalid"}
_json = msgspec.json.Decoder()


class RendererProcess:
    """The main thread receives; the others run jobs and send."""

    def __init__(
        self, sock: socket.socket, limit_memory: Callable[[int], None] = lambda num_bytes: None
    ) -> None:
        self._sock = sock
        self._limit_memory = limit_memory
        self._joiner = Joiner()
        self._lock = threading.Lock()
        self._text: Text | None = None
        self._lock_of_grammars = threading.Lock()
        self._known_grammars: Grammars | None = None

    def serve(self) -> None:
        """Serve until the core closes the socket or sends Stop."""
        with ThreadPoolExecutor(NUM_THREADS, "render") as threads:
            while (message := self._receive()) is not None:
                match message:
                    case messages.LoadText():
                        self._load(message)
                    case Stop():
                        break
                    case _:
                        threads.submit(self._run, message)

    def _receive(self) -> messages.ToRenderer | None:
        while datagram := self._sock.recv(PART_BYTES + 1):
            data = self._joiner.add(datagram)
            if data is not None:
                return messages.decode_to_renderer(data)
        return None

    def _load(self, message: messages.LoadText) -> None:
        try:
            if message.version != messages.VERSION:
                text = f"the core speaks version {message.version}, not {messages.VERSION}"
                raise ConfigError([text])
            self._limit_memory(message.memory_bytes)
            source = message.source
            self._text = read_text(
                source.path, is_made_up=source.is_made_up, parses_special=source.parses_special
            )
            vocabulary = self._text.vocabulary
        except ConfigError as error:
            self._send(StartFailed(error.problems))
            return
        except Exception as error:  # Any error of a library is the answer to LoadText.
            log.exception("the tokenizer cannot be loaded")
            text = f"tokenizer: {describe_error(error)}"[:MAX_ERROR_CHARS]
            self._send(StartFailed((text,)))
            return
        self._limit_memory(message.memory_bytes)
        take_part()
        self._send(messages.TextReady(messages.VERSION, vocabulary))

    def _run(self, message: messages.EncodeJob) -> None:
        try:
            found = [messages.pack_tokens(tokens).tobytes() for tokens in self._tokens(message)]
            self._send(messages.Encoded(message.job, found))
        except OSError:
            pass  # The core has gone.
        except BaseException as error:  # Also panics of the library, which are not Exceptions.
            self._send(_failure(message.job, error))

    def _tokens(self, message: messages.EncodeJob) -> Sequence[list[int]]:
        text = self._text
        assert text is not None, "jobs come after LoadText"
        if isinstance(message, messages.CheckGrammar):
            check_apart(partial(self._grammars(text).check, message.constraint))
            return []
        if isinstance(message, messages.EncodeTexts):
            return [text.encode(each, is_whole=message.is_whole) for each in message.texts]
        asked, options = _json.decode(message.messages), _json.decode(message.options)
        return [text.encode_chat(asked, options, message.max_chars)]

    def _grammars(self, text: Text) -> Grammars:
        """Return the grammars of the model's tokens, read with the first request for one."""
        from penstock.llm.grammars import Grammars

        with self._lock_of_grammars:
            if self._known_grammars is None:
                self._known_grammars = Grammars(
                    text.vocabulary, partial(text.encode, is_whole=False)
                )
            return self._known_grammars

    def _send(self, message: messages.FromRenderer) -> None:
        with self._lock:
            for datagram in split(messages.encode(message)):
                self._sock.send(datagram)


def _failure(job: int, error: BaseException) -> messages.NotEncoded:
    if isinstance(error, PenstockError):
        return messages.NotEncoded(job, KINDS.get(type(error), "failed"), error_text(error))
    if isinstance(error, MemoryError):
        reason = "the tokenizer needs more memory than it may use"
        return messages.NotEncoded(job, "failed", reason)
    log.error("a text cannot be encoded", exc_info=error)
    return messages.NotEncoded(job, "failed", "the tokenizer failed")


def main() -> None:
    os.environ[PARALLELISM] = "false"
    sock = begin_life()
    if sock is None:
        return
    sys.setswitchinterval(SWITCH_S)
    RendererProcess(sock, limit_memory).serve()
    sock.close()
    os._exit(0)


if __name__ == "__main__":
    main()

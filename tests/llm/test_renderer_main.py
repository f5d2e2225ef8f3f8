"""The process that runs a model's tokenizer and chat template, without the core."""

import resource
import subprocess
import sys
import threading

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from test_renderer import write_text
from tiny_text import TOKENIZER

from penstock.llm import messages
from penstock.llm.renderer_main import RendererProcess
from penstock.processes.channel import socket_pair
from penstock.processes.parts import PART_BYTES, Joiner, split


class Talk:
    """The core's end of the socket."""

    def __init__(self, **options):
        self.sock, theirs = socket_pair()
        self.sock.setblocking(True)
        self.sock.settimeout(60)
        self._theirs = theirs
        self._thread = threading.Thread(target=RendererProcess(theirs, **options).serve)
        self._thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.sock.close()
        self._thread.join(60)
        self._theirs.close()

    def say(self, message):
        for datagram in split(messages.encode(message)):
            self.sock.send(datagram)
        return self

    def hear(self):
        joiner = Joiner()
        while (data := joiner.add(self.sock.recv(PART_BYTES + 1))) is None:
            pass
        return messages.decode_from_renderer(data)


def load(source, version=messages.VERSION):
    return messages.LoadText(version, source, 1 << 30)


def test_it_answers_each_job_by_its_number(tmp_path):
    with Talk() as talk:
        assert isinstance(talk.say(load(write_text(tmp_path))).hear(), messages.TextReady)
        found = talk.say(messages.EncodeTexts(5, ["the cat"], True)).hear()
        assert (found.job, messages.pack_tokens(found.tokens[0]).tolist()) == (
            5,
            TOKENIZER.encode("the cat").ids,
        )
        found = talk.say(messages.EncodeChat(6, b'[{"role": "user"}]', b"{}", 3)).hear()
        assert (found.job, found.kind) == (6, "too_large")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MemoryError(), "more memory"),
        (ValueError("secret"), "the tokenizer failed"),
        (KeyboardInterrupt(), "the tokenizer failed"),
    ],
)
def test_an_error_of_the_library_is_an_answer(tmp_path, monkeypatch, error, reason):
    def encode(*_, **__):
        raise error

    with Talk() as talk:
        talk.say(load(write_text(tmp_path))).hear()
        monkeypatch.setattr("penstock.llm.text.Text.encode", encode)
        found = talk.say(messages.EncodeTexts(1, ["a"], True)).hear()
        assert found.kind == "failed" and reason in found.reason and "secret" not in found.reason


def test_another_version_and_missing_files_are_told(tmp_path):
    with Talk() as talk:
        assert "version 99" in talk.say(load(write_text(tmp_path), 99)).hear().problems[0]
        (tmp_path / "tokenizer.json").unlink()
        source = load(messages.TextSource(str(tmp_path)))
        assert "tokenizer.json" in talk.say(source).hear().problems[0]


def test_memory_is_limited_before_files_are_read(tmp_path):
    limits = []
    with Talk(limit_memory=limits.append) as talk:
        talk.say(load(write_text(tmp_path))).hear()
    assert limits == [1 << 30, 1 << 30]


def test_data_beyond_the_limit_cannot_be_had():
    """In a process of its own: the limit would stay."""
    code = (
        "from penstock.processes.start import limit_memory\n"
        "limit_memory(64 << 20)\n"
        "bytearray(32 << 20)\n"
        "try:\n"
        "    bytearray(128 << 20)\n"
        "except MemoryError:\n"
        "    print('limited')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "limited\n"
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY

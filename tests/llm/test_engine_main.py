"""An engine as the core sees it: over a socket, in a thread here and in a process of its own."""

import hashlib
import os
import socket
import subprocess
import sys
import threading

import pytest

torch = pytest.importorskip("torch")

import tiny_llm as tiny  # noqa: E402

from penstock.llm import messages  # noqa: E402
from penstock.llm.engine_main import EngineProcess  # noqa: E402
from penstock.repository.manifest import FileEntry, Manifest  # noqa: E402
from penstock.sampling_params import SamplingParams  # noqa: E402
from penstock.wire.frames import StartFailed, Stop  # noqa: E402


def generate(number, tokens, max_tokens=6, n=1) -> messages.GenerateRequest:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, n=n)
    return messages.GenerateRequest(number, messages.pack_tokens(tokens), params)


def requests(report: messages.StepReport) -> list[int]:
    return [event.request for event in report.events]


class Core:
    """The other end."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.settimeout(60)

    def send(self, message) -> None:
        self.sock.send(messages.encode(message))

    def receive(self):
        return messages.decode_from_engine(self.sock.recv(1 << 20))

    def load(self, folder, **changes):
        self.send(messages.LoadEngine(messages.VERSION, tiny.settings_of(folder, **changes)))
        return self.receive()

    def finish(self, number, num=1) -> list[list[int]]:
        """The tokens of all sequences of a request."""
        found = [[] for _ in range(num)]
        left = num
        while left:
            message = self.receive()
            assert isinstance(message, messages.StepReport), message
            for event in message.events:
                if event.request == number:
                    found[event.index].append(event.token)
                    left -= bool(event.reason)
        return found


@pytest.fixture
def core():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    thread = threading.Thread(target=EngineProcess(theirs).serve, daemon=True)
    thread.start()
    yield Core(ours)
    ours.close()
    thread.join(60)
    assert not thread.is_alive()
    theirs.close()


def test_a_model_is_loaded_and_continues_as_by_hand(core, tmp_path):
    weights = tiny.write_folder(tmp_path)
    ready = core.load(tmp_path)
    assert isinstance(ready, messages.Ready)
    assert (ready.vocabulary, ready.max_length) == (50, tiny.MAX_LENGTH)
    core.send(generate(7, [3, 1, 4, 1, 5]))
    assert core.finish(7) == [tiny.continued(weights, tiny.CONFIG, [3, 1, 4, 1, 5], 6)]


def test_several_at_once_and_one_that_nobody_waits_for(core, tmp_path):
    weights = tiny.write_folder(tmp_path)
    core.load(tmp_path)
    core.send(generate(1, [1, 2, 3], max_tokens=50))
    core.send(generate(2, [4, 5], n=2))
    core.send(messages.GiveUp((1,)))
    wanted = tiny.continued(weights, tiny.CONFIG, [4, 5], 6)
    assert core.finish(2, num=2) == [wanted, wanted]
    core.send(generate(3, [6], max_tokens=1))
    message = core.receive()
    assert requests(message) == [3] and message.num_running == 0
    assert message.num_free_blocks == core_blocks(tmp_path)


def test_a_step_without_a_token_is_told_too(core, tmp_path):
    tiny.write_folder(tmp_path)
    core.load(tmp_path, max_tokens=4)
    core.send(generate(1, list(range(1, 10)), max_tokens=1))
    steps = [core.receive() for _ in range(3)]
    assert [each.events == [] for each in steps] == [True, True, False]
    assert [each.num_computed for each in steps] == [4, 8, 9]
    assert [each.num_running for each in steps] == [1, 1, 0]
    assert [len(each.waits_s) for each in steps] == [1, 0, 0] and steps[0].num_asked == 9
    core.send(generate(2, list(range(1, 10)), max_tokens=1))
    assert core.receive().num_cached == 8


def core_blocks(folder) -> int:
    from penstock.llm.engine_loading import load

    engine, _ = load(tiny.settings_of(folder))
    return engine.scheduler.pool.num_blocks


def test_a_text_ends_a_sequence(core, tmp_path):
    tiny.write_folder(tmp_path)
    core.load(tmp_path)
    core.send(generate(1, [1, 2, 3], max_tokens=40))
    core.receive()
    core.send(messages.EndText(1, 0))
    core.send(generate(2, [1], max_tokens=1))
    while requests(message := core.receive()) != [2]:
        assert requests(message) == [1]
    assert message.num_running == 0


@pytest.mark.parametrize(
    ("message", "text", "is_overload"),
    [
        (generate(1, range(60), max_tokens=10), "expected at most 64 together", False),
        (generate(1, [1], n=99), "n is 99; expected at most 16", False),
    ],
)
def test_what_cannot_run_is_refused(core, tmp_path, message, text, is_overload):
    tiny.write_folder(tmp_path)
    core.load(tmp_path)
    core.send(message)
    refused = core.receive()
    assert isinstance(refused, messages.RequestRefused)
    assert text in refused.reason and refused.is_overload == is_overload


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"cache_bytes": 5000}, "blocks do not hold one sequence of 64 tokens"),
        ({"path": "/nowhere"}, "/nowhere: expected a folder with config.json"),
    ],
)
def test_what_cannot_be_loaded_is_told(core, tmp_path, changes, text):
    tiny.write_folder(tmp_path)
    failed = core.load(tmp_path, **changes)
    assert isinstance(failed, StartFailed) and text in failed.problems[0]


def test_a_core_of_another_version_is_told(core, tmp_path):
    core.send(messages.LoadEngine(99, tiny.settings_of(tmp_path)))
    assert "version 99" in core.receive().problems[0]


def test_made_up_weights_need_a_configuration_only(core, tmp_path):
    ready = core.load(tiny.config_file(tmp_path), is_made_up=True)
    assert isinstance(ready, messages.Ready), ready


def test_in_a_process_of_its_own(tmp_path):
    weights = tiny.write_folder(tmp_path)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "penstock.llm.engine_main"]
    with theirs:
        process = subprocess.Popen(
            [*command, str(theirs.fileno()), str(os.getpid())], pass_fds=[theirs.fileno()]
        )
    try:
        core = Core(ours)
        assert isinstance(core.load(tmp_path), messages.Ready)
        core.send(generate(1, [9, 8, 7]))
        assert core.finish(1) == [tiny.continued(weights, tiny.CONFIG, [9, 8, 7], 6)]
        core.send(Stop())
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        ours.close()


def test_a_version_that_was_written_to_is_not_loaded(tmp_path, core):
    """Of the same size, so that nothing but the digests can tell."""
    tiny.write_folder(tmp_path)
    files = {
        each.name: FileEntry(each.stat().st_size, hashlib.sha256(each.read_bytes()).hexdigest())
        for each in tmp_path.iterdir()
    }
    path = tmp_path / "manifest.json"
    path.write_bytes(Manifest(1, "2026-01-01T00:00:00Z", files).encode())
    assert isinstance(core.load(tmp_path, manifest=str(path)), messages.Ready)
    with open(tmp_path / "model.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    failed = core.load(tmp_path, manifest=str(path))
    assert isinstance(failed, StartFailed)
    assert "differs from what was committed" in failed.problems[0]


def test_with_a_promise_the_pace_is_known_before_the_first_request(tmp_path):
    from penstock.llm.engine_loading import load

    tiny.write_folder(tmp_path)
    engine, _ = load(tiny.settings_of(tmp_path, ttft_s=0.5))
    assert engine.pace.is_known and engine.is_idle and engine.scheduler.shares_prompts
    assert engine.scheduler.num_computed == 0 and engine.scheduler.take_waits() == ()
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks
    without, _ = load(tiny.settings_of(tmp_path))
    assert not without.pace.is_known and not without.scheduler.shares_prompts

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

from penstock.llm import engine_links, messages  # noqa: E402
from penstock.llm.engine_main import EngineProcess  # noqa: E402
from penstock.processes.channel import socket_pair  # noqa: E402
from penstock.repository.manifest import FileEntry, Manifest  # noqa: E402
from penstock.sampling_params import SamplingParams  # noqa: E402
from penstock.wire.frames import Attach, EngineReady, StartFailed, Stop  # noqa: E402


def generate(number, tokens, max_tokens=6, n=1) -> messages.GenerateRequest:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, n=n)
    return messages.GenerateRequest(number, messages.pack_tokens(tokens), params)


def requests(report: messages.StepReport) -> list[int]:
    return [event.request for event in report.events]


class Shard:
    """The other end of a shard's socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.settimeout(60)

    def send(self, message) -> None:
        self.sock.send(messages.encode(message))

    def receive(self):
        return messages.decode_engine_to_shard(self.sock.recv(1 << 20))

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


class Core(Shard):
    """The other end: the core's socket, and that of one shard."""

    def __init__(self, sock: socket.socket) -> None:
        self.core = sock
        sock.settimeout(60)
        self._attached = []
        super().__init__(self.attach().sock)

    def close(self) -> None:
        for each in (self.core, *self._attached):
            each.close()

    def attach(self, buffer_bytes: int | None = None) -> Shard:
        """Add a shard; the engine can send it so much before it reads."""
        ours, theirs = socket_pair()
        ours.setblocking(True)
        if buffer_bytes is not None:
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        with theirs:
            socket.send_fds(self.core, [messages.encode(Attach(0))], [theirs.fileno()])
        self._attached.append(ours)
        return Shard(ours)

    def tell(self, message) -> None:
        self.core.send(messages.encode(message))

    def load(self, folder, **changes):
        self.tell(messages.LoadEngine(messages.VERSION, tiny.settings_of(folder, **changes)))
        return self.hear()

    def hear(self):
        return messages.decode_from_engine(self.core.recv(1 << 20))


@pytest.fixture
def core():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    thread = threading.Thread(target=EngineProcess(theirs).serve, daemon=True)
    thread.start()
    core = Core(ours)
    yield core
    core.close()
    thread.join(60)
    assert not thread.is_alive()
    theirs.close()


def test_a_model_is_loaded_and_continues_as_by_hand(core, tmp_path):
    weights = tiny.write_folder(tmp_path)
    ready = core.load(tmp_path)
    assert isinstance(ready, EngineReady)
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
    assert [each.num_computed for each in steps] == [4, 4, 1]
    assert [each.num_running for each in steps] == [1, 1, 0]
    assert [len(each.waits_s) for each in steps] == [1, 0, 0] and steps[0].num_asked == 9
    core.send(generate(2, list(range(1, 10)), max_tokens=1))
    assert core.receive().num_cached == 8


def test_drafted_tokens_are_told(core, tmp_path):
    """Several tokens of a text may come with one step, and its reason with the last."""
    weights = tiny.write_folder(tmp_path)
    core.load(tmp_path, max_tokens=32, max_drafted=4)
    core.send(generate(1, [5, 6, 7] * 3, max_tokens=40))
    steps = []
    while not any(event.reason for step in steps for event in step.events):
        steps.append(core.receive())
    events = [event for step in steps for event in step.events]
    assert [event.token for event in events] == tiny.continued(
        weights, tiny.CONFIG, [5, 6, 7] * 3, 40
    )
    assert [event.reason for event in events] == [""] * 39 + ["length"]
    num_drafted, num_accepted = (
        sum(getattr(step, name) for step in steps) for name in ("num_drafted", "num_accepted")
    )
    assert 0 < num_accepted <= num_drafted and len(steps) == 40 - num_accepted


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
    core.tell(messages.LoadEngine(99, tiny.settings_of(tmp_path)))
    assert "version 99" in core.hear().problems[0]


def test_made_up_weights_need_a_configuration_only(core, tmp_path):
    ready = core.load(tiny.config_file(tmp_path), is_made_up=True)
    assert isinstance(ready, EngineReady), ready


def test_in_a_process_of_its_own(tmp_path):
    weights = tiny.write_folder(tmp_path)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "penstock.llm.engine_main"]
    with theirs:
        process = subprocess.Popen(
            [*command, str(theirs.fileno()), str(os.getpid())], pass_fds=[theirs.fileno()]
        )
    core = Core(ours)
    try:
        assert isinstance(core.load(tmp_path), EngineReady)
        core.send(generate(1, [9, 8, 7]))
        assert core.finish(1) == [tiny.continued(weights, tiny.CONFIG, [9, 8, 7], 6)]
        core.tell(Stop())
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        core.close()


def test_a_version_that_was_written_to_is_not_loaded(tmp_path, core):
    """Of the same size, so that nothing but the digests can tell."""
    tiny.write_folder(tmp_path)
    files = {
        each.name: FileEntry(each.stat().st_size, hashlib.sha256(each.read_bytes()).hexdigest())
        for each in tmp_path.iterdir()
    }
    path = tmp_path / "manifest.json"
    path.write_bytes(Manifest(1, "2026-01-01T00:00:00Z", files).encode())
    assert isinstance(core.load(tmp_path, manifest=str(path)), EngineReady)
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


def test_shards_share_the_engine_and_each_gets_its_own_tokens(core, tmp_path):
    weights = tiny.write_folder(tmp_path)
    core.load(tmp_path)
    other = core.attach()
    prompts = {1: (core, [3, 1, 4]), 2: (other, [1, 5]), 3: (core, [9, 2]), 4: (other, [6, 5, 3])}
    for number, (shard, prompt) in prompts.items():
        shard.send(generate(number, prompt, max_tokens=20))
    reports = {shard: [] for shard in (core, other)}
    for shard, own in ((core, {1, 3}), (other, {2, 4})):
        found, left = {number: [] for number in own}, 2
        while left:
            report = shard.receive()
            reports[shard].append(report)
            assert set(requests(report)) <= own
            for event in report.events:
                found[event.request].append(event.token)
                left -= bool(event.reason)
        for number in own:
            assert found[number] == tiny.continued(weights, tiny.CONFIG, prompts[number][1], 20)
    everything = [*reports[core], *reports[other]]
    # What the engine counts is told to one of them: prompts, and all tokens but the last.
    assert sum(each.num_computed for each in everything) == 10 + 4 * 19
    assert sum(len(each.waits_s) for each in everything) == 4


def test_a_shard_that_is_gone_leaves_no_sequence_behind(core, tmp_path):
    tiny.write_folder(tmp_path)
    core.load(tmp_path, max_waiting=64)
    gone = core.attach()
    for number in range(10, 16):
        gone.send(generate(number, [number], max_tokens=60))
    assert gone.receive().num_running
    gone.sock.close()
    core.send(generate(1, [1], max_tokens=40))
    core.finish(1)
    core.send(generate(2, [2], max_tokens=1))
    message = core.receive()
    assert message.num_running == message.num_waiting == 0
    assert message.num_free_blocks == core_blocks(tmp_path)


def test_a_shard_that_does_not_read_ends_without_holding_up_the_others(core, tmp_path, monkeypatch):
    monkeypatch.setattr(engine_links, "MAX_UNSENT_BYTES", 1 << 9)
    tiny.write_folder(tmp_path)
    core.load(tmp_path)
    stuck = core.attach(1 << 13)
    for number in range(100, 104):
        stuck.send(generate(number, [number % 50], max_tokens=60))
    for number in range(3):
        core.send(generate(number, [1], max_tokens=60))
        core.finish(number)
    seen = []
    while not any(isinstance(each, messages.StepFailed) for each in seen):
        seen.append(stuck.receive())
    failed = [each for each in seen if isinstance(each, messages.StepFailed)]
    assert "does not read" in failed[0].reason
    assert set(failed[0].requests) <= set(range(100, 104))
    # It may go on.
    stuck.send(generate(200, [1], max_tokens=2))
    assert requests(stuck.receive()) == [200]

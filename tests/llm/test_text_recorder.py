"""Text requests in a recording: what was asked and said, and what is redacted."""

from pathlib import Path

from penstock.config import RecordPolicy
from penstock.data.recordings import open_recording
from penstock.errors import BackendFailed
from penstock.llm.generation import Generation
from penstock.llm.messages import GenerateRequest, TokenEvent, pack_tokens
from penstock.llm.text_recorder import tap
from penstock.sampling_params import SamplingParams
from penstock.serving.metrics import ModelMetrics
from penstock.serving.record_writer import MAX_HELD_BYTES, RecordWriter, RingState
from penstock.serving.recording_files import RingPlace, SegmentRing
from penstock.serving.request_recorder import RequestRecorder
from penstock.wire.openai_forms import TokenUsage


class Sink:
    def __init__(self) -> None:
        self.events: list[object] = []

    def token(self, event: TokenEvent) -> None:
        self.events.append(event.text)

    def finished(self, totals: TokenUsage) -> None:
        self.events.append(totals)

    def failed(self, error: Exception) -> None:
        self.events.append(error)


def generation(sink: Sink) -> Generation:
    params = SamplingParams(temperature=0.0, max_tokens=5, n=2)
    found = Generation(GenerateRequest(1, pack_tokens([4, 5, 6]), params), sink, b"key", 50.0)
    found.asked = {"prompt": "the question"}
    return found


def event(index: int, text: str) -> TokenEvent:
    return TokenEvent(1, index, 7, "", 0, text=text)


def recorder(folder: Path, *redacted: str) -> RequestRecorder:
    ring = SegmentRing(folder / "llm", "llm", RingPlace())
    ring.policy = policy = RecordPolicy(10**6, 1.0)
    metrics, writer = ModelMetrics("llm", "2"), RecordWriter()
    state = RingState(ring, "llm")
    return RequestRecorder(state, writer, metrics, "2", policy, frozenset(redacted))


def run(found: RequestRecorder, sink: Sink, error: Exception | None = None) -> None:
    asked = generation(sink)
    tap(asked, found)
    for index, text in ((0, "an "), (1, "no"), (0, "answer")):
        asked.sink.token(event(index, text))
    if error is None:
        asked.sink.finished(TokenUsage(3, 3))
    else:
        asked.sink.failed(error)
    found.writer.start()
    found.writer.close()


def test_a_request_is_recorded_and_passed_on(tmp_path: Path) -> None:
    found, sink = recorder(tmp_path), Sink()
    run(found, sink)
    assert sink.events == ["an ", "no", "answer", TokenUsage(3, 3)]
    (entry,) = open_recording(tmp_path).entries
    record = entry.record
    assert record.asked == {"prompt": "the question"} and record.texts == ("an answer", "no")
    assert record.parameters == {"temperature": 0.0, "n": 2, "max_tokens": 5}
    assert (record.status, record.version, record.num_tokens) == ("ok", "2", (3, 3))
    assert record.caller and found.writer.hold(MAX_HELD_BYTES)


def test_errors_are_recorded_with_what_came_before(tmp_path: Path) -> None:
    sink, error = Sink(), BackendFailed("gone")
    run(recorder(tmp_path), sink, error)
    assert sink.events[-1] is error
    (entry,) = open_recording(tmp_path).entries
    assert entry.record.status == "BackendFailed" and entry.record.texts == ("an answer", "no")


def test_what_was_asked_counts_towards_the_limits_before_it_has_tokens(tmp_path: Path) -> None:
    found, asked = recorder(tmp_path), generation(Sink())
    # A field that no template shows.
    asked.asked = {"messages": [{"role": "user", "content": "hi", "note": "x" * 10**6}]}
    tap(asked, found)
    asked.sink.finished(TokenUsage(3, 3))
    assert found.metrics.num_unrecorded["too_large"] == 1
    asked = generation(Sink())
    asked.asked = {"messages": [{"role": "user", "content": "hi", "seed": 1 << 70}]}
    tap(asked, found)
    asked.sink.finished(TokenUsage(3, 3))
    assert found.metrics.num_unrecorded["not_encodable"] == 1
    assert found.writer.hold(MAX_HELD_BYTES), "nothing is held any more"


def test_redacted_texts_are_nowhere_in_the_file(tmp_path: Path) -> None:
    run(recorder(tmp_path, "text_input", "text_output"), Sink())
    (file,) = (tmp_path / "llm").iterdir()
    data = file.read_bytes()
    assert b"question" not in data and b"answer" not in data
    (entry,) = open_recording(tmp_path).entries
    assert entry.record.asked is None and entry.record.texts is None
    assert entry.record.num_tokens == (3, 3)

"""Records text requests of a language model, as `serving.request_recorder` records tensors.

The sink of a sampled generation collects its text; the record is made when it ends. A generation
that its client cancels leaves no record. Runs on the event loop.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.errors import PenstockError
from penstock.llm.generation import Generation, GenerationSink
from penstock.llm.messages import TokenEvent
from penstock.serving.request_recorder import RequestRecorder, hash_caller
from penstock.types import Parameter
from penstock.wire.openai_forms import TokenUsage
from penstock.wire.recording import OK, RecordedRequest

# The tensors that stand for the texts in the model's signature.
PROMPT, ANSWER = "text_input", "text_output"


@dataclass(slots=True, eq=False)
class TextTap:
    """Passes everything on to the sink of the request."""

    inner: GenerationSink
    recorder: RequestRecorder
    generation: Generation
    texts: list[str] = field(default_factory=list)

    def token(self, event: TokenEvent) -> None:
        while len(self.texts) <= event.index:
            self.texts.append("")
        self.texts[event.index] += event.text
        self.inner.token(event)

    def finished(self, totals: TokenUsage) -> None:
        try:
            self._record(OK, totals)
        finally:
            self.inner.finished(totals)

    def failed(self, error: PenstockError) -> None:
        try:
            self._record(type(error).__name__, self.generation.totals)
        finally:
            self.inner.failed(error)

    def _record(self, status: str, totals: TokenUsage) -> None:
        recorder, generation = self.recorder, self.generation
        hidden = recorder.redacted
        asked = None if PROMPT in hidden else dict(generation.asked or {})
        texts = None if ANSWER in hidden else tuple(self.texts)
        arrived = generation.arrived or recorder.clock()
        record = RecordedRequest(
            arrived=recorder.arrival(arrived),
            id="",
            version=recorder.version,
            status=status,
            latency_s=recorder.clock() - arrived,
            caller=hash_caller(generation.caller),
            parameters={} if "parameters" in hidden else sampling_of(generation),
            asked=asked,
            texts=texts,
            num_tokens=(totals.num_prompt, totals.num_generated),
        )
        recorder.write(record)


def tap(generation: Generation, recorder: RequestRecorder) -> None:
    """Record a text request if it is in the sample."""
    if recorder.is_next():
        generation.sink = TextTap(generation.sink, recorder, generation)


def sampling_of(generation: Generation) -> dict[str, Parameter]:
    """Return the sampling parameters that decide whether the same answer can be expected."""
    params = generation.request.params
    found: dict[str, Parameter] = {"temperature": params.temperature, "n": params.n}
    if params.max_tokens is not None:
        found["max_tokens"] = params.max_tokens
    return found

"""Messages with the two processes of a language model (see `wire.frames`).

The core starts an engine and gives it a socket to each shard, which sends its requests there
itself; the core is the only shard unless there are others. `ToEngine` and `FromEngine` are those of
the core, `ShardToEngine` and `EngineToShard` those of shards, `ToRenderer` and `FromRenderer` those
of the process that owns a renderer. Tokens travel as bytes, four a token. All results of a step for
a shard are one message. Messages of engines are one datagram each; those of renderers may be larger
(see `processes.parts`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

import msgspec

from penstock.config import DEFAULT_HANG_S
from penstock.llm.token_bytes import Vocabulary
from penstock.sampling_params import Constraint, SamplingParams
from penstock.wire.frames import (
    MAX_FRAME_BYTES,
    Attach,
    EngineReady,
    Frame,
    StartFailed,
    Stop,
)

if TYPE_CHECKING:
    Tokens = array[int]
else:  # Python 3.11 has no generic arrays.
    Tokens = array
VERSION = 3
# From integers, or from their bytes.
pack_tokens = partial(array, "I")
# Limit of a prompt; the other fields of a message are small.
MAX_PROMPT_TOKENS = (MAX_FRAME_BYTES - (1 << 16)) // 4


class EngineSettings(Frame, tag="set"):
    """How to run a model; "auto" values are resolved before."""

    path: str
    device: str
    # Name of a torch dtype, or fp8, int8 or int4.
    dtype: str
    num_threads: int
    block_size: int
    # 0: what the GPU has left, or 1 GiB on a CPU.
    cache_bytes: int
    max_sequences: int
    max_tokens: int
    max_length: int
    max_waiting: int
    ttft_s: float | None = None
    tpot_s: float | None = None
    # Tokens drafted for a sequence in a step; 0: no speculative decoding.
    max_drafted: int = 0
    # Random weights for the configuration at `path`.
    is_made_up: bool = False
    # Manifest of a committed version; the model's files must match its digests.
    manifest: str = ""
    # Files with MD5 digests, which are compared too.
    checksums: tuple[tuple[str, str], ...] = ()
    # Used by shards: an engine that is silent for longer hangs, unless its steps are that slow.
    hang_s: float = DEFAULT_HANG_S
    # Used by shards: seconds that the renderer may take for a request.
    text_timeout_s: float = 5.0
    # The datatype is a default: the engine may measure and choose another one.
    is_dtype_free: bool = False
    # Used by shards: special tokens within messages are special, not text.
    parses_special: bool = False
    # Used by shards: the families by which answers are read, or "auto".
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"


class LoadEngine(Frame, tag="load"):
    version: int
    settings: EngineSettings


class GenerateRequest(Frame, tag="gen"):
    """One prompt, continued `params.n` times. A client's request with several prompts becomes one
    of these for each prompt; admission is decided for all of them with the first."""

    id: int
    tokens: Tokens
    params: SamplingParams
    # For requests of several prompts. Others: the id of the first. First: the tokens of the others.
    leader: int | None = None
    num_following: int = 0


class GiveUp(Frame, tag="up"):
    requests: tuple[int, ...]


class EndText(Frame, tag="end"):
    """End a sequence because of its text: request, and index of the sequence."""

    request: int
    index: int


class Logprobs(Frame):
    """Logprob of a token, and the most likely tokens with theirs."""

    logprob: float
    top_tokens: Sequence[int] = ()
    top_logprobs: Sequence[float] = ()


class TokenEvent(Frame):
    """A new token of one sequence, on its whole way from the engine to the request's sink."""

    request: int
    # Which of the request's sequences.
    index: int
    token: int
    # Why the sequence ended; empty while it continues.
    reason: str
    # Prompt tokens found in the prefix cache.
    num_cached: int
    # None: not requested.
    logprobs: Logprobs | None = None
    # Set by the shard, which detokenizes.
    text: str = ""


class StepReport(Frame, tag="new"):
    """The result of a step for one shard that has requests open. Counts are of the whole engine, so
    only one shard gets those of a step; for the others they are 0."""

    # Possibly empty.
    events: list[TokenEvent]
    num_running: int
    num_waiting: int
    num_free_blocks: int
    step_s: float
    # Since the last report: preemptions; tokens computed, looked up in the cache, found there.
    num_preemptions: int = 0
    num_computed: int = 0
    num_asked: int = 0
    num_cached: int = 0
    # Since the last report: drafted tokens, and those that were accepted.
    num_drafted: int = 0
    num_accepted: int = 0
    # Queueing time of the requests that were started since the last report.
    waits_s: tuple[float, ...] = ()
    # Seconds of the steps since the last report.
    busy_s: float = 0.0
    # New tokens of each expert, in all layers together; only in some reports.
    expert_tokens: tuple[int, ...] = ()


class PromptLogprobsChunk(Frame, tag="prompt"):
    """Logprobs of prompt tokens, the first of them at `start`; position 0 never has one."""

    request: int
    start: int
    logprobs: Sequence[Logprobs]


class RequestRefused(Frame, tag="no"):
    """A request was refused. `is_overload`: a retry may succeed."""

    request: int
    reason: str
    is_overload: bool
    retry_after_s: float = 1.0
    # For overloads: the reason in the metrics.
    kind: str = "queue_full"


class StepFailed(Frame, tag="failed"):
    """A step failed; these requests end with it. `is_invalid`: by the client's grammar."""

    requests: tuple[int, ...]
    reason: str
    is_invalid: bool = False


class TextSource(Frame):
    """Tokenizer and chat template that a renderer loads; the fields are those of the settings."""

    path: str
    is_made_up: bool = False
    parses_special: bool = False


class LoadText(Frame, tag="load"):
    version: int
    source: TextSource
    # Data that the process may allocate beyond what it holds once loaded.
    memory_bytes: int


class EncodeTexts(Frame, tag="texts"):
    job: int
    texts: list[str]
    # Whether to add the special tokens that the model wants around a text.
    is_whole: bool


class EncodeChat(Frame, tag="chat"):
    """Messages and template options as JSON, as clients sent them."""

    job: int
    messages: bytes
    options: bytes
    max_chars: int


class CheckGrammar(Frame, tag="grammar"):
    """Compile a grammar to see whether it is valid and small enough; answered by no tokens."""

    job: int
    constraint: Constraint


class TextReady(Frame, tag="ready"):
    version: int
    vocabulary: Vocabulary


class Encoded(Frame, tag="done"):
    """Tokens of each text, four bytes each."""

    job: int
    tokens: list[bytes]


# The client's messages are invalid or too large, or the model's files failed.
Failure = Literal["invalid", "too_large", "failed"]


class NotEncoded(Frame, tag="no"):
    job: int
    kind: Failure
    reason: str


ToEngine = LoadEngine | Attach | Stop
FromEngine = EngineReady | StartFailed
ShardToEngine = GenerateRequest | GiveUp | EndText
EngineToShard = PromptLogprobsChunk | StepReport | RequestRefused | StepFailed
EncodeJob = EncodeTexts | EncodeChat | CheckGrammar
ToRenderer = LoadText | EncodeJob | Stop
FromRenderer = TextReady | StartFailed | Encoded | NotEncoded
Datagram = bytes | memoryview
encode = msgspec.msgpack.Encoder(enc_hook=array.tobytes).encode
decode_to_engine: Callable[[Datagram], ToEngine] = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine: Callable[[Datagram], FromEngine] = msgspec.msgpack.Decoder(FromEngine).decode
decode_shard_to_engine: Callable[[Datagram], ShardToEngine] = msgspec.msgpack.Decoder(
    ShardToEngine, dec_hook=lambda kind, data: pack_tokens(data)
).decode
decode_engine_to_shard: Callable[[Datagram], EngineToShard] = msgspec.msgpack.Decoder(
    EngineToShard
).decode
decode_to_renderer: Callable[[bytes], ToRenderer] = msgspec.msgpack.Decoder(ToRenderer).decode
decode_from_renderer: Callable[[bytes], FromRenderer] = msgspec.msgpack.Decoder(FromRenderer).decode

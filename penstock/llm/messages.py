"""Messages between the core and an engine, each one datagram (see `wire.frames`).

    core → engine   Load, GenerateRequest, GiveUp, EndText, Stop
    engine → core   Ready, LoadFailed, PromptLogprobsChunk, StepReport, Refused, Failed

Prompts travel as bytes, four a token. All results of a step are one message.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

from penstock.config import DEFAULT_HANG_S
from penstock.sampling_params import SamplingParams
from penstock.wire.frames import MAX_FRAME_BYTES, Frame

if TYPE_CHECKING:
    Tokens = array[int]
else:  # Python 3.11 has no generic arrays.
    Tokens = array
VERSION = 1
TOKEN_TYPE: Literal["I"] = "I"
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
    # Random weights for the configuration at `path`.
    is_made_up: bool = False
    # Manifest of a committed version; the model's files must match its digests.
    manifest: str = ""
    # Used by the core: an engine that is silent for longer hangs, unless its steps are that slow.
    hang_s: float = DEFAULT_HANG_S
    # Used by the core: seconds that the renderer may take for a request.
    text_timeout_s: float = 5.0
    # The datatype is a default: the engine may measure and choose another one.
    is_dtype_free: bool = False
    # Used by the core: special tokens within messages are special, not text.
    parses_special: bool = False


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


class StopEngine(Frame, tag="stop"):
    pass


class Ready(Frame, tag="ready"):
    version: int
    load_s: float
    num_blocks: int
    max_length: int
    vocabulary: int
    built: Mapping[str, str]


class LoadFailed(Frame, tag="lf"):
    problems: tuple[str, ...]


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
    # Set by the core, which detokenizes.
    text: str = ""


class StepReport(Frame, tag="new"):
    # Possibly empty.
    events: list[TokenEvent]
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_preemptions: int
    step_s: float
    # Tokens since the engine was loaded: computed, looked up in the cache, found there.
    num_computed: int = 0
    num_asked: int = 0
    num_cached: int = 0
    # Queueing time of the requests that were started since the last message.
    waits_s: tuple[float, ...] = ()


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


class StepFailed(Frame, tag="bad"):
    """A step failed; these requests end with it."""

    requests: tuple[int, ...]
    reason: str


ToEngine = LoadEngine | GenerateRequest | GiveUp | EndText | StopEngine
FromEngine = Ready | LoadFailed | PromptLogprobsChunk | StepReport | RequestRefused | StepFailed


def pack_tokens(tokens: Iterable[int]) -> Tokens:
    return array(TOKEN_TYPE, tokens)


def unpack_tokens(data: bytes) -> Tokens:
    found = array(TOKEN_TYPE)
    found.frombytes(data)
    return found


def _encode_array(tokens: object) -> bytes:
    assert isinstance(tokens, array)
    return tokens.tobytes()


_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(
    ToEngine, dec_hook=lambda kind, data: unpack_tokens(data)
)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
encode = msgspec.msgpack.Encoder(enc_hook=_encode_array).encode
decode_to_engine = _to_engine.decode
decode_from_engine = _from_engine.decode

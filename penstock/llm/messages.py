"""Messages between the core and an engine, each one datagram (see `wire.frames`).

    core → engine   Load, Generate, GiveUp, EndText, Stop
    engine → core   Ready, LoadFailed, Prompt, Pieces, Refused, Failed

Tokens travel as bytes, four each. All results of a step are one message.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import msgspec

from penstock.config import DEFAULT_HANG_S
from penstock.wire.frames import MAX_FRAME_BYTES, Frame

VERSION = 1
TOKEN_TYPE = "I"
# Limit of a prompt; the other fields of a message are small.
MAX_PROMPT_TOKENS = (MAX_FRAME_BYTES - (1 << 16)) // 4


def packed(tokens: Sequence[int]) -> bytes:
    return array(TOKEN_TYPE, tokens).tobytes()


def unpacked(data: bytes) -> list[int]:
    found = array(TOKEN_TYPE)
    found.frombytes(data)
    return found.tolist()


class Settings(Frame, tag="set"):
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


class Load(Frame, tag="load"):
    version: int
    settings: Settings


class Generate(Frame, tag="gen"):
    """A request. `sampling` has the fields of `params.Sampling` that differ from the defaults."""

    request: int
    tokens: bytes
    sampling: dict[str, float | int | None]
    bias: dict[int, float]
    max_tokens: int
    min_tokens: int
    stop_tokens: tuple[int, ...]
    num: int
    priority: int
    salt: str
    leader: int | None = None
    num_following: int = 0


class GiveUp(Frame, tag="up"):
    """Abort these requests."""

    requests: tuple[int, ...]


class EndText(Frame, tag="end"):
    """End a sequence because of its text: request, and index of the sequence."""

    request: int
    index: int


class Stop(Frame, tag="stop"):
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


class Pieces(Frame, tag="new"):
    """Results of a step: one entry per token, possibly none; reasons are empty while a sequence
    continues."""

    requests: tuple[int, ...]
    indices: tuple[int, ...]
    tokens: tuple[int, ...]
    reasons: tuple[str, ...]
    num_found: tuple[int, ...]
    # State after the step.
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_preemptions: int
    step_s: float
    # Logprobs by place in `tokens`, for requests that want them.
    likelihoods: dict[int, tuple[float, tuple[int, ...], tuple[float, ...]]] = {}
    # Tokens since the engine was loaded: computed, looked up in the cache, found there.
    num_computed: int = 0
    num_asked: int = 0
    num_cached: int = 0
    # Queueing time of the requests that were started since the last message.
    waits_s: tuple[float, ...] = ()


Likely = tuple[float, tuple[int, ...], tuple[float, ...]]


class Prompt(Frame, tag="prompt"):
    """Logprobs of the tokens of a request's prompt, from `start` on."""

    request: int
    start: int
    likelihoods: tuple[Likely, ...]


class Refused(Frame, tag="no"):
    """A request was refused. `is_overload`: a retry may succeed."""

    request: int
    reason: str
    is_overload: bool
    retry_after_s: float = 1.0
    # For overloads: the reason in the metrics.
    kind: str = "queue_full"


class Failed(Frame, tag="bad"):
    """A step failed; these requests end with it."""

    requests: tuple[int, ...]
    reason: str


ToEngine = Load | Generate | GiveUp | EndText | Stop
FromEngine = Ready | LoadFailed | Prompt | Pieces | Refused | Failed
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)
encode = msgspec.msgpack.Encoder().encode


def decode_to_engine(data: bytes | memoryview) -> ToEngine:
    found: ToEngine = _to_engine.decode(data)
    return found


def decode_from_engine(data: bytes | memoryview) -> FromEngine:
    found: FromEngine = _from_engine.decode(data)
    return found

"""The messages between the core and an engine, each one datagram (see `wire.frames`).

    core → engine   Load, Generate, GiveUp, EndText, Stop
    engine → core   Ready, LoadFailed, Prompt, Pieces, Refused, Failed

Tokens travel as bytes, four each. All that a step brought is one message.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import msgspec

from penstock.config import DEFAULT_HANG_S
from penstock.wire.frames import MAX_FRAME_BYTES, Frame

VERSION = 1
TOKEN_TYPE = "I"
# Of a prompt; what else a message has is small.
MAX_PROMPT_TOKENS = (MAX_FRAME_BYTES - (1 << 16)) // 4


def packed(tokens: Sequence[int]) -> bytes:
    return array(TOKEN_TYPE, tokens).tobytes()


def unpacked(data: bytes) -> list[int]:
    found = array(TOKEN_TYPE)
    found.frombytes(data)
    return found.tolist()


class Settings(Frame, tag="set"):
    """How a model is run; "auto" was resolved before."""

    path: str
    device: str
    # Of torch.
    dtype: str
    num_threads: int
    block_size: int
    # 0: what is left of the device's memory.
    cache_bytes: int
    max_sequences: int
    max_tokens: int
    max_length: int
    max_waiting: int
    ttft_s: float | None = None
    tpot_s: float | None = None
    # Weights are made up for the configuration at `path`.
    is_made_up: bool = False
    # Of a version that was committed: its files are to be those of it.
    manifest: str = ""
    # The core's: an engine that is silent for longer hangs, if its steps are not so slow.
    hang_s: float = DEFAULT_HANG_S
    # The core's too: seconds that the renderer may take for a request, and whether special tokens
    # within messages are special.
    text_timeout_s: float = 5.0
    # The datatype is a default: the engine may measure and choose another one.
    is_dtype_free: bool = False
    parses_special: bool = False


class Load(Frame, tag="load"):
    version: int
    settings: Settings


class Generate(Frame, tag="gen"):
    """`sampling` are those of `params.Sampling` that differ from its own."""

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
    """Nobody waits for these any more."""

    requests: tuple[int, ...]


class EndText(Frame, tag="end"):
    """A sequence has ended by its text: request, and which of its sequences."""

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
    """One of each for every token of a step, which may have brought none; reasons are empty while a
    sequence goes on."""

    requests: tuple[int, ...]
    indices: tuple[int, ...]
    tokens: tuple[int, ...]
    reasons: tuple[str, ...]
    num_found: tuple[int, ...]
    # What is under way after it.
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_preemptions: int
    step_s: float
    # Of the tokens that somebody wants to know it of, by their place.
    likelihoods: dict[int, tuple[float, tuple[int, ...], tuple[float, ...]]] = {}
    # Tokens since the engine was loaded: computed, looked for in the cache, found there.
    num_computed: int = 0
    num_asked: int = 0
    num_cached: int = 0
    # How long requests waited that were begun since the last message.
    waits_s: tuple[float, ...] = ()


Likely = tuple[float, tuple[int, ...], tuple[float, ...]]


class Prompt(Frame, tag="prompt"):
    """How likely the tokens of a request's prompt were, from `start` on."""

    request: int
    start: int
    likelihoods: tuple[Likely, ...]


class Refused(Frame, tag="no"):
    """`is_overload`: it may be asked for again later."""

    request: int
    reason: str
    is_overload: bool
    retry_after_s: float = 1.0
    # Of an overload: what it counts as.
    kind: str = "queue_full"


class Failed(Frame, tag="bad"):
    """A step could not be run; these end with it."""

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

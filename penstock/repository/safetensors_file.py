"""The tensors of a safetensors file, read from its header without any weights."""

from __future__ import annotations

from pathlib import Path

import msgspec

MAX_HEADER_BYTES = 100 << 20


class StoredTensor(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


# Made when this is imported: msgspec crashes when several threads are the first to use a type.
_headers = msgspec.json.Decoder(StoredTensor)


def read_header(file: Path) -> list[StoredTensor] | None:
    """Return the tensors in the file's header; None if the header is invalid."""
    try:
        with open(file, "rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            if size > MAX_HEADER_BYTES:
                return None
            header = msgspec.json.decode(stream.read(size), type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        return [_headers.decode(raw) for raw in header.values()]
    except (OSError, msgspec.MsgspecError):
        return None

"""Compiled kernels as bytes, so that a version can bring them along.

Triton keeps what it compiles in a folder of its own, by a digest of source, options, compiler and
GPU: what does not fit is not found there, and compiled as ever.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from triton.runtime.cache import get_cache_manager

# Of what is kept of a kernel: what it is, and its code for the GPU.
KEPT = (".json", ".cubin")
Stored = dict[str, dict[str, bytes]]


def pack(functions: Iterable[Any]) -> bytes:
    """All that was compiled of these functions in this process."""
    found: Stored = {}
    for function in functions:
        for cache, *_ in function.device_caches.values():
            for kernel in cache.values():
                files = kernel.metadata_group.items()
                found[kernel.hash] = {
                    name: Path(path).read_bytes() for name, path in files if name.endswith(KEPT)
                }
    return msgspec.msgpack.encode(found)


def unpack(content: bytes) -> int:
    """Put them where Triton looks; how many were not there. msgspec.DecodeError and ValueError
    where the bytes make no sense."""
    found = msgspec.msgpack.decode(content, type=Stored)
    for digest, files in found.items():
        int(digest, 16)
        if any(Path(name).name != name for name in files):
            raise ValueError(f"{sorted(files)}: names of files expected")
    return sum(_put(digest, files) for digest, files in found.items())


def _put(digest: str, files: dict[str, bytes]) -> bool:
    cache = get_cache_manager(digest)
    (main,) = (name for name in files if name.endswith(".json"))
    if cache.get_group(main):
        return False
    cache.put_group(main, {name: cache.put(data, name) for name, data in files.items()})
    return True

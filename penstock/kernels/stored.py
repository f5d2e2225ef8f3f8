"""Serialise compiled kernels, so that a version can ship them.

Triton caches compiled kernels in a folder, by a digest of source, options, compiler and GPU:
kernels that do not match are not found there, and compiled as usual.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
from triton import JITFunction
from triton.runtime.cache import get_cache_manager

# Files to keep of a kernel: its metadata, and its code for the GPU.
KEPT = (".json", ".cubin")
Stored = dict[str, dict[str, bytes]]


def pack(functions: Iterable[JITFunction]) -> bytes:
    """Return everything compiled from these functions in this process."""
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
    """Add kernels to Triton's cache; return how many were new. Raise msgspec.DecodeError or
    ValueError if the bytes are invalid."""
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

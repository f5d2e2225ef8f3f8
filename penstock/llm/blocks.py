"""Block pool of the KV cache, with prefix caching.

Pure: it knows ids and tokens, but neither tensors nor time. A block holds `block_size` tokens. A
full block has a key, a hash of its tokens and all tokens before them. A block that no sequence
holds keeps its key until it is reused, so a later sequence with the same prefix finds it. Free
blocks are reused in LRU order, the last block of a sequence before its first, because prefixes are
what sequences share. The scheduler calls it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

# Array type of the tokens that a key hashes; wide enough for any vocabulary.
TOKEN_TYPE = "I"
KEY_BYTES = 16


def first_key(salt: str) -> bytes:
    """Return the parent key of first blocks. Sequences never share blocks across salts."""
    return hashlib.blake2b(salt.encode(), digest_size=KEY_BYTES).digest()


def next_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    content = parent + array(TOKEN_TYPE, tokens).tobytes()
    return hashlib.blake2b(content, digest_size=KEY_BYTES).digest()


class BlockPool:
    """Invariant: a block is held by `num_holders` sequences, or it is free; a block with a key is
    found by its key, whether held or free."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Prompt tokens that were looked up in the cache, and those that were found there.
        self.num_asked = self.num_found = 0
        self._num_holders = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._by_key: dict[bytes, int] = {}
        # In order of reuse.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Free blocks, including cached ones: those are evicted when their room is needed."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._by_key)

    def num_needed(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Return the cached blocks of the longest known prefix, without holding them."""
        blocks: list[int] = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_free_without(self, blocks: Sequence[int]) -> int:
        """Return how many blocks would be free if a sequence held these."""
        return len(self._free) - sum(self._num_holders[block] == 0 for block in blocks)

    def hold(self, blocks: Sequence[int]) -> None:
        """Add one holder to each block."""
        for block in blocks:
            if self._num_holders[block] == 0:
                del self._free[block]
            self._num_holders[block] += 1

    def take(self, count: int) -> list[int]:
        """Allocate `count` free blocks, of which there are enough, and drop their content."""
        assert count <= len(self._free), "taken without looking"
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._forget(block)
            self._num_holders[block] = 1
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Remove one holder from each block."""
        for block in reversed(blocks):
            assert self._num_holders[block] > 0, "a block is released once for each holder"
            self._num_holders[block] -= 1
            if self._num_holders[block] == 0:
                self._free[block] = None
                if self._keys[block] is None:
                    # Without a key its content cannot be found again, so reuse it first.
                    self._free.move_to_end(block, last=False)

    def name(self, block: int, key: bytes) -> None:
        """Give a full, computed block its key, so that others can share it. A second block with the
        same content gets no key, and so is reused first."""
        assert self._num_holders[block] > 0 and self._keys[block] is None
        if key not in self._by_key:
            self._keys[block] = key
            self._by_key[key] = block

    def clear(self) -> None:
        """Drop all cached content, as benchmarks do after their warm-up."""
        for block in list(self._by_key.values()):
            self._forget(block)

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            del self._by_key[key]
            self._keys[block] = None

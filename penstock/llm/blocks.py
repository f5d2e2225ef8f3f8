"""Which blocks of the KV cache hold which tokens: handed out, shared by sequences that begin alike,
and found again by what is in them.

Pure: it knows ids and tokens, and neither tensors nor time. A block holds `block_size` tokens. Full
blocks have a key, made from their tokens and all before them; one that nobody holds any more keeps
its key until its room is needed, so whoever comes with the same beginning finds it. Those that were
let go longest ago are taken first, of one sequence the last block before the first: what many share
is at the beginning. The scheduler calls it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

# Of tokens in a key; as wide as any vocabulary.
TOKEN_TYPE = "I"
KEY_BYTES = 16


def first_key(salt: str) -> bytes:
    """What the key of a first block builds on: nobody finds the blocks of another salt."""
    return hashlib.blake2b(salt.encode(), digest_size=KEY_BYTES).digest()


def next_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    content = parent + array(TOKEN_TYPE, tokens).tobytes()
    return hashlib.blake2b(content, digest_size=KEY_BYTES).digest()


@dataclass(slots=True)
class Counts:
    """Of tokens that were looked for in the cache, and of those that were there."""

    num_asked: int = 0
    num_found: int = 0


class BlockPool:
    """Invariant: a block is held by `num_holders` sequences, or it is one of the free ones; one
    with a key is found by it, whether it is held or free."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.counts = Counts()
        self._num_holders = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._by_key: dict[bytes, int] = {}
        # Those to be taken first come first.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Those in the cache among them: they are given up when somebody needs their room."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._by_key)

    def num_needed(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def found(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of the longest beginning that is there; nobody holds them for it yet."""
        blocks: list[int] = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_free_without(self, blocks: Sequence[int]) -> int:
        """How many would be free if somebody held these."""
        return len(self._free) - sum(self._num_holders[block] == 0 for block in blocks)

    def hold(self, blocks: Sequence[int]) -> None:
        """One more sequence needs them."""
        for block in blocks:
            if self._num_holders[block] == 0:
                del self._free[block]
            self._num_holders[block] += 1

    def take(self, count: int) -> list[int]:
        """So many of the free ones, with nothing in them; whoever asks has looked that there are
        enough."""
        assert count <= len(self._free), "taken without looking"
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._forget(block)
            self._num_holders[block] = 1
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """A sequence needs them no longer."""
        for block in reversed(blocks):
            assert self._num_holders[block] > 0, "released by nobody who held it"
            self._num_holders[block] -= 1
            if self._num_holders[block] == 0:
                self._free[block] = None
                if self._keys[block] is None:
                    # Nobody can find what is in it.
                    self._free.move_to_end(block, last=False)

    def name(self, block: int, key: bytes) -> None:
        """It is full and computed: others may share it. The second with the same content stays
        unnamed, and is the first to go."""
        assert self._num_holders[block] > 0 and self._keys[block] is None
        if key not in self._by_key:
            self._keys[block] = key
            self._by_key[key] = block

    def clear(self) -> None:
        """Nothing that was computed is found any more."""
        for block in list(self._by_key.values()):
            self._forget(block)

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            del self._by_key[key]
            self._keys[block] = None

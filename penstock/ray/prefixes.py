"""Which replica of a language model gets a prompt: one that has seen its start, if that is not
overloaded. Pure: prompts are hashed by blocks, loads are arguments.

Replicas keep the keys and values of prompts (prefix caching), so the replica that has computed the
longest part of a prompt answers first. Routers do not talk to each other: a prompt that a router
has not seen goes where rendezvous hashing sends its start, which is the same replica for all
routers.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence

# Bytes of a block: about 64 tokens of English, a few KV blocks.
BLOCK_BYTES = 256
# Only the first 16 kB of a prompt count.
MAX_BLOCKS = 64
# Blocks that a router remembers; about 100 bytes each.
MAX_KNOWN = 200_000
# A replica may have this many requests more than the least loaded one, or SLACK_FACTOR times as
# many, before its prompts go elsewhere.
SLACK = 4
SLACK_FACTOR = 1.5

Replica = str


def hash_blocks(data: bytes, salt: bytes = b"") -> tuple[int, ...]:
    """Return a hash for each whole block of a prompt, of all bytes up to its end; for a shorter
    prompt, one of the whole. Prompts with another salt share no cache."""
    running = hashlib.blake2b(salt, digest_size=8)
    found: list[int] = []
    for start in range(0, len(data) - BLOCK_BYTES + 1, BLOCK_BYTES):
        if len(found) == MAX_BLOCKS:
            break
        running.update(data[start : start + BLOCK_BYTES])
        found.append(int.from_bytes(running.copy().digest()))
    if not found:
        running.update(data)
        found.append(int.from_bytes(running.digest()))
    return tuple(found)


class PrefixTable:
    """The blocks that this router has sent, and to which replica each went last."""

    def __init__(self, max_known: int = MAX_KNOWN) -> None:
        self._known: OrderedDict[int, Replica] = OrderedDict()
        self._max_known = max_known
        self._num_ranked = 0

    def __len__(self) -> int:
        return len(self._known)

    def rank(self, blocks: Sequence[int], loads: Mapping[Replica, int]) -> list[Replica]:
        """Return the replicas, best first: that of the longest known part, unless it is overloaded,
        then those of rendezvous hashing, overloaded ones last."""
        if not loads:
            return []
        self._num_ranked += 1
        if not blocks:
            # Nothing to share: the least loaded ones, in turns.
            return sorted(rendezvous(self._num_ranked, list(loads)), key=loads.__getitem__)
        limit = max(min(loads.values()) + SLACK, SLACK_FACTOR * min(loads.values()))
        order = rendezvous(blocks[0], list(loads))
        owner = self._find_owner(blocks, loads)
        if owner is not None:
            order.remove(owner)
            order.insert(0, owner)
        # Stable: among the overloaded ones the least loaded comes first.
        late = sorted((each for each in order if loads[each] > limit), key=loads.__getitem__)
        return [each for each in order if loads[each] <= limit] + late

    def _find_owner(self, blocks: Sequence[int], loads: Mapping[Replica, int]) -> Replica | None:
        for block in reversed(blocks):
            replica = self._known.get(block)
            if replica is not None and replica in loads:
                return replica
        return None

    def learn(self, blocks: Sequence[int], replica: Replica) -> None:
        """Note that this replica computes a prompt."""
        for block in blocks:
            self._known[block] = replica
            self._known.move_to_end(block)
        while len(self._known) > self._max_known:
            self._known.popitem(last=False)

    def forget(self, replicas: Sequence[Replica]) -> None:
        """Drop what replicas that are gone have computed."""
        gone = set(replicas)
        for block in [block for block, each in self._known.items() if each in gone]:
            del self._known[block]


def rendezvous(key: int, replicas: Sequence[Replica]) -> list[Replica]:
    """Order replicas by highest random weight: one that comes or goes moves only its own keys."""
    seed = key.to_bytes(8)

    def weight(replica: Replica) -> bytes:
        return hashlib.blake2b(seed + replica.encode(), digest_size=8).digest()

    return sorted(replicas, key=weight, reverse=True)

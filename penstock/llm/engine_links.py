"""An engine's sockets: one to the core, and one to each shard that sends requests.

Never waits for a shard: what a shard does not read stays in memory, up to a limit. Knows requests
only by their numbers, which are unique over all shards.
"""

from __future__ import annotations

import select
import socket
from collections import deque
from collections.abc import Iterable

from penstock.llm import messages
from penstock.processes.channel import Channel

# Bytes that may wait for a shard; the requests of one that has more are given up.
MAX_UNSENT_BYTES = 64 << 20


class EngineLink:
    """The engine's end of the socket to one shard. `requests` are those of it that are open."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.channel = Channel(sock)
        self.requests: set[int] = set()
        self._unsent: deque[bytes] = deque()
        self._num_unsent_bytes = 0

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, message: messages.EngineToShard) -> bool:
        """Send a message, now or when the shard reads; False if too much waits for it."""
        data = messages.encode(message)
        if not self._unsent and self._try(data):
            return True
        self._unsent.append(data)
        self._num_unsent_bytes += len(data)
        return self._num_unsent_bytes <= MAX_UNSENT_BYTES

    def flush(self) -> None:
        """Send what waits, as far as the socket has room."""
        while self._unsent and self._try(self._unsent[0]):
            self._num_unsent_bytes -= len(self._unsent.popleft())

    def drop_unsent(self) -> None:
        self._unsent.clear()
        self._num_unsent_bytes = 0

    def _try(self, data: bytes) -> bool:
        try:
            self.channel.send(data)
        except BlockingIOError:
            return False
        except (BrokenPipeError, ConnectionResetError):
            pass  # The end of its socket tells, if it has not yet.
        return True


class EngineLinks:
    """Invariant: an open request is in `_owners` and in the `requests` of its link."""

    def __init__(self, core: socket.socket) -> None:
        self.core = Channel(core)
        self._poll = select.poll()
        self._poll.register(self.core, select.POLLIN)
        self._links: dict[int, EngineLink] = {}
        self._owners: dict[int, EngineLink] = {}
        # Links that are polled for room.
        self._full: set[EngineLink] = set()

    def close(self) -> None:
        """Close the sockets to shards; the core's is the caller's."""
        for link in self._links.values():
            link.channel.close()

    def attach(self, fd: int) -> EngineLink:
        link = EngineLink(socket.socket(fileno=fd))
        self._links[link.channel.fileno()] = link
        self._poll.register(link.channel, select.POLLIN)
        return link

    def detach(self, link: EngineLink) -> None:
        """Forget a shard that is gone, with its requests."""
        self._poll.unregister(link.channel)
        del self._links[link.channel.fileno()]
        self._full.discard(link)
        link.channel.close()
        for request in link.requests:
            del self._owners[request]

    def open_request(self, request: int, link: EngineLink) -> None:
        self._owners[request] = link
        link.requests.add(request)

    def close_request(self, request: int) -> None:
        """Forget a request that has ended."""
        link = self._owners.pop(request, None)
        if link is not None:
            link.requests.discard(request)

    def owner(self, request: int) -> EngineLink | None:
        return self._owners.get(request)

    def wait(self, is_idle: bool) -> tuple[bool, list[EngineLink]]:
        """Return whether the core has sent something, and the shards that have. If `is_idle`, wait
        for that. Meanwhile shards get what waits for them."""
        while True:
            for link in self._links.values():
                if link.has_unsent and link not in self._full:
                    self._full.add(link)
                    self._poll.modify(link.channel, select.POLLIN | select.POLLOUT)
            found = dict(self._poll.poll(None if is_idle else 0))
            if self._full:
                self._flush()
            links = [
                self._links[fd] for fd, event in found.items()
                if fd in self._links and event & ~select.POLLOUT
            ]  # fmt: skip
            if self.core.fileno() in found or links or not is_idle:
                return self.core.fileno() in found, links

    def _flush(self) -> None:
        for link in list(self._full):
            link.flush()
            if not link.has_unsent:
                self._full.discard(link)
                self._poll.modify(link.channel, select.POLLIN)

    def events_by_link(
        self, events: list[messages.TokenEvent]
    ) -> dict[EngineLink, list[messages.TokenEvent]]:
        """Return the events for each shard that has requests open."""
        links = [link for link in self._links.values() if link.requests]
        if len(links) == 1:
            return {links[0]: events}
        found: dict[EngineLink, list[messages.TokenEvent]] = {link: [] for link in links}
        for event in events:
            found[self._owners[event.request]].append(event)
        return found

    def requests_by_link(self, requests: Iterable[int]) -> dict[EngineLink, list[int]]:
        """Return open requests by the shard that sent them."""
        found: dict[EngineLink, list[int]] = {}
        for request in requests:
            if (link := self._owners.get(request)) is not None:
                found.setdefault(link, []).append(request)
        return found

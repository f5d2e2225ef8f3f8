"""Ray Serve's request router of language models: prompts go where their start was computed. Needs
Ray (`ray.serve.request_router`, alpha in Ray 2.60); `prefixes` decides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from penstock.ray.prefixes import PrefixTable


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """One for each handle. Loads are what this router has sent and not heard the end of: replicas
    are not asked, so that routing costs no round trip."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._table = PrefixTable()
        self._sent: Counter[str] = Counter()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the replicas in the order in which they are to be tried."""
        if pending_request is None:
            return [candidate_replicas]
        # If none accepts, wait before they are tried again.
        pending_request.routing_context.should_backoff = True
        replicas = {each.replica_id.unique_id: each for each in candidate_replicas}
        loads = {name: self._sent[name] for name in replicas}
        return [[replicas[name]] for name in self._table.rank(_blocks(pending_request), loads)]

    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        self._sent[replica_id.unique_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        super().on_request_completed(replica_id, internal_request_id)
        name = replica_id.unique_id
        self._sent[name] = max(0, self._sent[name] - 1)

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: object
    ) -> None:
        super().on_request_routed(pending_request, replica_id, result)
        self._table.learn(_blocks(pending_request), replica_id.unique_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._drop([replica_id.unique_id])

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        there = {each.replica_id.unique_id for each in replicas}
        self._drop([name for name in self._sent if name not in there])

    def _drop(self, names: Sequence[str]) -> None:
        if names:
            self._table.forget(names)
        for name in names:
            self._sent.pop(name, None)


def _blocks(request: PendingRequest) -> Sequence[int]:
    found: Sequence[int] = request.kwargs.get("prefix", ())
    return found

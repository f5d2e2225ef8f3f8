"""An ensemble whose requests are in the shards, as the core sees it.

Each shard runs the steps with its own part of the members (`serving.ensemble`), so tensors pass no
process but the members' workers. The core checks the members and adds up what the shards count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.config import ENSEMBLE, ModelConfig
from penstock.errors import NotReady
from penstock.serving.ensemble_members import EnsembleMembers
from penstock.serving.ensemble_steps import slowest
from penstock.serving.explain import Explanation, StepState
from penstock.serving.metrics import ModelMetrics
from penstock.serving.metrics_record import add
from penstock.serving.model_table import ModelTable
from penstock.serving.served import ModelProcess
from penstock.serving.shard import ModelReading, decode_explanation
from penstock.serving.shards import PartHost, ShardedVersion, Shards, ShardSession
from penstock.wire import frames


class ShardedEnsemble(ShardedVersion):
    """It has no workers, so the core has no part in its requests."""

    mode = ENSEMBLE

    def __init__(self, config: ModelConfig, shards: Shards, table: ModelTable) -> None:
        super().__init__(config, shards)
        self._members = EnsembleMembers(config, table)
        self.metrics = ModelMetrics.from_config(config)
        self.processes: Sequence[ModelProcess] = ()
        self._explanation: Explanation | None = None

    @property
    def parts(self) -> Sequence[PartHost]:
        return ()

    @property
    def opening(self) -> frames.OpenModel:
        return frames.OpenModel(self.number, self.config, (), ())

    @property
    def is_ready(self) -> bool:
        return not self._is_closing and not self._members.reason

    @property
    def shown_state(self) -> str:
        if self._is_closing:
            return "UNLOADING"
        return "UNAVAILABLE" if self._members.reason else "READY"

    @property
    def reason(self) -> str:
        return self._members.reason

    async def start(self) -> None:
        """Check the members, then open it in all shards."""
        self._members.check()
        await self._shards.open_model(self)

    async def close(self) -> None:
        self._is_closing = True
        await self._shards.retire_model(self)

    def join(self, shard: int, session: ShardSession) -> None:
        """Do nothing: the core sends it nothing."""

    def count(self, readings: Mapping[int, ModelReading]) -> None:
        super().count(readings)
        self.metrics = ModelMetrics.from_config(self.config)
        for each in (*self._retired, *self._readings.values()):
            add(self.metrics, each.metrics)

    async def refresh(self) -> None:
        """Read the explanations of the shards."""
        answers = await self._shards.ask_all(frames.ExplainModel(self.number))
        told = [decode_explanation(answer) for answer in answers.values()]
        if told:
            self._explanation = replace(self._fold(told), state=self.shown_state)

    def explain(self) -> Explanation:
        if self._explanation is None:
            raise NotReady(f"model '{self.config.name}' is not open in any shard")
        return self._explanation

    @staticmethod
    def _fold(told: Sequence[Explanation]) -> Explanation:
        """Add up what the shards say."""
        refused: dict[str, int] = {}
        for each in told:
            for reason, count in each.refused.items():
                refused[reason] = refused.get(reason, 0) + count
        steps = [_sum(parts) for parts in zip(*(each.steps for each in told), strict=True)]
        return replace(told[0], refused=refused, steps=steps, verdicts=[slowest(steps)])


def _sum(parts: Sequence[StepState]) -> StepState:
    """Add up the figures of one step in all shards."""
    return replace(
        parts[0],
        num_answered=sum(each.num_answered for each in parts),
        num_failed=sum(each.num_failed for each in parts),
        queue_s=sum(each.queue_s for each in parts),
        compute_s=sum(each.compute_s for each in parts),
        total_s=sum(each.total_s for each in parts),
        num_skipped=sum(each.num_skipped for each in parts),
    )

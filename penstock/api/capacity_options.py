"""Options of `penstock.capacity` and `penstock capacity`."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.api.options import flags_of, number, text

load_flag, model_flag = map(flags_of, ("Load", "Model"))


@dataclass(frozen=True, slots=True)
class CapacityOptions:
    """A load, and the replicas that serve it."""

    rate: str = load_flag(
        "Requests per second of all replicas, e.g. 50000/s",
        "Always needed. Give the highest rate that you expect, not the mean.",
        **text("N", "-"),
    )
    replica_rate: str = load_flag(
        "Requests per second that one replica sustains",
        "Give it if the version has no evidence: penstock bench --max-rate measures it.",
        **text("N", "from the version's evidence"),
    )
    slo: str = load_flag(
        "Latency target that the replica's rate keeps",
        "Give it with --replica-rate, for the depth of the queue.",
        **text("SLO", "from the version's evidence"),
    )
    headroom: float = load_flag(
        "Percent of a replica's rate that is kept free",
        "Raise it if load rises faster than replicas start, or for bursts.",
        **number(10.0, "PERCENT", 0, 99),
    )
    failure_domain: int = load_flag(
        "Replicas that fail together",
        "Raise it to the GPUs of a node: when they fail, the others take the whole load. 0 plans "
        "for no failure.",
        **number(1, "N", 0, 10_000),
    )
    price: float | None = load_flag(
        "Price of one replica per hour, in any currency",
        "Give it to see what the load costs.",
        **number(None, "NUMBER", 1e-9),
    )
    model: str = model_flag(
        "Model to plan for, if MODEL is a repository",
        "Needed when the repository holds several models.",
        **text("NAME", "the only one"),
    )
    version: str = model_flag(
        "Version of the model",
        "Give it to plan for a version that is not served.",
        **text("V", "the served one"),
    )

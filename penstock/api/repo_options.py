"""Options of `penstock repo promote` and `penstock.repo.promote`: one frozen dataclass. Values and
their checks only."""

from __future__ import annotations

import re
from dataclasses import dataclass

from penstock.api.options import flags_of, number, text
from penstock.errors import CommandLineError
from penstock.wire.version_rows import PromoteBody

reason_flag = flags_of("Reasons")
rollout_flag = flags_of("Rollouts, on a running server")
server_flag = flags_of("Server")
PERCENT = re.compile(r"(\d+(?:\.\d+)?) ?%")


@dataclass(frozen=True, slots=True)
class PromoteOptions:
    force: str = reason_flag(
        "Promote against the evidence, and why",
        "Evidence that is missing, missed its SLO or is from other hardware is overridden, and the "
        "history records REASON. Use it when you know better.",
        **text("REASON"),
    )
    reason: str = reason_flag(
        "Why the version is promoted",
        "The history records it. Give it for those who look there later.",
        **text("TEXT"),
    )
    canary: str = rollout_flag(
        "Share of requests to begin with, such as 5%",
        "The share grows while live figures keep what the evidence promises. Use it when tests "
        "before the rollout do not cover real requests.",
        **text("PERCENT"),
    )
    steps: str = rollout_flag(
        "Shares that follow the first one",
        "As in 5%,25%,50%. Change it for a slower or faster canary.",
        **text("PERCENT,…", "chosen by the server"),
    )
    header: str = rollout_flag(
        "Header that names the version of a request",
        "Its value is candidate, stable or a version. Change it if clients use that name already.",
        **text("NAME", "Penstock-Version"),
    )
    hash_header: str = rollout_flag(
        "Header whose value chooses the version",
        "Requests with the same value get the same version. Use it when users must not see both.",
        **text("NAME", "none, each request on its own"),
    )
    shadow: bool = rollout_flag(
        "Compare answers to copies of requests",
        "The version answers no client. Use it before any client sees the version; with --canary, "
        "the canary follows once the shadow holds.",
        value=False,
    )
    agreement: str = rollout_flag(
        "Least share of rows on which both versions agree",
        "Lower it for a model that was trained again and is to answer differently.",
        **text("PERCENT", "from the evidence, or 95%"),
    )
    step_s: float | None = rollout_flag(
        "Shortest time of a step in seconds",
        "Raise it if some requests come only at certain times of the day.",
        **number(None, "SECONDS", 0.001, default="60"),
    )
    mirrored_per_s: float | None = rollout_flag(
        "Most requests per second that run in both versions",
        "Lower it if the machine has no capacity to spare.",
        **number(None, "NUMBER", 0.001, default="10, with --shadow 50"),
    )
    api_key: str = server_flag(
        "API key with the scope 'admin'",
        "Needed when the server asks for one. Prefer PENSTOCK_API_KEY: other users of the machine "
        "can see flags.",
        metavar="KEY",
        variable="PENSTOCK_API_KEY",
    )

    @property
    def rollout_flags(self) -> list[str]:
        """Return the flags of a rollout that are given."""
        given = {
            "--canary": self.canary,
            "--steps": self.steps,
            "--header": self.header,
            "--hash-header": self.hash_header,
            "--shadow": self.shadow,
            "--agreement": self.agreement,
            "--step-s": self.step_s,
            "--mirrored-per-s": self.mirrored_per_s,
        }
        return [flag for flag, value in given.items() if value]

    def body(self, version: str) -> PromoteBody:
        """Return the request; CommandLineError for options that contradict each other."""
        problems = list(self._problems())
        if problems:
            raise CommandLineError(problems)
        return PromoteBody(
            version,
            self.force,
            self.reason,
            self.canary,
            self.shadow,
            self.steps,
            self.header,
            self.hash_header,
            self.agreement,
            self.step_s,
            self.mirrored_per_s,
        )

    def _problems(self) -> list[str]:
        problems: list[str] = []
        shares = [share.strip() for share in self.steps.split(",")] if self.steps else []
        named = {
            "--canary": [self.canary] if self.canary else [],
            "--steps": shares,
            "--agreement": [self.agreement] if self.agreement else [],
        }
        for flag, texts in named.items():
            wrong = [share for share in texts if not 0 < _percent(share) <= 100]
            problems += [f"{flag} {share!r} is not a share such as 5%" for share in wrong]
        if not problems and shares:
            numbers = [_percent(share) for share in shares]
            if numbers != sorted(set(numbers)):
                problems.append(f"--steps {self.steps!r}: each share must exceed the one before")
            elif numbers[0] < _percent(self.canary):
                share = f"--canary {self.canary}"
                problems.append(f"--steps {self.steps!r}: begins below {share}; give larger shares")
        alone = [flag for flag in self.rollout_flags if flag not in ("--canary", "--shadow")]
        if alone and not (self.canary or self.shadow):
            problems.append(f"{', '.join(alone)}: only with --canary or --shadow")
        return problems


def _percent(text: str) -> float:
    """Return the number of a share such as 5%; 0 for other texts."""
    match = PERCENT.fullmatch(text.strip())
    return float(match[1]) if match else 0.0

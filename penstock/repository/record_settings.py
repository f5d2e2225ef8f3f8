"""The parameters of a recording in config.pbtxt: `penstock.record`, its share and its redactions.

Texts to a `RecordPolicy` and back. Knows nothing of files; `serving.request_recorder` records.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from penstock import slo
from penstock.config import RecordPolicy
from penstock.types import DATATYPES, TensorSpec

RECORD, SHARE, REDACT = "penstock.record", "penstock.record_share", "penstock.record_redact"
OFF = "off"
# Parts of a request, beside its tensors, that can be redacted.
PARTS = ("id", "parameters")
# A smaller ring would hold hardly a request.
MIN_BYTES = 64 * 1024


def read(
    given: Mapping[str, str], specs: Sequence[TensorSpec], report: Callable[[str, str], None]
) -> RecordPolicy | None:
    """Return the policy; None if no parameter is given. `report` gets the key and the text of each
    problem."""
    if not {RECORD, SHARE, REDACT} & given.keys():
        return None
    default = RecordPolicy()
    size, share, redact = default.max_bytes, default.share, default.redact
    if (text := given.get(RECORD)) is not None:
        try:
            size = 0 if text.strip() == OFF else slo.parse_size(text)
        except ValueError:
            report(RECORD, f"'{text}' is not a size like 64MB, nor '{OFF}'")
        if 0 < size < MIN_BYTES:
            report(RECORD, f"'{text}' is less than {slo.format_size(MIN_BYTES)}")
    if (text := given.get(SHARE)) is not None:
        share = _share(text)
        if math.isnan(share):
            report(SHARE, f"'{text}' is not a number above 0 up to 1")
    if (text := given.get(REDACT)) is not None:
        redact = tuple(part.strip() for part in text.split(",") if part.strip())
        names = [spec.name for spec in specs]
        unknown = [name for name in redact if name not in (*names, *PARTS, *DATATYPES)]
        if unknown:
            expected = f"expected {', '.join((*names, *PARTS))} or a datatype such as BYTES"
            report(REDACT, f"'{unknown[0]}' is no input or output; {expected}")
    return RecordPolicy(size, share, redact)


def write(policy: RecordPolicy) -> dict[str, str]:
    """Return the parameters that read back to this policy."""
    values = {RECORD: slo.format_size(policy.max_bytes) if policy.max_bytes else OFF}
    if policy.share != RecordPolicy().share:
        values[SHARE] = repr(policy.share)
    if policy.redact:
        values[REDACT] = ", ".join(policy.redact)
    return values


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        return math.nan
    return share if 0 < share <= 1 else math.nan

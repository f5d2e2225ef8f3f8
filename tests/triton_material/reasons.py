"""Items of Triton's material that do not pass, or do not run here, and why. An item that fails and
is not listed ends the run with an error, and so does one that is listed and passes."""

from __future__ import annotations

# Title of an item: why it fails.
FAILS: dict[str, str] = {}

# Group: title of an item: why it is not run.
NOT_RUN: dict[str, dict[str, str]] = {}

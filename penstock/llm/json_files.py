"""JSON files that models come with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError

_SURROGATE = "\\ud"


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; raise ConfigError if the file cannot be read or is not an object."""
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text)
        if _SURROGATE in text.lower():
            # `json` accepts half of an escaped pair; UTF-8 has no bytes for it.
            json.dumps(found, ensure_ascii=False).encode()
    except (OSError, ValueError) as error:
        raise ConfigError([f"{path.name}: cannot be read: {error}"]) from None
    if not isinstance(found, dict):
        raise ConfigError([f"{path.name}: expected an object"])
    return found

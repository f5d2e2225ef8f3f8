"""The file of API keys: read, checked, and read again when it has changed.

[[key]]
name = "team-a"
secret = "at least sixteen characters"
scopes = ["infer"]            # infer, metrics, shared_memory, admin
requests_per_s = 100          # optional, as the next two; of all models together
tokens_per_s = 5000           # of language models, prompts and answers together
queue_share = 0.25            # of the requests that one model may hold
"""

from __future__ import annotations

import asyncio
import logging
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

from penstock.errors import ConfigError
from penstock.protocols.gate import SCOPES, Keys, digest_secret
from penstock.serving.quotas import Quota

log = logging.getLogger("penstock.keys")
# Interval between checks of the file.
WATCH_S = 1.0
EXAMPLE = '  [[key]]\n  secret = "at least 16 characters"\n  scopes = ["infer"]'
UNREADABLE = (
    "--api-keys needs a TOML file there that the server can read (in a container: mounted), with "
    f"for each key\n{EXAMPLE}"
)
MIN_SECRET = 16
# Characters of a name that logs show.
MAX_NAME = 200
# All keys go to a shard in one frame.
MAX_KEYS = 4096
# Quotas and the largest value of each.
QUOTAS = {"requests_per_s": 1e9, "tokens_per_s": 1e9, "queue_share": 1.0}
FIELDS = ("name", "secret", "scopes", *QUOTAS)


class KeyFile:
    """The key file of a running server, read again when it has changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, ...] | None = None

    def read(self) -> Keys:
        self._stamp = file_stamp(self._path)
        return read_keys(self._path)

    def read_if_changed(self) -> Keys | None:
        """Return new keys; None if the file is unchanged. ConfigError once for each bad change."""
        return None if file_stamp(self._path) == self._stamp else self.read()


async def watch_keys(
    key_file: KeyFile, check: Callable[[Keys], None], use: Callable[[Keys], None]
) -> None:
    """Give the keys to `use` whenever the file changes. If it cannot be read, or `check` raises
    ConfigError, the current keys stay."""
    while True:
        await asyncio.sleep(WATCH_S)
        try:
            keys = await asyncio.to_thread(key_file.read_if_changed)
            if keys is not None:
                check(keys)
        except ConfigError as error:
            log.error("the API keys stay as they are: %s", error)
            continue
        if keys is not None:
            use(keys)
            log.info("API keys reloaded: %d", len(keys.scopes))


def file_stamp(path: Path) -> tuple[int, ...] | None:
    """Return a stamp that changes with the file's content; None if the file is missing."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_ino, found.st_size, found.st_mtime_ns)


def read_keys(path: Path) -> Keys:
    """Read a key file. ConfigError lists every problem."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([f"{path}: {error.strerror}; {UNREADABLE}"]) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: {error}"]) from None
    except RecursionError:
        raise ConfigError([f"{path}: nested too deeply"]) from None
    entries = content.get("key")
    is_list = isinstance(entries, list) and all(isinstance(each, dict) for each in entries)
    if not is_list or not entries:
        raise ConfigError([f"{path}: holds no [[key]]; expected for each key\n{EXAMPLE}"])
    if len(entries) > MAX_KEYS:
        raise ConfigError([f"{path}: {len(entries)} keys; at most {MAX_KEYS} can be held"])
    strange = [name for name in content if name != "key"]
    problems = [f"{path}: {name}: no such field; expected [[key]]" for name in strange]
    first: dict[bytes, int] = {}
    scopes: dict[bytes, frozenset[str]] = {}
    names: dict[bytes, str] = {}
    quotas: dict[bytes, Quota] = {}
    for index, entry in enumerate(entries):
        found = _key_problems(entry)
        if not found:
            digest = digest_secret(entry["secret"].encode())
            scopes[digest] = frozenset(entry["scopes"])
            names[digest] = entry.get("name", "")[:MAX_NAME]
            quotas[digest] = Quota(**{name: entry.get(name) for name in QUOTAS})
            if first.setdefault(digest, index) != index:
                found.append(f".secret: the same as that of key[{first[digest]}]")
        problems += [f"{path}: key[{index}]{problem}" for problem in found]
    if problems:
        raise ConfigError(problems)
    return Keys(scopes, names, {key: each for key, each in quotas.items() if each != Quota()})


def _key_problems(entry: Mapping[str, object]) -> list[str]:
    """Return the problems of one key; they never quote its secret."""
    expected = ", ".join(FIELDS)
    problems = [
        f".{name}: no such field; expected {expected}" for name in entry if name not in FIELDS
    ]
    if not isinstance(entry.get("name", ""), str):
        problems.append(".name: expected a string")
    secret, wanted = entry.get("secret"), entry.get("scopes")
    if not isinstance(secret, str) or len(secret) < MIN_SECRET or not secret.isascii():
        problems.append(f".secret: at least {MIN_SECRET} ASCII characters are needed")
    wrong = [w for w in wanted if w not in SCOPES] if isinstance(wanted, list) else []
    if not isinstance(wanted, list) or not wanted or wrong:
        told = "".join(f"; {each!r:.40} is none" for each in wrong)
        problems.append(f".scopes: expected a list of some of {', '.join(SCOPES)}{told}")
    problems += [
        f".{name}: expected a number above 0, up to {most:g}"
        for name, most in QUOTAS.items()
        if not _is_number(entry.get(name, most), most)
    ]
    return problems


def _is_number(value: object, limit: float) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < cast(float, value) <= limit

"""Keys of memfds: written and read, and nothing else is one."""

import pytest

from penstock.wire.region_keys import MemfdKey, memfd_name, parse_memfd_key

TOKEN = "0123456789abcdef" * 2


def test_a_key_is_read_as_it_was_written():
    key = MemfdKey(4321, 17, TOKEN)
    assert str(key) == f"memfd:4321:17:{TOKEN}"
    assert parse_memfd_key(str(key)) == key
    assert memfd_name(TOKEN).endswith(TOKEN)


@pytest.mark.parametrize(
    "key",
    [
        "memfd:",
        f"memfd:0:3:{TOKEN}",
        f"memfd:-1:3:{TOKEN}",
        f"memfd:self:3:{TOKEN}",
        f"memfd:1:../3:{TOKEN}",
        f"memfd:1:3:{TOKEN[:-1]}",
        f"memfd:1:3:{TOKEN}/",
        f"memfd:1:3:{TOKEN}\n",
        f"memfd:{'9' * 11}:3:{TOKEN}",
    ],
)
def test_what_is_malformed_is_no_key(key: str):
    assert parse_memfd_key(key) is None

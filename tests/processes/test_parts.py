"""Messages of any size, in datagrams."""

from penstock.processes.parts import PART_BYTES, Joiner, split


def joined(data):
    joiner = Joiner()
    found = [joiner.add(datagram) for datagram in split(data)]
    assert all(each is None for each in found[:-1])
    return found[-1], len(found)


def test_a_large_message_travels_in_parts():
    data = b"a" * (3 * PART_BYTES) + b"b"
    assert joined(data) == (data, 4)
    assert joined(b"b") == (b"b", 1)
    assert all(len(each) <= PART_BYTES + 1 for each in split(data))

"""Clients' memory as those who admit requests see it: found, held while it is used, given up after
the last use, and read without a crash if its file is truncated."""

import contextlib
import os
from collections.abc import Iterator

import pytest

from penstock.errors import InvalidRequest, PenstockError
from penstock.serving.regions import Region, RegionTable, read_regions
from penstock.types import RegionPlace, Request, RequestedOutput, Response, Tensor
from penstock.wire import frames

OWNER = b"key"


class Answers:
    def __init__(self) -> None:
        self.answers: list[Response | PenstockError] = []

    def respond(self, request: Request, answer: Response | PenstockError, final: bool) -> None:
        self.answers.append(answer)


class Worker:
    """What a link to a worker is told."""

    def __init__(self) -> None:
        self.unmapped: list[int] = []

    def unmap_region(self, region: Region) -> None:
        self.unmapped.append(region.number)


@pytest.fixture
def table() -> Iterator[RegionTable]:
    table = RegionTable(is_allowed=True)
    yield table
    table.close_all()


def add(table: RegionTable, nbytes: int = 64, name: str = "r", number: int = 1) -> Region:
    fd = os.memfd_create("region")
    os.write(fd, bytes(range(nbytes)))
    memory = frames.MapRegion(number, name, 0, nbytes)
    return table.open(frames.OpenRegion(OWNER, memory), fd)


def request(
    *inputs: Tensor, outputs: tuple[RequestedOutput, ...] = (), caller: bytes = OWNER
) -> Request:
    made = Request(Answers(), list(inputs), 0.0, outputs=outputs)
    made.caller, made.uses_regions = caller, True
    return made


def placed(offset: int, nbytes: int, datatype: str = "UINT8", region: str = "r") -> Tensor:
    return Tensor("x", datatype, (nbytes,), b"", RegionPlace(region, offset, nbytes))


def wanted(offset: int, nbytes: int) -> RequestedOutput:
    parameters = {
        "shared_memory_region": "r",
        "shared_memory_byte_size": nbytes,
        "shared_memory_offset": offset,
    }
    return RequestedOutput("y", parameters)


def is_open(fd: int) -> bool:
    with contextlib.suppress(OSError):
        os.fstat(fd)
        return True
    return False


def test_tensors_are_found_within_their_region(table: RegionTable):
    region = add(table)
    loan = table.lend(request(placed(0, 64), outputs=(wanted(32, 32),)))
    assert loan.regions == {region}
    assert loan.inputs[0].frame == frames.RegionSpan("x", 1, 0, 64)
    assert loan.outputs["y"].frame == frames.RegionSpan("y", 1, 32, 32)
    assert bytes(loan.inputs[0].read()) == bytes(range(64))


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 65), (1, 64), (64, 1), (1 << 62, 1 << 62)])
def test_places_beyond_the_end_are_refused(table: RegionTable, offset: int, nbytes: int):
    add(table)
    for asked in (request(placed(offset, nbytes)), request(outputs=(wanted(offset, nbytes),))):
        with pytest.raises(InvalidRequest, match=rf"'r': {nbytes} bytes at {offset} of 64"):
            table.lend(asked)


def test_regions_of_other_keys_do_not_exist(table: RegionTable):
    add(table)
    for caller in (b"", b"other"):
        with pytest.raises(InvalidRequest, match="Unable to find shared memory region: 'r'"):
            table.lend(request(placed(0, 4), caller=caller))


def test_a_server_that_allows_none_names_the_option():
    with pytest.raises(InvalidRequest, match="--shared-memory"):
        RegionTable().lend(request(placed(0, 4)))


def test_a_region_stays_until_the_last_request_that_uses_it_has_ended(table: RegionTable):
    region, worker = add(table), Worker()
    fd = region.fd
    region.users.add(worker)
    loans = [table.lend(request(placed(0, 4))) for _ in range(2)]
    for loan in loans:
        loan.begin()
    table.close(1)
    with pytest.raises(InvalidRequest, match="Unable to find"):
        table.lend(request(placed(0, 4)))
    loans[0].end()
    assert is_open(fd) and not worker.unmapped
    assert bytes(region.read(0, 4)) == bytes(range(4)), "the second may still be read"
    loans[1].end()
    assert not is_open(fd) and worker.unmapped == [1]


def test_a_region_without_users_goes_at_once_and_its_name_is_free(table: RegionTable):
    fd = add(table).fd
    table.close(1)
    table.close(1)
    assert not is_open(fd)
    again = add(table, number=2)
    assert table.lend(request(placed(0, 4))).regions == {again}


def test_texts_are_read_at_once(table: RegionTable):
    add(table)
    asked = request(placed(4, 8, "BYTES"))
    assert not table.lend(asked).regions
    assert bytes(asked.inputs[0].data) == bytes(range(4, 12)) and asked.inputs[0].place is None


def test_a_truncated_file_is_an_error_of_the_request(table: RegionTable):
    region = add(table)
    os.ftruncate(region.fd, 10)
    span = table.lend(request(placed(8, 8))).inputs[0]
    with pytest.raises(InvalidRequest, match="'r': its file is shorter"):
        span.read()
    with pytest.raises(InvalidRequest, match="shorter"):
        region.write(8, b"12345678")
    assert os.fstat(region.fd).st_size == 10, "it does not grow"


class TestModelsThatKnowNoRegions:
    def test_inputs_are_read_and_outputs_written(self, table: RegionTable):
        region = add(table)
        asked = request(placed(0, 8), outputs=(wanted(32, 16),))
        sink = asked.sink
        read_regions(asked, table)
        assert bytes(asked.inputs[0].data) == bytes(range(8)) and not asked.uses_regions
        table.close(1)
        assert is_open(region.fd), "the answer has to be written"
        fd = os.dup(region.fd)
        asked.respond(Response("m", "1", [Tensor("y", "UINT8", (4,), b"abcd")]))
        (answer,) = sink.answers
        assert answer.outputs[0].place == RegionPlace("r", 32, 4) and not answer.outputs[0].data
        assert os.pread(fd, 4, 32) == b"abcd" and region.fd is None
        os.close(fd)

    def test_an_output_that_does_not_fit_is_an_error(self, table: RegionTable):
        region = add(table)
        asked = request(outputs=(wanted(60, 4),))
        sink = asked.sink
        read_regions(asked, table)
        asked.respond(Response("m", "1", [Tensor("y", "UINT8", (8,), b"abcdefgh")]))
        (answer,) = sink.answers
        assert "(4 bytes) should be at least 8 bytes to hold the results" in str(answer)
        assert region.num_users == 0

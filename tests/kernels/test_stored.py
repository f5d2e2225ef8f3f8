"""What was compiled is found again elsewhere; what makes no sense is refused."""

from pathlib import Path

import msgspec
import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
stored = pytest.importorskip("penstock.kernels.stored")
conv = pytest.importorskip("penstock.kernels.conv")
DIGEST = "ab" * 32
FILES = {"kernel.json": b'{"name": "kernel"}', "kernel.cubin": b"\0code"}


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_kernels_are_put_where_triton_looks_and_only_once(cache):
    content = msgspec.msgpack.encode({DIGEST: FILES})
    assert stored.unpack(content) == 1
    written = {path.name: path.read_bytes() for path in cache.rglob("kernel.*")}
    assert written == FILES
    group = triton.runtime.cache.get_cache_manager(DIGEST).get_group("kernel.json")
    assert {name: Path(path).read_bytes() for name, path in group.items()} == FILES
    assert stored.unpack(content) == 0


@pytest.mark.parametrize(
    "found",
    [{"not a digest": FILES}, {DIGEST: {**FILES, "../kernel.cubin": b""}}, {DIGEST: [1]}, 7],
)
def test_what_makes_no_sense_is_refused_and_nothing_is_written(cache, found):
    with pytest.raises((msgspec.DecodeError, ValueError)):
        stored.unpack(msgspec.msgpack.encode(found))
    assert not cache.exists() or list(cache.rglob("kernel.*")) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="nothing is compiled on a CPU")
def test_a_kernel_that_was_packed_is_not_compiled_again(cache, monkeypatch, tmp_path):
    hits = []

    def listen(*, cache_hit, **others) -> None:
        hits.append(cache_hit)

    monkeypatch.setattr(triton.knobs.compilation, "listener", listen)
    x = torch.randn(1, 24, 9, 9, device="cuda").half()
    window = conv.ConvWindow((2, 2), (2, 2), (0, 0))
    functions = [conv.FUNCTIONS[1]]
    functions[0].device_caches.clear()
    first = conv.max_pool(x.contiguous(memory_format=torch.channels_last), window)
    content = stored.pack(functions)
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "elsewhere"))
    functions[0].device_caches.clear()
    assert stored.unpack(content) == 1
    second = conv.max_pool(x.contiguous(memory_format=torch.channels_last), window)
    assert hits == [False, True] and torch.equal(first, second)

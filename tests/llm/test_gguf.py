"""GGUF files: what is in them, value by value, and what is wrong with those that are broken."""

import struct

import numpy as np
import pytest
from gguf_writer import floats, gguf

from penstock.errors import ConfigError
from penstock.llm.gguf import FORMATS, GgufFile

KINDS = {each.name: kind for kind, each in FORMATS.items()}


def written(folder, content):
    path = folder / "model.gguf"
    path.write_bytes(content)
    return path


def problem_of(folder, content) -> str:
    with pytest.raises(ConfigError) as error:
        GgufFile(written(folder, content))
    (problem,) = error.value.problems
    return problem


def half(block, at):
    return float(np.frombuffer(bytes(block[at : at + 2]), np.float16)[0])


def by_hand(name, block):
    """One block, as the format's description has it, without numpy's help."""
    values = []
    if name == "Q4_0":
        nibbles = [b & 15 for b in block[2:]] + [b >> 4 for b in block[2:]]
        return [(q - 8) * half(block, 0) for q in nibbles]
    if name == "Q4_1":
        nibbles = [b & 15 for b in block[4:]] + [b >> 4 for b in block[4:]]
        return [q * half(block, 0) + half(block, 2) for q in nibbles]
    if name == "Q8_0":
        return [(b - 256 if b > 127 else b) * half(block, 0) for b in block[2:]]
    if name == "Q4_K":
        q, qs = block[4:16], block[16:]
        for j in range(8):
            if j < 4:
                scale, least = q[j] & 63, q[j + 4] & 63
            else:
                scale = (q[j + 4] & 15) | (q[j - 4] >> 6) << 4
                least = (q[j + 4] >> 4) | (q[j] >> 6) << 4
            for byte in qs[j // 2 * 32 : j // 2 * 32 + 32]:
                nibble = byte >> 4 if j % 2 else byte & 15
                values.append(half(block, 0) * scale * nibble - half(block, 2) * least)
        return values
    assert name == "Q6_K"
    for n in range(2):
        low, high = block[n * 64 : n * 64 + 64], block[128 + n * 32 : 160 + n * 32]
        scales = [b - 256 if b > 127 else b for b in block[192 + n * 8 : 200 + n * 8]]
        for part in range(4):
            for i in range(32):
                byte = low[i + 32 * (part % 2)]
                nibble = byte >> 4 if part > 1 else byte & 15
                q = (nibble | (high[i] >> 2 * part & 3) << 4) - 32
                values.append(half(block, 208) * scales[2 * part + i // 16] * q)
    return values


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K"])
def test_values_are_those_of_the_description(tmp_path, name):
    form = FORMATS[KINDS[name]]
    draw = np.random.default_rng(5)
    blocks = draw.integers(0, 256, (6, form.num_bytes), np.uint8)
    for at in {"Q4_0": [0], "Q4_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q6_K": [208]}[name]:
        factors = draw.normal(0, 0.1, 6).astype(np.float16)
        blocks[:, at : at + 2] = factors.view(np.uint8).reshape(6, 2)
    shape = (3, 2 * form.num_values)
    path = written(tmp_path, gguf({}, {"w": (shape, KINDS[name], blocks.tobytes())}))
    with GgufFile(path) as file:
        found = file.tensor("w")
    wanted = np.array([by_hand(name, block.tolist()) for block in blocks]).reshape(shape)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("name", "dtype"), [("F32", np.float32), ("F16", np.float16)])
def test_plain_numbers_are_read_as_they_are(tmp_path, name, dtype):
    values = np.arange(6, dtype=dtype).reshape(2, 3) / 4
    path = written(tmp_path, gguf({}, {"w": ((2, 3), KINDS[name], values.tobytes())}))
    with GgufFile(path) as file:
        np.testing.assert_array_equal(file.tensor("w"), values.astype(np.float32))


def test_bf16_is_the_upper_half_of_fp32(tmp_path):
    values = np.array([1.0, -2.5, 3e38], np.float32)
    upper = (values.view(np.uint32) >> 16).astype(np.uint16)
    path = written(tmp_path, gguf({}, {"w": ((3,), KINDS["BF16"], upper.tobytes())}))
    with GgufFile(path) as file:
        np.testing.assert_allclose(file.tensor("w"), values, rtol=0.01)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [32, 64, 8])
def test_metadata_and_places_of_tensors(tmp_path, version, alignment):
    metadata = {
        "general.alignment": alignment,
        "general.architecture": "llama",
        "llama.rope.freq_base": 1e5,
        "tokenizer.ggml.tokens": ["a", "ü", ""],
        "tokenizer.ggml.scores": [0.5, -1.0, 2.0],
        "tokenizer.ggml.add_bos_token": False,
        "nested": [[1, 2], [3]],
    }
    tensors = {
        "one": ((2, 3), 0, floats(range(6))),
        "other": ((5,), 0, floats([5, 4, 3, 2, 1])),
    }
    path = written(tmp_path, gguf(metadata, tensors, version, alignment))
    with GgufFile(path) as file:
        assert file.metadata == metadata
        np.testing.assert_array_equal(file.tensor("one"), np.arange(6).reshape(2, 3))
        kept = file.tensor("other")
    # Arrays outlive the file.
    np.testing.assert_array_equal(kept, [5, 4, 3, 2, 1])


WHOLE = gguf({"a": 1, "b": ["x", "y"]}, {"w": ((2, 32), KINDS["Q8_0"], bytes(68))})


@pytest.mark.parametrize("size", range(0, len(WHOLE), 7))
def test_a_file_that_was_cut_off_is_refused(tmp_path, size):
    assert problem_of(tmp_path, WHOLE[:size]).startswith("model.gguf: ")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"PK\3\4" + bytes(40), "not a GGUF file: it begins with b'PK"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF version 1; expected one of [2, 3]"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "tensors do not fit a file of 24 bytes"),
        (gguf({}, {"w": ((1,), 99, b"")}), "tensor 'w': format 99 is not read here; expected F32"),
        (gguf({}, {"w": ((33,), 8, b"")}), "tensor 'w': rows of 33 are not in Q8_0's blocks"),
        (gguf({}, {"w": ((4,), 0, bytes(8))}), "tensor 'w' ends behind the file: it was cut off"),
        (gguf({"general.alignment": 0}, {}), "general.alignment: 0; expected a positive number"),
        (gguf({}, {"w": ((1, 1, 1, 1, 1), 0, b"")}), "5 dimensions; expected 1 to 4"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, content, expected):
    assert expected in problem_of(tmp_path, content)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.gguf: cannot be read"):
        GgufFile(tmp_path / "model.gguf")


def test_a_list_longer_than_the_file_is_not_made(tmp_path):
    key = struct.pack("<Q", 1) + b"k"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + struct.pack("<II", 9, 8)
    assert "a list of" in problem_of(tmp_path, head + struct.pack("<Q", 1 << 50) + bytes(64))

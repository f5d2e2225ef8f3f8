"""What is sent to a server: rows as files, by how many clients, and how long they wait."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from served_builds import a_config, null_build

from penstock.config import BatchPolicy
from penstock.data import InputSpec, RequestForm, open_source
from penstock.errors import BackendFailed
from penstock.optimizer import endpoints
from penstock.optimizer.plan import Plan
from penstock.optimizer.served import ServedBench
from penstock.slo import parse
from penstock.types import Array, TensorSpec


class TestClients:
    @pytest.mark.parametrize(
        ("policy", "num_instances", "clients"),
        [
            (BatchPolicy(32, is_dynamic=True), 2, 128),
            (BatchPolicy(32, is_dynamic=True), 8, 256),
            (BatchPolicy(32, is_dynamic=False), 4, 8),
            (BatchPolicy(1, is_dynamic=True), 1, 4),
            (BatchPolicy(32, is_dynamic=True, slo_latency_s=0.1), 2, 4),
            (BatchPolicy(32, is_dynamic=True, slo_latency_s=0.1), 8, 16),
        ],
    )
    def test_are_as_many_as_the_server_does_not_refuse(self, policy, num_instances, clients):
        config = a_config(max_batch=policy.max_batch_size, num_instances=num_instances)
        config = replace(config, batching=policy)
        assert endpoints.num_clients(config) == clients


class TestPatience:
    @pytest.mark.parametrize(
        ("slo", "seconds"),
        [
            ("p99 < 20ms at 200/s", 3.0),
            ("p50 < 4s, throughput >= 1/s", 12.0),
            ("throughput >= 0.05/s", 60.0),
            ("memory <= 1GiB", 60.0),
        ],
    )
    def test_is_as_long_as_the_slo_makes_sense_of(self, slo, seconds):
        assert endpoints.patience_s(parse(slo).latency_s) == seconds


class TestRows:
    """What is written is what the bench then sends."""

    def sent(self, spec: TensorSpec, arrays, folder: Path) -> list[np.ndarray]:
        rows = [{spec.name: array, "label": np.array(1)} for array in arrays]
        path = endpoints.write_rows(rows, a_config(spec), folder)
        source = open_source(InputSpec(path), RequestForm("tensors", (spec,), True), 0, 1)
        found = {}
        while len(found) < len(arrays):
            index, sample = source.next()
            assert list(sample.tensors) == [spec.name]
            found[index] = sample.tensors[spec.name][0]
        return [found[index] for index in range(len(arrays))]

    @pytest.mark.parametrize("datatype", ["FP32", "INT64", "UINT8", "BOOL", "FP16"])
    def test_equal_shapes(self, tmp_path, datatype):
        spec = TensorSpec("x", datatype, (2, 3))
        random = np.random.default_rng(1)
        arrays = [random.integers(0, 2, (2, 3)) * (n % 2) for n in range(5)]
        found = self.sent(spec, arrays, tmp_path)
        assert [each.tolist() for each in found] == [each.tolist() for each in arrays]

    def test_many_lengths(self, tmp_path):
        arrays = [np.arange(n, dtype=np.int64) for n in (1, 5, 3)]
        found = self.sent(TensorSpec("x", "INT64", (-1,)), arrays, tmp_path)
        assert [each.tolist() for each in found] == [each.tolist() for each in arrays]

    def test_floats_of_many_lengths_are_exact(self, tmp_path):
        arrays = [np.random.default_rng(n).standard_normal(n).astype(np.float32) for n in (1, 5)]
        found = self.sent(TensorSpec("x", "FP32", (-1,)), arrays, tmp_path)
        assert all(np.array_equal(*pair) for pair in zip(found, arrays, strict=True))

    def test_texts_and_bytes(self, tmp_path):
        texts = ["good", "\N{SNOWMAN}", b"\xff\x00"]
        arrays = [np.array([text], np.object_) for text in texts]
        found = self.sent(TensorSpec("x", "BYTES", (1,)), arrays, tmp_path)
        assert [each.item() for each in found] == [b"good", "\N{SNOWMAN}".encode(), b"\xff\x00"]

    def test_bits_of_bf16_are_numbers_in_files(self, tmp_path):
        bits = np.array([0x3F80, 0xC000], np.uint16)  # 1 and -2
        (found,) = self.sent(TensorSpec("x", "BF16", (2,)), [bits], tmp_path)
        assert found.tolist() == bits.tolist()

    def test_a_tensor_that_is_called_file(self, tmp_path):
        (found,) = self.sent(TensorSpec("file", "FP32", (2,)), [np.ones(2)], tmp_path)
        assert found.tolist() == [1, 1]

    def test_rows_with_a_one_for_the_batch_that_the_model_has_got(self, tmp_path):
        arrays = [np.full((1, 2), number, np.float32) for number in range(3)]
        found = self.sent(TensorSpec("x", "FP32", (2,)), arrays, tmp_path)
        assert [each.tolist() for each in found] == [[n, n] for n in range(3)]

    def test_no_more_bytes_than_are_worth_it(self, tmp_path, monkeypatch):
        monkeypatch.setattr(endpoints, "MAX_BYTES", 1000)
        rows = [{"x": np.zeros(100, np.float32)} for _ in range(5)]
        spec = TensorSpec("x", "FP32", (100,))
        path = endpoints.write_rows(rows, a_config(spec), tmp_path)
        assert len(np.load(path)["x"]) == 2

    def test_none_are_no_file(self, tmp_path):
        assert endpoints.write_rows([], a_config(), tmp_path) == ""


def numbers(*values: float) -> list[dict[str, Array]]:
    return [{"x": np.array([value], np.float32)} for value in values]


def a_bench(rows: list[dict[str, Array]]) -> ServedBench:
    return ServedBench(Plan("m.onnx", "model", "out"), rows, lambda doing: None)


def test_every_row_is_answered_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "NUM_REQUESTS", 64)
    rows = numbers(*range(10))
    found = a_bench(rows).answers(null_build(tmp_path, max_batch=4), 60.0)
    assert len(found) == 64
    assert {place for place, _ in found} == set(range(10))
    for place, answer in found:
        assert np.array_equal(answer["y"], rows[place]["x"])


def test_a_server_that_fails_is_told(tmp_path: Path) -> None:
    with pytest.raises(BackendFailed, match="the server answered 500"):
        a_bench(numbers(7)).answers(null_build(tmp_path, fail_on=7), 60.0)


def test_no_time_still_asks_once(tmp_path: Path) -> None:
    found = a_bench(numbers(1, 2)).answers(null_build(tmp_path), 0.0)
    assert 1 <= len(found) <= endpoints.NUM_CLIENTS

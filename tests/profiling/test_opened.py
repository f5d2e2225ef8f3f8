"""Whatever the user names becomes a model's folder."""

import shutil

import onnx
import pytest

from penstock.errors import ConfigError
from penstock.profiling.opened import opened
from penstock.profiling.profiler import read_config


def test_a_model_s_folder_is_itself(encoder) -> None:
    with opened(str(encoder)) as folder:
        assert folder == encoder


def test_a_repository_of_one_model_is_that_model(encoder) -> None:
    with opened(str(encoder.parent)) as folder:
        assert folder == encoder


def test_of_several_models_one_is_named(encoder) -> None:
    shutil.copytree(encoder, encoder.parent / "other")
    with opened(str(encoder.parent), "other") as folder:
        assert folder == encoder.parent / "other"
    with pytest.raises(ConfigError, match="encoder, other; say which by --model"):
        opened(str(encoder.parent)).__enter__()
    with pytest.raises(ConfigError, match="holds no model 'third'; there: encoder, other"):
        opened(str(encoder.parent), "third").__enter__()


def test_an_onnx_file_becomes_a_folder_for_a_while(tmp_path, write_encoder) -> None:
    path = write_encoder(tmp_path / "my model.onnx")
    with opened(str(path)) as folder:
        config = read_config(folder)
        assert (config.name, config.backend) == ("my-model", "onnxruntime")
    assert not folder.exists()
    assert path.exists()


def test_weights_beside_the_file_come_along(tmp_path, write_encoder) -> None:
    model = onnx.load(write_encoder(tmp_path / "plain.onnx"))
    path = tmp_path / "large.onnx"
    onnx.save(model, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    with opened(str(path)) as folder:
        assert (folder / "1" / "w.bin").read_bytes() == (tmp_path / "w.bin").read_bytes()
    (tmp_path / "w.bin").unlink()
    with pytest.raises(ConfigError, match=r"weights 'w\.bin' are not beside it"):
        opened(str(path)).__enter__()


def test_other_threads_are_for_a_copy(encoder) -> None:
    with opened(str(encoder), num_threads=3) as folder:
        assert folder != encoder
        assert read_config(folder).options["intra_op_thread_count"] == "3"
    assert "intra_op_thread_count" not in read_config(encoder).options


def test_what_is_no_model_is_told(tmp_path) -> None:
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ConfigError, match=r"not a model; expected model\.onnx"):
        opened(str(tmp_path / "notes.txt")).__enter__()
    (tmp_path / "broken.onnx").write_bytes(b"no model")
    with pytest.raises(ConfigError, match="cannot be read as ONNX"):
        opened(str(tmp_path / "broken.onnx")).__enter__()
    with pytest.raises(ConfigError, match="no such file or folder"):
        opened(str(tmp_path / "nowhere")).__enter__()


def test_a_version_is_profiled_by_itself(encoder) -> None:
    with opened(str(encoder / "1")) as folder:
        assert (read_config(folder).name, read_config(folder).version) == ("encoder", "1")
    with opened(str(encoder / "1"), num_threads=3) as folder:
        assert read_config(folder).options["intra_op_thread_count"] == "3"

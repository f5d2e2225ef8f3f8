"""Errors of the original say what helps, and only that."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.errors import CANNOT_LOAD, BackendFailed, ConfigError
from penstock.optimizer.run_context import RunContext


@pytest.mark.parametrize(
    ("error", "data", "is_advised"),
    [
        ("Gather: index 9 is out of bounds", None, True),
        ("Gather: index 9 is out of bounds", Path("data.npz"), False),
        (f"ONNX Runtime {CANNOT_LOAD}: acme.Frob is not a registered function/op", None, False),
    ],
)
def test_data_is_advised_where_it_helps(error: str, data: Path | None, is_advised: bool) -> None:
    context = SimpleNamespace(plan=SimpleNamespace(data=data))
    original = SimpleNamespace(candidate=SimpleNamespace(steps=()))

    def fail() -> None:
        raise BackendFailed(error)

    with pytest.raises(ConfigError) as caught:
        RunContext.required(context, original, fail)()
    assert str(caught.value).startswith(f"the original: {error}")
    assert ("give data" in str(caught.value)) == is_advised

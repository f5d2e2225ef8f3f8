"""The skeleton of every page."""

import importlib.util

import pytest
from benchmark import made_runs

from penstock.errors import ConfigError
from penstock.report import bench


def test_without_plotly_the_page_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="the page needs plotly, which is not installed"):
        bench.page(made_runs.empty())

"""`--cache-config`, written from Triton's documentation of it."""

import pytest

from penstock.api.cache_options import read_cache_config


def test_the_size_is_in_bytes_and_the_last_one_counts():
    config, problems = read_cache_config(["local,size=1048576", "local,size=2097152"])
    assert (config.max_bytes, problems) == (2 << 20, [])
    assert read_cache_config([])[0].max_bytes == 0


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "'' is not one of local"),
        ("lokal,size=1048576", "'lokal' is not one of local"),
        ("local", "'' is no setting of local; for example local,size="),
        ("local,bytes=1048576", "'bytes' is no setting of local"),
        ("local,size", "expected bytes"),
        ("local,size=1MB", "'1MB'; expected bytes, at least 1024"),
        ("local,size=-1", "expected bytes"),
        ("local,size=1000", "expected bytes"),
        ("local,size=\u0661\u0662\u0663\u0664\u0665", "expected bytes"),
        ("local,size=99999999999999999999", "expected bytes"),
    ],
)
def test_other_settings_are_refused_with_what_is_accepted(text: str, problem: str):
    [found] = read_cache_config([text])[1]
    assert found.startswith(f"--cache-config {text}: ")
    assert problem in found

"""Dates of certificates, against what the openssl command says."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from certificates import make_certificates

from penstock.protocols.certificate import BEGIN, END, Validity, read_validity


def test_the_first_certificate_of_a_chain_counts(tmp_path: Path) -> None:
    folder = make_certificates(tmp_path)
    own, issuer = (folder / name for name in ("server.pem", "ca.pem"))
    found = read_validity(own.read_text() + issuer.read_text())
    assert found.ends - found.begins == timedelta(days=2)
    assert not found.problem(datetime.now(UTC))
    assert read_validity("text before\n" + own.read_text()) == found


@pytest.mark.parametrize(
    "text", ["", "x", f"{BEGIN}\n{END}", f"{BEGIN}\nAAAA\n{END}", f"{BEGIN}\n!\n{END}", BEGIN]
)
def test_what_is_no_certificate_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="certificate"):
        read_validity(text)


@pytest.mark.parametrize("size", range(0, 200, 7))
def test_a_certificate_that_is_cut_off_is_refused(tmp_path: Path, size: int) -> None:
    import base64

    data = base64.b64encode(bytes([0x30, 0x82, 4, 0]) + bytes(size)).decode()
    with pytest.raises(ValueError, match="not a certificate"):
        read_validity(f"{BEGIN}\n{data}\n{END}")


def test_a_problem_names_the_date() -> None:
    validity = Validity(datetime(2026, 1, 2, tzinfo=UTC), datetime(2026, 3, 4, 5, 6, tzinfo=UTC))
    assert validity.problem(datetime(2026, 2, 1, tzinfo=UTC)) == ""
    assert validity.problem(datetime(2027, 1, 1, tzinfo=UTC)) == "expired on 2026-03-04 05:06 UTC"
    early = validity.problem(datetime(2025, 1, 1, tzinfo=UTC))
    assert early == "not valid before 2026-01-02 00:00 UTC"

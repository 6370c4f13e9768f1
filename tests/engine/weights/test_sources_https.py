"""Certificates, proxies and addresses: what does not hold is said at once, with what to do."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from firstlight.engine.errors import Refused
from firstlight.engine.weights.sources.http import HttpFiles
from firstlight.engine.weights.sources.mirror import mirror
from firstlight.engine.weights.sources.retry import Retry
from tests.engine.weights import far
from tests.waiting import PATIENCE_S

PATIENT = Retry(
    attempts=1000, patience_s=PATIENCE_S, stall_s=PATIENCE_S
)  # what is tried again is never refused in time


def certified(home: Path, host: str = "127.0.0.1", years: int = 10) -> Path:
    """A key and a certificate that vouches for itself, in one file; with `years` below 0 it has expired."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a test")])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=3650))
        .not_valid_after(now + datetime.timedelta(days=365 * years))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    form = serialization.PrivateFormat.PKCS8
    private = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    file = home / "certificate.pem"
    file.write_bytes(private + made.public_bytes(serialization.Encoding.PEM))
    return file


@pytest.mark.parametrize(
    ("host", "years", "trusted", "why"),
    [
        ("127.0.0.1", 10, True, None),
        ("127.0.0.1", 10, False, "self-signed"),
        ("127.0.0.2", 10, True, "mismatch"),
        ("127.0.0.1", -1, True, "expired"),
    ],
)
def test_a_certificate_holds_or_is_refused_at_once(
    host: str, years: int, trusted: bool, why: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = certified(tmp_path, host, years)
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(file))
    secured = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    secured.load_cert_chain(file)
    (tmp_path / "config.json").write_bytes(b"{ }")
    with far.served(tmp_path, secured) as web:
        source = HttpFiles(web.url, retry=PATIENT)
        if why is None:
            assert source.stat("config.json").nbytes == 3
        else:
            with pytest.raises(Refused, match="certificate does not hold") as caught:
                source.stat("config.json")
            assert why in str(caught.value)
            assert "SSL_CERT_FILE" in str(caught.value.findings[0].next)
        assert source.usage["retries"] == 0
        source.close()


def test_a_server_without_tls_is_said_to_be_one(tmp_path: Path) -> None:
    with far.served(tmp_path) as web:
        source = HttpFiles(web.url.replace("http:", "https:"), retry=PATIENT)
        with pytest.raises(Refused, match="speaks no TLS"):
            source.stat("config.json")
        source.close()


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("ALL_PROXY", "junk://127.0.0.1:1"),
        ("HTTPS_PROXY", "http://[::1"),
        ("SSL_CERT_FILE", "/nowhere/certificates.pem"),
        ("SSL_CERT_FILE", __file__),
    ],
)
def test_what_the_environment_says_of_connections_is_refused_by_name(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(Refused) as caught:
        HttpFiles("https://127.0.0.1/model")
    assert variable in str(caught.value.findings[0].next)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:99999/x",
        "http://[::1/x",
        "http://127.0.0.1:abc/x",
        "https:///x",
        f"https://{'a' * 70}.example/x",
    ],
)
def test_what_is_no_address_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(Refused) as caught:
        mirror(url, cache=tmp_path)
    assert "address" in str(caught.value.findings[0].next)

"""The ways to a server: TLS, proxies of the environment, socket files."""

import shutil
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from batchwright.calls import Endpoint, Kind, Pool, chat
from batchwright.errors import ConfigError
from raw_server import RawServer, Seen, Tunnel

PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BATCHWRIGHT_HOME", str(tmp_path / "home"))
    for name in ("OPENAI_API_KEY", "SSL_CERT_FILE", "SSL_CERT_DIR", *PROXIES):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 127.0.0.1, signed by itself; its key lies beside it."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("there is no openssl command to make a certificate with")
    path = tmp_path_factory.mktemp("tls") / "certificate.pem"
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    subject = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", path.with_name("key.pem"), "-out", path]
    subprocess.run([openssl, *words.split(), *subject, *files], check=True, capture_output=True)
    return path


@pytest.fixture
def tls(certificate: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, certificate.with_name("key.pem"))
    return context


async def quick(seen: Seen) -> None:
    await seen.answer()


def questions(n: int):
    return [chat("m", f"question {i}", temperature=0) for i in range(n)]


def test_a_server_with_a_trusted_certificate_is_spoken_to_and_given_the_key(
    certificate, tls, monkeypatch
):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    monkeypatch.setenv("OPENAI_API_KEY", "sk-otter")
    with RawServer(quick, tls=tls) as server:
        with Pool(server.url, limit=2) as pool:
            assert [o.text for o in pool.map(questions(3))] == [
                f"re: question {i}" for i in (0, 1, 2)
            ]
        assert {seen.headers["authorization"] for seen in server.seen} == {"Bearer sk-otter"}


def test_a_server_nobody_vouches_for_is_not_told_a_word(certificate, tls, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-otter")
    with RawServer(quick, tls=tls) as server:
        with Pool(server.url, limit=2, tries=1) as pool:
            (failed,) = pool.map(questions(1))
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        # The certificate is for the number, not for this name.
        with Pool(f"https://localhost:{server.port}", limit=2, tries=1) as pool:
            (elsewhere,) = pool.map(questions(1))
        assert server.seen == []

    for outcome in (failed, elsewhere):
        assert outcome.kind is Kind.UNREACHABLE
        assert "TLS connection to" in outcome.error
        assert "sk-otter" not in outcome.error


def test_a_certificate_file_that_is_not_there_is_said_to_be_missing(monkeypatch, tmp_path):
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none.pem"))

    with (
        Pool("https://127.0.0.1:9", limit=2) as pool,
        pytest.raises(ConfigError, match="SSL_CERT_FILE"),
    ):
        pool.map(questions(1))


def test_plain_http_gets_the_key_only_if_it_is_named(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-otter")
    with RawServer(quick) as server:
        for endpoint in (Endpoint(server.url), Endpoint(server.url, key_env="OPENAI_API_KEY")):
            with Pool(endpoint, limit=2) as pool:
                assert pool.map(questions(1))[0]
        assert [seen.headers.get("authorization") for seen in server.seen] == [
            None,
            "Bearer sk-otter",
        ]


@pytest.mark.parametrize("user", ["", "user:word@"])
def test_https_goes_through_the_proxy_unread(user, certificate, tls, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    monkeypatch.setenv("OPENAI_API_KEY", "sk-otter")
    with Tunnel() as proxy, RawServer(quick, tls=tls) as server:
        monkeypatch.setenv("HTTPS_PROXY", proxy.url.replace("//", f"//{user}"))
        with Pool(server.url, limit=1) as pool:
            assert all(pool.map(questions(3)))
        (head,) = proxy.heads
        assert head.startswith(f"CONNECT 127.0.0.1:{server.port} ")
        assert ("Proxy-Authorization: Basic dXNlcjp3b3Jk" in head) == bool(user)
        assert "sk-otter" not in head
        # What is meant for the proxy ends there, and what is meant for the server comes.
        assert not any("proxy-authorization" in seen.headers for seen in server.seen)
        assert {seen.headers["authorization"] for seen in server.seen} == {"Bearer sk-otter"}

        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        with Pool(server.url, limit=1) as pool:
            assert all(pool.map(questions(3)))
        assert len(proxy.heads) == 1


def test_unix_sockets_and_other_model_names_work(tmp_path):
    path = str(tmp_path / "server.sock")
    with RawServer(quick, unix=path) as server:
        with Pool(Endpoint(f"unix://{path}", model="theirs"), limit=2) as pool:
            assert pool.map(questions(3))[2].text == "re: question 2"
        assert {seen.body["model"] for seen in server.seen} == {"theirs"}
        assert {seen.path for seen in server.seen} == {"/v1/chat/completions"}


def test_the_proxy_of_the_environment_is_used_and_no_proxy_is_kept_to(monkeypatch):
    with RawServer(quick) as proxy:
        monkeypatch.setenv("HTTP_PROXY", f"http://user:word@127.0.0.1:{proxy.port}")
        with Pool("http://model.example:8000/v1", limit=2) as pool:
            assert pool.map(questions(1))[0].text == "re: question 0"
        (seen,) = proxy.seen
        assert seen.path == "http://model.example:8000/v1/chat/completions"
        assert seen.headers["proxy-authorization"] == "Basic dXNlcjp3b3Jk"

        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        with RawServer(quick) as server, Pool(server.url, limit=2) as pool:
            assert pool.map(questions(1))[0]
        assert len(proxy.seen) == 1


def test_a_proxy_that_is_not_there_is_named(monkeypatch):
    with RawServer(quick) as server:
        port = server.port
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{port}")
    with Pool("http://model.example/v1", limit=1, tries=1) as pool:
        (failed,) = pool.map(questions(1))

    assert failed.kind is Kind.UNREACHABLE
    assert "proxy" in failed.error

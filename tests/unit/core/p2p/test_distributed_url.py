import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmcache_core.p2p import DistributedUrl, distributed_url_of, is_encrypted, parse_distributed_url


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [
        ("lm://10.0.0.7:65433", "10.0.0.7", 65433),
        ("lm://[fd00::7]:65535", "fd00::7", 65535),
        ("lm+tls://10.0.0.7:65433", "10.0.0.7", 65433),
        ("lm://127.0.0.1:1", "127.0.0.1", 1),
        ("lm://100.64.0.1:1", "100.64.0.1", 1),
        ("lm://8.8.8.8:1", "8.8.8.8", 1),
        ("lm://[2600:1f18::7]:1", "2600:1f18::7", 1),
        ("lm://10-0-0-7.default.pod.cluster.local:1", "10-0-0-7.default.pod.cluster.local", 1),
        ("lm://node7:1", "node7", 1),
        ("lm://0xbad.example:1", "0xbad.example", 1),
        ("lm+tls://[fd00::7]:65535", "fd00::7", 65535),
    ],
)
def test_url_of_a_pod_is_read(url: str, host: str, port: int) -> None:
    assert parse_distributed_url(url) == DistributedUrl(host, port)
    assert is_encrypted(url) is url.startswith("lm+tls:")
    assert distributed_url_of(host, port, is_encrypted(url)) == url


def test_one_text_takes_an_address_of_either_kind() -> None:
    """A manifest has `lm://[$(POD_IP)]:65433`."""
    assert parse_distributed_url("lm://[10.1.2.3]:65433").host == "10.1.2.3"
    assert parse_distributed_url("lm://[fd00::7]:65433").host == "fd00::7"


@pytest.mark.parametrize(
    "url",
    [
        *("", "http://a:1", "lmttls://a:1", "lm://a", "lm://a:0", "lm://a:65536"),
        *("lm://user:secret@a:1", "lm://a:1/", "lm://a:1?x", "lm://a b:1", "lm://a:1\n"),
        *("lm://fd00::7:1", "lm://[:::::]:1", "lm://[10.1]:1", "lm://0.0.0.0:1", "lm://0:80"),
        *("lm://2130706433:80", "lm://010.0.0.1:80", "lm://0.0.0.0.:80"),
        *("lm://[::ffff:0.0.0.0]:80", "lm://[::ffff:10.0.0.7]:80", "lm://169.254.169.254:80"),
        *("lm://[fe80::1]:80", "lm://224.0.0.1:80", "lm://255.255.255.255:80", "lm://0.1.2.3:80"),
        *("lm://240.0.0.1:80", "lm://1.2.3.4.5:80", "lm://name.7:80", "lm://[::127.0.0.1]:80"),
        *("lm://[64:ff9b::a9fe:a9fe]:80", "lm://[2002:a9fe:a9fe::1]:80"),
        *("lm://[2001:0:a00:7::f5ff:fff8]:80", "lm://[100::1]:80", "lm://" + "a" * 300 + ":1"),
    ],
)
def test_other_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="distributed URL"):
        parse_distributed_url(url)


@given(st.text(max_size=40).map(lambda text: "lm://" + text))
def test_any_text_is_read_or_refused(url: str) -> None:
    try:
        host, port = parse_distributed_url(url)
    except ValueError:
        return
    assert url in (f"lm://{host}:{port}", f"lm://[{host}]:{port}")

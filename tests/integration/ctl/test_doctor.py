"""`lmcachectl doctor` finds what is wrong with real services, files, Redis servers and a
namespace, and says what to do.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import redis
import yaml
from lmcache_core.sidecar import SidecarConnection
from lmcache_core.wire.capabilities import ROLE_PREFIX
from lmcache_core.wire.messages import engine_hello
from lmcache_ctl.doctor.configuration import MODELS, ConfigFile, check_files
from lmcache_demo.settings import quiet_environment

from tests.fixtures.ctl import Ctl, SmallCluster
from tests.fixtures.embedded import PATIENCE_S
from tests.fixtures.frames import ENGINE
from tests.fixtures.kubernetes_pods import pod, pods_api
from tests.fixtures.neighbourhood import start_sidecar
from tests.fixtures.ports import free_port
from tests.fixtures.processes import Processes
from tests.fixtures.redis_sentinel import watched_redis
from tests.fixtures.redis_server import redis_executable, running_redis
from tests.fixtures.service_process import running_service
from tests.fixtures.tls import Authority, early_pair, ended_pair, replace
from tests.fixtures.waiting import wait_until


def wrong(found: dict[str, Any], check: str) -> list[tuple[str, str, str]]:
    return [
        (one["level"], one["where"], one["what"])
        for one in found["findings"]
        if one["check"] == check and one["level"] != "ok"
    ]


def in_three_days() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=3)


def diagnosed(folder: Path, settings: Mapping[str, Mapping[str, Any]], code: int = 0) -> Any:
    """Let the doctor check settings files.

    Args:
        settings: By the kind of service; what follows a slash names the file.
    """
    options = []
    for name, of_file in settings.items():
        kind, _, stem = name.partition("/")
        file = folder / f"{stem or kind}.yaml"
        texts = {key: str(value) for key, value in of_file.items() if isinstance(value, Path)}
        file.write_text(yaml.safe_dump({**of_file, **texts}))
        options.append(f"--check-config={kind}={file}")
    return Ctl().json("doctor", *options, code=code)


def by_file(found: dict[str, Any], check: str) -> dict[str, list[tuple[str, str]]]:
    """Return the findings of a check, good ones too, by the names of their files."""
    told: dict[str, list[tuple[str, str]]] = {}
    for one in found["findings"]:
        if one["check"] == check:
            stem = Path(one["where"].split()[1]).stem
            told.setdefault(stem, []).append((one["level"], one["what"]))
    return told


def test_a_healthy_cluster(cluster: SmallCluster) -> None:
    ctl = cluster.ctl()
    found = ctl.json("doctor")
    assert (found["num_errors"], found["num_warnings"]) == (0, 0)
    checks = {one["check"] for one in found["findings"]}
    assert {"reachable", "ready", "token", "versions", "clock", "peers"} <= checks
    text = ctl.text("doctor", "--strict")
    assert "0 errors, 0 warnings." in text
    assert "reachable (5)" in text


def test_a_hanging_service_and_a_wrong_token(cluster: SmallCluster) -> None:
    pid = cluster.services["storage-1"].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        found = cluster.ctl("wrong-token").json("doctor", "--timeout", "2", code=1)
    finally:
        os.kill(pid, signal.SIGCONT)
    [(level, where, what)] = wrong(found, "reachable")
    assert (level, where.split()[0]) == ("error", "storage")
    assert "no answer within 2 s" in what
    assert [level for level, _, _ in wrong(found, "token")] == ["error"] * 4
    fixes = {one["fix"] for one in found["findings"] if one["check"] == "token"}
    assert (
        "give a token of its auth_tokens_file with --token-file FILE or LMCACHE_CTL_TOKEN" in fixes
    )


def test_prefill_and_decode_at_sidecars_that_share_nothing(tmp_path: Path) -> None:
    with Processes(tmp_path, quiet_environment()) as owner, contextlib.ExitStack() as exits:
        urls = []
        for name, role in (("p", "kv_producer"), ("d", "kv_consumer")):
            sidecar = start_sidecar(owner, tmp_path, name)
            hello = engine_hello(ENGINE, [f"{ROLE_PREFIX}{role}"])
            connection = SidecarConnection(sidecar.socket, hello, PATIENCE_S)
            connection.open()
            exits.callback(connection.close)
            urls.append(f"--sidecar-url=http://127.0.0.1:{sidecar.port}")
        [(level, where, what)] = wrong(Ctl(urls).json("doctor"), "hand-over")
    assert (level, where) == ("warning", "sidecar d")
    assert what.endswith("no tier in common with p")


def test_a_service_of_another_version(cluster: SmallCluster, tmp_path: Path) -> None:
    """The interpreter finds this description of the package first: the service takes itself for
    that version.
    """
    described = tmp_path / "lmcache_lookup-0.0.9.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: lmcache-lookup\nVersion: 0.0.9\n"
    )
    environ = {
        "LMCACHE_LOOKUP_PORT": "0",
        "PYTHONPATH": str(tmp_path),
        "LMCACHE_LOOKUP_INSTANCE_ID": "older",
    }
    with running_service("lmcache_lookup", tmp_path, environ) as other:
        ctl = cluster.ctl()
        ctl.options.append(f"--lookup-url={other.url}")
        [(level, _, what)] = wrong(ctl.json("doctor"), "versions")
        assert "0.0.9 (1x)" in ctl.text("status")
        assert "finish the upgrade" in ctl.text("doctor", "--strict", code=1)
    assert level == "warning"
    assert "0.0.9: lookup" in what


def test_settings_files_are_read_as_their_services_do(tmp_path: Path) -> None:
    token = tmp_path / "service-token"
    token.write_text("a-token-0123456789")
    token.chmod(0o644)
    sidecar = {
        "arena_path": tmp_path / "arena",
        "arena_gb": 60000.0,
        "socket_path": "/" + "x" * 120,
        "service_token_file": token,
        "auth_tokens_file": "/nowhere/tokens.yaml",
    }
    settings = {
        "lookup": {"redis_ulr": "redis://h"},
        "broker": {"host": "0.0.0.0"},
        "sidecar": sidecar,
        "storage": {"memory_gb": 60000, "disk_path": tmp_path / "disk", "disk_gb": 1000000},
        "engine": {"chunk_size": 256, "local_cpu": True},
    }
    found = diagnosed(tmp_path, settings, code=1)
    configuration = {where.split()[0]: what for _, where, what in wrong(found, "configuration")}
    assert configuration["lookup"].startswith("redis_ulr: unknown option")
    assert "did you mean 'redis_url'" in configuration["lookup"]
    assert "auth_tokens_file is not set" in configuration["broker"]
    assert "engine" not in configuration
    files = wrong(found, "files")
    assert any("is world-readable (0644)" in what for _, _, what in files)
    errors = [what for level, _, what in files if level == "error"]
    assert any("auth_tokens_file=/nowhere/tokens.yaml" in what for what in errors)
    assert any("arena_gb wants 58.6 TiB" in what for _, _, what in wrong(found, "shared memory"))
    assert "socket_path has 121 bytes" in wrong(found, "socket")[0][2]
    assert "disk_gb wants" in wrong(found, "disk")[0][2]
    assert "memory_gb wants" in wrong(found, "memory")[0][2]
    assert wrong(found, "reachable") == [], "with files alone no service is asked"
    assert "write KIND=FILE" in Ctl().text("doctor", "--check-config", "sidecars=x", code=2)


def test_certificates_of_settings_files_are_checked(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    good, other, soon = (authority.sign(name) for name in ("good", "other", "soon"))
    authority.renew(soon, not_after=in_three_days())
    ended, early = ended_pair(authority), early_pair(authority)

    def served(cert: Path, key: Path) -> dict[str, Any]:
        return {"tls_cert_file": cert, "tls_key_file": key, "port": 0}

    client = {"tls_client_cert_file": good.cert, "tls_client_key_file": other.key}
    remote = {"remote_tls_cert_file": ended.cert, "remote_tls_key_file": ended.key}
    settings = {
        "lookup/good": served(good.cert, good.key),
        "lookup/foreign": served(good.cert, other.key),
        "lookup/ended": served(ended.cert, ended.key),
        "lookup/early": served(early.cert, early.key),
        "lookup/soon": served(soon.cert, soon.key),
        "sidecar/client": {"arena_path": tmp_path / "arena", "arena_gb": 0.01, **client},
        "engine": {"remote_url": "lm+tls://h:1", **remote},
    }
    found = diagnosed(tmp_path, settings, code=1)
    told = {
        Path(where.split()[1]).stem: (level, what)
        for level, where, what in wrong(found, "certificate")
    }
    assert set(told) == {"foreign", "ended", "early", "soon", "client", "engine"}
    assert told["foreign"][0] == told["client"][0] == "error"
    assert "key values mismatch; both must be PEM and belong together" in told["foreign"][1]
    assert told["ended"] == ("error", f"tls_cert_file {ended.cert} ended on 2025-03-01")
    assert told["early"] == ("error", f"tls_cert_file {early.cert} is not valid before 2100-02-01")
    assert told["engine"] == ("error", f"remote_tls_cert_file {ended.cert} ended on 2025-03-01")
    assert told["soon"] == ("warning", f"tls_cert_file {soon.cert} ends in 3.0 days")


def test_every_file_that_settings_name_is_read(tmp_path: Path) -> None:
    """Authorities also where there is no certificate; and the files of a bucket."""
    garbage, absent = tmp_path / "garbage.pem", tmp_path / "absent"
    garbage.write_text("not a certificate")
    bucket = {"s3_ca_file": garbage, "s3_access_key_file": absent, "s3_secret_key_file": absent}
    settings = {
        "sidecar": {"arena_path": tmp_path / "arena", "arena_gb": 0.01, "tls_ca_file": garbage},
        "storage": {"memory_gb": 0.01, "s3_bucket": "kv", **bucket},
    }
    found = diagnosed(tmp_path, settings, code=1)
    told = [what for check in ("files", "certificate") for _, _, what in wrong(found, check)]
    for option in ("tls_ca_file", *bucket):
        assert sum(f"{option}=" in what for what in told) == 1, (option, told)


def test_a_certificate_that_peers_do_not_trust_is_reported(tmp_path: Path) -> None:
    own, other = Authority(tmp_path), Authority(tmp_path, "other")
    pair = own.sign("pod")
    arena = {"arena_path": tmp_path / "arena", "arena_gb": 0.01}
    tls = {"tls_cert_file": pair.cert, "tls_key_file": pair.key}
    settings = {
        f"sidecar/{name}": {**arena, **tls, "tls_ca_file": trusted.file}
        for name, trusted in (("own", own), ("other", other))
    }
    [(level, where, what)] = wrong(diagnosed(tmp_path, settings), "certificate")
    assert (level, Path(where.split()[1]).stem) == ("warning", "other")
    assert what.startswith(f"tls_cert_file {pair.cert} is not trusted by tls_ca_file {other.file}")


def test_addresses_that_settings_name_and_that_do_not_answer(
    cluster: SmallCluster, tmp_path: Path
) -> None:
    storage = f"127.0.0.1:{cluster.services['storage-0'].ports['lm_port']}"
    urls = {
        "lookup_url": cluster.services["lookup"].url,
        "broker_url": "http://127.0.0.1:9",
        "remote_url": f"lm://{storage},no-such-host.invalid",
    }
    shared = {"remote_url": f"file://{tmp_path}/nowhere"}
    settings = {
        "sidecar/one": {"arena_path": tmp_path / "one", "arena_gb": 0.01, **urls},
        "sidecar/other": {"arena_path": tmp_path / "other", "arena_gb": 0.01, **shared},
    }
    found = by_file(diagnosed(tmp_path, settings), "addresses")
    assert ("warning", f"remote_url {tmp_path}/nowhere is not a directory") in found["other"]
    one = {what.partition(": ")[0]: level for level, what in found["one"]}
    assert one["broker_url 127.0.0.1:9"] == "warning"
    assert one["remote_url no-such-host.invalid:65432"] == "warning"
    well = [what for level, what in found["one"] if level == "ok"]
    assert [what.split()[0] for what in well] == ["lookup_url", "remote_url"]


def test_addresses_of_an_engine(cluster: SmallCluster, tmp_path: Path) -> None:
    """They are tried as a service's are; what is no URL keeps peers from being found."""
    peers = {"lookup_url": cluster.services["lookup"].url, "broker_url": "http://127.0.0.1:9"}
    unusable = {
        "lookup_url": "localhost:8081",
        "broker_url": "http://me:s3cret@h:x",
        "otlp_endpoint": "h:4318",
    }
    sockets = cluster.directory / "s.sock", tmp_path / "nothing.sock"
    settings = {
        "engine/silent": {"remote_url": "redis://127.0.0.1:1", **peers},
        "engine/wrong": {"local_cpu": True, **unusable},
        "engine/attached": {"sidecar_socket": sockets[0]},
        "engine/alone": {"sidecar_socket": sockets[1]},
    }
    found = diagnosed(tmp_path, settings, code=1)
    told = by_file(found, "addresses")
    assert sorted((level, what.partition(":")[0]) for level, what in told["silent"]) == [
        ("ok", "lookup_url 127.0.0.1"),
        ("warning", "broker_url 127.0.0.1"),
        ("warning", "remote_url 127.0.0.1"),
    ]
    assert [level for level, _ in told["wrong"]] == ["error"] * 3
    refused = "lookup_url='localhost:8081': must be http://host:port"
    assert any(what.startswith(refused) for _, what in told["wrong"])
    assert "s3cret" not in json.dumps(found)
    assert told["attached"] == [("ok", f"sidecar_socket {sockets[0]}")]
    assert told["alone"] == [("warning", f"sidecar_socket {sockets[1]}: No such file or directory")]
    checks = {one["check"] for one in found["findings"]}
    assert "limits" not in checks, "that is what a service needs of its machine"


def test_places_that_a_service_cannot_or_must_not_use(tmp_path: Path) -> None:
    arena, file = tmp_path / "arena", tmp_path / "file"
    arena.mkdir()
    arena.chmod(0o777)
    file.write_text("")
    settings = {
        "sidecar": {"arena_path": arena, "arena_gb": 0.01, "socket_path": file / "s.sock"},
        "storage": {"memory_gb": 0.01, "disk_path": file, "disk_gb": 0.01},
    }
    found = diagnosed(tmp_path, settings, code=1)
    shared = [(level, what) for level, _, what in wrong(found, "shared memory")]
    assert any(level == "error" and "is world-writable" in what for level, what in shared)
    for check in ("socket", "disk"):
        assert wrong(found, check)[0][2].endswith(f"{file} is not a directory")
    faults = [one for one in found["findings"] if one["level"] in ("error", "warning")]
    assert all(one["fix"] for one in faults), "each says what to do"


@pytest.mark.parametrize("path", ["{}/sidecar.yaml", "{}/" + "x" * 107, "/proc/nowhere/s.sock"])
def test_a_socket_that_cannot_be_made(tmp_path: Path, path: str) -> None:
    arena = {"arena_path": tmp_path / "arena", "arena_gb": 0.01}
    settings = {"sidecar": {"socket_path": path.format(tmp_path), **arena}}
    [(level, _, _)] = wrong(diagnosed(tmp_path, settings, code=1), "socket")
    assert level == "error"


@pytest.mark.parametrize("path", ["/proc/x", "{}/file/x"])
def test_a_disk_that_cannot_be_made(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("")
    disk = path.format(tmp_path)
    settings = {"storage": {"disk_path": disk, "disk_gb": 1, "memory_gb": 0.01}}
    found = diagnosed(tmp_path, settings, code=1)
    [(level, _, what)] = wrong(found, "disk")
    assert (level, what.startswith(f"disk_path {disk}: ")) == ("error", True)
    [fix] = [one["fix"] for one in found["findings"] if one["fix"] and "disk_path" in one["what"]]
    assert fix.startswith("choose a directory that the service may write to")


def test_a_default_directory_that_others_may_enter(tmp_path: Path) -> None:
    """The sidecar refuses it: another user may have made it first."""
    run = tmp_path / f"lmcache-{os.getuid()}"
    run.mkdir()
    run.chmod(0o750)
    arena = {"arena_path": tmp_path / "arena", "arena_gb": 0.01}
    with mock.patch.object(tempfile, "tempdir", str(tmp_path)):
        settings = {"sidecar": {"socket_path": run / "sidecar.sock", **arena}}
        found = diagnosed(tmp_path, settings, code=1)
    fault = "is not a directory that belongs to this user and that no other user may enter"
    assert [what for _, _, what in wrong(found, "socket")] == [f"{run} {fault}"]


def test_a_socket_of_a_running_sidecar_is_no_fault(cluster: SmallCluster, tmp_path: Path) -> None:
    settings = {"sidecar": {"arena_gb": 0.01, "socket_path": cluster.directory / "s.sock"}}
    assert wrong(diagnosed(tmp_path, settings), "socket") == []


def test_an_address_of_another_machine(tmp_path: Path) -> None:
    settings = {"broker": {"host": "192.0.2.1", "allow_anonymous": True}}
    [(level, _, what)] = wrong(diagnosed(tmp_path, settings), "addresses")
    assert level == "warning"
    assert what.startswith("192.0.2.1 is not an address of this machine:")


def test_paths_that_no_file_can_have(tmp_path: Path) -> None:
    """Asking the file system for them is an error of its own, which is neither "there" nor "not
    there".
    """
    long = str(tmp_path / ("x" * 300))
    sidecar = {"arena_path": long, "socket_path": f"{long}/s", "remote_url": f"file://{long}"}
    remote = {"remote_tls_cert_file": long, "remote_token_file": long}
    settings = {
        "lookup": {"port": 0, "tls_cert_file": long, "tls_key_file": long},
        "engine": {"remote_url": "lm+tls://127.0.0.1:9", **remote},
        "sidecar": {"arena_gb": 0.01, **sidecar},
        "storage": {"memory_gb": 0.01, "disk_path": long, "disk_gb": 0.01},
    }
    found = diagnosed(tmp_path, settings, code=1)
    assert sum("File name too long" in what for _, _, what in wrong(found, "files")) == 4
    [(_, _, what)] = wrong(found, "disk")
    assert what == f"disk_path {long}: File name too long"
    for check, fault in (
        ("shared memory", f"arena_path {long}: File name too long"),
        ("addresses", f"remote_url {long} is not a directory"),
    ):
        assert fault in [what for _, _, what in wrong(found, check)]


def test_the_packages_of_the_services_are_on_no_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(__file__).parents[3]
    for kind, (module, _, _) in MODELS.items():
        monkeypatch.setitem(sys.modules, module, None)
        [finding] = [
            one
            for one in check_files([ConfigFile(kind, tmp_path / "a.yaml")])[0]
            if one.check == "configuration"
        ]
        assert finding.level == "warning"
        told = re.fullmatch(
            r"install it from a checkout \(pip install (.*)\), or check it in its image",
            finding.fix,
        )
        assert told is not None, finding.fix
        assert all((root / directory / "pyproject.toml").is_file() for directory in told[1].split())


def test_a_redis_that_would_lose_the_index(tmp_path: Path) -> None:
    arguments = (
        "--requirepass",
        "a-pass-0123",
        "--maxmemory",
        "100mb",
        "--maxmemory-policy",
        "allkeys-lru",
        "--appendonly",
        "yes",
    )
    with running_redis_with_password(tmp_path, *arguments) as port:
        config = tmp_path / "lookup.yaml"
        config.write_text(f"redis_url: redis://:a-pass-0123@127.0.0.1:{port}/0")
        text = Ctl().text("doctor", "--check-config", f"lookup={config}", code=1)
        for password in ("another", ""):
            other = tmp_path / "other.yaml"
            other.write_text(f"redis_url: redis://:{password}@127.0.0.1:{port}")
            told = Ctl().text("doctor", "--check-config", f"lookup={other}", code=1)
            assert "it refuses the password" in told
            assert "correct that in redis_url" in told
    assert "maxmemory-policy is allkeys-lru" in text
    assert "CONFIG SET maxmemory-policy noeviction" in text
    assert "it writes every change to a disk (appendonly)" in text
    assert "a-pass" not in text
    with running_redis("--maxmemory", "100mb") as server:
        config = tmp_path / "broker.yaml"
        config.write_text(f"redis_url: {server.url}")
        assert "0 errors, 0 warnings" in Ctl().text("doctor", "--check-config", f"broker={config}")
        server.pause()
        told = Ctl().text("doctor", "--check-config", f"broker={config}", "--timeout", "1", code=1)
        server.resume()
    assert f"127.0.0.1:{server.port}: no answer" in told


def test_a_redis_that_sentinels_with_a_password_name(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("of-the-sentinels\n")
    login = {
        "redis_sentinel_username": "lookup",
        "redis_sentinel_password_file": str(tmp_path / "password"),
    }
    with watched_redis(login=("lookup", "of-the-sentinels")) as watched:
        found = diagnosed(tmp_path, {"lookup": {"redis_url": watched.url, **login}})
        port = watched.master.port
    [(level, where, _)] = wrong(found, "redis")
    assert level == "warning", "it has no maxmemory"
    assert where.endswith(f"127.0.0.1:{port}")


def answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


@contextlib.contextmanager
def running_redis_with_password(directory: Path, *arguments: str) -> Iterator[int]:
    """In a directory of its own, since it writes one; its port."""
    port = free_port()
    command = [
        redis_executable(),
        "--port",
        str(port),
        "--bind",
        "127.0.0.1",
        "--dir",
        str(directory),
        "--save",
        "",
        *arguments,
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with redis.Redis(port=port, password="a-pass-0123", socket_timeout=5) as client:
            wait_until(lambda: answers(client))
        yield port
    finally:
        process.kill()
        process.wait()


def test_a_certificate_that_ends_soon(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.sign("server")
    environ = {"PORT": "0", "TLS_CERT_FILE": str(pair.cert), "TLS_KEY_FILE": str(pair.key)}
    environ = {f"LMCACHE_LOOKUP_{name}": value for name, value in environ.items()}
    with running_service("lmcache_lookup", tmp_path, environ) as service:
        url = service.url.replace("http:", "https:")

        def found(trusted: Authority, code: int = 0) -> dict[str, str]:
            """What the doctor says of the certificate that the service shows now."""
            ctl = Ctl([f"--lookup-url={url}", f"--tls={trusted.file}"])
            findings = ctl.json("doctor", code=code)["findings"]
            return next(one for one in findings if one["check"] == "certificate")

        good = found(authority)
        assert good["level"] == "ok"
        assert good["what"].startswith("good for ")
        untrusted = found(Authority(tmp_path, "stranger"), code=1)
        assert untrusted["what"].startswith("not trusted")
        authority.renew(pair, not_after=in_three_days())
        wait_until(lambda: "ends in 3.0 days" in found(authority)["what"])
        early = early_pair(authority)
        replace(pair.key, early.key.read_bytes())
        replace(pair.cert, early.cert.read_bytes())

        def is_reported() -> bool:
            with contextlib.suppress(AssertionError):  # the service shows the former one
                told = found(authority, code=1)
                assert told["what"] == "not trusted: certificate is not yet valid"
                return told["fix"].startswith("have another one issued, or correct the clock")
            return False

        wait_until(is_reported)


def test_objects_of_a_release(tmp_path: Path) -> None:
    with pods_api() as api:
        well, waiting = (
            pod("demo-lmcache-lookup-7d9f8b6c5-x2x4z", "lookup", 8081),
            pod("demo-lmcache-storage-0", "storage", 8080),
        )
        waiting["status"] = {
            "phase": "Pending",
            "containerStatuses": [
                {
                    "name": "main",
                    "ready": False,
                    "restartCount": 7,
                    "image": "x",
                    "imageID": "",
                    "state": {
                        "waiting": {"reason": "ImagePullBackOff", "message": "no such image"}
                    },
                    "lastState": {"terminated": {"reason": "OOMKilled", "exitCode": 137}},
                }
            ],
        }
        del waiting["spec"]["containers"][0]["resources"]
        model = pod("demo-lmcache-vllm-m-1", "vllm", None, ("vllm", "sidecar"))
        conf = "max_split_size_mb:64,expandable_segments:True"
        model["spec"]["containers"][0]["env"] = [{"name": "PYTORCH_CUDA_ALLOC_CONF", "value": conf}]
        api.pods = [well, waiting, model]
        labels = well["metadata"]["labels"]
        owner = {
            "metadata": {"name": "demo-lmcache-lookup", "labels": labels},
            "status": {"readyReplicas": 1},
        }
        owner["spec"] = {
            "replicas": 2,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}},
        }
        claim = {
            "metadata": {
                "name": "data-demo-lmcache-storage-0",
                "labels": waiting["metadata"]["labels"],
            },
            "status": {"phase": "Pending"},
        }
        api.objects = {"deployments": [owner], "persistentvolumeclaims": [claim]}
        ctl = Ctl(
            [f"--kubeconfig={api.kubeconfig(tmp_path / 'kubeconfig')}", "--timeout=2"],
            {"HOME": str(tmp_path)},
        )
        found = ctl.json("doctor", code=1)
        told = {(where, what) for _, where, what in wrong(found, "kubernetes")}
        api.token = "changed"
        refused = ctl.json("doctor", code=1)
    assert told == {
        (
            "pod demo-lmcache-storage-0",
            "not ready: container main waits: ImagePullBackOff, no such image",
        ),
        (
            "pod demo-lmcache-storage-0",
            "container main has restarted 7 times (the last time: OOMKilled, code 137)",
        ),
        ("pod demo-lmcache-storage-0", "container main has no CPU request"),
        (
            "pod demo-lmcache-vllm-m-1",
            f"container vllm: PYTORCH_CUDA_ALLOC_CONF={conf}: vLLM refuses every KV connector with"
            " expandable_segments",
        ),
        ("deployment demo-lmcache-lookup", "1 of 2 replicas are ready"),
        ("persistentvolumeclaim data-demo-lmcache-storage-0", "its phase is Pending"),
    }
    assert "refuses pods in namespace ns (Unauthorized)" in wrong(refused, "kubernetes")[0][2]


def test_the_allocator_that_vllm_refuses_is_an_error_of_an_engine(tmp_path: Path) -> None:
    engine = tmp_path / "engine.yaml"
    engine.write_text("local_cpu: true")
    for conf, code in (("expandable_segments:True", 1), ("expandable_segments:False", 0)):
        ctl = Ctl(environ={"PYTORCH_CUDA_ALLOC_CONF": conf})
        found = ctl.json("doctor", f"--check-config=engine={engine}", code=code)
        assert len(wrong(found, "configuration")) == code

"""The command that makes the certificate, against an API server that others write to as well."""

from __future__ import annotations

import base64
import copy
from typing import TYPE_CHECKING, Any

import pytest
from cryptography import x509
from lmcache_webhook.certificate import main

if TYPE_CHECKING:
    from tests.integration.webhook.conftest import AdmissionApi

SECRET = "/api/v1/namespaces/lmcache/secrets/hook-tls"
CONFIGURATION = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/hooks"
WHERE = [
    *("--namespace", "lmcache", "--secret", "hook-tls"),
    *("--service", "hook", "--configuration", "hooks"),
]


def run(api: AdmissionApi, *more: str) -> int:
    return main([*WHERE, "--api-url", api.url, *more])


def bundles(api: AdmissionApi) -> list[Any]:
    return [
        webhook["clientConfig"].get("caBundle")
        for webhook in api.objects[CONFIGURATION]["webhooks"]
    ]


def test_before_and_after_an_installation(
    api: AdmissionApi, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(api) == 0
    said = capsys.readouterr().out
    assert "a new certificate for hook.lmcache.svc: there is none" in said
    assert "no webhook configuration yet" in said
    data = api.objects[SECRET]["data"]
    assert set(data) == {"ca.crt", "ca.key", "tls.crt", "tls.key"}
    api.configure("label.inject.lmcache.io", "annotation.inject.lmcache.io")
    assert run(api) == 0
    assert "2 webhooks of the configuration now trust" in capsys.readouterr().out
    assert bundles(api) == [data["ca.crt"]] * 2
    assert api.objects[SECRET]["data"] == data


def test_run_again_it_writes_nothing(api: AdmissionApi, capsys: pytest.CaptureFixture[str]) -> None:
    api.configure("a")
    assert run(api) == 0
    api.calls.clear()
    capsys.readouterr()
    assert run(api) == 0
    assert [call.split()[0] for call in api.calls] == ["GET", "GET"]
    assert capsys.readouterr().out == ""


def test_what_ends_soon_is_renewed_by_the_same_authority(api: AdmissionApi) -> None:
    api.configure("a")
    assert run(api, "--valid-days", "20", "--renew-days", "10") == 0
    before = copy.deepcopy(api.objects[SECRET]["data"])
    assert run(api, "--valid-days", "90", "--renew-days", "30") == 0
    after = api.objects[SECRET]["data"]
    assert after["tls.crt"] != before["tls.crt"]
    assert after["ca.crt"] == before["ca.crt"] == bundles(api)[0]
    certificate = x509.load_pem_x509_certificate(base64.b64decode(after["tls.crt"]))
    assert (certificate.not_valid_after_utc - certificate.not_valid_before_utc).days == 90


def test_a_secret_that_lacks_a_part_is_made_anew(api: AdmissionApi) -> None:
    assert run(api) == 0
    del api.objects[SECRET]["data"]["ca.key"]
    assert run(api) == 0
    assert set(api.objects[SECRET]["data"]) == {"ca.crt", "ca.key", "tls.crt", "tls.key"}


def test_of_two_who_write_at_once_both_use_the_first_ones(api: AdmissionApi) -> None:
    assert run(api) == 0
    theirs = api.objects.pop(SECRET)
    api.configure("a")
    api.race.append(copy.deepcopy(theirs))
    assert run(api) == 0
    assert api.objects[SECRET]["data"] == theirs["data"]
    assert bundles(api) == [theirs["data"]["ca.crt"]]


def test_who_is_always_too_late_gives_up(
    api: AdmissionApi, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(api) == 0
    useless = copy.deepcopy(api.objects[SECRET])
    useless["data"].pop("tls.key")
    api.put(SECRET, copy.deepcopy(useless))
    api.race += [copy.deepcopy(useless) for _ in range(10)]
    assert run(api) == 1
    assert "has changed in the meantime" in capsys.readouterr().out


@pytest.mark.parametrize("status", [401, 403, 500])
def test_an_api_server_that_refuses_is_told(
    api: AdmissionApi, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    api.refuse = status
    assert run(api) == 1
    assert f"the API server answers {status}" in capsys.readouterr().out


def test_no_api_server_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WHERE, "--api-url", "http://127.0.0.1:9"]) == 1
    assert "cannot be reached" in capsys.readouterr().out
    assert main(WHERE) == 2
    assert "this is not a pod of a cluster" in capsys.readouterr().out


def test_impossible_lifetimes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*WHERE, "--valid-days", "10", "--renew-days", "10"])
    assert caught.value.code == 2
    assert "1 <= renew < valid" in capsys.readouterr().err


def test_no_key_is_said(api: AdmissionApi, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(api) == 0
    said = capsys.readouterr()
    assert "KEY" not in said.out + said.err

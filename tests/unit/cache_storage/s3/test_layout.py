"""Names of objects in a bucket."""

from __future__ import annotations

import pytest
from lmcache_storage.s3.objects import is_record, object_name, tenant_name

from tests.suites.chunks import make_key

ODD = ["..", ".", ".a", "a/b", "a b", "a%2Fb", "a=2Fb", "a~b", "ä", "a\nb", "=2E", "A", "a"]


def test_tenants_have_different_plain_names() -> None:
    names = [tenant_name(tenant) for tenant in ODD]
    assert len(set(names)) == len(names)
    for name in names:
        assert name.isascii()
        assert not set(name) & set("/%~ \n\\")
        assert not name.startswith(".")


@pytest.mark.parametrize("tenant", ODD)
@pytest.mark.parametrize("prefix", ["", "a/b.c/"])
def test_names_of_records_are_recognised(tenant: str, prefix: str) -> None:
    name = object_name(prefix, make_key("a", tenant=tenant))
    assert is_record(name, prefix, tenant)
    assert is_record(name, prefix, None)
    assert not is_record(name, prefix, tenant + "x")
    assert not is_record(name, "z" + prefix, None)


@pytest.mark.parametrize(
    "name",
    [
        "lmcache/a/readme",
        "lmcache/a/00/x.kvr",
        f"lmcache/a/0/{'0' * 64}.kvr",
        f"lmcache/00/{'0' * 64}.kvr",
    ],
)
def test_other_names_are_no_records(name: str) -> None:
    assert not is_record(name, "lmcache/", None)

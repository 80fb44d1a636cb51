import hashlib
from pathlib import Path

import pytest
from lmcache_core.errors import AuthenticationError, ConfigError
from lmcache_core.security import Principal, TokenTable, validate_instance_id, validate_tenant
from lmcache_core.security.tokens import MAX_TOKEN_FILE_BYTES, MAX_TOKENS

from tests.fixtures.limits import without_descriptors

CLIENT = "client-token-0123456789"
ADMIN = "admin-token-0123456789"
SHA_CLIENT = hashlib.sha256(CLIENT.encode()).hexdigest()


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(
        tmp_path / "tokens.yaml",
        f"tokens:\n- {{name: vllm, tenant: prod, role: client, token_sha256: {SHA_CLIENT}}}\n"
        f"- {{name: ops, tenant: prod, role: admin, token: {ADMIN}}}\n",
    )


def test_tokens_name_their_principals(file: Path) -> None:
    table = TokenTable.from_file(file)
    assert table.authenticate(CLIENT) == Principal("prod", "client", "vllm")
    assert table.authenticate(ADMIN) == Principal("prod", "admin", "ops")
    assert not table.is_anonymous


@pytest.mark.parametrize(
    "token",
    [None, "", "x", CLIENT + "x", CLIENT[:-1], SHA_CLIENT, "é" * 20, "\ud800" * 20, "x" * 100_000],
)
def test_other_tokens_are_refused(file: Path, token: str | None) -> None:
    with pytest.raises(AuthenticationError) as error:
        TokenTable.from_file(file).authenticate(token)
    assert not token or token not in str(error.value) or len(token) == 1


def test_anonymous_takes_anyone() -> None:
    table = TokenTable.anonymous()
    assert table.is_anonymous
    assert (
        table.authenticate(None)
        == table.authenticate("whatever")
        == Principal("default", "admin", "anonymous")
    )
    table.reload_if_changed()
    assert table.is_anonymous


def test_no_secret_in_repr(file: Path) -> None:
    table = TokenTable.from_file(file)
    assert repr(table) == f"TokenTable({str(file)!r}, num_tokens=2)"
    assert "digest" not in repr(vars(table))
    assert ADMIN not in repr(vars(table))
    assert repr(TokenTable.anonymous()) == "TokenTable(anonymous)"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "Expected `object`"),
        ("tokens: []", "list 1 to"),
        ("tokens: {}", r"\$.tokens"),
        ("tokens: [}", "line 1 is not YAML"),
        ("tokens: 2001-99-99", "not YAML"),
        (
            "tokens: [{name: a, tenant: t, role: client, token: 0123456789abcdef}]\nextra: 1",
            "extra",
        ),
        (
            "tokens: [{name: a, tenant: t, role: client, token: 0123456789abcdef, scope: x}]",
            r"scope.*tokens\[0\]",
        ),
        (
            "tokens: [{name: a, tenant: t, role: root, token: 0123456789abcdef}]",
            r"root.*tokens\[0\].role",
        ),
        (
            "tokens: [{name: a, tenant: T, role: client, token: 0123456789abcdef}]",
            r"tokens\[0\] \(a\): tenant 'T'",
        ),
        ("tokens: [{name: a, tenant: ../x, role: client, token: 0123456789abcdef}]", "tenant"),
        (
            "tokens: [{name: 'a b', tenant: t, role: client, token: 0123456789abcdef}]",
            r"tokens\[0\]: name",
        ),
        ("tokens: [{name: a, tenant: t, role: client}]", "exactly one"),
        (
            (
                "tokens: [{name: a, tenant: t, role: client, token: 0123456789abcdef,"
                f" token_sha256: {SHA_CLIENT}}}]"
            ),
            "exactly one",
        ),
        ("tokens: [{name: a, tenant: t, role: client, token: short}]", "16 to 512"),
        (
            "tokens: [{name: a, tenant: t, role: client, token: '0123456789abcdef '}]",
            "visible ASCII",
        ),
        (
            "tokens: [{name: a, tenant: t, role: client, token: 1234567890123456}]",
            r"\$.tokens\[0\].token",
        ),
        ("tokens: [{name: a, tenant: t, role: client, token_sha256: abc}]", "64 hex digits"),
    ],
)
def test_bad_files_name_file_entry_and_fix(tmp_path: Path, text: str, complaint: str) -> None:
    path = write(tmp_path / "bad.yaml", text)
    with pytest.raises(ConfigError, match=complaint) as error:
        TokenTable.from_file(path)
    assert str(path) in str(error.value)
    assert "0123456789abcdef" not in str(error.value)


@pytest.mark.parametrize("double", [{"name"}, {"token"}])
def test_doubles_are_refused(tmp_path: Path, double: set[str]) -> None:
    names = ["a", "a" if "name" in double else "b"]
    tokens = ["0123456789abcdef0", "0123456789abcdef" + ("0" if "token" in double else "1")]
    entries = "".join(
        f"- {{name: {n}, tenant: t, role: client, token: {k}}}\n"
        for n, k in zip(names, tokens, strict=True)
    )
    with pytest.raises(ConfigError, match=f"share a {next(iter(double))}"):
        TokenTable.from_file(write(tmp_path / "t.yaml", f"tokens:\n{entries}"))


def test_a_broken_line_is_not_quoted(tmp_path: Path) -> None:
    path = write(tmp_path / "t.yaml", f"tokens:\n- {{name: a, token: {ADMIN}, ]\n")
    with pytest.raises(ConfigError) as error:
        TokenTable.from_file(path)
    assert ADMIN not in str(error.value)
    assert error.value.__suppress_context__


def test_a_name_twice_is_refused_and_not_quoted(tmp_path: Path) -> None:
    """Else the last role would count, or all tokens of the first list be gone."""
    (tmp_path / "tokens.yaml").write_text(
        "tokens:\n  - {name: a, tenant: t, role: client, role: admin, token:"
        " s3cret-s3cret-s3cret}\n"
    )
    with pytest.raises(ConfigError, match="line 2 has a name twice; keep one of them") as caught:
        TokenTable.from_file(tmp_path / "tokens.yaml")
    assert "s3cret" not in str(caught.value)


def test_size_bounds(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="larger than"):
        TokenTable.from_file(write(tmp_path / "big", "#" * (MAX_TOKEN_FILE_BYTES + 1)))
    many = "".join(
        f"- {{name: n{i}, tenant: t, role: client, token: token-of-sixteen-{i}}}\n"
        for i in range(MAX_TOKENS + 1)
    )
    with pytest.raises(ConfigError, match="list 1 to"):
        TokenTable.from_file(write(tmp_path / "many", "tokens:\n" + many))
    with pytest.raises(ConfigError, match="No such file"):
        TokenTable.from_file(tmp_path / "absent")


def test_reload_follows_a_replaced_file(file: Path) -> None:
    table = TokenTable.from_file(file)
    table.reload_if_changed()
    assert table.authenticate(CLIENT).name == "vllm"
    fresh = write(
        file.with_suffix(".new"),
        "tokens: [{name: n, tenant: other, role: client, token: fresh-token-0123456789}]",
    )
    fresh.replace(file)
    table.reload_if_changed()
    assert table.authenticate("fresh-token-0123456789").tenant == "other"
    with pytest.raises(AuthenticationError):
        table.authenticate(CLIENT)


def test_a_file_that_went_bad_is_reported_once_and_the_old_table_stays(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = TokenTable.from_file(file)
    fresh = "tokens: [{name: n, tenant: other, role: client, token: fresh-token-0123456789}]"

    def problems_after(*, num_looks: int = 3) -> int:
        caplog.clear()
        for _ in range(num_looks):
            table.reload_if_changed()
        assert table.authenticate(CLIENT).name == "vllm"
        return caplog.text.count("keeping what was read before")

    file.write_text("tokens: []")
    assert problems_after() == 1
    file.unlink()
    assert problems_after() == 1
    file.write_text(fresh)
    with without_descriptors():
        assert problems_after() == 1
    table.reload_if_changed()
    assert table.authenticate("fresh-token-0123456789").tenant == "other"


@pytest.mark.parametrize("name", ["", "A", "-a", ".a", "a/b", "a b", "a\n", "a" * 64, "ä"])
def test_tenant_names(name: str) -> None:
    with pytest.raises(ValueError):
        validate_tenant(name)
    assert validate_tenant("a" * 63) == "a" * 63


@pytest.mark.parametrize("name", ["", "-a", "../x", "a/b", "a:b", "a\n", "a" * 129])
def test_instance_ids(name: str) -> None:
    with pytest.raises(ValueError):
        validate_instance_id(name)
    assert validate_instance_id("vllm-0.Pod_1") == "vllm-0.Pod_1"

"""Keys: what each may reach, that secrets stay secret, and that a revoked key ends at once."""

import hmac
import json
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeromem_torch.errors import ZeroMemError
from zeromem_torch.scope import boundaries_in
from zeromem_torch.serving.keys import LOCAL, SCOPES, Caller, Keys
from zeromem_torch.serving.refusals import Forbidden, Unauthorized

SEGMENTS = st.sampled_from(["acme", "acme-corp", "a", "x", "acm", "%2F", "é"])
NAMES = st.lists(SEGMENTS, min_size=1, max_size=3).map("/".join)
ASKED = st.one_of(NAMES, NAMES.map(lambda name: name + "/"))


def reads(*boundaries: str) -> Caller:
    return Caller("k", frozenset(["read"]), boundaries)


@pytest.mark.parametrize(
    ("bound", "asked", "inside"),
    [
        ("acme/", "acme", True),
        ("acme/", "acme/", True),
        ("acme/", "acme/x", True),
        ("acme/", "acme/x/", True),
        ("acme/", "acme-corp", False),
        ("acme/", "acm", False),
        ("acme/", "", False),
        ("acme/", "/", False),
        ("acme/", ["acme/x", "other"], False),
        ("acme/", ["acme/x", "acme"], True),
        ("acme/", [], False),
        ("acme", "acme", True),
        ("acme", "acme/", False),
        ("acme", "acme/x", False),
        ("acme/x", "acme", False),
        ("acme/x", "acme/", False),
        ("acme/x/", "acme/", False),
    ],
)
def test_a_bound_goes_by_whole_segments(bound: str, asked: str | list[str], inside: bool) -> None:
    assert reads(bound).may("read", asked) is inside
    if inside:
        reads(bound).check("read", asked)
    else:
        with pytest.raises(Forbidden):
            reads(bound).check("read", asked)


@given(st.lists(ASKED, min_size=1, max_size=3), st.lists(ASKED, min_size=1, max_size=3), st.sets(NAMES, max_size=12))
def test_what_is_allowed_reaches_nothing_outside(bound: list[str], asked: list[str], known: set[str]) -> None:
    caller = reads(*bound)
    inside = set(boundaries_in(bound, known))  # of what there is, all that the key is bound to
    if caller.may("read", asked):
        assert set(boundaries_in(asked, known)) & known <= inside
    assert set(caller.visible(known)) == inside & known


def test_admin_is_all_and_the_others_are_themselves() -> None:
    held = {scope: Caller("k", frozenset([scope]), None) for scope in SCOPES}
    allowed = {(own, scope) for own, caller in held.items() for scope in SCOPES if caller.may(scope, "b")}
    assert allowed == {("read", "read"), ("write", "write"), *(("admin", scope) for scope in SCOPES)}
    assert all(LOCAL.may(scope, ["b", "c/"]) for scope in SCOPES)
    assert held["write"].visible(["b"]) == ()


@pytest.mark.parametrize("asked", [None, 7, ["a", 7], {"a": 1}, b"acme"])
def test_what_is_no_name_is_not_allowed(asked: object) -> None:
    assert not LOCAL.may("read", asked)  # type: ignore[arg-type]
    assert not reads("a").may("read", asked)  # type: ignore[arg-type]


def test_a_refusal_says_nothing_of_what_is_there() -> None:
    said: dict[str, str] = {}
    for scope, asked in [("read", "there"), ("read", "not there"), ("write", "a"), ("admin", ["x/", "y"])]:
        with pytest.raises(Forbidden) as caught:
            reads("a").check(scope, asked)
        assert said.setdefault(scope, str(caught.value)) == str(caught.value)
        assert f"one of scope {scope} for" in str(caught.value), "what to ask for is said"
    assert len({text.replace(scope, "") for scope, text in said.items()}) == 1


def test_a_secret_is_shown_once_and_stored_as_its_hash(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "memory" / "keys.json")
    assert not keys
    secret = keys.make("ann", scopes=["write", "read", "read"], boundaries=["acme/", "b"])
    file = keys.path.read_text()
    assert secret.startswith("zm_")
    assert secret not in file
    assert secret.split("_", 2)[2] not in file
    assert stat.S_IMODE(keys.path.stat().st_mode) == 0o600
    assert [path.name for path in keys.path.parent.iterdir() if path.suffix != ".lock"] == ["keys.json"]
    caller = Keys(keys.path).authenticate(secret)
    assert caller == Caller("ann", frozenset(["read", "write"]), ("acme/", "b"))
    (info,) = keys.list()
    assert (info.name, info.scopes, info.boundaries) == ("ann", ("read", "write"), ("acme/", "b"))
    assert "sha256" not in info.to_dict()


def test_wrong_secrets_are_all_refused_alike(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys.json")
    secret = keys.make("ann", scopes=["read"], boundaries=None)
    said = set()
    wrong = [secret[:-1], secret + "x", secret.upper(), f"zm_{'0' * 12}_{secret[16:]}", f"{secret[:16]}x", "\ud800"]
    for given_secret in [None, "", "zm_", "x" * 100_000, *wrong]:
        with pytest.raises(Unauthorized) as caught:
            keys.authenticate(given_secret)
        said.add(str(caught.value))
    assert len(said) == 1


def test_an_unknown_id_is_hashed_and_compared_like_a_known_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = Keys(tmp_path / "keys.json")
    secret = keys.make("ann", scopes=["read"], boundaries=None)
    compared: list[tuple[int, int]] = []
    compare = hmac.compare_digest

    def counting(one: str, other: str) -> bool:
        compared.append((len(one), len(other)))
        return compare(one, other)

    monkeypatch.setattr("zeromem_torch.serving.keys.hmac.compare_digest", counting)
    keys.authenticate(secret)
    for wrong in (f"{secret[:-1]}!", f"zm_{'f' * 12}_x", "", None):
        with pytest.raises(Unauthorized):
            keys.authenticate(wrong)
    assert compared == [(64, 64)] * 5


def test_a_key_revoked_elsewhere_ends_on_a_running_server(tmp_path: Path) -> None:
    running = Keys(tmp_path / "keys.json")
    elsewhere = Keys(tmp_path / "keys.json")
    ann = elsewhere.make("ann", scopes=["read"], boundaries=["a"])
    bo = elsewhere.make("bo", scopes=["admin"], boundaries=None)
    assert running.authenticate(ann).name == "ann"
    elsewhere.revoke("ann")
    with pytest.raises(Unauthorized):
        running.authenticate(ann)
    assert running.authenticate(bo).name == "bo"
    assert [info.name for info in running.list()] == ["bo"]


def test_revoking_the_last_key_does_not_open_the_server(tmp_path: Path) -> None:
    running = Keys(tmp_path / "keys.json")
    Keys(running.path).make("ann", scopes=["read"], boundaries=["a"])
    assert running
    Keys(running.path).revoke("ann")
    assert Keys(running.path)
    running.path.unlink()
    assert running, "whoever removes the file does not open a running server either"
    assert not Keys(running.path)


DAMAGES = ["", "{}", "[]", '{"version": 2, "keys": []}', '{"version": 1, "keys": [{}]}', "[" * 9]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_lets_nobody_in_and_stops_a_start(tmp_path: Path, damage: str) -> None:
    keys = Keys(tmp_path / "keys.json")
    secret = keys.make("ann", scopes=["read"], boundaries=["a"])
    keys.path.write_text(damage)
    with pytest.raises(Unauthorized):
        keys.authenticate(secret)
    with pytest.raises(ZeroMemError, match="keys"):
        Keys(keys.path)


def test_a_damaged_bound_is_not_read_as_none(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys.json")
    keys.make("ann", scopes=["read"], boundaries=["a"])
    plain = json.loads(keys.path.read_text())
    damaged: list[object] = [[], "", [7], {}]
    for bound in damaged:
        plain["keys"][0]["boundaries"] = bound
        keys.path.write_text(json.dumps(plain))
        with pytest.raises(ZeroMemError, match="keys"):
            Keys(keys.path)


@pytest.mark.parametrize(
    ("name", "scopes", "boundaries", "said"),
    [
        ("", ["read"], ["a"], "key"),
        ("a b", ["read"], ["a"], "key"),
        ("x" * 65, ["read"], ["a"], "key"),
        ("ann", ["reed"], ["a"], "did you mean 'read'"),
        ("ann", [], ["a"], "scope"),
        ("ann", ["read"], [], "boundaries"),
        ("ann", ["read"], [""], "boundary"),
        ("ann", ["read"], ["/"], "boundary"),
        ("ann", ["read"], ["a//"], "boundary"),
        ("ann", ["read"], ["a\0"], "NUL"),
    ],
)
def test_keys_that_cannot_be(tmp_path: Path, name: str, scopes: list[str], boundaries: list[str], said: str) -> None:
    keys = Keys(tmp_path / "keys.json")
    with pytest.raises(ZeroMemError, match=said):
        keys.make(name, scopes=scopes, boundaries=boundaries)
    assert not keys


def test_names_are_unique_and_unknown_ones_are_told(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys.json")
    keys.make("ann", scopes=["read"], boundaries=["a"])
    with pytest.raises(ZeroMemError, match="no other key has"):
        keys.make("ann", scopes=["read"], boundaries=["a"])
    with pytest.raises(ZeroMemError, match="did you mean 'ann'"):
        keys.revoke("anna")


def test_keys_made_at_once_are_all_kept(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda n: Keys(path).make(f"k{n}", scopes=["read"], boundaries=["a"]), range(24)))
    keys = Keys(path)
    assert sorted(keys.authenticate(secret).name for secret in made) == sorted(f"k{n}" for n in range(24))


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ZeroMemError, match="keys"):
        Keys(tmp_path / "file" / "keys.json").make("ann", scopes=["read"], boundaries=["a"])

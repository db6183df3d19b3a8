"""Who may do what where: keys, each bound to boundaries by exact name or by whole segments, with scopes.

A key's secret is shown once, when it is made. What is stored is its SHA-256: the secret holds 256 random bits, so there
is nothing to guess that a slow hash would have to protect.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from filelock import FileLock

from zeromem_torch import disk
from zeromem_torch.errors import ZeroMemError, nearest
from zeromem_torch.folder import KEYS as KEYS
from zeromem_torch.scope import Boundary
from zeromem_torch.serving.refusals import Forbidden, Unauthorized
from zeromem_torch.substrate.traces import check_boundary, check_text

SCOPES = ("read", "write", "admin")
"""admin: both others, and purge, metrics, status and release_memory, inside the key's boundaries."""
_NAME = re.compile(r"[\w.@+-]{1,64}")  # it stands in logs and in the history
_UNAUTHORIZED = str(
    ZeroMemError.of("key", "one that this server knows", "none or another", "send Authorization: Bearer zm_...")
)
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Caller:
    """Whoever a request comes from, and what that one may do."""

    name: str  # the key's: in logs, and the actor of the history
    scopes: frozenset[str]
    boundaries: tuple[str, ...] | None  # exact names, or "acme/" for acme and all below; None: every boundary

    def may(self, scope: str, asked: Boundary) -> bool:
        """Whether all that is asked for, a name, "prefix/" or a list of such, lies inside what the key is bound to."""
        if scope not in self.scopes and "admin" not in self.scopes:
            return False
        parts = [asked] if isinstance(asked, str) else asked
        if not isinstance(parts, Sequence) or not parts:
            return False  # an empty list must never come to mean everything
        return all(isinstance(part, str) and self._covers(part) for part in parts)

    def check(self, scope: str, asked: Boundary) -> None:
        """Refuse what this caller may not do, and name the scope that it needs; nothing of what is there is told."""
        if not self.may(scope, asked):
            advice = "use another, or ask who made it for more"
            raise Forbidden.of("key", f"one of scope {scope} for what is asked", "one that is not", advice)

    def visible(self, known: Iterable[str]) -> tuple[str, ...]:
        """Of these boundaries, those it may read."""
        return tuple(name for name in known if self.may("read", name))

    def _covers(self, part: str) -> bool:
        if self.boundaries is None:
            return True
        return any(
            f"{part.removesuffix('/')}/".startswith(bound) if bound.endswith("/") else part == bound
            for bound in self.boundaries
        )


LOCAL = Caller("local", frozenset(SCOPES), None)
"""Who calls a server without keys, which listens on loopback only."""


@dataclass(frozen=True)
class KeyInfo:
    """What may be shown of a key."""

    name: str
    id: str  # stands in the secret: zm_<id>_...
    scopes: tuple[str, ...]
    boundaries: tuple[str, ...] | None
    made_at: str

    def to_dict(self) -> dict[str, Any]:
        bound = None if self.boundaries is None else list(self.boundaries)
        return {
            "name": self.name,
            "id": self.id,
            "scopes": list(self.scopes),
            "boundaries": bound,
            "made_at": self.made_at,
        }


@dataclass(frozen=True)
class _Stored:
    info: KeyInfo
    digest: str
    caller: Caller


class Keys:
    """The keys of one memory, in a file that is read again when it changes: a revoked key ends on a running server.

    True from the first key on, even when all were revoked: whoever revokes the last one does not open the server.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: tuple[int, ...] | None = None  # what the file looked like when it was read
        self._needed = False
        self._keys: Mapping[str, _Stored] = {}  # by id
        self._refresh()

    def __bool__(self) -> bool:
        self._needed = self._needed or self.path.exists()
        return self._needed

    def make(self, name: str, *, scopes: Iterable[str] = ("read", "write"), boundaries: Iterable[str] | None) -> str:
        """A new key; returns its secret, which nobody can show again."""
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ZeroMemError.of("key", "a name of letters, digits and . _ @ + -, at most 64", name, "name it so")
        asked = tuple(dict.fromkeys(scopes))
        for scope in asked:
            if scope not in SCOPES:
                raise ZeroMemError.of("scope", " | ".join(SCOPES), scope, f"{nearest(scope, SCOPES)}name one of these")
        if not asked:
            raise ZeroMemError.of("scope", " | ".join(SCOPES), None, "name at least one")
        bound = None if boundaries is None else _checked(boundaries)
        secret_id = secrets.token_hex(6)
        secret = f"zm_{secret_id}_{secrets.token_urlsafe(32)}"
        made_at = datetime.now(UTC).isoformat(timespec="seconds")
        info = KeyInfo(name, secret_id, tuple(s for s in SCOPES if s in asked), bound, made_at)
        with self._changing():
            if any(key.info.name == name for key in self._keys.values()):
                raise ZeroMemError.of("key", "a name that no other key has", name, "name it otherwise, or revoke that")
            stored = _Stored(info, _digest(secret), Caller(name, frozenset(asked), bound))
            self._write({**self._keys, secret_id: stored})
        return secret

    def revoke(self, name: str) -> None:
        """Take a key back; running servers refuse it from their next request on."""
        with self._changing():
            kept = {key_id: key for key_id, key in self._keys.items() if key.info.name != name}
            if len(kept) == len(self._keys):
                known = [key.info.name for key in self._keys.values()]
                advice = f"{nearest(name, known)}`zeromem keys list` shows them"
                raise ZeroMemError.of("key", "the name of one that was made", name, advice)
            self._write(kept)

    def list(self) -> list[KeyInfo]:
        self._refresh()
        return [key.info for key in self._keys.values()]

    def authenticate(self, secret: str | None) -> Caller:
        """Whose secret this is. An id that is known takes as long as one that is not: both are hashed and compared."""
        try:
            self._refresh()
        except ZeroMemError as error:  # damaged while the server runs: nobody comes in by it
            log.error("%s", error)
            self._keys, self._seen = {}, None
        given = secret or ""
        stored = self._keys.get(given[3 : 3 + 12])
        same = hmac.compare_digest(_digest(given), stored.digest if stored else _NOBODY)
        if not same or stored is None:
            raise Unauthorized(_UNAUTHORIZED)
        return stored.caller

    # The file

    def _refresh(self) -> None:
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            self._keys, self._seen = {}, None
            return
        except OSError as error:
            raise self._unreadable(error) from error
        seen = (found.st_mtime_ns, found.st_size, found.st_ino)
        if seen == self._seen:
            return
        try:
            self._keys = _read(json.loads(self.path.read_bytes()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise self._unreadable(error) from error
        self._seen, self._needed = seen, True

    def _unreadable(self, error: Exception) -> ZeroMemError:
        advice = f"restore it, or remove it and make the keys anew ({type(error).__name__}: {error})"
        return ZeroMemError.of("keys", "a file that `zeromem keys` wrote", str(self.path), advice)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Two who change the file take turns, and each starts from what the other left."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(self.path.with_suffix(".lock")):
                self._refresh()
                yield
        except OSError as error:
            advice = f"check the folder ({error})"
            raise ZeroMemError.of("keys", "a file that can be written", str(self.path), advice) from error

    def _write(self, keys: Mapping[str, _Stored]) -> None:
        """All of it or nothing, readable by its owner alone from the first byte on."""
        rows = [{**key.info.to_dict(), "sha256": key.digest} for key in keys.values()]
        new = self.path.with_name(f"{self.path.name}.{secrets.token_hex(4)}.new")
        try:
            with os.fdopen(os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
                json.dump({"version": 1, "keys": rows}, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, self.path)
        finally:
            new.unlink(missing_ok=True)
        disk.sync(self.path.parent)
        self._refresh()


def _read(plain: Any) -> Mapping[str, _Stored]:
    if plain["version"] != 1:
        raise ValueError(f"version {plain['version']!r} of a newer zeromem")
    found = {}
    for row in plain["keys"]:
        bound = None if row["boundaries"] is None else _checked(row["boundaries"])
        scopes = tuple(str(scope) for scope in row["scopes"])
        info = KeyInfo(str(row["name"]), str(row["id"]), scopes, bound, str(row["made_at"]))
        if not re.fullmatch(r"[0-9a-f]{64}", row["sha256"]) or not set(scopes) <= set(SCOPES):
            raise ValueError(f"key {info.name!r} is damaged")
        found[info.id] = _Stored(info, row["sha256"], Caller(info.name, frozenset(scopes), bound))
    return found


def _checked(boundaries: Iterable[str]) -> tuple[str, ...]:
    given = tuple(dict.fromkeys([boundaries] if isinstance(boundaries, str) else boundaries))
    for name in given:
        check_text("key", "boundary", name)
        check_boundary(name.removesuffix("/"))
    if not given:
        raise ZeroMemError.of("boundaries", "at least one, or None for every boundary", given, "name what it may see")
    return given


def _digest(secret: str) -> str:
    return sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


_NOBODY = _digest(secrets.token_urlsafe(32))
"""What an unknown id is compared with."""

"""What a search may see: boundaries, filters and a point in time, applied before anything is ranked.

A filtered search answers as if the memory held only what passes: statistics, neighbours and the graph are those of the
traces that remain, so nothing left out can speak through the ranking of what is left in.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Self

from zeromem_torch.sizes import check_count
from zeromem_torch.substrate.traces import Trace, ZeroMemError, check_boundary, check_text, nearest, parse_time

Boundary = str | Sequence[str]
LEVELS = ("user", "agent", "run")


def boundary_of(user_id: str | None = None, agent_id: str | None = None, run_id: str | None = None) -> str:
    """The boundary of the ids other libraries know: "user=u1/agent=a1/run=r1", without the levels not given.

    A slash or percent sign in an id is written %2F or %25, so that no id reaches into another level.
    """
    segments = []
    for level, given in zip(LEVELS, (user_id, agent_id, run_id), strict=True):
        if given is not None:
            check_text("scope", f"{level}_id", given)
            segments.append(f"{level}={given.replace('%', '%25').replace('/', '%2F')}")
    if not segments:
        raise ZeroMemError.of("boundary", "one, or a user_id, agent_id or run_id", None, 'pass boundary="..."')
    return "/".join(segments)


def boundaries_in(asked: Boundary, known: Iterable[str]) -> tuple[str, ...]:
    """The known boundaries that are asked for, each once.

    A name is that boundary alone; with a slash behind it ("acme/"), it is also every boundary below it, by whole
    segments: "acme/alice", never "acme-corp".
    """
    names = [asked] if isinstance(asked, str) else list(asked) if isinstance(asked, Sequence) else [None]
    if not names:
        raise ZeroMemError.of("boundary", "a name, or a list of names", asked, "name at least one")
    found: dict[str, None] = {}
    listed = list(known) if any(isinstance(name, str) and name.endswith("/") for name in names) else ()
    for name in names:
        check_text("search", "boundary", name)
        assert isinstance(name, str)
        check_boundary(name.removesuffix("/"))
        if name.endswith("/"):
            found.update(dict.fromkeys(own for own in listed if f"{own}/".startswith(name)))
        else:
            found[name] = None
    return tuple(found)


@dataclass(frozen=True)
class Filters:
    """Which traces of the boundaries may be found; an empty field admits all."""

    session: frozenset[str] = frozenset()
    speaker: frozenset[str] = frozenset()
    role: frozenset[str] = frozenset()
    after: datetime | None = None  # event time, this one included
    before: datetime | None = None  # event time, this one not included
    metadata: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, given: Mapping[str, Any] | None) -> Self | None:
        """Filters as a caller writes them: {"speaker": "Ann", "session": ["s1", "s2"], "after": "2023-05-08", ...}."""
        if given is None:
            return None
        if not isinstance(given, Mapping):
            raise ZeroMemError.of("filters", "a mapping", given, 'write {"speaker": "Ann"}')
        values: dict[str, Any] = {}
        for name, value in given.items():
            if name in ("session", "speaker", "role"):
                listed = [value] if isinstance(value, str) else value
                if not isinstance(listed, list | tuple | set | frozenset):
                    raise ZeroMemError.of(f"filters, {name}", "a name or a list of names", value, "write it so")
                for one in listed:
                    check_text("filters", str(name), one)
                values[name] = frozenset(listed)
                if not listed:
                    raise ZeroMemError.of(f"filters, {name}", "at least one name", value, "leave it out to admit all")
            elif name in ("after", "before"):
                values[name] = parse_time(value)
            elif name == "metadata":
                if not isinstance(value, Mapping):
                    raise ZeroMemError.of("filters, metadata", "a mapping", value, 'write {"metadata": {"kind": "x"}}')
                for key, own in value.items():
                    if own is not None and not isinstance(own, str | int | float | bool):
                        raise ZeroMemError.of(f"filters, metadata, {key}", "a text, number or bool", own, "name one")
                values[name] = tuple(value.items())
            else:
                known = ("session", "speaker", "role", "after", "before", "metadata")
                advice = f"{nearest(str(name), known)}values of your own are filtered by metadata"
                raise ZeroMemError.of("filters", f"some of {', '.join(known)}", name, advice)
        return cls(**values)

    def admits(self, trace: Trace) -> bool:
        if (self.after or self.before) and trace.time is None:
            return False
        return (
            (not self.session or trace.session in self.session)
            and (not self.speaker or trace.speaker in self.speaker)
            and (not self.role or trace.role in self.role)
            and (self.after is None or trace.time is None or trace.time >= self.after)
            and (self.before is None or trace.time is None or trace.time < self.before)
            and all(_same(trace.metadata.get(name), value) for name, value in self.metadata)
        )


def _same(held: object, asked: object) -> bool:
    """Equal, and of one kind: 1 is not True."""
    return held == asked and isinstance(held, bool) == isinstance(asked, bool)


@dataclass(frozen=True)
class Scope:
    """What one query may see."""

    boundaries: tuple[str, ...]
    filters: Filters | None = None
    as_of: datetime | None = None

    def admits(self, trace: Trace, now: datetime) -> bool:
        return (self.filters is None or self.filters.admits(trace)) and self.stands(trace, now)

    def stands(self, trace: Trace, now: datetime) -> bool:
        """Whether a trace holds at ``as_of``, or now.

        It must be valid and not expired; at an ``as_of`` of the past it must also have happened (or, where no event
        time is known, have been stored) by then. What was updated or deleted since is not brought back.
        """
        moment = self.as_of or now
        if self.as_of is not None and (known := trace.time or trace.added_at) is not None and known > moment:
            return False
        return (
            (trace.valid_from is None or trace.valid_from <= moment)
            and (trace.valid_to is None or moment < trace.valid_to)
            and (trace.expires_at is None or moment < trace.expires_at)
        )


@dataclass(frozen=True)
class SearchRequest:
    """One query with all that a search may be told; the fields are those of `ZeroMem.search`."""

    query: str
    boundary: Boundary
    top_k: int | None = None
    token_budget: int | None = None
    filters: Mapping[str, Any] | None = None
    as_of: datetime | str | float | None = None
    min_score: float | None = None
    explain: bool = False
    reference_time: datetime | None = None

    @property
    def place(self) -> str:
        """The boundaries that are asked, as evidence names them."""
        return ", ".join(map(str, self.boundary)) if isinstance(self.boundary, list | tuple) else str(self.boundary)


def scopes_of(requests: Sequence[SearchRequest], known: Collection[str]) -> list[Scope]:
    """What each request may see of the known boundaries; a request that cannot be used is an error."""
    scopes: list[Scope] = []
    boundaries: dict[str, tuple[str, ...]] = {}
    admitted: dict[int, Filters | None] = {}
    for number, asked in enumerate(requests):
        for name, value in (("top_k", asked.top_k), ("token_budget", asked.token_budget)):
            if value is not None:
                check_count(name, value)
        if asked.min_score is not None and not (_is_number(asked.min_score) and -1 <= asked.min_score <= 1):
            advice = "evidence shows its relevance"
            raise ZeroMemError.of("min_score", "a cosine from -1 to 1", asked.min_score, advice)
        check_text("query" if len(requests) == 1 else f"query {number}", "text", asked.query)
        _check_time("reference_time", asked.reference_time)
        moment = None if asked.as_of is None else parse_time(asked.as_of)
        if id(asked.filters) not in admitted:
            admitted[id(asked.filters)] = Filters.of(asked.filters)
        name = repr(asked.boundary)
        if name not in boundaries:
            boundaries[name] = boundaries_in(asked.boundary, known)
        scopes.append(Scope(boundaries[name], admitted[id(asked.filters)], moment))
    return scopes


def _check_time(name: str, time: object) -> None:
    if time is not None and not isinstance(time, datetime):
        raise ZeroMemError.of(name, "a datetime or None", time, "read it with parse_time(...)")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def bounded(trace: Trace) -> bool:
    """Whether the moment of a search decides if this trace is seen."""
    return trace.valid_from is not None or trace.valid_to is not None or trace.expires_at is not None


def utc_now() -> datetime:
    return datetime.now(UTC)

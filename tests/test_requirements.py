"""What people ask of a memory: one test, or a few, for each requirement that docs/requirements.md lists.

Requirements are numbered R1, R2, ...; a test bears the number of its own. Most are looked into elsewhere in more depth;
here each is put to the library as a user holds it.
"""

import asyncio
import io
import json
import pickle
import re
import socket
import struct
import sys
import threading
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import safetensors
import torch
from toys import RULES, HashEncoder, memory_of, talk

import zeromem_torch
from zeromem_torch import CachedEncoder, Evidence, Trace, ZeroMem, ZeroMemError
from zeromem_torch.substrate.encoder import Encoded
from zeromem_torch.substrate.tokenizer import tokenize

ROOT = Path(__file__).resolve().parent.parent
LAKE = talk(
    "lake",
    ["Have you been to Oslo?", "Yes, I bought a boat there.", "What colour is it?", "It is red, and it leaks."],
    ["The boat sank on the Mjosa last week.", "Oh no! Was anybody hurt?"],
)


def opened(path: Path, encoder: Any = None, **given: Any) -> ZeroMem:
    return ZeroMem.open(path, encoder=encoder or HashEncoder(), config=RULES, **given)


def ids(evidence: Evidence) -> list[str]:
    return [item.trace_id for item in evidence.main]


# R5: deterministic ties, and batches that change nothing


@pytest.mark.parametrize("size", [1, 7, 1024])
def test_r5_a_query_is_answered_the_same_in_any_batch(size: int) -> None:
    memory = memory_of(*LAKE, *talk("other", ["I sold the boat.", "Why?", "It leaked."]))
    asked = [("Who bought a boat?", "lake"), ("Why was it sold?", "other"), ("What leaks?", "lake")] * 350
    alone = {pair: ids(memory.search(pair[0], boundary=pair[1])) for pair in asked[:3]}
    found = []
    for start in range(0, size * 2, size):
        some = asked[start : start + size]
        found += memory.search_batch([q for q, _ in some], boundaries=[b for _, b in some])
    assert [ids(evidence) for evidence in found] == [alone[pair] for pair in asked[: len(found)]]


def test_r5_equal_texts_keep_the_order_they_were_added_in() -> None:
    memory = memory_of(*(Trace(f"d{number}", "pool", "The same text.") for number in (3, 1, 2, 0)))
    assert ids(memory.search("The same text.", boundary="pool")) == ["d3", "d1", "d2", "d0"]


# R6: nothing crosses a boundary, in any view


@pytest.mark.parametrize("name", ["a", "a_b", "a%", "acme", "acme-corp", "acme/x", "🚢", "A", "*", "..", "'; --"])
def test_r6_a_boundary_is_exact_whatever_its_name(name: str) -> None:
    names = ["a", "a_b", "a%", "ab", "acme", "acme-corp", "acme/x", "🚢", "A", "*", "..", "'; --"]
    memory = memory_of(*(Trace("1", own, "The password is here.", title="Secret") for own in names))
    found = memory.search("The password", boundary=name, top_k=99, explain=True)
    assert [(item.boundary, item.trace_id) for item in found.main] == [(name, "1")]
    assert memory.get("1", boundary=name).boundary == name
    assert [trace.boundary for trace in memory.list(boundary=name)] == [name]
    assert memory.delete_all(boundary=name) == 1
    assert len(memory) == len(names) - 1


def test_r6_a_prefix_is_asked_for_and_goes_by_whole_segments() -> None:
    memory = memory_of(*(Trace(own, own, "A note.") for own in ("acme", "acme/a", "acme/a/b", "acme-corp", "acmeX")))
    assert set(ids(memory.search("note", boundary="acme/", top_k=9))) == {"acme", "acme/a", "acme/a/b"}
    assert ids(memory.search("note", boundary="acme", top_k=9)) == ["acme"]


def test_r6_nearer_traces_of_others_starve_nobody() -> None:
    near = [Trace(f"a{number}", "alice", "The red boat of Oslo sank.") for number in range(200)]
    memory = memory_of(*near, Trace("b", "bob", "Something else altogether."))
    assert ids(memory.search("The red boat of Oslo sank.", boundary="bob")) == ["b"]
    mixed = memory_of(*(replace(trace, boundary="all", speaker="Alice") for trace in near))
    mixed.add(Trace("b", "all", "Something else altogether.", speaker="Bob"))
    assert ids(mixed.search("The red boat of Oslo sank.", boundary="all", filters={"speaker": "Bob"})) == ["b"]


# R7: files are written whole, and damage is found, said and healed


@pytest.mark.parametrize("damage", ["flip", "flip the manifest", "truncate", "empty", "remove", "remove the manifest"])
def test_r7_damage_to_the_index_is_found_reported_and_healed(tmp_path: Path, damage: str) -> None:
    with opened(tmp_path) as memory:
        memory.add(LAKE)
        expected = ids(memory.search("Who bought a boat?", boundary="lake"))
    (segment,) = (tmp_path / "index").glob("segment-*.safetensors")
    file = tmp_path / "index" / "manifest.json" if "manifest" in damage else segment
    raw = bytearray(file.read_bytes())
    if damage.startswith("remove"):
        file.unlink()
    else:
        raw[len(raw) // 2] ^= 4
        file.write_bytes(raw if damage.startswith("flip") else raw[: len(raw) // 3] if damage == "truncate" else b"")
    with opened(tmp_path) as memory:
        assert memory.notes, "what was found is said"
        assert memory.verify().ok
        assert ids(memory.search("Who bought a boat?", boundary="lake")) == expected
    with opened(tmp_path) as memory:
        assert not memory.notes, "it was healed for good"


def test_r7_a_record_that_is_no_record_is_refused_and_left_alone(tmp_path: Path) -> None:
    with opened(tmp_path) as memory:
        memory.add(LAKE)
    file = tmp_path / "memory.sqlite"
    file.write_bytes(b"not a database " * 1000)
    with pytest.raises(ZeroMemError, match=r"memory\.sqlite"):
        opened(tmp_path)
    assert file.read_bytes().startswith(b"not a database")


# R8: adding again, replacing, deleting, reopening


def test_r8_add_is_idempotent_upsert_replaces_and_delete_is_everywhere(tmp_path: Path) -> None:
    with opened(tmp_path) as memory:
        memory.add(LAKE)
        assert memory.add(LAKE) == [trace.id for trace in LAKE]
        assert len(memory) == len(LAKE)
        changed = replace(LAKE[1], text="Yes, I bought a green submarine there.")
        with pytest.raises(ZeroMemError, match="overwrite=True"):
            memory.add(changed)
        memory.add(changed, overwrite=True)
        found = memory.search("Who bought a green submarine?", boundary="lake", top_k=1)
        assert [item.text for item in found.main] == [changed.text]
        memory.delete(LAKE[4].id, boundary="lake")
    with opened(tmp_path) as memory:
        assert len(memory) == len(LAKE) - 1
        assert LAKE[4].id not in ids(memory.search("The boat sank on the Mjosa.", boundary="lake", top_k=99))
        assert ids(memory.search(changed.text, boundary="lake"))[0] == changed.id
        assert memory.verify().ok
        assert not [t for t in memory.list(limit=None) if "bought a boat" in t.text], "the old text is gone"


def test_r8_two_boundaries_may_use_one_id(tmp_path: Path) -> None:
    with opened(tmp_path) as memory:
        memory.add([Trace("1", "a", "One."), Trace("1", "b", "Two.")])
        memory.delete("1", boundary="a")
        assert memory.get("1").text == "Two."


# R9: what an update changes, and what it may not


@pytest.mark.parametrize(
    ("field", "value"),
    [("text", "New."), ("title", "T"), ("time", "2024-01-01"), ("metadata", {"k": 2}), ("expires_at", "2999-01-01")],
)
def test_r9_update_keeps_what_was_not_passed(tmp_path: Path, field: str, value: Any) -> None:
    trace = replace(LAKE[0], metadata={"k": 1, "mood": "calm"}, title="Lake")
    with opened(tmp_path) as memory:
        memory.add(trace)
        memory.update(trace.id, **{field: value})
    with opened(tmp_path) as memory:
        after = memory.get(trace.id)
        kept = {name: value for name, value in trace.to_dict().items() if name != field}
        assert {name: after.to_dict()[name] for name in kept} == kept
        assert getattr(after, field) != getattr(trace, field)
        assert after.updated_at is not None


@pytest.mark.parametrize("field", ["speaker", "role", "session", "order", "id", "boundary", "nonsense"])
def test_r9_provenance_does_not_change(field: str) -> None:
    memory = memory_of(*LAKE)
    changes: dict[str, Any] = {"boundary": "lake", field: "other"}  # an id or boundary names another trace
    with pytest.raises((ZeroMemError, TypeError)):
        memory.update(LAKE[0].id, **changes)
    assert memory.get(LAKE[0].id, boundary="lake") == LAKE[0]
    with pytest.raises(ZeroMemError, match="speaker"):
        memory.add(replace(LAKE[0], speaker="Somebody else"), overwrite=True)


def test_r9_the_old_text_no_longer_matches() -> None:
    memory = memory_of(*LAKE, Trace("x", "lake", "Zebras are striped."))
    assert ids(memory.search("Zebras are striped.", boundary="lake"))[0] == "x"
    memory.update("x", boundary="lake", text="Nothing.")
    again = memory.search("Zebras are striped.", boundary="lake", top_k=99, explain=True)
    assert all("Zebra" not in item.text for item in again.main)
    assert memory.verify().ok


# R10: when it happened, and when it was stored


FORMS = ["1:56 pm on 8 May, 2023", "2023/05/08 (Mon) 13:56", "2023-05-08T13:56:00Z", 1683554160, 1683554160000]


@pytest.mark.parametrize("form", FORMS)
def test_r10_event_time_is_not_ingestion_time(form: Any) -> None:
    memory = memory_of()
    before = datetime.now(UTC)
    memory.add("It rained.", boundary="b", timestamp=form)
    (trace,) = memory.list()
    assert trace.time == datetime(2023, 5, 8, 13, 56, tzinfo=UTC)
    assert trace.added_at is not None
    assert before <= trace.added_at <= datetime.now(UTC)
    memory.add("No time was given.", boundary="c")
    assert next(iter(memory.list(boundary="c"))).time is None, "today is not made up"


def test_r10_the_callers_zone_is_kept_through_a_change_of_clocks(tmp_path: Path) -> None:
    berlin = ZoneInfo("Europe/Berlin")
    twice = [datetime(2023, 10, 29, 2, 30, tzinfo=berlin, fold=fold) for fold in (1, 0)]  # half past two, twice
    with opened(tmp_path) as memory:
        memory.add([Trace(str(fold), "b", "Tick.", session=f"s{fold}", time=t) for fold, t in enumerate(twice)])
    with opened(tmp_path) as memory:
        held = {trace.id: trace.time for trace in memory.list()}
        assert held["0"] is not None
        assert held["0"].timestamp() == twice[0].timestamp()
        assert held["1"] is not None
        assert (held["0"] - held["1"]).total_seconds() == 3600
        assert held["0"].utcoffset() == timedelta(hours=1)
        again = [Trace(str(fold), "b", "Tick.", session=f"s{fold}", time=t) for fold, t in enumerate(twice)]
        assert memory.add(again) == ["0", "1"], "the same moments: nothing has changed"


def test_r10_every_session_date_of_locomo(shared_data: Path) -> None:
    import gzip

    data = json.loads(gzip.decompress((shared_data / "locomo" / "locomo_tuning6.json.gz").read_bytes()))
    dates = [v for talk in data for k, v in talk["conversation"].items() if re.fullmatch(r"session_\d+_date_time", k)]
    assert len(dates) > 100
    memory = memory_of()
    memory.add([{"id": str(n), "boundary": "b", "text": "Hello.", "time": date} for n, date in enumerate(dates)])
    assert all(trace.time and trace.time.year in (2022, 2023, 2024) for trace in memory.list(limit=None))


# R11: every script, and never no words at all


@pytest.mark.parametrize(
    ("stored", "asked"),
    [
        ("我住在奥斯陆的船上", "奥斯陆"),
        ("ｆｕｌｌ ｗｉｄｔｈ", "full width"),
        ("The part is CN-A10293.", "cn-a10293"),
        ("C++ is not C#.", "C#"),
        ("Version v2.1.0 is out.", "v2.1.0"),
        ("Write to ann@example.org.", "ann@example.org"),
        ("Das Straßenfest", "STRASSENFEST"),
        ("Ünïcödé 🚣", "🚣"),
        ("كتبت رسالة", "رسالة"),
    ],
)
def test_r11_what_was_written_is_found(stored: str, asked: str) -> None:
    others = [Trace(str(n), "b", text) for n, text in enumerate(["Nothing.", "天气很好", "Something else 🌧", "C."])]
    memory = memory_of(*others, Trace("x", "b", stored))
    found = memory.search(asked, boundary="b", top_k=99, explain=True)
    lexical = {item.trace_id: item.explanation["signals"]["lexical_turn"] for item in found.main if item.explanation}
    assert max(lexical, key=lambda name: lexical[name]) == "x"
    assert lexical["x"] == 1


def test_r11_no_text_is_without_tokens_in_any_category_of_unicode() -> None:
    seen: dict[str, list[str]] = {}
    for code in range(0x20, 0x20000, 7):
        char = chr(code)
        category = unicodedata.category(char)
        if category not in ("Cs", "Cn", "Co", "Cc", "Cf", "Zs", "Zl", "Zp") and len(seen.setdefault(category, [])) < 40:
            seen[category].append(char)
    assert len(seen) > 15
    memory = memory_of(Trace("x", "b", "Something."))
    for chars in seen.values():
        for char in chars:
            assert tokenize(char), f"U+{ord(char):04X}"
        text = " ".join(chars)
        assert memory.add(text, boundary="b")
        assert memory.search(text, boundary="b").found


# R12: bad input gets one clear error, and nothing is changed


@dataclass
class Bent(HashEncoder):
    """An encoder that returns what none should."""

    way: str = ""

    def encode(self, texts: Sequence[str], *, states: bool = False) -> Encoded:
        encoded = super().encode(texts, states=states)
        wrong = {
            "NaN": {"vectors": encoded.vectors * torch.nan},
            "infinity": {"states": encoded.states / 0},
            "dim": {"vectors": encoded.vectors[:, 1:]},
            "few": {"vectors": encoded.vectors[1:]},
        }
        for name, value in wrong[self.way].items() if self.way and states else ():
            object.__setattr__(encoded, name, value)  # as an encoder outside our type checks would have it
        return encoded


@pytest.mark.parametrize("way", ["NaN", "infinity", "dim", "few"])
def test_r12_vectors_that_cannot_be_are_refused_before_anything_is_stored(tmp_path: Path, way: str) -> None:
    encoder = Bent()
    with opened(tmp_path, encoder) as memory:
        memory.add(LAKE)
        encoder.way = way
        with pytest.raises(ZeroMemError, match="encoder"):
            memory.add(talk("new", ["Hello there."]))
        encoder.way = ""
        assert len(memory) == len(LAKE)
        assert memory.verify().ok
        memory.add(talk("new", ["Hello there."]))
        assert ids(memory.search("Hello", boundary="new")) == ["new/1:1"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"query": " "}, "query"),
        ({"query": "a\0"}, "NUL"),
        ({"query": "\ud800"}, "Unicode"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": -1}, "top_k"),
        ({"token_budget": 0}, "token_budget"),
        ({"boundary": ""}, "boundary"),
        ({"filters": {"nope": 1}}, "filters"),
        ({"as_of": "whenever"}, "time"),
        ({"min_score": "high"}, "min_score"),
        ({"min_score": float("nan")}, "min_score"),
    ],
)
def test_r12_searches_that_cannot_be(given: dict[str, Any], said: str) -> None:
    memory = memory_of(*LAKE)
    with pytest.raises(ZeroMemError, match=said):
        memory.search(**{"query": "boat", "boundary": "lake", **given})
    assert memory.search("boat", boundary="lake", top_k=10**6).found, "k beyond what there is finds all"


def test_r12_a_turn_of_a_megabyte_is_kept_whole(tmp_path: Path) -> None:
    text = "word " * 200_000 + "needle."
    with opened(tmp_path) as memory:
        memory.add(Trace("big", "b", text))
        assert memory.add([], boundary="b") == []
        assert memory.search_batch([], boundaries=[]) == []
    with opened(tmp_path) as memory:
        assert memory.get("big").text == text
        assert "needle" in memory.search("needle", boundary="b").main[0].text


# R15: no telemetry, no network


def test_r15_nothing_is_sent_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("the network was touched")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refused)
    monkeypatch.setattr(socket, "getaddrinfo", refused)
    with ZeroMem.open(tmp_path) as memory:  # the embedded encoder, and the tagger that dialogues need
        memory.add(LAKE)
        assert memory.search("Who bought a boat?", boundary="lake").found
        memory.verify()
    with ZeroMem.open(tmp_path) as memory:
        assert memory.search("Who bought a boat?", boundary="lake").found


# R16: no pickle


def test_r16_no_pickle_is_written_or_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("pickle was asked to read")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, refused)
    with opened(tmp_path) as memory:
        memory.add(LAKE)
        memory.search("boat", boundary="lake")
    with opened(tmp_path) as memory:
        memory.search("boat", boundary="lake")
        memory.pipeline.save_pretrained(tmp_path / "weights")
        zeromem_torch.ZeroMemPipeline.from_pretrained(tmp_path / "weights")
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size]
    assert {path.suffix for path in files} <= {".sqlite", ".safetensors", ".json", ".sqlite-wal", ".sqlite-shm"}
    for path in files:
        if path.suffix == ".safetensors":  # a header of JSON, then plain numbers
            raw = path.read_bytes()
            (length,) = struct.unpack("<Q", raw[:8])
            assert isinstance(json.loads(raw[8 : 8 + length]), dict)
            with safetensors.safe_open(path, "pt") as held:
                assert list(held.keys())
        elif path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".sqlite":
            assert path.read_bytes().startswith(b"SQLite format 3\0")


# R17: every score can be taken apart


def test_r17_an_explanation_sums_to_the_score() -> None:
    memory = memory_of(*LAKE)
    for query in ("Who bought a boat?", "What did Ann say in May 2023?", "What colour is the boat that sank?"):
        found = memory.search(query, boundary="lake", explain=True)
        assert found.route in ("relational", "local")
        for place, item in enumerate(found.items, start=1):
            explained = item.explanation
            assert explained is not None
            assert sum(explained["sums"].values()) == pytest.approx(item.score, abs=1e-5)
            assert sum(item.parts.values()) == pytest.approx(item.score, abs=1e-5)
            fused = explained["sums"]["graph"] + explained["sums"]["hierarchy"]
            assert fused == pytest.approx(item.parts["fused"], abs=1e-5)
            assert sum(explained["weights"].values()) == pytest.approx(1)
            assert set(explained["ranks"]) == {"graph", "hierarchy", "fused", "final"}
            assert item.trace_id in explained["windows"]
            assert item.trace_id in explained["episode"]
            assert (item.source is None) == (item.reason in ("main", "ranked"))
            assert item.source is None or item.source in ids(found)
            if place > 1:
                assert item.score <= found.items[place - 2].score + 1e-6
        ranks = [item.explanation["ranks"] for item in found.items if item.explanation]
        assert {name: min(rank[name] for rank in ranks) for name in ("fused", "final")} == {"fused": 1, "final": 1}
        json.dumps(found.to_dict())
    assert memory.search("boat", boundary="lake").items[0].explanation is None, "only when asked for"


# R18: reading changes nothing


def test_r18_a_thousand_searches_do_not_change_the_record(tmp_path: Path) -> None:
    with opened(tmp_path) as memory:
        memory.add(LAKE)
        before = memory._record.row_hash()
        queries = [f"Who bought boat {number}?" for number in range(1000)]
        memory.search_batch(queries[:900], boundaries=["lake"] * 900, explain=True)
        for query in queries[900:]:
            memory.search(query, boundary="lake", filters={"speaker": "Ann"})
        memory.get(LAKE[0].id)
        memory.list()
        memory.history(LAKE[0].id)
        memory.export_jsonl(io.StringIO())
        memory.verify()
        assert memory._record.row_hash() == before
        memory.update(LAKE[0].id, metadata={"seen": True})
        assert memory._record.row_hash() != before, "a hash that cannot change shows nothing"
    with opened(tmp_path, read_only=True) as reader:
        assert reader.search("boat", boundary="lake").found
        with pytest.raises(ZeroMemError, match="read_only"):
            reader.add("x", boundary="b")


# R19: async twins leave the loop free


@dataclass
class Waiting(HashEncoder):
    """An encoder that waits for the event loop: a twin that blocks the loop would wait for ever."""

    gate: threading.Event = field(default_factory=threading.Event)
    armed: bool = False

    def encode(self, texts: Sequence[str], *, states: bool = False) -> Encoded:
        if self.armed and not self.gate.wait(timeout=30):
            raise AssertionError("the event loop was blocked")
        return super().encode(texts, states=states)


def test_r19_the_loop_runs_on_while_a_search_does() -> None:
    encoder = Waiting()
    memory = memory_of(*LAKE, encoder=encoder)
    encoder.armed = True

    async def both() -> Evidence:
        searching = asyncio.create_task(memory.asearch("Who bought a boat?", boundary="lake"))
        for _ in range(20):
            await asyncio.sleep(0.001)  # turns of the loop that a blocking search would not allow
        assert not searching.done()
        encoder.gate.set()
        return await searching

    assert asyncio.run(both()).found


def test_r19_every_method_that_touches_the_disk_has_a_twin(tmp_path: Path) -> None:
    async def session() -> None:
        with opened(tmp_path) as memory:
            (own,) = await memory.aadd("I live in Oslo.", boundary="u", timestamp="2024-01-01")
            assert (await memory.asearch("Oslo", boundary="u")).found
            assert (await memory.asearch_batch(["Oslo"], boundaries=["u"]))[0].found
            assert (await memory.aupdate(own, text="I live in Lom.")).text == "I live in Lom."
            assert (await memory.aget(own)).id == own
            assert len(await memory.alist()) == 1
            assert [change.action for change in await memory.ahistory(own)] == ["add", "update"]
            await memory.adelete(own)
            assert await memory.adelete_all(boundary="u") == 0

    asyncio.run(session())


# R20: nothing is cut off in silence


def test_r20_lists_have_no_hidden_end(tmp_path: Path) -> None:
    memory = memory_of(*(Trace(str(n), f"b{n % 3}", f"Note number {n}.") for n in range(1234)))
    assert [trace.id for trace in memory.list(limit=None)] == [str(n) for n in range(1234)]
    seen: list[str] = []
    page = memory.list()
    while True:
        seen += [trace.id for trace in page]
        if page.next_cursor is None:
            break
        assert len(page) == 100
        page = memory.list(cursor=page.next_cursor)
    assert seen == [str(n) for n in range(1234)]
    assert memory.list(boundary="b0", limit=412).next_cursor is None, "just as many as there are"
    assert memory.list(boundary="b0", limit=411).next_cursor is not None
    assert len(memory.search("Note", boundary="b1", top_k=1000).main) == 411
    assert memory.export_jsonl(tmp_path / "all.jsonl") == 1234
    assert len((tmp_path / "all.jsonl").read_text().splitlines()) == 1234


# R21: the encoder is remembered


def test_r21_another_encoder_is_an_error_that_says_how_to_change(tmp_path: Path) -> None:
    with opened(tmp_path) as memory:
        memory.add(LAKE)
    with pytest.raises(ZeroMemError, match=r"made with, hash-1, got 'hash-2'.*reencode"):
        opened(tmp_path, HashEncoder(fingerprint="hash-2"))
    with pytest.raises(ZeroMemError, match=r"given as an object.*ZeroMem\.open\(path, encoder="):
        ZeroMem.open(tmp_path)
    with opened(tmp_path) as memory:
        other = HashEncoder(fingerprint="hash-2", max_tokens=12)
        memory.reencode(other)
        assert memory.verify().ok
        assert other.calls
        assert memory.search("Who bought a boat?", boundary="lake").found
    with opened(tmp_path, HashEncoder(fingerprint="hash-2", max_tokens=12)) as memory:
        assert not memory.notes
        assert memory.search("Who bought a boat?", boundary="lake").found


# R22: progress is seen where somebody looks


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("looked_at", [True, False])
def test_r22_progress_goes_to_a_terminal_and_to_a_callback(monkeypatch: pytest.MonkeyPatch, looked_at: bool) -> None:
    screen = Terminal() if looked_at else io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    done: list[tuple[int, int | None]] = []
    memory = memory_of()
    many = [Trace(str(n), "b", f"Note {n}.") for n in range(1100)]
    memory.add(many, progress=lambda count, whole: done.append((count, whole)))
    assert done == [(512, 1100), (1024, 1100), (1100, 1100)]
    assert ("reading" in screen.getvalue()) is looked_at
    lines = "\n".join(json.dumps({"text": f"Line {n}."}) for n in range(700))
    counts: list[int] = []
    assert memory.import_jsonl(io.StringIO(lines), boundary="c", progress=lambda count, _: counts.append(count)) == 700
    assert counts == [512, 700]


# The table


def test_every_requirement_that_lasts_is_in_the_table_with_a_test_that_bears_its_number() -> None:
    table = (ROOT / "docs" / "requirements.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (R\d+) \|.*?\| (.+?) \|$", table, re.MULTILINE))
    wanted = [f"R{n}" for n in (*range(5, 13), *range(15, 23))]
    assert list(rows) == wanted
    own = {name: [test for test in globals() if test.startswith(f"test_{name.lower()}_")] for name in wanted}
    for name, cell in rows.items():
        files = re.findall(r"`(tests/[\w/]+\.py)`", cell)
        assert "tests/test_requirements.py" in files
        assert all((ROOT / file).exists() for file in files), name
        assert own[name], name


def test_a_cache_forgets_what_is_purged(tmp_path: Path) -> None:
    """Part of deletion everywhere (R8): caches hold no vector of what was purged."""
    cache = CachedEncoder(HashEncoder(), tmp_path / "cache.sqlite")
    with opened(tmp_path / "memory", cache) as memory:
        memory.add(LAKE)
        kept = len(cache._ask("SELECT key FROM encoded"))
        memory.delete(LAKE[1].id, purge=True)
        assert len(cache._ask("SELECT key FROM encoded")) == kept - 1
    cache.close()

"""Tool calls of a model: what works, what every kind of malformed call gets back, and that none of them writes."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import RULES, HashEncoder

from zeromem_torch.handles import TOOLS, MemoryManager, execute
from zeromem_torch.library import ZeroMem
from zeromem_torch.substrate.traces import Trace

NAMES = [tool["function"]["name"] for tool in TOOLS]


def made() -> MemoryManager:
    memory = ZeroMem(RULES, encoder=HashEncoder())
    memory.add(Trace("a/1", "alice", "Please answer in French.", speaker="Alice"))
    memory.add(Trace("b/1", "bob", "Please answer in Dutch.", speaker="Bob"))
    return MemoryManager(memory, boundary="alice", session="s1", context_budget=200)


@pytest.fixture
def manager() -> MemoryManager:
    return made()


def call(name: object, arguments: object) -> dict[str, Any]:
    """A tool call as OpenAI's API gives it."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": text}}


def run(manager: MemoryManager, name: object, **arguments: Any) -> dict[str, Any]:
    result = execute(manager, call(name, arguments))
    assert json.loads(json.dumps(result)) == result
    return result


STORED = {"type": "preference", "key": "reply/language", "value": "French", "source": "a/1", "confidence": 0.9}


def test_a_conversation_with_the_memory(manager: MemoryManager) -> None:
    assert run(manager, "memory_store", **STORED) == {"handle": "mem:preference:reply/language"}
    handle = "mem:preference:reply/language"
    known = run(manager, "memory_retrieve", handle=handle)
    assert "French" not in json.dumps(known)
    assert (known["type"], known["key"], known["source"], known["confidence"]) == (
        "preference",
        "reply/language",
        "a/1",
        0.9,
    )
    assert known["tokens"] == 1
    assert known["expires_at"] is None
    assert run(manager, "memory_query", type="preference", key="reply/") == {
        "matches": [{"handle": handle, "score": 1.0}],
        "left_out": 0,
    }
    (found,) = run(manager, "memory_query", text="Which language to reply in?")["matches"]
    assert found["handle"] == handle
    assert not manager.context_log
    opened = run(manager, "memory_materialize", handles=[handle], token_budget=50)
    assert opened["text"] == "[mem:preference:reply/language] French"
    assert (opened["handles"], opened["left_out"]) == ([handle], [])
    assert opened["tokens"] == manager.ledger.tokens_entered
    assert run(manager, "memory_forget", handle=handle) == {"forgotten": handle}
    assert run(manager, "memory_retrieve", handle=handle)["error"]["code"] == "not_found"


def test_every_form_of_a_call_is_read(manager: MemoryManager) -> None:
    function = {"name": "memory_query", "arguments": "{}"}
    forms: list[object] = [
        {"id": "1", "type": "function", "function": function},
        SimpleNamespace(id="1", type="function", function=SimpleNamespace(**function)),
        SimpleNamespace(type="function_call", call_id="1", **function),
        function,
        {**function, "arguments": {}},
        {**function, "arguments": ""},
        {**function, "arguments": '{"type": null, "text": null}'},
    ]
    for form in forms:
        assert execute(manager, form) == {"matches": [], "left_out": 0}


def test_values_of_every_json_type(manager: MemoryManager) -> None:
    for number, value in enumerate(["text", "", 7, 7.5, True, None, [1, [2]], {"a": {"b": None}}]):
        handle = run(manager, "memory_store", type="fact", key=f"v{number}", value=value)["handle"]
        assert manager.retrieve(handle).value == value


def test_a_lifetime_is_given_in_seconds(manager: MemoryManager) -> None:
    handle = run(manager, "memory_store", type="fact", key="door", value=4711, ttl_seconds=90)["handle"]
    ttl = manager.retrieve(handle).ttl
    assert ttl is not None
    assert ttl.total_seconds() == 90


def test_what_a_query_leaves_out_is_said(manager: MemoryManager) -> None:
    for number in range(13):
        manager.store("fact", f"n{number:02}", number)
    result = run(manager, "memory_query", type="fact")
    assert len(result["matches"]) == 10
    assert result["left_out"] == 3
    assert len(run(manager, "memory_query", type="fact", limit=13)["matches"]) == 13
    assert len(run(manager, "memory_query", text="which number", limit=2)["matches"]) == 2


def test_the_budget_holds_for_a_model_too(manager: MemoryManager) -> None:
    handles = [str(manager.store("fact", f"n{n}", "word " * 50)) for n in range(6)]
    opened = run(manager, "memory_materialize", handles=handles)
    assert opened["tokens"] <= 200
    assert len(opened["handles"]) == 3
    assert opened["left_out"] == handles[3:]


MALFORMED: list[tuple[object, str, list[str]]] = [
    (None, "bad_call", ["function.name"]),
    ({}, "bad_call", ["function.name"]),
    ("memory_query", "bad_call", ["function.name"]),
    ({"function": {"arguments": "{}"}}, "bad_call", ["function.name"]),
    (call(7, {}), "bad_call", ["function.name"]),
    (call("memory_find", {}), "unknown_operation", ["memory_query"]),
    (call("memory_quer", {}), "unknown_operation", ["did you mean 'memory_query'"]),
    ({"function": {"name": "memory_query"}}, "bad_json", ["a JSON object", "None"]),
    (call("memory_query", "{"), "bad_json", ["valid JSON"]),
    (call("memory_query", "{'type': 'fact'}"), "bad_json", ["valid JSON"]),
    (call("memory_query", '{"type": "fact"} and more'), "bad_json", ["valid JSON"]),
    (call("memory_query", "[]"), "bad_json", ["a JSON object"]),
    (call("memory_query", "null"), "bad_json", ["a JSON object"]),
    (call("memory_query", '{"type": "fact", "type": "episodic"}'), "bad_json", ["each field once", "'type'"]),
    (call("memory_query", "[" * 100_000), "bad_json", ["a JSON object"]),
    (call("memory_query", '{"limit": ' + "9" * 5000 + "}"), "bad_json", ["valid JSON"]),
    (call("memory_store", '{"type": "fact", "key": "a", "value": NaN}'), "bad_json", ["'NaN'"]),
    (call("memory_store", '{"type": "fact", "key": "a", "value": 1e999}'), "refused", ["value"]),
    (call("memory_store", {"type": "fact", "key": "a"}), "bad_arguments", ["value", "required"]),
    (call("memory_store", {"key": "a", "value": "b"}), "bad_arguments", ["type", "required"]),
    (call("memory_store", {"type": None, "key": "a", "value": "b"}), "bad_arguments", ["type", "string"]),
    (call("memory_store", {**STORED, "type": "prefrence"}), "bad_arguments", ["did you mean 'preference'"]),
    (call("memory_store", {**STORED, "type": ["fact"]}), "bad_arguments", ["type", "string"]),
    (call("memory_store", {**STORED, "key": 5}), "bad_arguments", ["key", "string"]),
    (call("memory_store", {**STORED, "key": ""}), "refused", ["key", "not blank"]),
    (call("memory_store", {**STORED, "key": "a//b"}), "refused", ["key", "not empty"]),
    (call("memory_store", {**STORED, "confidence": 2}), "bad_arguments", ["confidence", "at most 1"]),
    (call("memory_store", {**STORED, "confidence": "0.9"}), "bad_arguments", ["confidence", "number"]),
    (call("memory_store", {**STORED, "confidence": True}), "bad_arguments", ["confidence", "number"]),
    (call("memory_store", {**STORED, "ttl_seconds": 0}), "bad_arguments", ["ttl_seconds", "above 0"]),
    (call("memory_store", {**STORED, "source": "b/1"}), "refused", ["source"]),
    (call("memory_store", {**STORED, "value": "a\0b"}), "refused", ["value", "NUL"]),
    (call("memory_store", '{"type": "fact", "key": "a", "value": "\\ud83d"}'), "refused", ["valid Unicode"]),
    (call("memory_store", {**STORED, "boundary": "bob"}), "bad_arguments", ["'boundary'", "leave it out"]),
    (call("memory_query", {"boundary": "bob"}), "bad_arguments", ["'boundary'"]),
    (call("memory_query", {"limit": 0}), "bad_arguments", ["limit", "at least 1"]),
    (call("memory_query", {"limit": 1.5}), "bad_arguments", ["limit", "integer"]),
    (call("memory_query", {"text": ""}), "refused", ["not blank"]),
    (call("memory_query", {"text": "tea", "key": "a"}), "refused", ["key"]),
    (call("memory_retrieve", {}), "bad_arguments", ["handle", "required"]),
    (call("memory_retrieve", {"handle": "reply/language"}), "bad_arguments", ["mem:<type>:<id>"]),
    (call("memory_retrieve", {"handle": "mem:fact:nothing"}), "not_found", ["mem:fact:nothing"]),
    (call("memory_materialize", {"handles": []}), "bad_arguments", ["handles", "at least one"]),
    (call("memory_materialize", {"handles": "mem:preference:kept"}), "bad_arguments", ["handles", "array"]),
    (call("memory_materialize", {"handles": ["mem:preference:kept", 7]}), "bad_arguments", ["handles[1]"]),
    (call("memory_materialize", {"handles": ["mem:preference:kept", "x"]}), "bad_arguments", ["mem:<type>:<id>"]),
    (call("memory_materialize", {"handles": ["mem:preference:kept", "mem:fact:x"]}), "not_found", ["mem:fact:x"]),
    (call("memory_forget", {"handle": "mem:fact:nothing"}), "not_found", ["mem:fact:nothing"]),
    (call("memory_forget", {"handle": "a/1"}), "bad_arguments", ["mem:<type>:<id>"]),
    (call("memory_forget", {"handle": "mem:preference:kept", "purge": True}), "bad_arguments", ["'purge'"]),
]


@pytest.mark.parametrize(("malformed", "code", "words"), MALFORMED)
def test_a_malformed_call_gets_an_error_and_writes_nothing(
    manager: MemoryManager, malformed: object, code: str, words: list[str]
) -> None:
    manager.store("preference", "kept", "This stays.")
    before = list(manager.memory.list().items)
    result = execute(manager, malformed)
    error = result["error"]
    assert set(error) == {"code", "message", "expected", "got", "next"}
    assert error["code"] == code
    assert [word for word in words if word not in error["message"]] == []
    assert all(error.values())
    assert len(json.dumps(result)) < 2000
    assert list(manager.memory.list().items) == before
    assert not manager.context_log


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["mem:fact:a", "fact", "a"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = sorted({field for tool in TOOLS for field in tool["function"]["parameters"]["properties"]})


@settings(deadline=None)
@given(st.sampled_from(NAMES), st.dictionaries(st.sampled_from(FIELDS) | st.text(), ANY, max_size=4), st.booleans())
def test_no_call_raises(name: str, arguments: dict[str, Any], as_text: bool) -> None:
    manager = SHARED
    result = execute(manager, call(name, arguments) if as_text else {"name": name, "arguments": arguments})
    json.dumps(result).encode()
    assert [trace.id for trace in manager.memory.list(boundary="bob").items] == ["b/1"]


SHARED = made()


def test_schemas_are_what_a_client_expects() -> None:
    assert NAMES == ["memory_store", "memory_retrieve", "memory_query", "memory_materialize", "memory_forget"]
    assert json.loads(json.dumps(TOOLS)) == TOOLS
    for tool in TOOLS:
        assert set(tool) == {"type", "function"}
        assert set(tool["function"]) == {"name", "description", "parameters"}
        parameters = tool["function"]["parameters"]
        assert parameters["additionalProperties"] is False
        assert set(parameters["required"]) <= set(parameters["properties"])
        assert "boundary" not in parameters["properties"]
        assert all("description" in field for field in parameters["properties"].values() if field["type"] != "array")

"""Files of conversations: each format as it is found in the wild, what is wrong by its line, and ids that last."""

import gzip
import io
import json
import zipfile
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeromem_torch.imports import FORMATS, Chat, read_chat, stem
from zeromem_torch.substrate.traces import Trace, ZeroMemError


def read(text: str, name: str = "chat.txt", **options: Any) -> Chat:
    return read_chat(text.encode(), name, **options)


def said(chat: Chat) -> list[tuple[str, str]]:
    return [(trace.speaker or trace.role, trace.text) for trace in chat.traces]


def lines(*values: object) -> str:
    return "\n".join(json.dumps(value) for value in values) + "\n"


def zipped(files: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return buffer.getvalue()


def chatgpt(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A conversation of ChatGPT's export: a chain of messages below an empty root."""
    mapping: dict[str, Any] = {"root": {"id": "root", "message": None, "parent": None, "children": ["n0"]}}
    for number, message in enumerate(messages):
        parent = f"n{number - 1}" if number else "root"
        children = [f"n{number + 1}"] if number + 1 < len(messages) else []
        node = {"id": f"n{number}", "parent": parent, "children": children}
        mapping[f"n{number}"] = {**node, "message": {"id": f"m{number}", **message}}
    own = {"title": "Boats", "create_time": 1683554000.5, "conversation_id": "c1"}
    return {**own, "mapping": mapping, "current_node": f"n{len(messages) - 1}", **more}


def message(role: str, *parts: Any, **more: Any) -> dict[str, Any]:
    content = {"content_type": "text", "parts": list(parts)}
    return {"author": {"role": role}, "create_time": 1683554160.0, "content": content, "recipient": "all", **more}


# Plain text


@pytest.mark.parametrize(
    "line",
    [
        "[08/05/2023, 13:56] Ann: Hello: all",
        "[08.05.23, 13:56:00] Ann: Hello: all",
        "08/05/2023, 13:56 - Ann: Hello: all",
        "08/05/2023, 1:56 pm - Ann: Hello: all",
        "[08/05/23, 1:56:00\u202fPM] Ann: Hello: all",
        "08/05/2023, 1:56 p.m. - Ann: Hello: all",
        "2023-05-08 13:56 - Ann: Hello: all",
        "2023-05-08, 13:56 - Ann: Hello: all",
        "[2023-05-08 13:56:00] Ann: Hello: all",
        "2023-05-08T13:56:00Z Ann: Hello: all",
        "2023-05-08T15:56:00+02:00 Ann: Hello: all",
        "2023/05/08 13:56 Ann: Hello: all",
        "\u200e[08/05/2023, 13:56] ~\u202fAnn: Hello: all\r",
    ],
)
def test_a_line_with_a_date(line: str) -> None:
    chat = read(line, dates="day-first")
    (trace,) = chat.traces
    assert (chat.format, chat.bad) == ("chat", [])
    assert (trace.speaker, trace.text) == ("Ann", "Hello: all")
    assert trace.time == datetime(2023, 5, 8, 13, 56, tzinfo=UTC)
    assert trace.session == "chat 2023-05-08"


def test_a_messengers_export() -> None:
    chat = read(
        "[08/05/2023, 13:56:00] Messages and calls are end-to-end encrypted.\n"
        "[08/05/2023, 13:56:00] Ann: One\n\n[so to say]\nNote: two\n"
        "[08/05/2023, 13:57:10] Bo: \u200eimage omitted\n"
        "[08/05/2023, 13:57:10] Bo: <Media omitted>\n"
        "[08/05/2023, 13:57:10] Bo: Better \u200e<This message was edited>\n"
        "[25/05/2023, 09:00:00] +44 7700 900123: Hi\n"
    )
    assert said(chat) == [("Ann", "One\n\n[so to say]\nNote: two"), ("Bo", "Better"), ("+44 7700 900123", "Hi")]
    assert chat.left_out == {"notice of the app": 1, "message without text": 2}
    assert (chat.bad, chat.notes) == ([], [])  # the 25th says which number is the day
    assert [trace.session for trace in chat.traces] == ["chat 2023-05-08"] * 2 + ["chat 2023-05-25"]
    assert [trace.order for trace in chat.traces] == sorted(trace.order for trace in chat.traces)


@pytest.mark.parametrize(
    ("days", "first", "notes"),
    [
        (["08/05/2023", "25/05/2023"], "2023-05-08", 0),
        (["05/08/2023", "05/25/2023"], "2023-05-08", 0),
        (["08/05/2023", "08/05/2023"], "2023-05-08", 1),  # nothing to go by
        (["05/08/2023", "05/09/2023", "06/01/2023"], "2023-05-08", 1),  # otherwise time would run backwards
        (["08/05/2023", "09/05/2023", "01/06/2023"], "2023-05-08", 1),
        (["2023-05-08"], "2023-05-08", 0),
    ],
)
def test_which_number_is_the_month(days: list[str], first: str, notes: int) -> None:
    chat = read("\n".join(f"[{day}, 10:00] Ann: on {day}" for day in days))
    assert str(chat.traces[0].time)[:10] == first
    assert len(chat.notes) == notes


def test_the_caller_may_say_which_number_is_the_month() -> None:
    text = "[08/05/2023, 10:00] Ann: hi"
    assert [str(read(text, dates=d).traces[0].time)[:7] for d in ("day-first", "month-first")] == ["2023-05", "2023-08"]


def test_names_without_dates() -> None:
    chat = read("Ann: Hello\nthere: now\n\nBo B. Smith: http://x.org\nUser: Hi\nASSISTANT:\nAt your service.\n")
    assert said(chat) == [
        ("Ann", "Hello"),
        ("there", "now"),  # nothing tells a name from a word with a colon behind it
        ("Bo B. Smith", "http://x.org"),
        ("user", "Hi"),
        ("assistant", "At your service."),
    ]
    assert {trace.session for trace in chat.traces} == {"chat"}
    assert [trace.order for trace in chat.traces] == [1, 2, 3, 4, 5]


def test_an_export_without_its_oldest_messages_keeps_ids_and_order() -> None:
    text = "\n".join(f"[08/05/2023, 13:5{minute // 2}] Ann: {minute % 2}" for minute in range(8))
    whole, rest = read(text).traces, read("\n".join(text.split("\n")[2:])).traces
    assert list(rest) == list(whole)[2:]
    assert len({trace.id for trace in whole}) == 8


# JSON


def test_our_own_export_comes_back_as_it_was() -> None:
    traces = [
        Trace("1", "acme/ann", "One\u2028line", "s", 3, datetime(2023, 5, 8, tzinfo=UTC), "Ann", "user", "", {"n": 1}),
        Trace("2", "acme/bo", "Two", expires_at=datetime(2024, 5, 8, tzinfo=UTC)),
    ]
    text = "\n".join(json.dumps(trace.to_dict(), ensure_ascii=False) for trace in traces)
    chat = read(text, "out.jsonl", boundary="elsewhere")
    assert (chat.format, chat.traces, chat.homeless) == ("jsonl", traces, 0)
    array = read(json.dumps([trace.to_dict() for trace in traces], indent=2), "out.json")
    assert array.traces == traces


def test_lines_without_id_or_boundary() -> None:
    chat = read(lines({"text": "a"}, {"text": "a"}, {"text": "b", "id": "x", "boundary": "own"}), "talk.jsonl.gz")
    assert [trace.boundary for trace in chat.traces] == ["talk", "talk", "own"]
    assert chat.homeless == 2
    assert len({trace.id for trace in chat.traces}) == 3


def test_questions_for_an_evaluation_are_left_out() -> None:
    chat = read(lines({"id": "1", "text": "a"}, {"question": "?", "evidence": ["1"]}))
    assert (len(chat.traces), chat.left_out) == (1, {"question": 1})


def test_openai_messages_one_a_line() -> None:
    chat = read(
        lines(
            {"role": "system", "content": "Be kind."},
            {"role": "user", "name": "Ann", "content": "Hi", "timestamp": 1683554160},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "t"}]},
            {"role": "tool", "content": "12 degrees", "tool_call_id": "t"},
            {"role": "assistant", "content": [{"type": "text", "text": "Cold."}, {"type": "image_url"}], "audio": None},
        ),
        "log.jsonl",
    )
    assert chat.format == "openai"
    assert said(chat) == [("Ann", "Hi"), ("tool", "12 degrees"), ("assistant", "Cold.")]
    assert chat.left_out == {"system message": 1, "message without text": 1}
    assert [(trace.session, trace.order) for trace in chat.traces] == [("log", 1), ("log", 2), ("log", 3)]
    assert chat.traces[0].time == datetime(2023, 5, 8, 13, 56, tzinfo=UTC)


def test_a_mistyped_content_is_not_left_out_in_silence() -> None:
    talk = [{"role": "user", "contents": "Hi"}, {"role": "assistant", "content": "Hello"}, {"role": "user", "x": 1}]
    chat = read(json.dumps({"messages": talk}), "log.json")
    assert said(chat) == [("assistant", "Hello")]
    (bad,) = chat.bad
    assert "content: expected what was said, got None; did you mean 'contents'? name it 'content'" in bad
    assert chat.left_out == {"message without text": 1}


def test_openai_messages_in_an_array() -> None:
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    chat = read(json.dumps(talk), "log.json")
    assert (chat.format, said(chat)) == ("openai", [("user", "Hi"), ("assistant", "Hello")])


def test_openai_conversations_one_a_line() -> None:
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    chat = read(lines({"messages": talk}, {"messages": talk, "id": "c7"}), "train.jsonl")
    sessions = [(trace.session, trace.order) for trace in chat.traces]
    assert sessions == [("train 1", 1), ("train 1", 2), ("c7", 1), ("c7", 2)]
    assert len({trace.id for trace in chat.traces}) == 4
    whole = read(json.dumps({"messages": talk}, indent=1), "one.json")
    assert (whole.format, len(whole.traces)) == ("openai", 2)


def test_chatgpt() -> None:
    shown = [
        message("system", ""),
        message("user", "Which boat?"),
        message("assistant", {"content_type": "image_asset_pointer"}, "The red one.", create_time=None),
        message("tool", "a web page"),
        message("user", "secret instructions", metadata={"is_visually_hidden_from_conversation": True}),
        message("assistant", "import boats", recipient="python"),
        message("user", "", " "),
        message("user", "Thanks"),
    ]
    chat = read(json.dumps([chatgpt(*shown)]), "conversations.json")
    assert chat.format == "chatgpt"
    assert said(chat) == [("user", "Which boat?"), ("assistant", "The red one."), ("user", "Thanks")]
    assert [trace.id for trace in chat.traces] == ["m1", "m2", "m7"]
    assert [(trace.session, trace.order) for trace in chat.traces] == [("c1", 1), ("c1", 2), ("c1", 3)]
    assert chat.traces[1].time == datetime(2023, 5, 8, 13, 53, 20, 500_000, UTC)  # its conversation's
    assert {trace.metadata["conversation"] for trace in chat.traces} == {"Boats"}
    assert chat.left_out == {
        "system message": 1,
        "tool message": 1,
        "hidden message": 1,
        "message without text": 2,
    }


def test_of_edited_chatgpt_messages_the_branch_that_was_shown_last() -> None:
    talk = chatgpt(message("user", "First try"), message("assistant", "No."))
    other = {"id": "x", "parent": "root", "children": [], "message": {"id": "mx", **message("user", "Second try")}}
    talk["mapping"]["x"] = other
    assert said(read(json.dumps([{**talk, "current_node": "x"}]))) == [("user", "Second try")]
    assert said(read(json.dumps([{**talk, "current_node": "n1"}]))) == [("user", "First try"), ("assistant", "No.")]
    lost = read(json.dumps([{**talk, "current_node": None}]))
    assert said(lost) == [("user", "Second try")]  # the last that nothing follows
    talk["mapping"]["root"]["parent"] = "n1"  # a ring
    assert len(read(json.dumps([{**talk, "current_node": "n1"}])).traces) == 2


def test_claude() -> None:
    talk = {
        "uuid": "c1",
        "name": "Boats",
        "created_at": "2023-05-08T13:00:00.000000Z",
        "chat_messages": [
            {"uuid": "m1", "sender": "human", "text": "Which boat?", "created_at": "2023-05-08T13:56:00.123456Z"},
            {
                "uuid": "m2",
                "sender": "assistant",
                "text": "as it was",
                "content": [{"type": "thinking"}, {"type": "text", "text": "The red one."}, {"type": "tool_use"}],
            },
            {"uuid": "m3", "sender": "human", "text": "", "content": [], "attachments": [{"file_name": "a.pdf"}]},
        ],
    }
    chat = read(json.dumps([talk, {"uuid": "c2", "name": "", "chat_messages": []}]), "conversations.json")
    assert chat.format == "claude"
    assert said(chat) == [("user", "Which boat?"), ("assistant", "The red one.")]
    assert [trace.id for trace in chat.traces] == ["m1", "m2"]
    assert chat.traces[0].time == datetime(2023, 5, 8, 13, 56, 0, 123456, UTC)
    assert chat.traces[1].time == datetime(2023, 5, 8, 13, tzinfo=UTC)
    assert chat.traces[0].metadata == {"conversation": "Boats"}
    assert chat.left_out == {"message without text": 1, "attachment": 1}


# Packed files


def test_gzip_and_zip_are_seen_by_their_content() -> None:
    text = json.dumps([chatgpt(message("user", "Hi"))])
    assert len(read_chat(gzip.compress(text.encode()), "c.dat").traces) == 1
    packed = zipped({"chat.html": "x", "conversations.json": text, "user.json": "{}"})
    chat = read_chat(packed, "export-2023.zip")
    assert (chat.format, said(chat), chat.traces[0].boundary) == ("chatgpt", [("user", "Hi")], "export-2023")
    split = zipped({"a/conversations-000.json": text, "a/conversations-001.json": text.replace('"m0"', '"m9"')})
    assert [trace.id for trace in read_chat(split, "e.zip").traces] == ["m0", "m9"]


def test_a_zipped_chat_takes_the_archives_name() -> None:
    packed = zipped({"_chat.txt": "Ann: hi", "__MACOSX/._chat.txt": "junk"})
    (trace,) = read_chat(packed, "Chat with Ann.zip").traces
    assert (trace.boundary, trace.session) == ("Chat with Ann", "Chat with Ann")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a/b/chat.txt", "chat"),
        ("C:\\talks\\chat.jsonl.gz", "chat"),
        ("conversations.JSON", "conversations"),
        ("v1.2 notes.txt", "v1.2 notes"),
        ("export.zip", "export"),
        (".txt", ".txt"),
        ("stdin", "stdin"),
    ],
)
def test_stem(name: str, expected: str) -> None:
    assert stem(name) == expected


# What goes wrong


@pytest.mark.parametrize(
    ("raw", "options", "words"),
    [
        (b"", {}, "f.txt: expected conversations, got 'an empty file'"),
        (b" \n ", {}, "an empty file"),
        (b"A note about boats.\nNothing else.", {}, "zeromem add -"),
        (b"A note about boats.", {"format": "chat"}, '"Ann: Hello" lines'),
        (b"Ann: \xff\xfe", {}, "expected text in UTF-8, got 'the byte 0xff at 5'"),
        (b"\x1f\x8bnot really", {}, "expected a file that can be unpacked"),
        (b"PK\x03\x04not really", {}, "expected a file that can be unpacked"),
        (zipped({"readme": "x"}), {}, "expected conversations.json, or .jsonl, .json or .txt files"),
        (zipped({"a.txt": "Ann: hi", "b.json": '{"text": "x"}'}), {}, "expected more of the format chat, got 'jsonl'"),
        (b'[{"mapping": {}}, {"map', {}, "expected JSON, got "),
        (b'{\n"mapping": {},\n"tit', {}, "it may be cut short"),
        (b"[" * 100_000, {}, "expected one of these"),
        (b"{" + b'"a":{' * 100_000, {}, "expected JSON"),
        (b'{"text": "x"}', {"format": "chatgpt"}, "ChatGPT's exported conversations.json, got 'what looks like"),
        (b"Ann: hi", {"format": "claude"}, "leave --format out"),
        (b"Ann: hi", {"format": "whatsapp"}, "format: expected one of auto, jsonl, chat"),
        (b"Ann: hi", {"dates": "iso"}, "dates: expected one of auto, day-first"),
        (b"Ann: hi", {"boundary": "a//b"}, "boundary: expected segments that are not empty"),
        (b"Ann: hi", {"boundary": ""}, "boundary: expected something that is not blank"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_in_words(raw: bytes, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ZeroMemError) as error:
        read_chat(raw, "f.txt", **options)
    assert words in str(error.value)
    assert len(str(error.value)) < 700


def test_bad_lines_are_told_by_number_and_the_rest_is_read() -> None:
    chat = read(
        '{"text": "good"}\nnot json\n\n[1]\n{"text": ""}\n{"text": "x", "spoker": "Ann"}\n'
        '{"text": "x", "time": "soon"}\n'
        '{"id": "1", "text": "one"}\n{"id": "1", "text": "two"}\n{"id": "1", "text": "one"}\n{"text": "a\\ud800"}\n',
        "talk.jsonl",
    )
    assert [trace.text for trace in chat.traces] == ["good", "one"]
    assert [why.split(":")[0] for why in chat.bad] == [f"talk.jsonl line {n}" for n in (2, 4, 5, 6, 7, 9, 11)]
    assert "mend the line" in chat.bad[0]
    assert "did you mean 'speaker'" in chat.bad[3]
    assert chat.left_out == {"repeated line": 1}


def test_bad_messages_of_exports_are_told_by_place() -> None:
    claude = {"chat_messages": [7, {"uuid": "m", "sender": "human", "text": "x", "created_at": "never"}]}
    chat = read(json.dumps([claude, 5, {"chat_messages": None}]), "conversations.json")
    assert [why.split(":")[0] for why in chat.bad] == [
        "conversations.json[0], chat_messages[0]",
        "conversations.json[0], chat_messages[1]",
        "conversations.json[1]",
        "conversations.json[2]",
    ]
    broken = read(json.dumps([chatgpt(message("user", "x", create_time="never")), {"mapping": 3}]), "c.json")
    assert [why.split(":")[0] for why in broken.bad] == ["c.json[0], message n0", "c.json[1]"]


def test_days_that_do_not_exist_are_told_by_line() -> None:
    chat = read("[31/02/2023, 10:00] Ann: hi\n[01/03/2023, 25:00] Ann: ho\n[01/03/2023, 10:00] Ann: good")
    assert [trace.text for trace in chat.traces] == ["good"]
    assert [why.split(":")[0] for why in chat.bad] == ["chat.txt line 1", "chat.txt line 2"]


def test_lines_before_the_first_message_are_told() -> None:
    chat = read("Chat history\n[01/03/2023, 10:00] Ann: good")
    assert len(chat.bad) == 1
    assert "remove what stands above the first message" in chat.bad[0]


# Properties


@pytest.mark.parametrize(
    ("text", "more"),
    [
        ("Ann: a\nBo: a\nAnn: a\n", "Ann: b"),
        ("[08/05/2023, 13:56] Ann: a\n[08/05/2023, 13:56] Ann: a\n", "[08/05/2023, 13:56] Bo: b"),
        (lines({"text": "a"}, {"text": "a"}), '{"text": "a"}'),
        (lines({"role": "user", "content": "a"}, {"role": "user", "content": "a"}), '{"role": "user", "content": "a"}'),
        ('{"messages": [{"role": "user", "content": "a"}]}\n' * 2, '{"messages": [{"role": "user", "content": "a"}]}'),
    ],
)
def test_a_file_that_has_grown_has_the_same_traces_and_more(text: str, more: str) -> None:
    once, grown = read(text).traces, read(text + more).traces
    assert once == read(text).traces
    assert len({trace.id for trace in grown}) == len(grown) == len(once) + 1
    assert grown[: len(once)] == once


@given(st.text(max_size=200) | st.binary(max_size=200), st.sampled_from(["auto", *FORMATS]))
def test_any_file_is_read_or_refused_in_words(raw: str | bytes, format: str) -> None:
    with suppress(ZeroMemError):
        chat = read_chat(raw if isinstance(raw, bytes) else raw.encode(errors="surrogatepass"), "f", format=format)
        assert all(why.startswith("f") for why in chat.bad)


KEYS = "mapping current_node message messages chat_messages author content parts text role parent id".split()
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(KEYS), inner),
    max_leaves=20,
)


@given(st.lists(JSON, max_size=4))
def test_any_json_is_read_or_refused_in_words(values: list[Any]) -> None:
    for text in (json.dumps(values), lines(*values)):
        with suppress(ZeroMemError):
            assert all(why.startswith("f.json") for why in read(text, "f.json").bad)

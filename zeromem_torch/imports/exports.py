"""Conversations in JSON: traces, OpenAI's messages, and what ChatGPT and Claude export.

The exports have no published schema. What is read here is what they have in common over the years; any of it may be
missing, and what is not known is passed by.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from zeromem_torch.imports.chat import Json, Piece, Reader
from zeromem_torch.substrate.traces import ZeroMemError, nearest


def _read_traces(reader: Reader, pieces: Sequence[Piece]) -> None:
    for place, value in reader.objects(pieces):
        if "question" in value:  # of a file for `zeromem eval`
            reader.leave_out("question")
        else:
            reader.say(place, value)


_NOT_KEPT = {"tool_calls", "tool_call_id", "function_call", "refusal", "audio", "annotations", "weight"}
_TIMES = ("timestamp", "created_at", "create_time")


def _read_openai(reader: Reader, pieces: Sequence[Piece]) -> None:
    """An object with `messages` is a session; messages that stand alone are one, all of the file."""
    turns: Counter[str] = Counter()
    for number, (place, value) in enumerate(reader.objects(pieces), start=1):
        if "messages" in value:
            own = next((str(value[name]) for name in ("session", "conversation_id", "id") if value.get(name)), "")
            shared = {"session": own or f"{reader.stem} {number}", "boundary": value.get("boundary")}
            messages = reader.each(place, value, "messages")
        else:
            shared, messages = {"session": reader.stem}, iter([(place, value)])
        for where, message in messages:
            if message.get("role") in ("system", "developer"):
                reader.leave_out(f"{message['role']} message")
                continue
            if not (text := _text_of(message.get("content"))):
                if "content" not in message and (close := nearest("content", message)):  # left out, it would be lost
                    reader.refuse(where, ZeroMemError.of("content", "what was said", None, f"{close}name it 'content'"))
                else:
                    reader.leave_out("message without text")
                continue
            fields = {name: one for name, one in message.items() if name not in (*_NOT_KEPT, *_TIMES, "content")}
            fields = {**shared, **{name: one for name, one in fields.items() if one is not None}, "text": text}
            fields.setdefault("time", next((message[name] for name in _TIMES if name in message), None))
            session = str(fields["session"])
            turns[session] += 1
            reader.say(where, {"order": turns[session], **fields})


def _read_chatgpt(reader: Reader, pieces: Sequence[Piece]) -> None:
    """Of each conversation, a tree of edits, the branch that was shown last."""
    for number, (place, value) in enumerate(reader.objects(pieces), start=1):
        nodes = value.get("mapping")
        if not isinstance(nodes, Mapping):
            reader.refuse(place, ZeroMemError.of("mapping", "an object of messages", nodes, "export it again"))
            continue
        session = str(value.get("conversation_id") or value.get("id") or f"{reader.stem} {number}")
        order = 0
        for name, message in _branch(nodes, value.get("current_node")):
            role, content = _inner(message, "author").get("role"), _inner(message, "content").get("parts")
            if role not in ("user", "assistant"):
                reader.leave_out(f"{role} message")
            elif _inner(message, "metadata").get("is_visually_hidden_from_conversation"):
                reader.leave_out("hidden message")
            elif not (text := _text_of(content)) or message.get("recipient") not in (None, "all"):
                reader.leave_out("message without text")  # an image, a thought, code for a tool
            else:
                order += 1
                time = message.get("create_time") or value.get("create_time")
                own = {"id": message.get("id") or name, "text": text, "role": role, "time": time}
                shared = {"session": session, "order": order, "metadata": _titled(value.get("title"))}
                reader.say(f"{place}, message {name}", {**own, **shared})


def _branch(nodes: Json, current: object) -> Iterator[tuple[str, Json]]:
    """Messages from the first one to the current one, by the names of their nodes."""
    if not isinstance(current, str) or current not in nodes:  # the last one that nothing follows
        current = next((name for name in reversed(list(nodes)) if not _inner(nodes, name).get("children")), None)
    path: dict[str, Json] = {}
    while isinstance(current, str) and current in nodes and current not in path:
        path[current] = _inner(nodes, current)
        current = path[current].get("parent")
    for name in reversed(path):
        if message := _inner(path[name], "message"):  # the root has none
            yield name, message


def _read_claude(reader: Reader, pieces: Sequence[Piece]) -> None:
    for number, (place, value) in enumerate(reader.objects(pieces), start=1):
        session = str(value.get("uuid") or f"{reader.stem} {number}")
        order = 0
        for where, message in reader.each(place, value, "chat_messages"):
            for held in (message.get("attachments"), message.get("files")):
                for _ in held if isinstance(held, list) else ():
                    reader.leave_out("attachment")
            if not (text := _text_of(message.get("content")) or _text_of(message.get("text"))):
                reader.leave_out("message without text")
                continue
            order += 1
            role = "user" if message.get("sender") == "human" else "assistant"
            time = message.get("created_at") or value.get("created_at")
            own = {"id": message.get("uuid"), "text": text, "role": role, "time": time}
            shared = {"session": session, "order": order, "metadata": _titled(value.get("name"))}
            reader.say(where, {**own, **shared})


def _text_of(content: object) -> str:
    """The text in a message's content: a string, or a list of parts of which some are text."""
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    return "\n".join(text for text in texts if isinstance(text, str) and text.strip())


def _inner(value: Json, key: str) -> Json:
    inner = value.get(key)
    return inner if isinstance(inner, Mapping) else {}


def _titled(title: object) -> dict[str, str]:
    return {"conversation": title} if isinstance(title, str) and title.strip() else {}


JSON_READERS: dict[str, Callable[[Reader, Sequence[Piece]], None]] = {
    "jsonl": _read_traces,
    "openai": _read_openai,
    "chatgpt": _read_chatgpt,
    "claude": _read_claude,
}

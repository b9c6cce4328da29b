"""Every word a chart or a table shows, in English and Chinese (Prefill and Decode as in the articles)."""

from __future__ import annotations

import unicodedata

from pdlib.spec import one_of
from pdlib.words import articles, latency, transfer

LANGUAGES = ("en", "zh")

WORDS: dict[str, tuple[str, str]] = {**articles.WORDS, **latency.WORDS, **transfer.WORDS}


def say(key: str, lang: str, *values: object) -> str:
    """The text of `key` in `lang`, with {0}, {1} … replaced; InputError for an unknown language."""
    one_of("language", lang, LANGUAGES)
    return WORDS[key][LANGUAGES.index(lang)].format(*values)


def name(key: str, lang: str) -> str:
    """Like `say` where there may be nothing to translate: a key without words stands for itself."""
    return say(key, lang) if key in WORDS else key


def wrapped(lines: list[str], width: int) -> list[str]:
    """Lines of at most `width` columns, broken at blanks; a Chinese character counts as two columns."""
    made = []
    for line in lines:
        now = ""
        for word in line.split(" "):
            if now and _columns(f"{now} {word}") > width:
                made.append(now)
                now = "    " + word
            else:
                now = f"{now} {word}" if now else word
        made.append(now)
    return made


def _columns(text: str) -> int:
    """Width of `text` in columns of a Latin letter."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)

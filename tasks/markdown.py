"""Text that others wrote (models, data sets) inside Markdown that people read: shown as it is, formatting nothing."""

import re
import unicodedata

_ACTIVE = re.compile(r"([\\`*\[\]<>|~&!#])")
"""Characters that could start formatting, a link, an image, HTML or a table cell."""


def cell(value: object, longest: int = 300) -> str:
    """`value` in one line, for a table cell or a sentence; None is empty, a float has four digits."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return _ACTIVE.sub(r"\\\1", shortened(visible(str(value)).replace("\n", " "), longest))


def block(text: str, longest: int = 500) -> str:
    """`text` as a code block that nothing inside it can end."""
    shown = shortened(visible(text), longest)
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", shown)), default=0))
    return f"{fence}text\n{shown}\n{fence}"


def visible(text: str) -> str:
    """`text` with what does not show (control characters, changes of the writing direction) as its code point."""
    return "".join(
        c if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Co") else f"\\u{{{ord(c):x}}}"
        for c in text.replace("\r\n", "\n"))


def shortened(text: str, longest: int) -> str:
    """The first `longest` characters, and how many are left out."""
    return text if len(text) <= longest else f"{text[:longest]} … ({len(text) - longest} characters more)"

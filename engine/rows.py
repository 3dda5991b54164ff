"""Rows of data: read from JSON lines, checked for the form of a prompt, known by the digest of what they ask.

Standard library only: the landing of prompts judges files by the same rules as the prepare stage.
"""

import gzip
import hashlib
import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, BinaryIO

from engine.spec.prepare import FileSource

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
MAX_LINE_BYTES = 16 << 20
"""A longer line is a bad row: memory must not depend on the file."""
ROLES = ("system", "user", "assistant", "tool")
DIGEST_BYTES = 16
"""128 bits: a chance collision among a billion prompts is less likely than 1e-20."""


@dataclass(frozen=True)
class Row:
    """One row as it was read."""

    file: str
    line: int
    """From 1; the row's number in formats without lines."""
    fields: dict[str, Any]


@dataclass(frozen=True)
class BadRow:
    """One row that cannot be used: a line of the quarantine file."""

    file: str
    line: int
    kind: str
    """What it is counted under: utf8, json, gzip, schema, empty, equal, template, duplicate, overlap,
    overlong."""
    reason: str


@dataclass(frozen=True)
class Candidate:
    """A row of the right form, before the template and the tokenizer have seen it."""

    file: str
    line: int
    content: str | list[dict[str, str]]
    """A raw string, or chat messages."""
    answer: str
    task: str
    metadata: dict[str, Any]
    tools: list[Any] | None = None
    question: str | None = None
    """Of a generated row: what is asked, before any template."""
    responses: tuple[str, ...] = ()
    """To train on: the demonstrated one, or the chosen and the rejected one."""

    @property
    def text(self) -> str:
        """What a person reads: the last message."""
        return self.content if isinstance(self.content, str) else self.content[-1]["content"]

    def bad(self, kind: str, reason: str) -> BadRow:
        """This row as a line of the quarantine file."""
        return BadRow(self.file, self.line, kind, reason)

    def digest(self) -> bytes:
        """Of all that the model is given, white space around messages aside; not of the answer."""
        parts = self._turns()
        parts = [parts, self.tools] if self.tools else parts
        return _digest({"prompt": parts, "responses": self.responses} if self.responses else parts)

    def asked_digest(self) -> bytes:
        """Of the task alone: a held-out question in other words of the system is still the held-out question."""
        if self.question is not None:
            return _digest(self.question.strip())
        turns = self._turns()
        return _digest(turns if isinstance(turns, str) else [turn for turn in turns if turn[0] != "system"])

    def _turns(self) -> Any:
        if isinstance(self.content, str):
            return self.content.strip()
        return [[message["role"], message["content"].strip()] for message in self.content]


def read_lines(uri: str, stream: BinaryIO) -> Iterator[Row | BadRow]:
    """The rows of a file of JSON lines (gzip when the name ends in `.gz`), one in memory at a time."""
    lines = gzip.GzipFile(fileobj=stream) if uri.endswith(".gz") else stream
    number = 0
    try:
        while content := lines.readline(MAX_LINE_BYTES):
            number += 1
            if len(content) == MAX_LINE_BYTES and not content.endswith(b"\n"):
                _skip_line(lines)
                yield BadRow(uri, number, "json", f"line is longer than {MAX_LINE_BYTES} bytes")
            elif content.strip():
                yield _parse_line(uri, number, content)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        yield BadRow(uri, number + 1, "gzip", f"truncated or corrupt gzip: {error}; the rest of the file is lost")


class _Wrong(ValueError):
    """What is wrong with a row: kind and reason."""


def check_row(row: Row, source: FileSource, chat: bool, responses: tuple[str, ...] = ()) -> Candidate | BadRow:
    """Read a row by the column names of its source.

    Args:
        chat: the tokenizer has a chat template, so that a string prompt is a user message.
        responses: which ones a row of the set has, see `engine.spec.prepare.RESPONSES`.
    """
    try:
        fields = dict(row.fields)
        content = _check_prompt(_take(fields, source.prompt_field), source.prompt_field)
        if chat and isinstance(content, str):
            content = [{"role": "user", "content": content}]
        texts = _take_responses(fields, [getattr(source, f"{name}_field") for name in responses])
        answer = "" if responses or source.answer_field is None else _as_text(_take(fields, source.answer_field))
        task = fields.pop(source.task_field, None) if source.task_field else None
        tools = fields.pop(source.tools_field, None) if source.tools_field else None
        if tools is not None and not isinstance(tools, list):
            raise _Wrong("schema", f"{source.tools_field} is {type(tools).__name__}, not a list")
        task_name = _check_encodable(task) if isinstance(task, str) and task else _stem(row.file)
        return Candidate(row.file, row.line, content, answer, task_name, _as_json(fields), _as_json(tools) or None,
                         responses=texts)
    except _Wrong as wrong:
        return BadRow(row.file, row.line, *wrong.args)


def _skip_line(lines: Any) -> None:
    while (content := lines.readline(MAX_LINE_BYTES)) and not content.endswith(b"\n"):
        continue


def _parse_line(uri: str, number: int, content: bytes) -> Row | BadRow:
    try:
        text = content.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        return BadRow(uri, number, "utf8", f"bad UTF-8 at byte {error.start} of the line: {error.reason}")
    try:
        fields = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        return BadRow(uri, number, "json", f"not JSON: {error}")
    if not isinstance(fields, dict):
        return BadRow(uri, number, "schema", f"not an object but {type(fields).__name__}")
    return Row(uri, number, fields)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _digest(parts: Any) -> bytes:
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=DIGEST_BYTES).digest()


def _take(fields: dict[str, Any], name: str) -> Any:
    if fields.get(name) is None:
        raise _Wrong("schema", f"no field {name!r}")
    return fields.pop(name)


def _take_responses(fields: dict[str, Any], names: list[str]) -> tuple[str, ...]:
    texts = []
    for name in names:
        text = _take(fields, name)
        if not isinstance(text, str):
            raise _Wrong("schema", f"{name} is {type(text).__name__}, not a string")
        texts.append(_check_text(text, name))
    if len({text.strip() for text in texts}) < len(texts):
        raise _Wrong("equal", f"{' and '.join(names)} are equal: the pair prefers nothing")
    return tuple(texts)


def _check_prompt(value: Any, name: str) -> str | list[dict[str, str]]:
    if isinstance(value, str):
        return _check_text(value, name)
    if not isinstance(value, list):
        raise _Wrong("schema", f"{name} is {type(value).__name__}, not a string or a list of messages")
    if not value:
        raise _Wrong("empty", f"{name} has no messages")
    messages = [_check_message(message, f"{name}[{place}]") for place, message in enumerate(value)]
    if messages[-1]["role"] in ("assistant", "system"):
        raise _Wrong("schema", f"{name} ends with a message of the {messages[-1]['role']}, not of the user")
    return messages


def _check_message(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise _Wrong("schema", f"{where} is {type(message).__name__}, not an object with role and content")
    given = {key: value for key, value in message.items() if value is not None}
    if given.keys() != {"role", "content"}:
        raise _Wrong("schema", f"{where} has the keys {sorted(given)}, not role and content")
    if given["role"] not in ROLES:
        raise _Wrong("schema", f"{where}.role is {str(given['role'])[:40]!r}, not one of {', '.join(ROLES)}")
    if not isinstance(given["content"], str):
        raise _Wrong("schema", f"{where}.content is {type(given['content']).__name__}, not a string")
    return {"role": given["role"], "content": _check_text(given["content"], f"{where}.content")}


def _check_text(text: str, where: str) -> str:
    if not text.strip():
        raise _Wrong("empty", f"{where} is empty")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _Wrong("utf8", f"{where} has half a surrogate pair at character {error.start}") from None
    return text


def _as_text(answer: Any) -> str:
    return _check_encodable(answer if isinstance(answer, str) else json.dumps(_as_json(answer), sort_keys=True))


def _check_encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _Wrong("utf8", f"half a surrogate pair at character {error.start} of {text[:20]!r}") from None
    return text


def _as_json(value: Any) -> Any:
    """`value` with what JSON cannot say (dates, decimals, bytes of Parquet columns) as text."""
    if isinstance(value, str):
        return _check_encodable(value)
    if isinstance(value, dict):
        return {_check_encodable(str(key)): _as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(item) for item in value]
    if value is None or isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)


def _stem(file: str) -> str:
    name = PurePosixPath(file).name
    return next((name.removesuffix(suffix) for suffix in SUFFIXES if name.endswith(suffix)), name)

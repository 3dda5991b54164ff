"""Reads Dockerfiles as far as ours go: instructions, stages, continuation lines, build arguments."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "docker"


def instructions(name: str) -> list[tuple[str, str]]:
    """(INSTRUCTION, arguments) in order, continuation lines joined, comments gone."""
    text = re.sub(r"^\s*#.*\n", "", (FOLDER / name).read_text(), flags=re.MULTILINE)
    lines = filter(None, map(str.strip, re.sub(r"\\\n", " ", text).splitlines()))
    return [(word, " ".join(rest.split())) for word, _, rest in (line.partition(" ") for line in lines)]


def stages(name: str) -> list[list[tuple[str, str]]]:
    """The instructions of each stage, FROM first."""
    found: list[list[tuple[str, str]]] = []
    for instruction in instructions(name):
        if instruction[0] == "FROM":
            found.append([])
        found[-1].append(instruction)
    return found


def expand(text: str, arguments: dict[str, str]) -> str:
    """Replace ${NAME} of build arguments."""
    return re.sub(r"\$\{(\w+)\}", lambda match: arguments[match[1]], text)

"""The names of docs/metrics.md, for tests that look at what a stage logs."""

import re
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"
PLACES = {"<objective>": "(?:sft|reward_model|dpo|ipo)", "<reward>": r"[\w.-]+", "<phase>": "[a-z]+"}


def documented() -> list[tuple[str, str]]:
    """Every name of the tables, and the unit column of its row."""
    rows = [line.split("|")[1:4] for line in DOCUMENT.read_text().splitlines() if line.startswith("| `")]
    return [(name, unit.strip()) for names, unit, _ in rows for name in re.findall(r"`([^`]+)`", names)]


def pattern(name: str) -> re.Pattern:
    """What a name with placeholders stands for."""
    text = re.escape(name)
    for place, meaning in PLACES.items():
        text = text.replace(re.escape(place), meaning)
    return re.compile(text)


def undocumented(metrics) -> list[str]:
    """Those of some metrics that the tables do not have; `_before` at the end is allowed for `eval/`."""
    names = [name for name, _ in documented()]
    patterns = [pattern(name) for name in [*names, *(f"{name}_before" for name in names if name.startswith("eval/"))]]
    return sorted(name for name in metrics if not any(p.fullmatch(name) for p in patterns))

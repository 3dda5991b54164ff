"""What a reviewer reads: the gate's table, answers of both models side by side, where to look further. Pure."""

from collections.abc import Iterable, Mapping, Sequence

from engine.spec.evaluation import Pair, SampleRecord, choose_pairs
from tasks.gates import GateResult
from tasks.markdown import block, cell

LONGEST_PROMPT, LONGEST_RESPONSE = 300, 500
"""Characters shown of a text; with at most 12 pairs a page stays below 25 kB."""
KINDS = {"gained": "Answers that got better", "lost": "Answers that got worse", "changed": "Other words, same score"}


def pairs_of(lines: Iterable[str]) -> list[Pair]:
    """Greedy answers of champion and candidate worth reading, from the lines of an evaluation's `samples.jsonl`."""
    samples = (SampleRecord.model_validate_json(line) for line in lines if line.strip())
    return choose_pairs(samples, "champion", "candidate")


def summary(verdict: GateResult, links: Mapping[str, str]) -> str:
    """The gate's table and the links, Markdown: the description of the model version."""
    listed = "\n".join(f"- [{name}]({url})" for name, url in links.items() if url)
    return verdict.markdown() + (f"\n{listed}\n" if listed else "")


def review_page(verdict: GateResult, pairs: Sequence[Pair], links: Mapping[str, str]) -> str:
    """The whole evidence, Markdown: the body of the approval. What models and data say formats nothing in it."""
    sections = [summary(verdict, links)]
    for kind, title in KINDS.items():
        chosen = [pair for pair in pairs if pair.kind == kind]
        if chosen:
            sections.append("\n\n".join([f"### {title}", *map(_pair, chosen)]))
    return "\n\n".join(sections) + "\n"


def _pair(pair: Pair) -> str:
    old, new = pair.before, pair.after
    expected = f", expected {cell(new.answer, 100)}" if new.answer else ""
    return "\n\n".join([
        f"**{cell(new.task, 50)} {cell(new.id, 50)}**{expected}", block(new.prompt, LONGEST_PROMPT),
        f"Champion, score {old.score:g}, {old.tokens} tokens:", block(old.response, LONGEST_RESPONSE),
        f"Candidate, score {new.score:g}, {new.tokens} tokens:", block(new.response, LONGEST_RESPONSE)])

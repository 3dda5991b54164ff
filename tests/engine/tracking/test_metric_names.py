"""docs/metrics.md has every metric that a stage logs, with a unit, and none that no stage logs.

The names are read from the source: every literal or f-string of the modules that make metrics that looks like one. What
real stages log is checked against the same tables where they run (test_train, test_finetune, test_every_algorithm).
"""

import ast
import re
from pathlib import Path

import torch

from engine.algorithms.mismatch import mismatch_metrics
from engine.controller.phases import PHASES
from engine.spec.tracking import clean_metric_name
from engine.workers.reward import _RATES
from tests.engine.metric_names import documented, pattern, undocumented

ENGINE = Path(__file__).parents[3] / "engine"
MODULES = [*sorted((ENGINE / "dataflows").glob("*.py")), *sorted((ENGINE / "workers").glob("*.py")),
           ENGINE / "train.py", ENGINE / "finetune.py"]
OBJECTIVES = ["sft", "reward_model", "dpo", "ipo"]
PAIRS = OBJECTIVES[1:]
FILLED = {
    ("objectives.py", "actor/{name}"): [f"actor/{name}" for name in ("entropy", "kl_loss")],
    ("safe_rlhf.py", "cost_{name}"): [],
    ("steps.py", "rollout/{name}"): [f"rollout/{name}" for name in mismatch_metrics(torch.ones(6))],
    ("train.py", "time/{name}_s"): [f"time/{name}_s" for name in PHASES],
    ("train.py", "memory/{phase}_bytes"): ["memory/generate_bytes"],
    ("minibatches.py", "{role}/grad_norm"): [
        f"{role}/grad_norm" for role in ("actor", "critic", "cost_critic", *OBJECTIVES)],
    ("minibatches.py", "{role}/lr"): [f"{role}/lr" for role in ("actor", "critic", "cost_critic", *OBJECTIVES)],
    ("minibatches.py", "{role}/skipped_steps"): [
        f"{role}/skipped_steps" for role in ("actor", "critic", "cost_critic", *OBJECTIVES)],
    ("reward.py", "{prefix}/mean"): ["reward/mean"], ("reward.py", "{prefix}/std"): ["reward/std"],
    ("reward.py", "{prefix}/errors"): ["reward/errors"],
    ("reward.py", "{prefix}/{name}/mean"): ["reward/exact/mean"],
    ("reward.py", "{prefix}/{name}/{rate}"): [f"reward/exact/{rate}" for rate in _RATES],
    ("finetune.py", "{role}/loss"): [], ("finetune.py", "{role}/accuracy"): [],  # read, not made
}
"""What an f-string of a module becomes; the second critic's are those of the first with another prefix."""
OF_OBJECTIVES = {"loss": [*OBJECTIVES, "eval"], "accuracy": [*OBJECTIVES, "eval"], "sequence_accuracy": ["sft", "eval"],
                 "chosen_score": [*PAIRS, "eval"], "rejected_score": [*PAIRS, "eval"]}
NAME = re.compile(r"[a-z_{}.]+(/[a-z0-9_{}.]+)+")


def literals(path):
    """Strings of a module that have the form of a metric's name, f-strings with their fields in braces."""
    tree = ast.parse(path.read_text())
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)
              if part is not node}
    for node in ast.walk(tree):
        if id(node) in inside:
            continue
        if isinstance(node, ast.JoinedStr):
            text = "".join(part.value if isinstance(part, ast.Constant) else "{" + ast.unparse(part.value) + "}"
                           for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        if NAME.fullmatch(text) and text != "{seed}/{iteration}/{sample_id}":
            yield text


def logged():
    """Every name that the source can log."""
    names = set()
    for path in MODULES:
        for text in literals(path):
            key = (path.name, text)
            if text.startswith("{self.role}/"):
                end = text.removeprefix("{self.role}/")
                names |= {f"{role}/{end}" for role in OF_OBJECTIVES[end]}
            elif "{" in text:
                assert key in FILLED, f"{path.name}: {text} is a new family of metrics; say in FILLED what it becomes"
                names |= set(FILLED[key])
            else:
                names.add(text)
    return names | {name.replace("critic/", "cost_critic/", 1) for name in names if name.startswith("critic/")}


def test_every_metric_of_the_source_is_documented():
    names = logged()
    assert len(names) > 80 and {"actor/loss", "rollout/mismatch_k3", "time/update_s", "dpo/chosen_score"} <= names
    assert undocumented(names) == []


def test_every_documented_metric_is_in_the_source():
    names = logged()
    assert [name for name, _ in documented() if not any(pattern(name).fullmatch(known) for known in names)] == []


def test_no_name_is_documented_twice_and_mlflow_takes_all_as_they_are():
    names = [name for name, _ in documented()]
    assert len(set(names)) == len(names)
    for name in names:
        shown = name.replace("<reward>", "math_verify").replace("<phase>", "generate").replace("<objective>", "sft")
        assert clean_metric_name(shown) == shown


def test_the_unit_can_be_read_from_the_table_where_a_name_has_one():
    units = dict(documented())
    for name, unit in units.items():
        if name.endswith(("_s", "_bytes", "_tokens_mean", "_tokens_max", "_share", "_rate", "_per_s")):
            assert unit, name

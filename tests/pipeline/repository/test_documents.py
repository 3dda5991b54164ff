"""Documents: links lead somewhere, commands exist, the preset in them is one."""

import re
import subprocess

import pytest
import yaml

from engine.layout import ModelShape, check_generation_layout, check_layout
from engine.spec import load_spec
from tasks.pipeline import parse_pipeline, read_yaml
from tests.pipeline.repository.source_tree import ROOT, files

DOCUMENTS = files(".md")
PRESETS = (ROOT / "docs" / "presets.md").read_text()
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def anchors(text):
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_of_a_document_leads_somewhere(document):
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_make_command_in_a_document_is_a_target(document):
    # In back quotes or at the start of a line of a code block; "make sure" in prose is none.
    commands = re.findall(r"(?:`|^)make ([a-z][a-z-]*)(?=`| +[A-Z]+=| +#|$)", document.read_text(), re.MULTILINE)
    assert set(commands) <= TARGETS


def test_the_readme_names_its_two_commands_and_the_page_for_contributors_fits_a_screen():
    readme = (ROOT / "README.md").read_text()
    assert "make demo" in readme and "make test" in readme
    assert len((ROOT / "AGENTS.md").read_text().splitlines()) <= 60


def test_python_modules_that_documents_run_exist():
    for document in DOCUMENTS:
        for module in re.findall(r"python -m ([a-z_.]+)", document.read_text()):
            if module.split(".")[0] in {"engine", "tasks"}:
                path = ROOT / module.replace(".", "/")
                assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), (document.name, module)


def test_help_lists_every_target():
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {"setup", "check", "test", "test-fast", "demo", "bench", "chaos", "lock", "clean"} <= TARGETS
    for target in ("setup", "check", "test", "test-fast", "demo", "bench", "chaos", "lock", "clean"):
        assert f"make {target} " in shown


def test_pre_commit_uses_local_hooks_only():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert {repository["repo"] for repository in config["repos"]} == {"local"}
    assert {hook["language"] for repository in config["repos"] for hook in repository["hooks"]} == {"system"}


def test_the_preset_in_the_documentation_fits_the_schema_and_its_model():
    [text] = re.findall(r"```yaml\n(.*?)```", PRESETS, re.DOTALL)
    plan = parse_pipeline(read_yaml(text, "presets.md"))
    shape = ModelShape(family="qwen2", num_layers=28, hidden_size=1536, ffn_hidden_size=8960, num_heads=12,
                       num_kv_heads=2, head_dim=128, vocab_size=151936, tied_embeddings=True)
    check_layout(shape, plan.train_numbers.layout)
    check_generation_layout(shape, plan.train_numbers.rollout.layout)
    assert plan.evaluate_numbers.layout.replicas(plan.evaluate_numbers.world_size) == 2


def test_the_specs_that_the_documentation_makes_of_it_fit_the_schema(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [preset] = re.findall(r"```yaml\n(.*?)```", PRESETS, re.DOTALL)
    (tmp_path / "mine.yaml").write_text(preset)
    script = PRESETS[PRESETS.index("## Without Airflow"):]
    exec(re.findall(r"```python\n(.*?)```", script, re.DOTALL)[0], {})
    for stage in ("prepare", "train", "evaluate"):
        assert load_spec(tmp_path / "try" / stage).stage == stage

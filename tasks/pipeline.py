"""One file per run: the whole of a training pipeline, as `examples/*.yaml` and the DAG's form describe it.

`prepare`, `sft`, `reward_model`, `dpo`, `train` and `evaluate` are the specs of the engine's stages without the fields
that the run itself fills in (where things are, where they go). They are checked through those specs, so there is no
second schema to keep.
"""

from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import yaml
from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from engine.errors import SpecError
from engine.spec import EvaluateSpec, FinetuneSpec, GatePolicy, PrepareSpec, ReportSpec, RewardModelReward, TrainSpec
from engine.spec.base import URI, Count, Spec
from engine.spec.job import parse_spec, shown

AnySpec = TypeVar("AnySpec", PrepareSpec, FinetuneSpec, TrainSpec, EvaluateSpec, ReportSpec)

FINETUNED: dict[str, tuple[str, ...]] = {"sft": ("sft",), "reward_model": ("reward_model",), "dpo": ("dpo", "ipo")}
"""Optional sections of the finetune stage, in the order they run, and the kinds of objective each may have."""
TRAINED = "trained"
"""As `model` of a reward: the reward model that the run trains itself."""

_TRAINING_FIELDS = {"model": "run", "prompts": "run", "checkpoint_dir": "run", "export_dir": "run"}
RUN_FIELDS: dict[str, dict[str, Any]] = {
    "prepare": {"tokenizer": "run", "output": "run"},
    "train": _TRAINING_FIELDS,
    **{name: _TRAINING_FIELDS | {"objective": {"kind": kinds[0]}} for name, kinds in FINETUNED.items()},
    "evaluate": {"models": [{"name": "base", "uri": "run"}], "prompts": "run"},
}
"""Fields that the run fills in, with a stand-in to check the rest by; a section may give its own `objective`."""
RUN_ONLY: dict[str, tuple[str, ...]] = {
    "prepare": (), **dict.fromkeys(("train", *FINETUNED), ("resume_from", "tracking")),
    "evaluate": ("cache", "tracking")}
"""Optional fields that only the run may set."""


class StageRule(Spec):
    """How many stages are trained and when to stop before the last."""

    count: Count = 1
    """Stages at most; each is one train, one evaluation, one decision."""
    metric: str = "mean_reward"
    """Metric of the evaluation that decides."""
    target: float | None = None
    """Stop when the metric has reached this; None: no target."""
    min_improvement: float | None = None
    """Stop when a stage raised the metric by less than this over the stage before (the first: over the base model)."""


class RegistryRule(Spec):
    """Where the candidate goes."""

    model: str = Field(min_length=1, pattern=r"^[A-Za-z0-9_.-]+$")
    """Name of the registered model."""
    experiment: str = "ratchet"
    """MLflow experiment of the runs."""


class Pipeline(Spec):
    """A whole run of `train_ppo`."""

    description: str = ""
    """One sentence for the person who chooses a preset."""
    model: URI
    """Hugging Face directory of the base model; a relative path is below RATCHET_HOME."""
    start_from: Literal["base", "champion"] = "base"
    """`champion`: train the model in production further (the base model while there is none)."""
    prepare: dict[str, Any]
    sft: dict[str, Any] | None = None
    """Supervised fine-tuning before everything else; None: none."""
    reward_model: dict[str, Any] | None = None
    """Training of a reward model, from the fine-tuned model if there is one."""
    dpo: dict[str, Any] | None = None
    """DPO before RL, likewise."""
    train: dict[str, Any]
    """RL, from what was trained last before it. `iterations` counts one stage."""
    evaluate: dict[str, Any]
    stages: StageRule = StageRule()
    gate: GatePolicy = GatePolicy()
    registry: RegistryRule

    @field_validator("prepare", "sft", "reward_model", "dpo", "train", "evaluate")
    @classmethod
    def _is_a_stage(cls, section: dict[str, Any] | None, info: ValidationInfo) -> dict[str, Any] | None:
        if section is None:
            return None
        where = str(info.field_name)
        for name in (*RUN_FIELDS[where], *RUN_ONLY[where]):
            if name in section and name != "objective":
                raise ValueError(f"{name} is set by the run; remove it (got {str(section[name])[:80]!r})")
        spec = parse_spec({"stage": "finetune" if where in FINETUNED else where, **RUN_FIELDS[where], **section})
        if isinstance(spec, FinetuneSpec) and spec.objective.kind not in FINETUNED[where]:
            raise ValueError(f"objective.kind: must be {' or '.join(FINETUNED[where])} (got {spec.objective.kind!r})")
        return section

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        needed = {"train": "train"} | {name: self.finetune_numbers(name).data for name in self.finetuned}
        for section, rows in needed.items():
            if self.prepare.get(rows) is None:
                raise ValueError(f"prepare.{rows}: is missing, but section {section} trains on it")
        train = self.train_numbers
        scored = {"train.rewards": train.rewards, "evaluate.rewards": self.evaluate_numbers.rewards,
                  "train.algorithm.costs": getattr(train.algorithm, "costs", [])}
        trained = [name for name, rewards in scored.items() for reward in rewards
                   if isinstance(reward, RewardModelReward) and reward.model == TRAINED]
        if trained and self.reward_model is None:
            raise ValueError(f"reward_model: is missing, but {trained[0]} has the model {TRAINED!r}")
        return self

    @property
    def finetuned(self) -> tuple[str, ...]:
        """The sections of the finetune stage that there are, in the order they run."""
        return tuple(name for name in FINETUNED if getattr(self, name) is not None)

    def finetune_numbers(self, section: str) -> FinetuneSpec:
        """A section of the finetune stage as `train_numbers`."""
        return build(FinetuneSpec, RUN_FIELDS[section] | getattr(self, section))

    @property
    def train_numbers(self) -> TrainSpec:
        """The `train` section with its defaults, and stand-ins for what the run fills in: not to be run."""
        return build(TrainSpec, RUN_FIELDS["train"] | self.train)

    @property
    def evaluate_numbers(self) -> EvaluateSpec:
        """The `evaluate` section in the same way."""
        return build(EvaluateSpec, RUN_FIELDS["evaluate"] | self.evaluate)


def build(kind: type[AnySpec], fields: dict[str, Any]) -> AnySpec:
    """The spec of an engine stage from its fields.

    Raises:
        SpecError: one line with each wrong field, its value, and what it must be.
    """
    spec = parse_spec({"stage": kind.model_fields["stage"].default, **fields})
    assert isinstance(spec, kind), f"{type(spec).__name__} for {kind.__name__}"
    return spec


def parse_pipeline(data: Any) -> Pipeline:
    """Check `data` against the schema.

    Raises:
        SpecError: one line with each wrong field, its value, and what it must be.
    """
    if not isinstance(data, dict):
        raise SpecError(f"a preset is a mapping of sections, not {type(data).__name__}")
    try:
        return Pipeline.model_validate(data)
    except ValidationError as error:
        raise SpecError("; ".join(_describe(item) for item in error.errors())) from None


def _describe(item: Any) -> str:
    where = ".".join(map(str, item["loc"]))
    if isinstance(item.get("ctx", {}).get("error"), ValueError):
        # Our own sentence names the field inside the section, and its value.
        return f"{where}{'.' if where else ''}{item['ctx']['error']}"
    return f"{where or 'preset'}: {item['msg']}{shown(item.get('input'))}"


def read_yaml(text: str, where: str) -> dict[str, Any]:
    """A YAML mapping; empty text is an empty one.

    Raises:
        SpecError: not YAML, or not a mapping; with the line.
    """
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SpecError(f"{where}: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SpecError(f"{where}: must be a mapping of sections (got {str(content)[:80]!r})")
    return content


def preset_names(folder: Path) -> list[str]:
    """Names of the presets in a folder."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def read_preset(folder: Path, name: str) -> dict[str, Any]:
    """The content of a preset file.

    Raises:
        SpecError: there is none of that name.
    """
    if name not in preset_names(folder):
        raise SpecError(f"preset: {name!r} is not in {folder}; there are {', '.join(preset_names(folder)) or 'none'}")
    return read_yaml((folder / f"{name}.yaml").read_text(), f"{name}.yaml")


def merge(base: Any, change: Any) -> Any:
    """`base` with the leaves of `change` put over it; lists are replaced whole.

    A mapping with another `kind` replaces the whole mapping: the fields of one union member mean nothing to another.
    """
    if not (isinstance(base, dict) and isinstance(change, dict)):
        return change
    if change.get("kind", base.get("kind")) != base.get("kind"):
        return change
    return {**base, **{key: merge(base[key], value) if key in base else value for key, value in change.items()}}

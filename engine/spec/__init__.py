"""The one schema of Ratchet: what the DAG form, `examples/*.yaml` and `python -m engine` all build. Torch-free."""

from engine.spec.algorithm import (
    CISPO,
    DAPO,
    GRPO,
    GSPO,
    KL,
    OPO,
    PPO,
    RLOO,
    AdaptiveKL,
    Algorithm,
    FixedKL,
    ReinforcePP,
    ReMax,
    SafeRLHF,
)
from engine.spec.evaluate import EvaluatedModel, EvaluateSpec
from engine.spec.evaluation import Evaluation, ModelEvaluation, PromptScores, SampleRecord
from engine.spec.finetune import DPO, IPO, SFT, FinetuneSpec, RewardModelling
from engine.spec.gate import GatePolicy, GuardMetric, Limit, PrimaryMetric
from engine.spec.job import RunResult, RunSpec, dump_spec, hash_spec, load_spec, parse_spec
from engine.spec.prepare import Demonstration, FileSource, GeneratedSource, PrepareSpec, PromptSetSpec
from engine.spec.report import ReportSpec
from engine.spec.reward import (
    CodeReward,
    ExactMatchReward,
    JsonSchemaReward,
    JudgeReward,
    LengthReward,
    MathVerifyReward,
    NumericMatchReward,
    ReasoningGymReward,
    RegexReward,
    Reward,
    RewardModelReward,
    reward_names,
)
from engine.spec.tracking import TrackingSpec
from engine.spec.train import OptimizerSpec, RolloutSpec, TrainingSpec, TrainSpec

__all__ = [
    "CISPO", "DAPO", "DPO", "GRPO", "GSPO", "IPO", "KL", "OPO", "PPO", "RLOO", "SFT", "AdaptiveKL", "Algorithm",
    "CodeReward", "Demonstration", "EvaluateSpec", "EvaluatedModel", "Evaluation", "ExactMatchReward",
    "FileSource", "FinetuneSpec", "FixedKL", "GatePolicy", "GeneratedSource", "GuardMetric", "JsonSchemaReward",
    "JudgeReward", "LengthReward", "Limit", "MathVerifyReward", "ModelEvaluation", "NumericMatchReward",
    "OptimizerSpec", "PrepareSpec", "PrimaryMetric", "PromptScores", "PromptSetSpec", "ReMax",
    "ReasoningGymReward", "RegexReward", "ReinforcePP", "ReportSpec", "Reward", "RewardModelReward",
    "RewardModelling", "RolloutSpec", "RunResult", "RunSpec", "SafeRLHF", "SampleRecord", "TrackingSpec",
    "TrainSpec", "TrainingSpec", "dump_spec", "hash_spec", "load_spec", "parse_spec", "reward_names",
]

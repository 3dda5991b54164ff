"""What finetuning must reach: stated held-out accuracies on words that were not trained on, seeds fixed."""

import pytest

from tests.engine.finetuning import finetune, make_world, write_finetune_job
from tests.engine.multiprocess import shared_ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """600 words to learn from, 100 others; an answer is right when it is the word's last letter."""
    return make_world(tmp_path_factory.mktemp("learning"), train=600, held_out=100)


def learn(world, name, kind, **fields):
    job = write_finetune_job(world, name, kind, rows_per_iteration=64, **fields)
    return job, shared_ranks(1).run(finetune, job)[0].metrics


@pytest.fixture(scope="module")
def fine_tuned(world):
    return learn(world, "sft", "sft", optimizer={"lr": 3e-3}, iterations=80)


def test_sft_answers_words_it_has_not_seen(fine_tuned):
    _, metrics = fine_tuned
    assert metrics["eval/sequence_accuracy_before"] < 0.1
    assert metrics["eval/sequence_accuracy"] >= 0.95


@pytest.mark.parametrize(("kind", "accuracy"), [("reward_model", 0.9), ("dpo", 0.95), ("ipo", 0.95)])
def test_preferences_are_learned_from_the_fine_tuned_model(world, fine_tuned, kind, accuracy):
    model = str(fine_tuned[0] / "export")
    _, metrics = learn(world, f"after-{kind}", kind, model=model, optimizer={"lr": 3e-4}, iterations=120)
    assert metrics["eval/accuracy_before"] == 0.5, "a new head, or the policy that is the reference"
    assert metrics["eval/accuracy"] >= accuracy
    assert metrics["eval/chosen_score"] > metrics["eval/rejected_score"]

"""A byte-level tokenizer for tests: any text round-trips, nothing is downloaded."""

from pathlib import Path

TEMPLATE = (
    "{% if tools %}<|tools|>{% for tool in tools %}{{ tool['name'] }} {% endfor %}<|end|>{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('tools are not spoken here') }}{% endif %}"
    "<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}")
SPECIAL = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tools|>"]


def make_text_tokenizer(directory: Path, chat: bool = True) -> Path:
    """Write a tokenizer of bytes and a few merges; returns `directory`. `chat`: with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(["What is the sum of these numbers? The answer is"] * 3, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>",
        chat_template=TEMPLATE if chat else None).save_pretrained(directory)
    return directory

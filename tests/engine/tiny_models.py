"""Random models of a hundred thousand parameters, as Hugging Face directories with a character tokenizer.

Heads are 32 wide: vLLM has no CPU attention for narrower ones.
"""

from pathlib import Path

CHARACTERS = "0123456789+-*= ?abcdefghijklmnopqrstuvwxyz"
PAD, BOS, EOS = 0, 1, 2
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}")


def make_tiny_model(directory: Path, family: str = "qwen2", seed: int = 0, **sizes: int | bool) -> Path:
    """Write a model and its tokenizer; returns `directory`.

    Args:
        family: llama, qwen2 or qwen3.
        sizes: of the Hugging Face config, over the defaults below.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    config_class, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM)}[family]
    numbers = {
        "vocab_size": 64, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "max_position_embeddings": 256, "tie_word_embeddings": False,
        "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD, "initializer_range": 0.2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model_class(config_class(**(numbers | sizes))).save_pretrained(directory)
    make_character_tokenizer(directory)
    return directory


def make_character_tokenizer(directory: Path) -> None:
    """Write a tokenizer that knows 64 tokens: three special ones, characters, and fillers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<bos>", "<eos>", *CHARACTERS]
    names += [f"<r{i}>" for i in range(len(names), 64)]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", chat_template=TEMPLATE,
    ).save_pretrained(directory)


def copy_with_new_weights(source: Path, target: Path, seed: int) -> Path:
    """Another model of the same architecture; returns `target`."""
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target)
    file = target / "model.safetensors"
    generator = torch.Generator().manual_seed(seed)
    weights = {name: w + 0.1 * torch.randn(w.shape, generator=generator) for name, w in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    return target


def make_reward_model(source: Path, target: Path, seed: int = 0) -> Path:
    """The backbone of a model under a random head, as a sequence classifier; returns `target`."""
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target)
    weights = load_file(target / "model.safetensors")
    weights.pop("lm_head.weight", None)
    hidden = weights["model.norm.weight"].shape[0]
    weights["score.weight"] = torch.randn(1, hidden, generator=torch.Generator().manual_seed(seed))
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def classifier_scores(directory: Path, sequences: list[list[int]]) -> list[float]:
    """Scores of whole sequences by transformers, one at a time: without padding the last token is the last one."""
    import torch
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(directory, num_labels=1, dtype=torch.float32)
    with torch.no_grad():
        return [model(torch.tensor([ids])).logits.item() for ids in sequences]

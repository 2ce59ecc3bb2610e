"""Everything a model needs between text and token ids, loaded from its files in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from text_pipeline.chat_template import ChatTemplate, ChatTemplateError
from text_pipeline.gguf_tokenizer import chat_templates_from_gguf, special_token_texts, tokenizer_from_gguf
from text_pipeline.hf_tokenizer import (
    chat_templates_of_folder,
    special_token_texts_of_folder,
    tokenizer_from_folder,
)
from text_pipeline.tokenizer import Tokenizer


@dataclass(frozen=True)
class TextModel:
    """A model's tokenizer and chat template; ``chat_template`` is None where its files have none."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The conversation as the model's prompt text, see ChatTemplate.render.

        Raises ChatTemplateError, also where the model has no chat template.
        """
        if self.chat_template is None:
            raise ChatTemplateError(
                "this model has no chat template and takes no chat messages; send a prompt to completions"
            )
        return self.chat_template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **kwargs
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> list[int]:
        """The conversation as token ids.

        Special tokens are parsed in the whole rendered text, as every engine does: a message that spells one
        gets it. The template writes BOS itself, so none is added. Raises ChatTemplateError, TokenizerError.
        """
        text = self.render_chat(messages, tools=tools, add_generation_prompt=add_generation_prompt, **kwargs)
        return self.tokenizer.encode(text, add_special_tokens=False, parse_special=True)


def load_text_model(
    kind: Literal["gguf", "hf"], path: Path, gguf_metadata: Mapping[str, object] | None = None
) -> TextModel:
    """Loads the text side of a model: from ``gguf_metadata`` (``gguf``) or the folder ``path`` (``hf``).

    ``path`` is the file or folder that messages name. Raises TokenizerError, ChatTemplateError.
    """
    if kind == "gguf":
        if gguf_metadata is None:
            raise ValueError(f"{path}: the metadata of a GGUF file is needed to load its tokenizer")
        tokenizer = tokenizer_from_gguf(gguf_metadata)
        templates = chat_templates_from_gguf(gguf_metadata)
        bos_token, eos_token = special_token_texts(gguf_metadata)
    elif kind == "hf":
        tokenizer = tokenizer_from_folder(path)
        templates = chat_templates_of_folder(path)
        bos_token, eos_token = special_token_texts_of_folder(path)
    else:
        raise ValueError(f"the model kind is {kind!r}; allowed are 'gguf' and 'hf'")
    return TextModel(tokenizer, _chat_template(templates, bos_token, eos_token))


def _chat_template(
    templates: Mapping[str, str], bos_token: str | None, eos_token: str | None
) -> ChatTemplate | None:
    tool_use = templates.get("tool_use")
    default = templates.get("default", tool_use)
    if default is None:
        return None
    return ChatTemplate(default, bos_token, eos_token, tool_use_source=tool_use)

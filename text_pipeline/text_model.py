"""Everything a model needs between text and token ids, loaded from its files in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from text_pipeline.chat_template import ChatTemplate, ChatTemplateError
from text_pipeline.control_tokens import ClientTexts, ControlTokens, unescape_marks
from text_pipeline.gguf_tokenizer import chat_templates_from_gguf, special_token_texts, tokenizer_from_gguf
from text_pipeline.hf_tokenizer import (
    chat_templates_of_folder,
    special_token_texts_of_folder,
    tokenizer_from_folder,
)
from text_pipeline.token_counts import MinTokenCount
from text_pipeline.tokenizer import Tokenizer


class TextModel:
    """A model's tokenizer and chat template; ``chat_template`` is None where its files have none."""

    def __init__(self, tokenizer: Tokenizer, chat_template: ChatTemplate | None) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.control_tokens = ControlTokens(tokenizer, chat_template.sources if chat_template else ())
        self.min_token_count = MinTokenCount(tokenizer)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> RenderedChat:
        """The conversation as the model's prompt, see ChatTemplate.render.

        What the caller gives is text, in every place: spellings of control tokens in it do not become those
        tokens, see ControlTokens. Raises ChatTemplateError, also where the model has no chat template, and
        TokenizerError.
        """
        if self.chat_template is None:
            raise ChatTemplateError(
                "this model has no chat template and takes no chat messages; send a prompt to completions"
            )
        try:
            marked = self.control_tokens.mark(ClientTexts(messages, tools, kwargs))
        except RecursionError:
            raise ChatTemplateError("a value is nested too deeply") from None
        text = self.chat_template.render(
            marked.texts.messages,
            tools=marked.texts.tools,
            add_generation_prompt=add_generation_prompt,
            **marked.texts.variables,
        )
        return RenderedChat(unescape_marks(text, marked.mark), marked.mark, self.control_tokens)


@dataclass(frozen=True)
class RenderedChat:
    """A conversation as text, with ``mark`` inside the control tokens that are not the template's."""

    marked_text: str
    mark: str | None
    control_tokens: ControlTokens

    @property
    def text(self) -> str:
        """The text without marks."""
        return self.marked_text if self.mark is None else self.marked_text.replace(self.mark, "")

    def encode(self) -> list[int]:
        """The token ids. Raises TokenizerError."""
        return self.control_tokens.encode(self.marked_text, self.mark)


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

"""The models of a router: those it has the text side of, and how they are served now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from model_files.generation_defaults import OPENAI_DEFAULTS, GenerationDefaults
from router.state.prompt_hashes import HashGroup
from text_pipeline.text_model import TextModel


@dataclass(frozen=True, kw_only=True)
class RouterModel:
    """A model that this router can tokenize for, whoever serves it."""

    text: TextModel
    defaults: GenerationDefaults = OPENAI_DEFAULTS


ModelTable = Mapping[str, RouterModel]  # by the name in requests and in workers' records


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model that decode workers serve now, with the limits requests must respect."""

    name: str
    fingerprint: str
    max_model_len: int  # tokens
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    hash_groups: tuple[HashGroup, ...]  # for which a prompt is hashed
    defaults: GenerationDefaults = OPENAI_DEFAULTS


class ModelNotReadyError(Exception):
    """The model cannot be served now; the message says why. A later try may succeed."""

"""A model that is served now, as the requests for it see it."""

from __future__ import annotations

from dataclasses import dataclass

from model_files.generation_defaults import OPENAI_DEFAULTS, GenerationDefaults


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model that decode workers serve now, with the limits requests must respect."""

    name: str
    fingerprint: str
    max_model_len: int  # tokens
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    defaults: GenerationDefaults = OPENAI_DEFAULTS


class ModelNotReadyError(Exception):
    """The model cannot be served now; the message says why. A later try may succeed."""

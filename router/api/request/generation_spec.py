"""What is to be generated: a request once its body has been read, checked and tokenized."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.sampling_params import SamplingParams
from router.served_model import ServedModel
from router.state.prompt_hashes import PromptHashes
from text_pipeline.stop_strings import StopStrings


@dataclass(frozen=True, kw_only=True)
class GenerationSpec:
    """A request in token ids, ready to dispatch. Choice ``p * n + i`` is the i-th answer to prompt p."""

    response_id: str
    request_id: str  # on workers, with the choice's number behind it if there are several
    endpoint: str  # "chat" | "completions", the metrics' label
    model: ServedModel
    prompts: list[list[int]]
    hashes: list[PromptHashes]  # per prompt
    sampling: list[SamplingParams]  # per prompt, with the request's seed: each choice gets its own
    n: int
    stop_strings: StopStrings  # for all choices
    skip_special_tokens: bool
    include_stop_in_output: bool
    cache_salt: str
    priority: int  # smaller ones first, where requests wait
    continues_prompt_text: bool  # the answer is the rest of the prompt's text, not a message of its own
    timeout_ms: float
    received_at: float  # monotonic seconds of the router's clock
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def num_choices(self) -> int:
        """Sequences to generate."""
        return len(self.prompts) * self.n

    def text_before(self, index: int) -> Sequence[int]:
        """The tokens whose text choice ``index`` goes on with."""
        return self.prompts[index // self.n] if self.continues_prompt_text else ()

    @property
    def system_fingerprint(self) -> str:
        """Names the weights that answer."""
        return f"fp_{self.model.fingerprint[:10]}"


def new_response_id(prefix: str) -> str:
    """A fresh id such as ``chatcmpl-4f…``; never the client's own, which need not be unique."""
    return f"{prefix}-{secrets.token_hex(16)}"


def worker_request_id(client_id: str, response_id: str) -> str:
    """The id under which workers know and log a request: the client's, and what makes it unique."""
    return f"{client_id}-{response_id[-8:]}"

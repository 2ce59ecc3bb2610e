"""What a request must fulfil to be accepted at all."""

from __future__ import annotations

from engine.new_request import NewRequest
from engine.scheduler.errors import DoesNotFitError


def check_request(request: NewRequest, *, capacity_tokens: int, max_model_len: int) -> None:
    """Raises ValueError if ``request`` is malformed, DoesNotFitError if it could never run here.

    ``capacity_tokens`` is what the whole KV cache holds, ``max_model_len`` the model's limit in tokens.
    """
    request_id = request.request_id
    num_prompt, num_output = len(request.spec.prompt_token_ids), len(request.spec.output_token_ids)
    if num_prompt == 0:
        raise ValueError(f"request {request_id} has an empty prompt, must have at least 1 token")
    if request.remote_prefill and request.prefill_only:
        raise ValueError(f"request {request_id} is both remote_prefill and prefill_only, may be one of them")
    if num_output >= request.spec.sampling.max_tokens:
        raise ValueError(
            f"request {request_id} already has {num_output} output tokens,"
            f" and max_tokens is {request.spec.sampling.max_tokens}"
        )
    if num_prompt + num_output >= max_model_len or num_prompt + num_output > capacity_tokens:
        raise DoesNotFitError(
            f"request {request_id} has {num_prompt} prompt and {num_output} output tokens;"
            f" the KV cache holds {capacity_tokens} tokens, and max_model_len is {max_model_len} tokens"
            " with at least one of them for output"
        )

"""Request fields of other servers that mean nothing here: refused by name, so that none is silently dropped.

The tables are data: what is refused, and with which value a field asks for nothing and may stay. A field that
is in neither table nor schema is ignored, because clients grow new ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from router.api.errors import unsupported


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsupported:
    """Fields that are refused for one reason, unless they are null or have a value that asks for nothing."""

    reason: str  # what the client is told
    names: tuple[str, ...] = ()  # refused with every value
    neutral: Mapping[str, tuple[Any, ...]]  # by name: the values that ask for nothing


def _fields(reason: str, *names: str, **neutral: Any) -> Unsupported:
    """``neutral`` gives one value per name; a tuple stands for several."""
    values = {name: value if isinstance(value, tuple) else (value,) for name, value in neutral.items()}
    return Unsupported(reason=reason, names=names, neutral=values)


# Of OpenAI, vLLM, SGLang, Dynamo, TensorRT-LLM and llama.cpp. What only one endpoint has in its schema is
# refused by the other.
UNSUPPORTED: tuple[Unsupported, ...] = (
    _fields(
        "Structured output is not supported.",
        *"guided_json guided_regex guided_choice guided_grammar guided_decoding_backend".split(),
        *"guided_whitespace_pattern structured_outputs structural_tag regex ebnf json_schema grammar".split(),
        response_format={"type": "text"},
        grammar_lazy=False,
    ),
    _fields("Tool calls are not looked for in the answer.", parse_tool_calls=False),
    _fields(
        "Reasoning is not controlled by the server. Where the model's chat template has a switch for it, set "
        "that in 'chat_template_kwargs'.",
        *"reasoning reasoning_effort reasoning_format thinking thinking_budget max_thinking_tokens".split(),
        *"enable_thinking task".split(),
        thinking_token_budget=-1,
        reasoning_budget=-1,
        thinking_forced_open=False,
        include_reasoning=True,
        separate_reasoning=True,
        stream_reasoning=True,
    ),
    _fields("The length of answers is not controlled by a style setting.", verbosity="medium"),
    _fields(
        "Only text goes in and out.",
        *"audio mm_processor_kwargs media_io_kwargs images_config".split(),
        *"max_dynamic_patch min_dynamic_patch".split(),
        modalities=["text"],
        use_audio_in_video=False,
    ),
    _fields(
        "Answers are not stored, moderated or searched for.", "moderation", "web_search_options", store=False
    ),
    _fields(
        "All requests are served in one tier; 'priority' orders those that wait.",
        service_tier=("auto", "default"),
    ),
    _fields("Predicted outputs are not supported.", "prediction"),
    _fields(
        "Chat templates come with the model; variables for it go into 'chat_template_kwargs'.",
        "chat_template",
        "documents",
        "chat_template_content_format",
        continue_final_message=False,
    ),
    _fields("The chat template writes the special tokens.", add_special_tokens=False),
    _fields("Only /v1/completions repeats the prompt.", echo=False),
    _fields(
        "Only /v1/completions takes a prompt in token ids.",
        "input_ids",
        "prompt_token_ids",
        "prompt_token_ids_b64",
    ),
    _fields("Here the limit is called 'max_tokens'.", "max_completion_tokens", "n_predict"),
    _fields("The number of alternatives is given by 'logprobs' here.", "top_logprobs"),
    _fields("Set 'logprobs' instead.", "n_probs"),
    _fields("Insertion before a suffix is not supported.", suffix=""),
    _fields("Prompts as embeddings are not supported.", "prompt_embeds"),
    _fields(
        "Prompts are not cut: send what shall be read.",
        "truncate_prompt_tokens",
        "prompt_ignore_length",
        truncation_side=("left", "right"),
        n_keep=0,
    ),
    _fields(
        "Beam search is not supported.",
        use_beam_search=False,
        length_penalty=1.0,
        early_stopping=False,
        best_of=1,
    ),
    _fields(
        "Log-probabilities of the prompt, or of tokens chosen beforehand, are not supported.",
        "prompt_logprobs",
        "logprob_token_ids",
    ),
    _fields(
        "Token ids and internal values are not part of the answer.",
        return_token_ids=False,
        return_tokens_as_token_ids=False,
        return_prompt_token_ids=False,
        return_prompt_text=False,
        return_token_offsets=False,
        return_mm_kwargs=True,
        return_tokens=False,
        return_hidden_states=False,
        return_routed_experts=False,
        routed_experts_start_len=0,
        routed_experts_prompt_start=0,
        return_cached_tokens_details=False,
        return_meta_info=False,
        return_context_logits=False,
        return_generation_logits=False,
        return_perf_metrics=False,
        return_progress=False,
        timings_per_token=False,
        post_sampling_probs=False,
        response_fields=([],),
    ),
    _fields(
        "Tokens cannot be allowed or forbidden by lists; 'logit_bias' makes them likely or unlikely.",
        allowed_token_ids=([],),
        bad_words=([],),
    ),
    _fields(
        "This way of sampling is not supported.",
        *"custom_logit_processor custom_params vllm_xargs samplers min_keep".split(),
        *"mirostat_tau mirostat_eta dynatemp_exponent xtc_threshold".split(),
        *"dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers repeat_last_n".split(),
        logits_processors=([],),
        mirostat=0,
        dynatemp_range=0,
        xtc_probability=0,
        dry_multiplier=0,
        typical_p=1.0,
        top_n_sigma=-1,
        top_p_min=0,
        watermarking=False,
    ),
    _fields("Here it is called 'repetition_penalty'.", repeat_penalty=1.0),
    _fields(
        "Here ends are given by 'stop' and 'stop_token_ids'.",
        "stop_regex",
        "repetition_detection",
        "t_max_predict_ms",
    ),
    _fields("Set 'include_stop_str_in_output' instead.", no_stop_trim=False),
    _fields(
        "Answers are always text; special tokens are written as they are.",
        detokenize=True,
        spaces_between_special_tokens=True,
    ),
    _fields("Each chunk is sent when its tokens are there.", stream_interval=1),
    _fields("LoRA adapters are not supported.", "lora_path", "lora_request", lora=([],)),
    _fields(
        "Each request carries its whole conversation: there are no sessions.",
        "session_id",
        "session_params",
        "conversation_params",
    ),
    _fields(
        "The router chooses the workers and moves the KV cache itself.",
        *"kv_transfer_params ec_transfer_params disaggregated_params nvext".split(),
        *"bootstrap_host bootstrap_port bootstrap_room".split(),
        *"routed_dp_rank disagg_prefill_dp_rank data_parallel_rank".split(),
        id_slot=-1,
    ),
    _fields("Prefixes are always cached; 'cache_salt' keeps them apart.", "extra_key", cache_prompt=True),
    _fields("Drafts from a corpus are not supported.", "ngram_corpus_id"),
    _fields("Name a request by the header X-Request-Id.", "request_id", "rid"),
    _fields("Metrics have no labels of the client's.", "custom_labels"),
)

# In the schemas, and without any effect.
IGNORED: Mapping[str, str] = {
    "user": "a name for the end user",
    "safety_identifier": "a name for the end user",
    "metadata": "notes for stored answers",
    "prompt_cache_key": "a hint for caching; prefixes are found without it",
    "prompt_cache_retention": "a hint for caching",
    "prompt_cache_options": "a hint for caching",
    "parallel_tool_calls": "no tools are called",
    "stream_options.include_obfuscation": "chunks are not padded",
}

_NEUTRAL: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    name: (group.reason, group.neutral.get(name, ()))
    for group in UNSUPPORTED
    for name in (*group.names, *group.neutral)
}


def check_extra_fields(extra: Mapping[str, Any] | None) -> None:
    """Refuse the first known field of ``extra``, what a body has beyond its schema. Raises ApiError (400)."""
    for name, value in (extra or {}).items():
        known = _NEUTRAL.get(name)
        if known is None or value is None:
            continue
        reason, neutral = known
        if not any(_is_same(value, one) for one in neutral):
            raise unsupported(name, f"{name!r} is not supported: {reason} {_allowed(neutral)}")


def unsupported_fields_markdown() -> str:
    """The tables as a section of ``docs/api.md``."""
    rows = ["| fields, and what they may be besides null | why |", "|---|---|"]
    for group in UNSUPPORTED:
        fields = [f"`{name}`" for name in group.names]
        for name, values in group.neutral.items():
            fields.append(f"`{name}` ({', '.join(f'`{json.dumps(value)}`' for value in values)})")
        rows.append(f"| {', '.join(fields)} | {group.reason} |")
    rows += ["", "Accepted and without any effect:", "", "| field | what it is |", "|---|---|"]
    rows += [f"| `{name}` | {what} |" for name, what in IGNORED.items()]
    return "\n".join(rows) + "\n"


def _allowed(neutral: tuple[Any, ...]) -> str:
    if not neutral:
        return "Leave it out."
    return f"Leave it out, or set it to {' or '.join(json.dumps(value) for value in neutral)}."


def _is_same(value: Any, neutral: Any) -> bool:
    """Equal, and not a truth value where a number is meant (or the other way round).

    An object may have members that ``neutral`` does not know.
    """
    if isinstance(value, dict) and isinstance(neutral, dict):
        return {name: value.get(name) for name in neutral} == neutral
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)

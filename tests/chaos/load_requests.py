"""The requests of the chaos tests: short and long prompts, greedy and sampled, all shapes of answers."""

from __future__ import annotations

import random
from typing import Any

from tests.chaos.steady_load import LoadRequest
from tests.integration.running_cluster import MODEL

WORDS = "river stone lamp garden seven quiet paper window copper orchard".split()


def counting_prompt(numbers: int) -> str:
    """Five tokens or fewer a number; the model goes on counting."""
    return " ".join(f"number {index}" for index in range(numbers))


def mixed_requests(
    num_requests: int, *, max_prompt_tokens: int = 600, max_answer_tokens: int = 60, seed: int = 0
) -> list[LoadRequest]:
    """Requests of all six kinds in turn, with prompts from a few tokens to ``max_prompt_tokens``, roughly.

    Answers have at least 8 tokens.
    """
    rng = random.Random(seed)
    makers = [_greedy_stream, _seeded_stream, _stop_stream, _chat_logprobs_stream, _greedy, _seeded_logprobs]
    shares = (0.02, 0.3, 1.0, 0.1, 0.6)
    requests = []
    for index in range(num_requests):
        num_tokens = max(6, int(max_prompt_tokens * shares[index % len(shares)]))
        max_tokens = rng.randint(8, max_answer_tokens)
        maker = makers[index % len(makers)]
        name = f"{maker.__name__.strip('_')} {index}: {num_tokens} tokens in, at most {max_tokens} out"
        requests.append(maker(name, num_tokens, max_tokens, rng))
    return requests


def stream_of(request: LoadRequest) -> LoadRequest:
    """The same request, streamed with usage."""
    body = {**request.body, "stream": True, "stream_options": {"include_usage": True}}
    return LoadRequest(name=request.name, path=request.path, body=body)


def completion(name: str, prompt: str, **fields: Any) -> LoadRequest:
    """A greedy completion, unless ``fields`` say otherwise."""
    body = {"model": MODEL, "prompt": prompt, "temperature": 0, "ignore_eos": True, **fields}
    return LoadRequest(name=name, path="/v1/completions", body=body)


def chat(name: str, content: str, **fields: Any) -> LoadRequest:
    """A greedy chat completion, unless ``fields`` say otherwise."""
    messages = [{"role": "user", "content": content}]
    body = {"model": MODEL, "messages": messages, "temperature": 0, "ignore_eos": True, **fields}
    return LoadRequest(name=name, path="/v1/chat/completions", body=body)


def _words(num_tokens: int, rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=num_tokens))


def _greedy_stream(name: str, num_tokens: int, max_tokens: int, rng: random.Random) -> LoadRequest:
    return stream_of(completion(name, _words(num_tokens, rng), max_tokens=max_tokens))


def _seeded_stream(name: str, num_tokens: int, max_tokens: int, rng: random.Random) -> LoadRequest:
    return stream_of(
        completion(
            name,
            _words(num_tokens, rng),
            max_tokens=max_tokens,
            temperature=0.9,
            top_p=0.95,
            seed=rng.randrange(1000),
            frequency_penalty=0.4,
        )
    )


def _stop_stream(name: str, num_tokens: int, max_tokens: int, rng: random.Random) -> LoadRequest:
    numbers = max(3, num_tokens // 4)
    stop = [f"number {numbers + rng.randint(1, 4)}"]
    return stream_of(completion(name, counting_prompt(numbers), max_tokens=60, stop=stop))


def _chat_logprobs_stream(name: str, num_tokens: int, max_tokens: int, rng: random.Random) -> LoadRequest:
    return stream_of(
        chat(name, _words(num_tokens, rng), max_tokens=max_tokens, logprobs=True, top_logprobs=2)
    )


def _greedy(name: str, num_tokens: int, max_tokens: int, rng: random.Random) -> LoadRequest:
    return completion(name, _words(num_tokens, rng), max_tokens=max_tokens)


def _seeded_logprobs(name: str, num_tokens: int, max_tokens: int, rng: random.Random) -> LoadRequest:
    return completion(
        name,
        _words(num_tokens, rng),
        max_tokens=max_tokens,
        temperature=0.7,
        seed=rng.randrange(1000),
        logprobs=1,
    )

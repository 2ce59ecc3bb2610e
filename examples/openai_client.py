"""A chat with a running Leadout through the official ``openai`` package, with the answer streamed.

    pip install openai
    python examples/openai_client.py "What is the capital of France?"

``OPENAI_BASE_URL`` names another endpoint than the local one.
"""

from __future__ import annotations

import os
import sys

from openai import APIConnectionError, OpenAI

BASE_URL = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")


def main() -> int:
    """Ask the question on the command line; print the answer as it comes, and what it took."""
    question = " ".join(sys.argv[1:]) or "What is the capital of France?"
    # The client insists on a key; a Leadout without keys of its own ignores it.
    client = OpenAI(base_url=BASE_URL, api_key=os.environ.get("OPENAI_API_KEY", "unused"))
    try:
        model = client.models.list().data[0].id
    except APIConnectionError:
        print(f"nothing answers at {BASE_URL}; start it with `leadout serve`", file=sys.stderr)
        return 1

    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=200,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage is not None:  # the last chunk, which has no choices
            details = chunk.usage.prompt_tokens_details
            cached = details.cached_tokens if details is not None else 0
            print(
                f"\n[{model}: {chunk.usage.prompt_tokens} prompt tokens, {cached or 0} of them cached, "
                f"{chunk.usage.completion_tokens} generated]"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())

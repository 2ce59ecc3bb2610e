"""``/v1/chat/completions`` with the official client, from HTTP to the worker's socket and back."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from cluster.messages import TokenLogprobs
from router.api.response.logprobs import spelling
from router.api.response.seeds import choice_seed
from tests.router.conftest import MODEL, StartRouter
from tests.router.scripted_worker import EOS, ScriptedWorker, answer, endless, until
from text_pipeline.tokenizer import Tokenizer

MakeWorker = Callable[..., ScriptedWorker]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


async def test_whole_answer(start_router: StartRouter, make_worker: MakeWorker, tokenizer: Tokenizer) -> None:
    worker = make_worker(script=answer([*tokenizer.encode("It is Paris."), EOS], cached_tokens=16))
    router = await start_router(worker)
    completion = await router.openai.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, extra_headers={"X-Leadout-Explain": "1"}
    )
    (choice,) = completion.choices
    assert choice.message.content == "It is Paris."
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    (sent,) = worker.generates
    prompt = tokenizer.decode(sent.spec.prompt_token_ids, skip_special_tokens=False)
    assert prompt.endswith(
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert sent.spec.sampling.is_greedy
    usage = completion.usage
    assert usage.prompt_tokens == len(sent.spec.prompt_token_ids)
    assert usage.completion_tokens == len(tokenizer.encode("It is Paris.")) + 1
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens == 16
    timings = completion.model_extra["leadout"]["timings"]
    assert timings["num_computed_tokens"] == usage.prompt_tokens - 16
    assert timings["decode_worker"] == "d0"
    router.assert_idle()


async def test_default_limit_is_the_rest_of_the_context(
    start_router: StartRouter, make_worker: MakeWorker
) -> None:
    worker = make_worker(script=answer([EOS]))
    router = await start_router(worker)
    await router.openai.chat.completions.create(model=MODEL, messages=QUESTION)
    (sent,) = worker.generates
    assert sent.spec.sampling.max_tokens == 256 - len(sent.spec.prompt_token_ids)


async def test_stream_chunks(
    start_router: StartRouter, make_worker: MakeWorker, tokenizer: Tokenizer
) -> None:
    router = await start_router(make_worker(script=answer([*tokenizer.encode("It is Paris."), EOS])))
    stream = await router.openai.chat.completions.create(
        model=MODEL, messages=QUESTION, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)
    first, *middle, finish, usage = chunks
    assert first.choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content for chunk in middle) == "It is Paris."
    assert len(middle) > 1
    assert all(chunk.choices[0].finish_reason is None for chunk in (first, *middle))
    assert finish.choices[0].finish_reason == "stop"
    assert finish.choices[0].delta.content is None
    assert usage.choices == []
    assert usage.usage.completion_tokens == len(tokenizer.encode("It is Paris.")) + 1
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_stream_without_usage_ends_with_done(
    start_router: StartRouter, make_worker: MakeWorker, tokenizer: Tokenizer
) -> None:
    router = await start_router(make_worker(script=answer(tokenizer.encode("a b"), finish_reason="length")))
    response = await router.post("chat/completions", {"model": MODEL, "messages": QUESTION, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    bodies = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert all("usage" not in body for body in bodies)
    assert bodies[-1]["choices"][0]["finish_reason"] == "length"


async def test_a_character_split_across_tokens_arrives_whole(
    start_router: StartRouter, make_worker: MakeWorker, tokenizer: Tokenizer
) -> None:
    text = "Grüße 👩‍🚀 漢字 ok"
    tokens = tokenizer.encode(text)
    assert any(spelling(token, tokenizer).startswith("bytes:") for token in tokens)  # else this shows nothing
    router = await start_router(make_worker(script=answer([*tokens, EOS])))
    stream = await router.openai.chat.completions.create(model=MODEL, messages=QUESTION, stream=True)
    pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(pieces) == text
    assert not any("�" in piece for piece in pieces)


async def test_a_cut_off_character_becomes_a_replacement(
    start_router: StartRouter, make_worker: MakeWorker, tokenizer: Tokenizer
) -> None:
    tokens = tokenizer.encode("👩")
    assert len(tokens) > 1
    router = await start_router(make_worker(script=answer(tokens[:1], finish_reason="length")))
    completion = await router.openai.chat.completions.create(model=MODEL, messages=QUESTION)
    assert completion.choices[0].message.content == "�"


async def test_stop_string_ends_the_answer_and_the_work(
    start_router: StartRouter, make_worker: MakeWorker, tokenizer: Tokenizer
) -> None:
    (token,) = tokenizer.encode(" the")
    worker = make_worker(script=endless(token))
    router = await start_router(worker)
    completion = await router.openai.chat.completions.create(model=MODEL, messages=QUESTION, stop=["the the"])
    (choice,) = completion.choices
    assert choice.message.content == " "
    assert choice.finish_reason == "stop"
    assert choice.model_extra["stop_reason"] == "the the"
    assert completion.usage.completion_tokens == 2
    await until(lambda: worker.num_running == 0, "the cancel")
    assert [cancel.reason for cancel in worker.cancels] == ["stop_string"]
    router.assert_idle()


async def test_stop_string_in_a_stream_never_shows_its_beginning(
    start_router: StartRouter, make_worker: MakeWorker, tokenizer: Tokenizer
) -> None:
    tokens = tokenizer.encode("one STOP here STOPPED not")
    router = await start_router(make_worker(script=answer([*tokens, EOS])))
    stream = await router.openai.chat.completions.create(
        model=MODEL, messages=QUESTION, stream=True, stop="STOPPED"
    )
    text = ""
    finish = None
    async for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        assert not text.endswith("STOPP")
        finish = chunk.choices[0].finish_reason or finish
    assert text == "one STOP here "
    assert finish == "stop"


async def test_stop_string_can_be_included(
    start_router: StartRouter, make_worker: MakeWorker, tokenizer: Tokenizer
) -> None:
    router = await start_router(make_worker(script=answer([*tokenizer.encode("a; b; c"), EOS])))
    completion = await router.openai.chat.completions.create(
        model=MODEL, messages=QUESTION, stop=";", extra_body={"include_stop_str_in_output": True}
    )
    assert completion.choices[0].message.content == "a;"


async def test_n_choices_have_their_own_seeds(
    start_router: StartRouter, make_worker: MakeWorker, tokenizer: Tokenizer
) -> None:
    async def by_seed(message: Any) -> Any:
        async for fields in answer([*tokenizer.encode(f"seed {message.spec.sampling.seed}"), EOS])(message):
            yield fields

    worker = make_worker(script=by_seed)
    router = await start_router(worker)
    completion = await router.openai.chat.completions.create(model=MODEL, messages=QUESTION, n=3, seed=40)
    assert [choice.index for choice in completion.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in completion.choices]
    assert texts == [f"seed {choice_seed(40, 0, choice)}" for choice in range(3)]
    assert len({message.key.request_id for message in worker.generates}) == 3
    assert completion.usage.prompt_tokens == len(worker.generates[0].spec.prompt_token_ids)

    stream = await router.openai.chat.completions.create(
        model=MODEL, messages=QUESTION, n=2, seed=7, stream=True
    )
    texts = ["", ""]
    finishes = []
    async for chunk in stream:
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        if choice.finish_reason:
            finishes.append(choice.index)
    assert texts == [f"seed {choice_seed(7, 0, choice)}" for choice in range(2)]
    assert sorted(finishes) == [0, 1]


async def test_a_seed_is_drawn_where_none_is_given(
    start_router: StartRouter, make_worker: MakeWorker
) -> None:
    worker = make_worker(script=answer([EOS]))
    router = await start_router(worker)
    for _ in range(2):
        await router.openai.chat.completions.create(model=MODEL, messages=QUESTION)
    seeds = {message.spec.sampling.seed for message in worker.generates}
    assert len(seeds) == 2
    assert all(0 <= seed < 2**63 for seed in seeds)


async def test_logprobs(start_router: StartRouter, make_worker: MakeWorker, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(" Paris 漢")
    other = tokenizer.encode(" London")[0]

    def logprobs(token_id: int) -> TokenLogprobs:
        return TokenLogprobs(
            token_id=token_id, logprob=-0.5, rank=1, top=((token_id, -0.5), (other, -math.inf))
        )

    worker = make_worker(script=answer(tokens, finish_reason="length", logprobs=logprobs))
    router = await start_router(worker)
    completion = await router.openai.chat.completions.create(
        model=MODEL, messages=QUESTION, logprobs=True, top_logprobs=2
    )
    assert worker.generates[0].spec.sampling.logprobs == 2
    content = completion.choices[0].logprobs.content
    assert len(content) == len(tokens)
    assert content[0].token == " Paris"
    assert content[0].logprob == -0.5
    assert content[0].top_logprobs[1].token == " London"
    assert content[0].top_logprobs[1].logprob == -9999.0
    assert b"".join(bytes(position.bytes) for position in content).decode() == " Paris 漢"

    stream = await router.openai.chat.completions.create(
        model=MODEL, messages=QUESTION, logprobs=True, stream=True
    )
    positions = []
    async for chunk in stream:
        if chunk.choices[0].logprobs:
            positions.extend(chunk.choices[0].logprobs.content)
    assert [position.top_logprobs for position in positions] == [[]] * len(tokens)


async def test_messages_of_text_parts_and_a_developer(
    start_router: StartRouter, make_worker: MakeWorker, tokenizer: Tokenizer
) -> None:
    worker = make_worker(script=answer([EOS]))
    router = await start_router(worker)
    messages: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello,"}, {"type": "text", "text": "you"}]},
    ]
    await router.openai.chat.completions.create(model=MODEL, messages=messages)
    prompt = tokenizer.decode(worker.generates[0].spec.prompt_token_ids, skip_special_tokens=False)
    assert "<|im_start|>system\nBe brief.<|im_end|>" in prompt
    assert "<|im_start|>user\nHello,\nyou<|im_end|>" in prompt


async def test_unknown_fields_are_ignored(start_router: StartRouter, make_worker: MakeWorker) -> None:
    router = await start_router(make_worker(script=answer([EOS])))
    body = {"model": MODEL, "messages": QUESTION, "a_field_of_tomorrow": {"x": 1}}
    assert (await router.post("chat/completions", body)).status_code == 200


async def test_a_long_prompt_goes_to_the_prefill_worker_and_the_plan_explains_it(
    start_router: StartRouter, make_worker: MakeWorker
) -> None:
    worker = make_worker(script=answer([EOS]))
    prefill = make_worker("p0", role="prefill", script=answer([EOS]))
    router = await start_router(worker, prefill)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "word " * 40}]}
    response = await router.post("chat/completions", body, headers={"X-Leadout-Explain": "1"})
    assert worker.generates[0].prefill_worker == "p0"
    plan = json.loads(response.headers["x-leadout-plan"])
    assert plan["decision"] == "remote"
    assert (plan["decode_worker"], plan["prefill_worker"]) == ("d0", "p0")
    assert {row["worker"] for row in plan["candidates"]} == {"d0", "p0"}
    assert await router.metric('leadout_router_plan_decisions_total{decision="remote"}') == 1


async def test_workers_know_a_request_by_the_client_s_id(
    start_router: StartRouter, make_worker: MakeWorker
) -> None:
    worker = make_worker(script=answer([EOS]))
    router = await start_router(worker)
    body = {"model": MODEL, "messages": QUESTION}
    for _ in range(2):
        response = await router.post("chat/completions", body, headers={"X-Request-Id": "mine"})
        assert response.headers["x-request-id"] == "mine"
    ids = [message.key.request_id for message in worker.generates]
    assert all(one.startswith("mine-") for one in ids)
    assert len(set(ids)) == 2  # a client's id need not be unique
    response = await router.post("chat/completions", body, headers={"X-Request-Id": "x" * 129})
    made_up = response.headers["x-request-id"]
    assert made_up.startswith("req-")
    assert worker.generates[2].key.request_id.startswith(f"{made_up}-")

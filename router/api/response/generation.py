"""What both endpoints do with a validated request: admit, dispatch, follow, account, clean up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
from starlette.requests import Request

from cluster.messages import TokenOutput
from cluster.sequence_spec import SequenceSpec
from router.api.errors import (
    ClientDisconnectedError,
    bad_request,
    from_worker,
    no_worker,
    overloaded,
)
from router.api.request.generation_spec import GenerationSpec
from router.api.response.choices import ChoiceDelta, ChoiceText
from router.api.response.seeds import choice_seed
from router.api.response.usage import UsageCounter
from router.dispatch.in_flight import Generation, SequenceRequest
from router.dispatch.waiting_line import LineFullError, NeverFitsError
from router.policy.plan import NoWorkerError, Plan
from router.services import RouterServices
from text_pipeline.output_text import OutputText


def request_timeout_ms(request: Request, limit_ms: int) -> float:
    """The client's ``X-Request-Timeout-Ms``, at most ``limit_ms``. Raises ApiError (400)."""
    header = request.headers.get("x-request-timeout-ms")
    if header is None:
        return float(limit_ms)
    if not (header.isascii() and header.isdecimal() and len(header) <= 12 and int(header) > 0):
        raise bad_request(
            f"The header X-Request-Timeout-Ms is {header[:40]!r}, must be a positive whole number of ms.",
            "X-Request-Timeout-Ms",
        )
    return float(min(int(header), limit_ms))


class ActiveGeneration:
    """One API request on the workers. ``close`` must be called, and cancels what is not finished."""

    def __init__(
        self, services: RouterServices, spec: GenerationSpec, request: Request, *, is_explained: bool = False
    ) -> None:
        """Admit and dispatch. Raises ApiError (429, 503) with nothing left behind."""
        self.spec = spec
        self._is_explained = is_explained
        self._services = services
        self._metrics = services.metrics
        self._choices = [self._choice_text(index) for index in range(spec.num_choices)]
        self.usage = UsageCounter([len(prompt) for prompt in spec.prompts], spec.n)
        self._last_token_at = [0.0] * spec.num_choices
        self._num_open = spec.num_choices
        self._is_closed = False
        self._generation = self._start()
        self._watcher = asyncio.create_task(_watch_disconnect(request, self._generation))
        self._metrics.prompt_tokens.inc(self.usage.prompt_tokens)

    @property
    def plan(self) -> Plan | None:
        """The plan of the first choice, as it stands now."""
        return self._generation.plans[0]

    async def deltas(self) -> AsyncIterator[tuple[int, ChoiceDelta] | None]:
        """Choice and delta as they arrive, until all have finished; None for each ``nudge``.

        ``usage`` counts what has been yielded.

        Raises ApiError if a choice fails (the others are then cancelled by ``close``), and
        ClientDisconnectedError when the client has gone.
        """
        while self._num_open:
            outputs = await self._generation.next()
            if self._generation.is_disconnected:
                raise ClientDisconnectedError
            if not outputs:
                yield None
            deltas = [  # of all at once: neither metrics nor cancels wait until a slow client has read one
                (index, self._feed(index, output))
                for index, output in outputs
                if not self._choices[index].is_finished
            ]
            for index, delta in deltas:
                self.usage.add(index, delta.num_tokens)
                yield index, delta
        self._metrics.e2e_request_latency.labels(self.spec.endpoint).observe(
            self._services.clock.monotonic() - self.spec.received_at
        )

    def nudge(self) -> None:
        """Have ``deltas`` yield None next."""
        self._generation.nudge()

    def close(self, reason: str) -> None:
        """Release everything; cancel unfinished sequences on their workers. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self._watcher.cancel()
        self._services.queue.close(self._generation, reason)

    def _start(self) -> Generation:
        spec = self.spec
        sequences = [self._sequence(index) for index in range(spec.num_choices)]
        try:
            return self._services.queue.start(sequences, spec.timeout_ms)
        except NeverFitsError as error:
            self._metrics.refused.inc()
            raise bad_request(
                f"The request asks for {spec.num_choices} sequences; this router serves at most "
                f"{error.max_sequences} at a time.",
                "n",
            ) from error
        except LineFullError as error:
            raise overloaded(error) from error
        except NoWorkerError as error:
            raise no_worker(str(error)) from error

    def _sequence(self, index: int) -> SequenceRequest:
        spec = self.spec
        prompt, choice = divmod(index, spec.n)
        sampling = spec.sampling[prompt]
        sampling = msgspec.structs.replace(sampling, seed=choice_seed(sampling.seed, prompt, choice))
        return SequenceRequest(
            request_id=spec.request_id if spec.num_choices == 1 else f"{spec.request_id}-{index}",
            model=spec.model.name,
            spec=SequenceSpec(
                prompt_token_ids=spec.prompts[prompt],
                sampling=sampling,
                cache_salt=spec.cache_salt,
                priority=spec.priority,
            ),
            hashes=spec.hashes[prompt],
            is_explained=self._is_explained,
        )

    def _choice_text(self, index: int) -> ChoiceText:
        spec = self.spec
        sampling = spec.sampling[index // spec.n]
        output_text = OutputText(
            self._services.tokenizer(spec.model),
            stop_strings=spec.stop_strings,
            include_stop=spec.include_stop_in_output,
            min_tokens=sampling.min_tokens,
            skip_special_tokens=spec.skip_special_tokens,
            prompt_token_ids=spec.text_before(index),
        )
        return ChoiceText(
            output_text,
            eos_token_ids=() if sampling.ignore_eos else spec.model.eos_token_ids,
            stop_token_ids=sampling.stop_token_ids,
            include_stop_in_output=spec.include_stop_in_output,
        )

    def _feed(self, index: int, output: TokenOutput) -> ChoiceDelta:
        if output.error is not None:
            raise from_worker(output.error)
        if output.token_ids:
            self._observe(index, output)
        delta = self._choices[index].feed(output)
        if delta.is_stop_string:
            self._services.queue.cancel(self._generation, index, "stop_string")
        if delta.finish_reason is not None:
            self._num_open -= 1
        return delta

    def _observe(self, index: int, output: TokenOutput) -> None:
        metrics, endpoint, now = self._metrics, self.spec.endpoint, self._services.clock.monotonic()
        metrics.generation_tokens.inc(len(output.token_ids))
        last = self._last_token_at[index]
        self._last_token_at[index] = now
        if last:
            metrics.inter_token_latency.labels(endpoint).observe((now - last) / len(output.token_ids))
        else:
            metrics.time_to_first_token.labels(endpoint).observe(now - self.spec.received_at)
        timings = output.timings
        if timings is not None:
            self.usage.first_token(index, timings)
            metrics.cached_tokens.inc(timings.num_prefill_cached_tokens + timings.num_decode_cached_tokens)
            metrics.request_queue_time.observe(timings.queue_ms / 1000)
            where = "remote" if timings.prefill_worker else "local"
            metrics.request_prefill_time.labels(where).observe(timings.prefill_ms / 1000)
            if timings.prefill_worker:
                metrics.request_transfer_time.observe(timings.transfer_ms / 1000)


async def _watch_disconnect(request: Request, generation: Generation) -> None:
    # The body has been read to its end, so the next message can only be the disconnect.
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            generation.disconnect()
            return

"""Everything one router process shares between its requests, wired together."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.clock import SystemClock
from cluster.config.settings import RouterConfig
from cluster.network import Connect
from model_files.generation_defaults import OPENAI_DEFAULTS, GenerationDefaults
from router.body_workers import BodyWorkers
from router.cluster_view import ClusterView
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.request_queue import RequestQueue
from router.metrics import RouterMetrics
from router.policy.longest_prefix import LongestPrefixPolicy, PolicySettings
from router.rejection_log import RejectionLog
from router.served_model import ModelNotReadyError, ServedModel
from text_pipeline.text_model import TextModel

_WAITING_BODIES = 16  # of the largest size: that many bytes of bodies may wait to be worked on


@dataclass(kw_only=True)
class RouterServices:
    """The parts of a router. Built by ``build_services``."""

    router_id: str
    model_name: str  # the one whose tokenizer is loaded
    text_model: TextModel
    generation_defaults: GenerationDefaults
    config: RouterConfig
    view: ClusterView
    queue: RequestQueue
    dispatcher: Dispatcher
    metrics: RouterMetrics
    body_workers: BodyWorkers
    rejections: RejectionLog = field(default_factory=RejectionLog)
    started_at: float = field(default_factory=time.time)
    is_draining: bool = False
    registry_problem: Callable[[], str] = lambda: ""  # why the members are not known; "" if they are
    _served: ServedModel | None = None  # as it was at ...
    _served_version: tuple[int, int] = (0, 0)  # ... this version of the cluster's state

    def served_model(self) -> ServedModel:
        """The model with the limits of the workers that are ready. Raises ModelNotReadyError."""
        name = self.model_name
        if self.is_draining:
            raise ModelNotReadyError("The router is shutting down.")
        state = self.view.state
        problem = self.registry_problem()
        if problem and state.workers:
            raise ModelNotReadyError(f"The view of the cluster is too old: {problem}.")
        if self._served is not None and self._served_version == state.version:
            return self._served
        workers = [worker for worker in state.decode_workers(name) if worker.is_ready]
        if not workers:
            raise ModelNotReadyError(
                f"No decode worker for the model {name!r} is ready: {'; '.join(self.not_ready_reasons())}."
            )
        models = [worker.record.model for worker in workers]
        largest = max(models, key=lambda model: model.max_model_len)
        self._served_version = state.version
        self._served = ServedModel(
            name=name,
            fingerprint=largest.fingerprint,
            max_model_len=largest.max_model_len,
            vocab_size=min(model.vocab_size for model in models),
            eos_token_ids=tuple({token for model in models for token in model.eos_token_ids}),
            defaults=self.generation_defaults,
        )
        return self._served

    def not_ready_reasons(self) -> list[str]:
        """Why this router cannot serve; empty if it can."""
        if self.is_draining:
            return ["the router is shutting down"]
        problem = self.registry_problem()
        if problem:
            return [problem]
        decode = self.view.state.decode_workers(self.model_name)
        if any(worker.is_ready for worker in decode):
            return []
        if not decode:
            others = [name for name in self.view.state.models(ready=False) if name != self.model_name]
            reasons = [f"no decode worker for {self.model_name!r} is registered"]
            if others:
                reasons.append(f"registered decode workers serve {', '.join(map(repr, others))}")
            reasons.extend(item.reason for item in self.view.incompatible if len(item.workers) == 1)
            return reasons
        return [
            f"decode worker {worker.record.id} "
            + ("has not reported its load yet" if worker.load is None else f"is {worker.state}")
            for worker in decode
        ]


def policy_settings(config: RouterConfig) -> PolicySettings:
    """What of the configuration the policy asks for."""
    return PolicySettings(
        local_prefill_max_tokens=config.local_prefill_max_tokens,
        overload_factor=config.overload_factor,
        overload_slack=config.overload_slack,
        max_failed_prefills=config.max_failed_prefills,
    )


def build_services(
    *,
    router_id: str,
    model_name: str,
    text_model: TextModel,
    load_text_model: Callable[[], TextModel],
    config: RouterConfig,
    connect: Connect,
    generation_defaults: GenerationDefaults = OPENAI_DEFAULTS,
) -> RouterServices:
    """Wire up a router's parts. Nothing is connected until ``view.update`` is called.

    ``load_text_model`` loads ``text_model`` in another process, and must be picklable.
    """
    metrics = RouterMetrics()
    num_tokens = text_model.tokenizer.vocab_size
    view = ClusterView(
        connect=connect,
        on_tokens=lambda worker, batch: dispatcher.on_tokens(worker, batch),
        on_worker_lost=lambda worker: dispatcher.on_worker_lost(worker),
        on_dropped=metrics.message_dropped,
        max_index_blocks=config.max_index_blocks,
        max_vocab_size=lambda name: num_tokens if name == model_name else None,
    )
    clock = SystemClock()
    dispatcher = Dispatcher(view, LongestPrefixPolicy(policy_settings(config)), metrics, clock)
    return RouterServices(
        router_id=router_id,
        model_name=model_name,
        text_model=text_model,
        generation_defaults=generation_defaults,
        config=config,
        view=view,
        queue=RequestQueue(
            dispatcher,
            metrics,
            clock,
            max_sequences=config.max_concurrent_requests,
            max_waiting=config.max_waiting_requests,
            max_wait_ms=config.max_wait_ms,
        ),
        dispatcher=dispatcher,
        metrics=metrics,
        body_workers=BodyWorkers(
            load_text_model,
            metrics,
            num_processes=config.body_processes,
            max_waiting_bytes=_WAITING_BODIES * config.max_request_body,
        ),
    )

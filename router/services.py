"""Everything one router process shares between its requests, wired together."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cluster.clock import Clock, SystemClock
from cluster.config.settings import RouterConfig
from cluster.network import Connect
from router.body_workers import BodyWorkers
from router.cluster_view import ClusterView
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.request_queue import RequestQueue
from router.http.rejection_log import RejectionLog
from router.metrics import RouterMetrics
from router.policy.longest_prefix import LongestPrefixPolicy, PolicySettings
from router.served_model import ModelNotReadyError, ModelTable, ServedModel
from text_pipeline.text_model import TextModel
from text_pipeline.tokenizer import Tokenizer

_WAITING_BODIES = 16  # of the largest size: that many bytes of bodies may wait to be worked on


@dataclass(kw_only=True)
class RouterServices:
    """The parts of a router. Built by ``build_services``."""

    router_id: str
    models: ModelTable
    config: RouterConfig
    view: ClusterView
    clock: Clock
    queue: RequestQueue
    dispatcher: Dispatcher
    metrics: RouterMetrics
    body_workers: BodyWorkers
    rejections: RejectionLog = field(default_factory=RejectionLog)
    started_at: float = field(default_factory=time.time)
    is_draining: bool = False
    registry_problem: Callable[[], str] = lambda: ""  # why the members are not known; "" if they are
    _served: dict[str, tuple[object, ServedModel]] = field(default_factory=dict)  # by name, with the version

    @property
    def text_models(self) -> dict[str, TextModel]:
        """Tokenizer and template of each model."""
        return {name: model.text for name, model in self.models.items()}

    def tokenizer(self, model: ServedModel) -> Tokenizer:
        """The model's tokenizer."""
        return self.models[model.name].text.tokenizer

    def served_model(self, name: str) -> ServedModel:
        """A model with the limits of the workers that are ready. Raises ModelNotReadyError."""
        if self.is_draining:
            raise ModelNotReadyError("The router is shutting down.")
        state = self.view.state
        problem = self.registry_problem()
        if problem and state.workers:
            raise ModelNotReadyError(f"The view of the cluster is too old: {problem}.")
        version, served = self._served.get(name, (None, None))
        if served is not None and version == state.version:
            return served
        workers = [worker for worker in state.decode_workers(name) if worker.is_ready]
        if not workers:
            raise ModelNotReadyError(
                f"No decode worker for the model {name!r} is ready: {'; '.join(self._why_not_ready(name))}."
            )
        models = [worker.record.model for worker in workers]
        largest = max(models, key=lambda model: model.max_model_len)
        served = ServedModel(
            name=name,
            fingerprint=largest.fingerprint,
            max_model_len=largest.max_model_len,
            vocab_size=min(model.vocab_size for model in models),
            eos_token_ids=tuple({token for model in models for token in model.eos_token_ids}),
            hash_groups=state.pool(name).groups,
            defaults=self.models[name].defaults,
        )
        self._served[name] = state.version, served
        return served

    def ready_models(self) -> list[str]:
        """Names of the models for which a worker takes requests now."""
        return [name for name in self.view.state.models(ready=True) if name in self.models]

    def not_ready_reasons(self) -> list[str]:
        """Why this router can serve no model; empty if it can serve one."""
        if self.is_draining:
            return ["the router is shutting down"]
        problem = self.registry_problem()
        if problem:
            return [problem]
        if self.ready_models():
            return []
        return [reason for name in self.models for reason in self._why_not_ready(name)]

    def _why_not_ready(self, name: str) -> list[str]:
        problem = self.registry_problem()
        if problem:
            return [problem]
        decode = self.view.state.decode_workers(name)
        if not decode:
            others = [other for other in self.view.state.models(ready=False) if other not in self.models]
            reasons = [f"no decode worker for {name!r} is registered"]
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
    models: ModelTable,
    load_text_models: Callable[[], Mapping[str, TextModel]],
    config: RouterConfig,
    connect: Connect,
) -> RouterServices:
    """Wire up a router's parts. Nothing is connected until ``view.update`` is called.

    ``load_text_models`` loads the text side of ``models`` in another process, and must be picklable.
    """
    metrics = RouterMetrics()
    view = ClusterView(
        connect=connect,
        on_tokens=lambda worker, batch: dispatcher.on_tokens(worker, batch),
        on_worker_lost=lambda worker: dispatcher.on_worker_lost(worker),
        on_dropped=metrics.message_dropped,
        max_index_blocks=config.max_index_blocks,
        vocab_sizes={name: model.text.tokenizer.vocab_size for name, model in models.items()},
    )
    clock = SystemClock()
    dispatcher = Dispatcher(view, LongestPrefixPolicy(policy_settings(config)), metrics, clock)
    return RouterServices(
        router_id=router_id,
        models=models,
        config=config,
        view=view,
        clock=clock,
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
            load_text_models,
            metrics,
            num_processes=config.body_processes,
            max_waiting_bytes=_WAITING_BODIES * config.max_request_body,
        ),
    )

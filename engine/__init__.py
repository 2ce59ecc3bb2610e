"""Runs a model on one worker: models, layers, kernels, KV cache, scheduler, sampler. Knows no network."""

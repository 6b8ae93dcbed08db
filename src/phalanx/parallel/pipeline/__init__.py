"""Pipelines: the layers of a model spread over ranks, and micro-batches that pass through them."""

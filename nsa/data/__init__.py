"""Data pipeline: sources, tokenizers, prepared shards, and resumable loaders.

It imports nothing: a worker process must start without PyTorch.
"""

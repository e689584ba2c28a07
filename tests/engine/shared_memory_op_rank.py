"""A user's own DeepSpeed script; with the argument "skip" it disables the shared-memory op."""

import os
import sys

import deepspeed
import torch

from nsa.engine import disable_shared_memory_op
from nsa.model import LanguageModel, ModelConfig

if "skip" in sys.argv:
    disable_shared_memory_op()
sizes = {"layers": 1, "width": 16, "heads": 2, "kv_heads": 1, "head_dim": 8, "mlp_width": 16}
model = LanguageModel(ModelConfig(vocab_size=31, **sizes))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
ids = torch.arange(20)[None]
engine.backward(engine(ids[:, :-1], labels=ids[:, 1:]))
engine.step()
print("trained", flush=True)
os._exit(0)

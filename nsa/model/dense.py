"""Dense causal attention, of the dense twin and of a sparse model's first steps."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from nsa.ops.documents import document_slices


def causal_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Return attention [B, T, Hq, Dv] over all previous tokens of the document."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    outputs = [
        F.scaled_dot_product_attention(
            q[:, :, doc], k[:, :, doc], v[:, :, doc], is_causal=True, enable_gqa=True
        )
        for doc in document_slices(q.shape[2], cu_seqlens)
        if doc.stop > doc.start
    ]
    o = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)  # one document: no copy
    return o.transpose(1, 2)

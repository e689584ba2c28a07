"""Hugging Face model: `LanguageModel` for transformers' generate(), save_pretrained() and Trainer.

`nsa export` packs this module with the weights as remote code (`nsa/export/remote_code.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    AutoModelForCausalLM,
)
from transformers.utils import can_return_tuple

from nsa.constants import IGNORE_INDEX
from nsa.model.cache import KVCache
from nsa.model.compressor import BlockMLP
from nsa.model.decode import extend_states, prefill_states
from nsa.model.hf_config import NSAConfig
from nsa.model.language_model import LanguageModel


class NSACache(Cache):
    """`KVCache` with transformers' interface; `forward(use_cache=True)` creates and fills it.

    Tokens cannot be removed, because older inputs of compressed blocks are not stored.
    """

    is_croppable = False

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.kv: KVCache | None = None
        self.columns = 0  # of input_ids so far, including padding

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the columns of input_ids so far, as generate() expects, including padding."""
        return self.columns

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.kv is not None:
            self.kv = self.kv.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.kv is not None:
            rows = torch.arange(self.kv.batch, device=self.kv.device)
            self.kv = self.kv.select(rows.repeat_interleave(repeats))

    def reset(self) -> None:
        self.kv, self.columns = None, 0

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise ValueError("NSACache: tokens cannot be removed; decode without an assistant")


class NSAForCausalLM(PreTrainedModel, GenerationMixin):
    """`LanguageModel` under the prefix "model.", with its embedding as the tied head.

    Padding, left or right, is never computed: each sequence gets what it would get alone.
    """

    config_class = NSAConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True
    _input_embed_layer = "embed"
    _no_split_modules = ["LanguageModel"]  # noqa: RUF012 - layers share tensors of one device
    _tied_weights_keys = {"lm_head.weight": "model.embed.weight"}  # noqa: RUF012
    _is_stateful = True  # makes generate() refuse assisted decoding, which removes tokens

    def __init__(self, config: NSAConfig) -> None:
        super().__init__(config)
        self.gradient_checkpointing = False
        self.model = LanguageModel(config.model_config())
        self.lm_head = nn.Linear(config.width, config.vocab_size, bias=False, device="meta")
        self.lm_head.weight = self.model.embed.weight
        if not self.model.embed.weight.is_meta:
            for parameter in self.model.parameters():
                parameter._is_hf_initialized = True  # LanguageModel's init, not post_init's
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: NSACache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return logits [B, T, V] of input_ids [B, T], and the loss if labels [B, T] are given.

        labels are not shifted: labels[b, t] is input_ids[b, t], or -100. attention_mask [B, T] is 0
        for padding, whose logits are meaningless; `logits_to_keep=1` returns the logits of each
        sequence's last token. A document starts where position_ids are 0; with a cache, each
        sequence is one document. Results with a cache have no gradients.
        """
        if input_ids is None or inputs_embeds is not None:
            raise ValueError("inputs_embeds: not supported; pass input_ids")
        cache = NSACache() if past_key_values is None and use_cache else past_key_values
        if not isinstance(cache, NSACache | None):
            kind = type(cache).__name__
            raise ValueError(f"past_key_values is a {kind}; pass an NSACache, or use_cache=True")
        if output_hidden_states is None:
            output_hidden_states = bool(self.config.output_hidden_states)
        real = _real_tokens(attention_mask, input_ids, cache, _keeps_last(logits_to_keep))
        starts = _document_starts(position_ids, input_ids, real, cache)
        if cache is None:
            states = self._hidden_states(input_ids, real, starts, output_hidden_states)
            logits = self.lm_head(_keep_columns(states[-1], real, logits_to_keep))
        elif output_hidden_states:
            raise ValueError("output_hidden_states: none with a cache; set use_cache=False")
        else:
            logits = self._logits_with_cache(input_ids, real, cache, logits_to_keep)
        loss = None
        if labels is not None:
            shifted = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
            if real is not None:
                shifted = shifted.masked_fill(~real, IGNORE_INDEX)
            loss = self.loss_function(
                logits, None, self.config.vocab_size, shift_labels=shifted, **kwargs
            )
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=cache,
            hidden_states=states if output_hidden_states else None,
        )

    def _hidden_states(
        self, input_ids: Tensor, real: Tensor | None, starts: Tensor | None, all_blocks: bool
    ) -> tuple[Tensor, ...]:
        """Return the head's input; with `all_blocks` the inputs of all blocks before it.

        Rows with padding or several documents are packed into one row of documents.
        """
        cu_seqlens = None
        if real is None and starts is not None:
            real = torch.ones_like(input_ids, dtype=torch.bool)
        if real is not None:
            starts = _first_tokens(real) if starts is None else _first_tokens(real) | starts
            input_ids = input_ids[real][None]
            offsets = starts[real].nonzero()[:, 0]
            cu_seqlens = F.pad(offsets, (0, 1), value=input_ids.shape[1]).int()
        block_inputs: list[Tensor] = []
        hooks = [
            block.register_forward_pre_hook(lambda _, inputs: block_inputs.append(_sum(*inputs)))
            for block in (self.model.blocks if all_blocks else ())
        ]
        try:
            states = self.model.hidden(input_ids, cu_seqlens)
        finally:
            for hook in hooks:
                hook.remove()
        return tuple(x if real is None else _unpack(x[0], real) for x in (*block_inputs, states))

    def _logits_with_cache(
        self, input_ids: Tensor, real: Tensor | None, cache: NSACache, logits_to_keep: int | Tensor
    ) -> Tensor:
        # Trainer generates under autocast, but the cache keeps the weights' dtype.
        with torch.no_grad(), torch.autocast(input_ids.device.type, enabled=False):
            if cache.kv is not None:
                states = extend_states(self.model, input_ids, cache.kv)
            else:
                mask = torch.ones_like(input_ids, dtype=torch.bool) if real is None else real
                prompts = [row[kept] for row, kept in zip(input_ids, mask, strict=True)]
                packed, cache.kv = prefill_states(self.model, prompts)
                states = _unpack(packed, mask)
            logits = self.lm_head(_keep_columns(states, real, logits_to_keep))
        cache.columns += input_ids.shape[1]
        return logits

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Any = None, every_n_layers: int = 1
    ) -> None:
        """Checkpoint every block; of torch's settings only `use_reentrant` has an effect."""
        if every_n_layers != 1:
            raise ValueError(
                f"every_n_layers = {every_n_layers}: every block is checkpointed; use 1"
            )
        keywords = getattr(gradient_checkpointing_func, "keywords", {})
        mode = "reentrant" if keywords.get("use_reentrant", True) else "non_reentrant"
        self.model.config.activation_checkpointing = mode if enable else "none"
        self.gradient_checkpointing = enable

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        embeddings = super().resize_token_embeddings(*args, **kwargs)
        self.model.config.vocab_size = self.config.vocab_size
        return embeddings

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize weights that a checkpoint lacks; `__init__` initializes a new model."""
        super()._init_weights(module)
        if isinstance(module, BlockMLP):
            nn.init.normal_(module.position, std=self.config.init_std)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # generate() creates no cache; forward() does


AutoModelForCausalLM.register(NSAConfig, NSAForCausalLM, exist_ok=True)
# Trainer shifts labels for label smoothing only for classes listed here.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[NSAConfig.model_type] = NSAForCausalLM.__name__


def _real_tokens(
    mask: Tensor | None, input_ids: Tensor, cache: NSACache | None, keeps_last: bool
) -> Tensor | None:
    """Return [B, T], true for tokens and false for padding; None if there is no padding.

    `mask` has a column for each column in the cache and each new one.
    """
    if mask is None:
        return None
    shape = (len(input_ids), input_ids.shape[1] + (0 if cache is None else cache.columns))
    if mask.shape != shape:
        cached = "" if cache is None else ", including the columns in the cache"
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}; it must be {shape}{cached}"
        )
    real = mask[:, -input_ids.shape[1] :] != 0
    if real.all():
        return None
    if cache is not None and cache.kv is not None:
        raise ValueError("attention_mask: with a filled cache every sequence needs new tokens")
    empty = ~real.any(1)
    continued = cache is not None or keeps_last  # generate() continues each sequence
    if empty.all() or (continued and empty.any()):
        row = int(empty.nonzero()[0])
        raise ValueError(f"attention_mask: row {row} has no token to continue; give it a bos")
    return real


def _document_starts(
    position_ids: Tensor | None, input_ids: Tensor, real: Tensor | None, cache: NSACache | None
) -> Tensor | None:
    """Return [B, T], true at the second and later documents of a row; None if there are none."""
    if position_ids is None:
        return None
    rows, columns = input_ids.shape
    if position_ids.shape[-1] != columns or position_ids.numel() not in (columns, rows * columns):
        raise ValueError(
            f"position_ids has shape {tuple(position_ids.shape)}; it must be {(rows, columns)}"
        )
    tokens = torch.ones_like(input_ids, dtype=torch.bool) if real is None else real
    starts = tokens & (position_ids.reshape(-1, columns) == 0)
    if cache is None or cache.kv is None:
        starts &= ~_first_tokens(tokens)
    if not starts.any():
        return None
    if cache is not None:
        row, column = starts.nonzero()[0].tolist()
        raise ValueError(
            f"position_ids[{row}, {column}] = 0 starts a second document; with a cache a sequence "
            "holds one: set use_cache=False, or give each document its own row"
        )
    return starts


def _first_tokens(real: Tensor) -> Tensor:
    """Return [B, T], true at each sequence's first token."""
    return real & (real.cumsum(1) == 1)


def _sum(x: Tensor, delta: Tensor | None) -> Tensor:
    """Return the residual stream from a block's inputs."""
    return x if delta is None else x + delta


def _unpack(packed: Tensor, real: Tensor) -> Tensor:
    """Unpack [tokens, width] to [B, T, width], with 0 for padding."""
    padded = packed.new_zeros(*real.shape, packed.shape[1])
    return padded.masked_scatter(real[..., None], packed)


def _keep_columns(hidden: Tensor, real: Tensor | None, keep: int | Tensor) -> Tensor:
    """Return the last `keep` columns (0: all), or the columns in the tensor `keep`.

    For keep = 1, return each sequence's last token, also if right padding follows it.
    """
    if real is not None and _keeps_last(keep):
        columns = torch.arange(real.shape[1], device=real.device)
        return hidden.take_along_dim((columns * real).argmax(1)[:, None, None], 1)
    return hidden[:, slice(-keep, None) if isinstance(keep, int) else keep]


def _keeps_last(keep: int | Tensor) -> bool:
    return isinstance(keep, int) and keep == 1

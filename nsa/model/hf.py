"""Hugging Face models: `LanguageModel` for transformers' Auto classes, generate() and Trainer.

    NSAModel         hidden states; the `base_model` of NSAForCausalLM
    NSAForCausalLM   logits and loss, generate()
    NSACache         `KVCache` with transformers' interface

Padded and packed batches become one row of documents: padding is never computed, and a token sees
its own document only.

Importing this module registers both models. `nsa export` packs it with the weights as remote code
(`nsa/export/remote_code.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    GenerationMixin,
    PreTrainedModel,
)
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import can_return_tuple

from nsa.constants import IGNORE_INDEX
from nsa.model import block
from nsa.model.attention_metadata import AttentionMetadata
from nsa.model.cache import KVCache
from nsa.model.compressor import BlockMLP, BlockPool
from nsa.model.config import INIT_STD, ModelConfig
from nsa.model.decode import prefill_states, step_states
from nsa.model.hf_config import NSAConfig, register_peft_targets
from nsa.model.language_model import LanguageModel, check_tokens
from nsa.ops.inputs import check_documents

# Servers that replace a model's attention, by the name of their attention. It would read earlier
# tokens from the server's cache; the server passes only the newest ones to the model.
SERVERS = {"vllm": "vLLM", "sglang": "SGLang"}


class Block(GradientCheckpointingLayer, block.Block):
    """`Block` that transformers can checkpoint; FSDP's settings wrap it by this name."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        # `_init_weights` reads init_scale. In __dict__: to mypy other attributes are tensors.
        residual = (2 * config.layers) ** -0.5  # as LanguageModel initializes
        self.attention.o.__dict__["init_scale"] = self.mlp.down.__dict__["init_scale"] = residual
        if hasattr(self.attention, "gates"):
            self.attention.gates.__dict__["init_scale"] = 0.0


@dataclass
class NSAModelOutput(BaseModelOutputWithPast):
    """Output of `NSAModel`, with the sum of its layers' selector losses; None in evaluation."""

    selector_loss: Tensor | None = None


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


class NSAPreTrainedModel(PreTrainedModel):
    """Base class: transformers' settings of all models, gradient checkpointing, initialization."""

    config_class = NSAConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _input_embed_layer = "embed"
    _no_split_modules = ["NSAModel"]  # noqa: RUF012 - layers share tensors of one device
    _is_stateful = True  # makes generate() refuse assisted decoding, which removes tokens

    def __init__(self, config: NSAConfig) -> None:
        if (server := SERVERS.get(config._attn_implementation)) is not None:
            raise ValueError(
                f"{server} has no sparse attention; give it a dense export (nsa export --attention "
                "dense), or use nsa serve"
            )
        super().__init__(config)
        register_peft_targets()

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        embeddings = super().resize_token_embeddings(*args, **kwargs)
        base: Any = self.base_model
        base.core.config.vocab_size = self.config.vocab_size
        tied = self.config.tie_word_embeddings
        base.core.__dict__["head"] = None if tied else self.get_output_embeddings()
        return embeddings

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize weights that a checkpoint lacks; `NSAModel` initializes a new model."""
        super()._init_weights(module)
        std = self.config.initializer_range
        if isinstance(module, BlockMLP):
            nn.init.normal_(module.position, std=std)
        elif isinstance(module, BlockPool):
            module.reset_parameters()
        if (scale := module.__dict__.get("init_scale")) is not None:
            nn.init.normal_(module.weight, std=std * scale)  # type: ignore[arg-type]

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # generate() creates no cache; forward() does


class NSAModel(NSAPreTrainedModel):
    """Hidden states of `LanguageModel`, which is the attribute `core`.

    Padding, left or right, is never computed: each sequence gets what it would get alone.
    """

    core: LanguageModel
    embed: nn.Embedding

    def __init__(self, config: NSAConfig) -> None:
        super().__init__(config)
        core = LanguageModel(config.model_config(), block=Block)
        # NSAForCausalLM has the head. `core` refers to it, but not as a submodule: its weight would
        # otherwise be a weight of NSAModel too.
        core._modules.pop("head", None)
        core.__dict__["head"] = None
        # self and core share one registry of submodules: weights keep the trainer's names, and
        # replacing a module in one (by an adapter, a larger vocabulary) replaces it in the other.
        self._modules = core._modules
        self.__dict__["core"] = core
        if not core.embed.weight.is_meta:
            if config.initializer_range != INIT_STD:
                core.initialize(config.initializer_range)
            for parameter in core.parameters():  # post_init() must not initialize them again
                parameter._is_hf_initialized = True  # type: ignore[attr-defined]
        self.post_init()

    def _replicate_for_data_parallel(self) -> NSAModel:
        """Give a replica its own core: Trainer uses nn.DataParallel where there is no launcher."""
        replica = super()._replicate_for_data_parallel()
        replica.__dict__["core"] = copy(self.core)
        replica.core._modules = replica._modules
        return replica

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: NSACache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        cu_seq_lens_q: Tensor | None = None,
        **kwargs: Any,
    ) -> NSAModelOutput:
        """Return the head's input for input_ids [B, T] or inputs_embeds [B, T, width].

        attention_mask [B, T] is 0 for padding, whose states are 0. A document starts where
        position_ids restart at 0; if they never do, or without them, at cu_seq_lens_q (batch 1).
        Documents do not see each other. With a cache, each sequence is one document, and
        results have no gradients. Other arguments have no effect.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("input_ids and inputs_embeds: pass one of them")
        if "cache" in kwargs:
            raise ValueError("generate_batch: its paged cache does not fit NSA; use generate()")
        tokens: Any = input_ids if inputs_embeds is None else inputs_embeds
        dimensions = 2 if inputs_embeds is None else 3
        if tokens.dim() != dimensions or tokens.shape[1] < 1:
            raise ValueError(
                f"input_ids or inputs_embeds has shape {tuple(tokens.shape)}; it must be [B, T] "
                f"or [B, T, {self.config.width}]"
            )
        cache = NSACache() if past_key_values is None and use_cache else past_key_values
        if not isinstance(cache, NSACache | None):
            kind = type(cache).__name__
            raise ValueError(f"past_key_values is a {kind}; pass an NSACache, or use_cache=True")
        if output_hidden_states is None:
            output_hidden_states = bool(self.config.output_hidden_states)
        loss: Tensor | None = None
        hidden: list[Tensor] = []  # each block's input
        if cache is not None:
            if cu_seq_lens_q is not None and len(cu_seq_lens_q) > 2:
                raise ValueError(
                    "cu_seq_lens_q: with a cache a sequence is one document; set use_cache=False"
                )
            states, hidden = self._states_with_cache(
                tokens, attention_mask, position_ids, cache, output_hidden_states
            )
        else:
            offset = self.core.loss_offset(tokens)
            tokens, real, metadata = pack(
                self.core.config, tokens, attention_mask, position_ids, cu_seq_lens_q, offset
            )

            def collect(x: Tensor) -> Tensor:
                """Collect a block's input and return it: what is collected gets a gradient."""
                unpacked = unpack(x, real)  # [B, T, width]
                hidden.append(unpacked)
                return x if real is None else unpacked[real][None]

            x = self.embed(tokens) if inputs_embeds is None else tokens
            x, loss = self.core.run_blocks(x, metadata, collect if output_hidden_states else None)
            states = unpack(x, real)
        return NSAModelOutput(
            last_hidden_state=states,
            past_key_values=cache,
            hidden_states=(*hidden, states) if output_hidden_states else None,
            selector_loss=loss,
        )

    @torch.compiler.disable
    def _states_with_cache(
        self,
        tokens: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: NSACache,
        with_inputs: bool,
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the final hidden states, and each block's input if `with_inputs`."""
        real = real_tokens(attention_mask, tokens, cache.columns)
        document_starts(position_ids, tokens, real, cache.columns)  # raises if a row holds two
        inputs: list[Tensor] = []

        def collect(_: nn.Module, arguments: tuple[Tensor, Tensor | None]) -> None:
            x, delta = arguments  # [1, tokens of all prompts, width], or in a step [1, B, width]
            inputs.append((x if delta is None else x + delta)[0])

        blocks = self.core.blocks if with_inputs else ()
        with _decoding(tokens.device), ExitStack() as hooks:
            for layer in blocks:
                hooks.enter_context(layer.register_forward_pre_hook(collect))
            if cache.kv is None:
                mask = tokens.new_ones(tokens.shape[:2]).bool() if real is None else real
                prompts = [row[kept] for row, kept in zip(tokens, mask, strict=True)]
                packed, cache.kv = prefill_states(self.core, prompts)
                states, inputs = unpack(packed, mask), [unpack(x, mask) for x in inputs]
            else:  # one step per token
                if not tokens.is_floating_point():  # before a step changes the cache
                    check_tokens(tokens, self.config.vocab_size)
                steps = [step_states(self.core, column, cache.kv) for column in tokens.unbind(1)]
                states = torch.stack(steps, 1)
                inputs = [torch.stack(inputs[n :: len(blocks)], 1) for n in range(len(blocks))]
        cache.columns += tokens.shape[1]
        return states, inputs


class NSAForCausalLM(NSAPreTrainedModel, GenerationMixin):
    """`NSAModel` with a head: its embedding, or with `tie_word_embeddings=False` another matrix."""

    accepts_loss_kwargs = True
    _tied_weights_keys = {"lm_head.weight": "model.embed.weight"}  # noqa: RUF012

    def __init__(self, config: NSAConfig) -> None:
        super().__init__(config)
        self.model = NSAModel(config)
        tied = config.tie_word_embeddings
        device = "meta" if tied else None  # post_init() ties it
        self.lm_head = nn.Linear(config.width, config.vocab_size, bias=False, device=device)
        self.model.core.__dict__["head"] = None if tied else self.lm_head
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
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return logits [B, T, V], and the loss if labels [B, T] are given; inputs: `NSAModel`.

        labels are not shifted: labels[b, t] is input_ids[b, t], or -100. shift_labels, if given,
        replace them: shift_labels[b, t] is the token after it. The logits of padding are
        meaningless; `logits_to_keep=1` returns the logits of each sequence's last token.
        """
        inputs = input_ids, attention_mask, position_ids, past_key_values, inputs_embeds
        output = self.model(*inputs, use_cache, output_hidden_states, return_dict=True, **kwargs)
        states, cache = output.last_hidden_state, output.past_key_values
        with nullcontext() if cache is None else _decoding(states.device):
            if not isinstance(logits_to_keep, int):
                kept = states[:, logits_to_keep]
            elif logits_to_keep == 1 and attention_mask is not None:
                kept = last_tokens(states, attention_mask)  # right padding may follow them
            else:
                kept = states[:, -logits_to_keep:]  # 0: all columns
            logits = self.lm_head(kept)
        loss = None
        if labels is not None or shift_labels is not None:
            shifted = shift_labels
            if shifted is None:
                shifted = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)  # type: ignore[index]
            if attention_mask is not None:
                padding = attention_mask[:, -shifted.shape[1] :] == 0
                shifted = shifted.masked_fill(padding, IGNORE_INDEX)
            loss = self.loss_function(
                logits, None, self.config.vocab_size, shift_labels=shifted, **kwargs
            )
            selector_loss, items = output.selector_loss, kwargs.get("num_items_in_batch")
            if selector_loss is not None and selector_loss.requires_grad:
                weight = self.config.attention["selector_loss"]
                if items is not None:  # Trainer sums micro-batches: weight by labels
                    total = torch.as_tensor(items, device=shifted.device)
                    weight = weight * (shifted != IGNORE_INDEX).sum() / total
                loss = loss + weight * selector_loss
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=cache, hidden_states=output.hidden_states
        )


@contextmanager
def _decoding(device: torch.device) -> Iterator[None]:
    """Disable gradients and autocast: the cache has the weights' dtype, and Trainer autocasts."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


@torch.compiler.disable  # sizes depend on the mask: one graph break instead of one per operation
def pack(
    config: ModelConfig,
    tokens: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    loss_offset: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, AttentionMetadata]:
    """Return the tokens to compute, a mask for `unpack`, and their attention metadata.

    `tokens` are ids [B, T] or embeddings [B, T, width]; a batch with padding or several documents
    in a row becomes [1, tokens]. The mask is [B, T], true for tokens and false for padding, or None
    if nothing was packed. Documents start where `position_ids` restart at 0; if they never do, or
    without them, at `cu_seqlens`. `loss_offset` is `AttentionMetadata.build`'s.
    """
    real = real_tokens(attention_mask, tokens)
    starts = document_starts(position_ids, tokens, real)
    if real is not None and starts is None and cu_seqlens is not None:
        raise ValueError(
            "cu_seq_lens_q: not with padding in attention_mask; pass position_ids that restart at "
            "0 with each document"
        )
    if real is None and starts is not None:
        real = torch.ones_like(starts)
    if real is not None:
        first = _first_tokens(real)
        starts = first if starts is None else first | starts
        tokens = tokens[real][None]
        offsets = starts[real].nonzero()[:, 0]
        cu_seqlens = F.pad(offsets, (0, 1), value=tokens.shape[1]).int()
    check_documents(cu_seqlens, tokens, "input_ids")
    metadata = AttentionMetadata.build(
        config, tokens.shape[1], cu_seqlens, tokens.device, loss_offset=loss_offset
    )
    return tokens, real, metadata


def unpack(packed: Tensor, real: Tensor | None) -> Tensor:
    """Return packed states [1, tokens, width] as [B, T, width], with 0 for padding."""
    if real is None:
        return packed
    return packed.new_zeros(*real.shape, packed.shape[-1]).masked_scatter(real[..., None], packed)


def real_tokens(mask: Tensor | None, tokens: Tensor, cached: int | None = None) -> Tensor | None:
    """Return [B, T], true for tokens and false for padding; None if there is no padding.

    `cached`: columns in the cache, None without a cache; `mask` covers them and the new ones.
    """
    if mask is None:
        return None
    rows, columns = tokens.shape[:2]
    shape = (rows, columns + (cached or 0))
    if mask.shape != shape:
        extra = "" if cached is None else ", including the columns in the cache"
        raise ValueError(f"attention_mask has shape {tuple(mask.shape)}; it must be {shape}{extra}")
    real = mask[:, -columns:] != 0
    if real.all():
        return None
    if cached:
        raise ValueError("attention_mask: with a filled cache every sequence needs new tokens")
    if cached is not None or not real.any():  # without a cache some rows may be empty
        check_rows(real)
    return real


def check_rows(real: Tensor) -> None:
    """Raise a ValueError if a row of `real` [B, T] has no token."""
    empty = ~real.any(1)
    if empty.any():
        row = int(empty.nonzero()[0])
        raise ValueError(f"attention_mask: row {row} has no token to continue; give it a bos")


def document_starts(
    position_ids: Tensor | None, tokens: Tensor, real: Tensor | None, cached: int | None = None
) -> Tensor | None:
    """Return [B, T], true at the second and later documents of a row; None if there are none."""
    if position_ids is None:
        return None
    rows, columns = tokens.shape[:2]
    if position_ids.shape[-1] != columns or position_ids.numel() not in (columns, rows * columns):
        raise ValueError(
            f"position_ids has shape {tuple(position_ids.shape)}; it must be {(rows, columns)}"
        )
    if real is None:
        real = torch.ones(rows, columns, dtype=torch.bool, device=tokens.device)
    starts = real & (position_ids.reshape(-1, columns) == 0)
    if not cached:
        starts &= ~_first_tokens(real)
    if not starts.any():
        return None
    if cached is not None:
        row, column = starts.nonzero()[0].tolist()
        raise ValueError(
            f"position_ids[{row}, {column}] = 0 starts a second document; with a cache a sequence "
            "holds one: set use_cache=False, or give each document its own row"
        )
    return starts


def _first_tokens(real: Tensor) -> Tensor:
    """Return [B, T], true at each sequence's first token."""
    return real & (real.cumsum(1) == 1)


@torch.compiler.disable  # reads the mask
def last_tokens(states: Tensor, mask: Tensor) -> Tensor:
    """Return each sequence's last token, [B, 1, width]."""
    real = mask[:, -states.shape[1] :] != 0
    check_rows(real)
    columns = torch.arange(real.shape[1], device=real.device)
    return states.take_along_dim((columns * real).argmax(1)[:, None, None], 1)


AutoConfig.register(NSAConfig.model_type, NSAConfig, exist_ok=True)
AutoModel.register(NSAConfig, NSAModel, exist_ok=True)
AutoModelForCausalLM.register(NSAConfig, NSAForCausalLM, exist_ok=True)
# Trainer shifts labels for label smoothing only for classes listed here.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[NSAConfig.model_type] = NSAForCausalLM.__name__

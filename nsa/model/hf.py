"""Hugging Face models: `LanguageModel` for transformers' Auto classes, generate() and Trainer.

    NSAModel         hidden states; the `base_model` of the other
    NSAForCausalLM   logits and loss, generate()

Importing this module registers both. `nsa export` packs it with the weights as remote code
(`nsa/export/remote_code.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
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
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import can_return_tuple

from nsa.constants import IGNORE_INDEX
from nsa.model import block
from nsa.model.compressor import BlockMLP, BlockPool
from nsa.model.config import INIT_STD, ModelConfig
from nsa.model.decode import extend_states, prefill_states
from nsa.model.hf_cache import NSACache
from nsa.model.hf_config import NSAConfig, register_peft_targets
from nsa.model.hf_inputs import (
    document_starts,
    keep_columns,
    pack,
    real_tokens,
    unpack,
)
from nsa.model.language_model import LanguageModel


class Block(GradientCheckpointingLayer, block.Block):
    """`Block` that transformers can checkpoint; FSDP's settings wrap it by this name."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        residual = (2 * config.layers) ** -0.5  # as LanguageModel initializes
        self.attention.o.__dict__["init_scale"] = self.mlp.down.__dict__["init_scale"] = residual
        if hasattr(self.attention, "gates"):
            self.attention.gates.__dict__["init_scale"] = 0.0


@dataclass
class NSAModelOutput(BaseModelOutputWithPast):
    """Adds the sum of the layers' selector losses, in training and if it is configured."""

    selector_loss: Tensor | None = None


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
        scale = module.__dict__.get("init_scale")
        if scale is not None:
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
        core._modules.pop("head", None)  # NSAForCausalLM has one
        core.__dict__["head"] = None
        # self and core share one registry of submodules: weights keep the trainer's names, and
        # replacing a module in one (by an adapter, a larger vocabulary) replaces it in the other.
        self._modules = core._modules
        self.__dict__["core"] = core
        if not core.embed.weight.is_meta:
            if config.initializer_range != INIT_STD:
                core.initialize(config.initializer_range)  # so post_init must not
            for parameter in core.parameters():
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
        """Return the head's input of input_ids [B, T] or inputs_embeds [B, T, width].

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
        if tokens.dim() != (2 if inputs_embeds is None else 3) or tokens.shape[1] < 1:
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
        if cache is not None:
            if cu_seq_lens_q is not None and len(cu_seq_lens_q) > 2:
                raise ValueError(
                    "cu_seq_lens_q: with a cache a sequence is one document; set use_cache=False"
                )
            inputs: list[Tensor] | None = [] if output_hidden_states else None
            states = self._states_with_cache(tokens, attention_mask, position_ids, cache, inputs)
            every = None if inputs is None else (*inputs, states)
            return NSAModelOutput(
                last_hidden_state=states, past_key_values=cache, hidden_states=every
            )
        offset = self.core.loss_offset(tokens)
        tokens, real, metadata = pack(
            self.core.config, tokens, attention_mask, position_ids, cu_seq_lens_q, offset
        )
        hidden: tuple[Tensor, ...] | None = () if output_hidden_states else None

        def collect(x: Tensor) -> Tensor:
            """Return what was collected, so that its gradient can be read."""
            nonlocal hidden
            hidden = (*(hidden or ()), unpack(x, real))
            return x if real is None else hidden[-1][real][None]

        x = self.embed(tokens) if inputs_embeds is None else tokens
        x, loss = self.core.run_blocks(x, metadata, None if hidden is None else collect)
        states = unpack(x, real)
        if hidden is not None:
            hidden = (*hidden, states)
        outputs: dict[str, Any] = {"last_hidden_state": states, "hidden_states": hidden}
        return NSAModelOutput(**outputs, selector_loss=loss)  # transformers 5.20: FloatTensor

    @torch.compiler.disable
    def _states_with_cache(
        self,
        tokens: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: NSACache,
        hidden: list[Tensor] | None,
    ) -> Tensor:
        """Return the final hidden states, and append each block's input to `hidden`."""
        real = real_tokens(attention_mask, tokens, cache.columns)
        document_starts(position_ids, tokens, real, cache.columns)
        with _decoding(tokens.device):
            if cache.kv is None:
                mask = tokens.new_ones(tokens.shape[:2]).bool() if real is None else real
                prompts = [row[kept] for row, kept in zip(tokens, mask, strict=True)]
                packed, cache.kv = prefill_states(self.core, prompts, hidden=hidden)
                states = unpack(packed, mask)
                if hidden is not None:
                    hidden[:] = [unpack(x, mask) for x in hidden]
            else:
                states = extend_states(self.core, tokens, cache.kv, hidden)
        cache.columns += tokens.shape[1]
        return states


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

        labels are not shifted: labels[b, t] is input_ids[b, t], or -100; if shift_labels are given
        instead or too, shift_labels[b, t] is the token after it. The logits of padding are
        meaningless; `logits_to_keep=1` returns the logits of each sequence's last token.
        """
        output = self.model(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            inputs_embeds,
            use_cache,
            output_hidden_states,
            return_dict=True,
            **kwargs,
        )
        states, cache = output.last_hidden_state, output.past_key_values
        with nullcontext() if cache is None else _decoding(states.device):
            logits = self.lm_head(keep_columns(states, attention_mask, logits_to_keep))
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
                if items is not None:  # Trainer sums micro-batches: each counts by its labels
                    total = torch.as_tensor(items, device=shifted.device)
                    weight = weight * (shifted != IGNORE_INDEX).sum() / total
                loss = loss + weight * selector_loss
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=cache, hidden_states=output.hidden_states
        )


AutoConfig.register(NSAConfig.model_type, NSAConfig, exist_ok=True)
AutoModel.register(NSAConfig, NSAModel, exist_ok=True)
AutoModelForCausalLM.register(NSAConfig, NSAForCausalLM, exist_ok=True)
# Trainer shifts labels for label smoothing only for classes listed here.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[NSAConfig.model_type] = NSAForCausalLM.__name__


@contextmanager
def _decoding(device: torch.device) -> Iterator[None]:
    """Disable gradients and autocast: the cache has the weights' dtype, and Trainer autocasts."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield

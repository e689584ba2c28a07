"""The model as one of Hugging Face's transformers: generate(), save_pretrained(), Trainer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import can_return_tuple

from nsa.constants import IGNORE_INDEX
from nsa.model.cache import KVCache
from nsa.model.compressor import MLPCompressor
from nsa.model.decode import extend_states, prefill_states
from nsa.model.hf_config import NSAConfig
from nsa.model.language_model import LanguageModel


class NSACache(Cache):
    """`KVCache` where transformers expects a cache of its own.

    It is made by the first call with `use_cache=True`, or empty by hand. A token that was seen
    cannot be taken back: what its block was compressed from is gone.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.kept: KVCache | None = None
        self.columns = 0  # of input_ids so far, padding included

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of input_ids, as generate() counts: the longest sequence may be shorter."""
        return self.columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """It grows as long as there is memory."""
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Go on with other beams."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these sequences, in this order."""
        if self.kept is not None:
            self.kept = self.kept.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence so many times."""
        if self.kept is not None:
            rows = torch.arange(self.kept.batch, device=self.kept.device)
            self.kept = self.kept.select(rows.repeat_interleave(repeats))

    def reset(self) -> None:
        """Forget everything."""
        self.kept, self.columns = None, 0

    def crop(self, tokens_to_remove: int) -> None:
        """What assisted decoding would need."""
        if tokens_to_remove:
            raise ValueError("NSACache: tokens cannot be taken back; decode without an assistant")

    @property
    def batch_size(self) -> int:
        return -1 if self.kept is None else self.kept.batch

    @property
    def is_croppable(self) -> bool:
        return False

    @property
    def is_initialized(self) -> bool:
        return self.kept is not None


class NSAForCausalLM(PreTrainedModel, GenerationMixin):
    """`LanguageModel` below the prefix "model.", and its embedding as the head.

    Padding, left or right, takes no part: each sequence is computed as if it stood alone.
    """

    config_class = NSAConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True
    _no_split_modules = ["LanguageModel"]  # noqa: RUF012 - what layers share is on one device
    _tied_weights_keys = {"lm_head.weight": "model.embed.weight"}  # noqa: RUF012
    _is_stateful = True  # generate() refuses an assistant, which would take tokens back

    def __init__(self, config: NSAConfig) -> None:
        super().__init__(config)
        self.gradient_checkpointing = False
        self.model = LanguageModel(config.model_config())
        self.lm_head = nn.Linear(config.width, config.vocab_size, bias=False, device="meta")
        self.lm_head.weight = self.model.embed.weight
        if not self.model.embed.weight.is_meta:
            for parameter in self.model.parameters():
                parameter._is_hf_initialized = True  # by LanguageModel, better than by post_init
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
        """Logits [B, T, V] of input_ids [B, T], and the loss where labels [B, T] are given.

        labels are not shifted: labels[b, t] is the token that input_ids[b, t] is, or -100.
        attention_mask [B, T] is 0 where there is no token; logits there mean nothing, but
        `logits_to_keep=1` are those of each sequence's own last token. A document begins where
        position_ids are 0; a cache has one a sequence. A cache is kept where
        `use_cache` says so or one is given; what is computed with it has no gradient.
        """
        if input_ids is None or inputs_embeds is not None:
            raise ValueError("inputs_embeds: this model takes input_ids and nothing instead")
        _check_cache(past_key_values)
        if output_hidden_states is None:
            output_hidden_states = bool(self.config.output_hidden_states)
        if past_key_values is None and use_cache:
            past_key_values = NSACache()
        there = _there(attention_mask, input_ids, past_key_values, logits_to_keep)
        anew = _begun_anew(position_ids, input_ids, there, past_key_values)
        if past_key_values is None:
            states = self._hidden_states(input_ids, there, anew, output_hidden_states)
            logits = self.lm_head(_kept(states[-1], there, logits_to_keep))
        else:
            if output_hidden_states:
                raise ValueError("output_hidden_states: none with a cache; set use_cache=False")
            logits = self._with_cache(input_ids, there, past_key_values, logits_to_keep)
        loss = None
        if labels is not None:
            after = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
            if there is not None:
                after = after.masked_fill(~there, IGNORE_INDEX)
            loss = self.loss_function(
                logits, None, self.config.vocab_size, shift_labels=after, **kwargs
            )
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=past_key_values,
            hidden_states=states if output_hidden_states else None,
        )

    def _hidden_states(
        self,
        input_ids: Tensor,
        there: Tensor | None,
        anew: Tensor | None,
        of_blocks: bool = False,
    ) -> tuple[Tensor, ...]:
        """What each block reads where `of_blocks` is set, and always what the head reads.

        It is the trainer's forward pass. Padded sequences, and those that hold documents, are
        packed: one row of documents.
        """
        ends = None
        if there is None and anew is not None:
            there = torch.ones_like(input_ids, dtype=torch.bool)
        if there is not None:
            starts = _first(there) if anew is None else _first(there) | anew
            input_ids = input_ids[there][None]
            ends = F.pad(starts[there].nonzero()[:, 0], (0, 1), value=input_ids.shape[1]).int()
        read: list[Tensor] = []
        hooks = [
            block.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
            for block in (self.model.blocks if of_blocks else ())
        ]
        try:
            states = self.model.hidden(input_ids, ends)
        finally:
            for hook in hooks:
                hook.remove()
        return tuple(x if there is None else _padded(x[0], there) for x in (*read, states))

    def _with_cache(
        self, input_ids: Tensor, there: Tensor | None, cache: NSACache, logits_to_keep: int | Tensor
    ) -> Tensor:
        """The logits of new tokens behind those that the cache has seen."""
        # What is kept has the weights' dtype, also where Trainer generates below autocast.
        with torch.no_grad(), torch.autocast(input_ids.device.type, enabled=False):
            if cache.kept is not None:
                states = extend_states(self.model, input_ids, cache.kept)
            elif there is None:
                packed, cache.kept = prefill_states(self.model, input_ids)
                states = packed.unflatten(0, input_ids.shape)
            else:
                prompts = [row[at] for row, at in zip(input_ids, there, strict=True)]
                packed, cache.kept = prefill_states(self.model, prompts)
                states = _padded(packed, there)
            logits = self.lm_head(_kept(states, there, logits_to_keep))
        cache.columns += input_ids.shape[1]
        return logits

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Any = None, every_n_layers: int = 1
    ) -> None:
        """A block is a segment, as in training; of torch's settings `use_reentrant` counts."""
        if every_n_layers != 1:
            raise ValueError(
                f"every_n_layers = {every_n_layers}: every block is checkpointed; use 1"
            )
        keywords = getattr(gradient_checkpointing_func, "keywords", {})
        way = "reentrant" if keywords.get("use_reentrant", True) else "non_reentrant"
        self.model.config.activation_checkpointing = way if enable else "none"
        self.gradient_checkpointing = enable

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.embed = value

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Embedding:
        embeddings = super().resize_token_embeddings(
            new_num_tokens, pad_to_multiple_of, mean_resizing
        )
        self.model.config.vocab_size = self.config.vocab_size
        return embeddings

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Of what a checkpoint lacks, or was added; a whole model is LanguageModel's to begin."""
        super()._init_weights(module)
        if isinstance(module, MLPCompressor):
            nn.init.normal_(module.position, std=self.config.init_std)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """generate() makes no cache for it: forward() makes its own."""
        return False


# Trainer shifts labels for its label smoothing where it finds the class here, and nowhere else.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[NSAConfig.model_type] = NSAForCausalLM.__name__


def _there(
    mask: Tensor | None, input_ids: Tensor, cache: NSACache | None, logits_to_keep: int | Tensor
) -> Tensor | None:
    """[B, T], where the new columns have a token; None where they all do.

    The mask has a column for every token that was seen, and for the new ones.
    """
    columns = input_ids.shape[1] + (0 if cache is None else cache.columns)
    if mask is None:
        return None
    if mask.shape != (len(input_ids), columns):
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}; it must be {(len(input_ids), columns)}"
            f"{'' if cache is None else ', with what the cache has seen'}"
        )
    there = mask[:, -input_ids.shape[1] :] != 0
    if there.all():
        return None
    if cache is not None and cache.kept is not None:
        raise ValueError("attention_mask: behind a cache every sequence has to have new tokens")
    empty = ~there.any(1)
    goes_on = cache is not None or _is_one(logits_to_keep)  # from its last token; a loss does not
    if empty.all() or (goes_on and empty.any()):
        row = int(empty.nonzero()[0])
        raise ValueError(f"attention_mask: row {row} has no token to go on from; give it a bos")
    return there


def _begun_anew(
    position_ids: Tensor | None, input_ids: Tensor, there: Tensor | None, cache: NSACache | None
) -> Tensor | None:
    """[B, T], where a document begins inside of a row, as collators that pack leave it; or None."""
    if position_ids is None:
        return None
    rows, columns = input_ids.shape
    if position_ids.shape[-1] != columns or position_ids.numel() not in (columns, rows * columns):
        raise ValueError(
            f"position_ids has shape {tuple(position_ids.shape)}; it must be {(rows, columns)}"
        )
    tokens = torch.ones_like(input_ids, dtype=torch.bool) if there is None else there
    anew = tokens & (position_ids.reshape(-1, columns) == 0)
    if cache is None or cache.kept is None:
        anew &= ~_first(tokens)
    if not anew.any():
        return None
    if cache is not None:
        row, column = anew.nonzero()[0].tolist()
        raise ValueError(
            f"position_ids[{row}, {column}] = 0 begins a document, and a cache has one a sequence; "
            "set use_cache=False, or give each document a row of its own"
        )
    return anew


def _first(there: Tensor) -> Tensor:
    """[B, T], where each sequence has its first token."""
    return there & (there.cumsum(1) == 1)


def _check_cache(cache: Any) -> None:
    if cache is not None and not isinstance(cache, NSACache):
        raise ValueError(
            f"past_key_values is a {type(cache).__name__}; this model keeps other things: pass a "
            "NSACache, or use_cache=True alone"
        )


def _padded(packed: Tensor, there: Tensor) -> Tensor:
    """[tokens, width] to [B, T, width], with 0 where there is no token."""
    empty = packed.new_zeros(*there.shape, packed.shape[1])
    return empty.masked_scatter(there[..., None], packed)


def _kept(hidden: Tensor, there: Tensor | None, keep: int | Tensor) -> Tensor:
    """The last columns, all for 0, or those that a tensor names.

    For 1 it is each sequence's own last token: padding may stand behind it.
    """
    if there is not None and _is_one(keep):
        columns = torch.arange(there.shape[1], device=there.device)
        return hidden.take_along_dim((columns * there).argmax(1)[:, None, None], 1)
    return hidden[:, slice(-keep, None) if isinstance(keep, int) else keep]


def _is_one(keep: int | Tensor) -> bool:
    return isinstance(keep, int) and keep == 1

"""A run's tokenizer as files that AutoTokenizer loads, with the run's own ids for any text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nsa.data.tokenizer import END_OF_TEXT, ByteTokenizer, HubTokenizer, Tokenizer

PAD = "<|pad|>"
BYTE_SPECIALS = {
    "<|startoftext|>": ByteTokenizer.bos_id,  # in no text, and the model knows nothing of it
    END_OF_TEXT: ByteTokenizer.eos_id,
    PAD: ByteTokenizer.pad_id,
}


def write_tokenizer(tokenizer: Tokenizer, folder: Path, seq_len: int) -> None:
    """Write tokenizer.json and tokenizer_config.json into `folder`."""
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    if isinstance(tokenizer, HubTokenizer):
        _, made_of, eos = tokenizer.made_of
        backend, pad = Backend.from_str(made_of), eos
    else:
        backend, eos, pad = _byte_backend(), END_OF_TEXT, PAD
    # The model has seen text alone: nothing is put around it, and nothing in it is more than text.
    backend.post_processor = None
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        split_special_tokens=True,
        model_max_length=seq_len,
        clean_up_tokenization_spaces=False,
        padding_side="left",  # generate() writes behind the last column
        model_input_names=["input_ids", "attention_mask"],
        bos_token=eos,  # where one text has ended, another one begins
        eos_token=eos,
        pad_token=pad,
    ).save_pretrained(folder)


def _byte_backend() -> Any:
    """Byte-level BPE that never merges, with each byte's value as its id."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    vocab = {letter: byte for byte, letter in enumerate(_letters())} | BYTE_SPECIALS
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in BYTE_SPECIALS])
    return backend


def _letters() -> list[str]:
    """The letter that byte-level tokenizers, since GPT-2's, write for each byte."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return [chr(256 + hidden.index(byte)) if byte in hidden else chr(byte) for byte in range(256)]

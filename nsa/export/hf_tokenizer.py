"""Hugging Face tokenizer files: AutoTokenizer encodes any text to the same ids as the run's.

The tokenizer files of an imported model are copied. Any other Hub tokenizer with special tokens
keeps them, its chat template and its start of text; it encodes a text's "<|im_start|>" as that
token, although training encoded it as plain text.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from nsa.data.tokenizer import (
    ORIGIN,
    ByteTokenizer,
    HubTokenizer,
    Tokenizer,
    load_pretrained,
    tokenizer_folder,
)
from nsa.untrusted import check_links, read_object

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja",
    "generation_config.json",  # its eos_token_id may list several ids, see `stop_ids`
)  # fmt: skip
# Fields of tokenizer_config.json about the machine that wrote it, or code in another folder.
DROPPED = ("local_files_only", "is_local", "auto_map")
END_OF_TEXT, PAD = "<|endoftext|>", "<|pad|>"
BYTE_SPECIALS = {
    "<|startoftext|>": ByteTokenizer.bos_id,  # reserved; the model was never trained on it
    END_OF_TEXT: ByteTokenizer.eos_id,
    PAD: ByteTokenizer.pad_id,
}


def copy_files(files: Iterable[Path], folder: Path) -> None:
    """Copy those of `files` that exist; parse each *_config.json, and leave out DROPPED."""
    for file in filter(Path.is_file, files):
        if not file.name.endswith("_config.json"):
            shutil.copyfile(file, folder / file.name)
            continue
        kept = {name: value for name, value in read_object(file).items() if name not in DROPPED}
        text = json.dumps(kept, indent=2, ensure_ascii=False) + "\n"
        (folder / file.name).write_text(text, encoding="utf-8")


def imported_files(tokenizer: Tokenizer | None) -> list[Path]:
    """Return the files of an imported model's own tokenizer; none for another tokenizer."""
    if not isinstance(tokenizer, HubTokenizer):
        return []
    source = tokenizer_folder(tokenizer.name)
    if not (source / ORIGIN).is_file():
        return []
    return [source / name for name in TOKENIZER_FILES if (source / name).is_file()]


def write_tokenizer(tokenizer: Tokenizer, folder: Path, seq_len: int) -> None:
    """Write tokenizer.json and tokenizer_config.json into `folder`."""
    if isinstance(tokenizer, HubTokenizer):
        if (local := tokenizer_folder(tokenizer.name)).is_dir():
            check_links(local)
        if files := imported_files(tokenizer):
            copy_files(files, folder)
            return
        source = load_pretrained(tokenizer.name)
        special = set(source.all_special_tokens) | {
            token.content for token in source.added_tokens_decoder.values() if token.special
        }
        # If eos is the only special token, the tokenizer below has all that `source` has.
        if source.chat_template or tokenizer.start_id is not None or len(special) > 1:
            source.model_max_length = seq_len
            source.padding_side = source.init_kwargs["padding_side"] = "left"  # else not saved
            source.pad_token = source.pad_token or source.eos_token
            for name in DROPPED:
                source.init_kwargs.pop(name, None)
            source.save_pretrained(folder)
            return
        _, serialized, eos, _ = tokenizer.definition
        backend, pad = Backend.from_str(serialized), eos
    else:  # byte-level BPE without merges; a byte's id is its value
        vocab = {letter: byte for byte, letter in bytes_to_unicode().items()} | BYTE_SPECIALS
        backend, eos, pad = Backend(models.BPE(vocab=vocab, merges=[])), END_OF_TEXT, PAD
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([AddedToken(name, normalized=False) for name in BYTE_SPECIALS])
    # As in training: adds no special tokens to a text and recognizes none in it.
    backend.post_processor = None
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        split_special_tokens=True,
        model_max_length=seq_len,
        clean_up_tokenization_spaces=False,
        padding_side="left",  # generate() appends after the last column
        model_input_names=["input_ids", "attention_mask"],
        bos_token=eos,  # a text starts with the token that ended the previous one
        eos_token=eos,
        pad_token=pad,
    ).save_pretrained(folder)

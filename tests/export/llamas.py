"""Small Llamas in folders of transformers, and imports of them."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from nsa.cli import main
from nsa.data.tokenizer import Tokenizer
from nsa.engine.load_run import load_run
from tests.data.texts import texts, train_tokenizer

Refused = Callable[..., str]  # the fixtures `refusal` and `refused`

# All blocks of 32 tokens are selected.
SPEC = ["block_len=8", "block_stride=4", "select_len=8", "select_top=4", "local_blocks=2"]
SMALL = [f"--set=attention.spec.{setting}" for setting in SPEC]
SHAPE: dict[str, Any] = {
    "vocab_size": 270,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 80,
    "rms_norm_eps": 1e-4,
    "rope_parameters": {"rope_theta": 3e4, "rope_type": "default"},
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,  # so large that attention is far from uniform
}

LLAMA_3: dict[str, Any] = {"rope_type": "llama3", "rope_theta": 5e4, "factor": 8.0}
LLAMA_3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_3 |= {"original_max_position_embeddings": 64}
LINEAR: dict[str, Any] = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
LINEAR |= {"partial_rotary_factor": 1.0}  # without effect
YARN: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
YARN |= {"original_max_position_embeddings": 32, "attention_factor": None}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {  # model_type and what differs from SHAPE
    "llama 2": ("llama", {"tie_word_embeddings": False}),
    "llama 3": ("llama", {"rope_parameters": LLAMA_3, "head_dim": 24}),
    "linear": ("llama", {"rope_parameters": LINEAR}),
    "yarn": ("qwen3", {"rope_parameters": YARN}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32, "tie_word_embeddings": False}),
    "smollm3": ("smollm3", {"pad_token_id": 0, "num_hidden_layers": 4}),  # RoPE in 3 of 4
}


def llama(folder: Path, shard: str = "1GB", **changes: Any) -> LlamaForCausalLM:
    """A Llama checkpoint with random weights, saved by transformers."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE | changes)).eval()
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def logits(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        output = model(tokens)
    return output if isinstance(output, torch.Tensor) else output.logits


def tokens(length: int) -> torch.Tensor:
    return torch.randint(270, (2, length), generator=torch.Generator().manual_seed(1))


def command(folder: Path, to: Path, *arguments: str) -> list[str]:
    """An import; with bytes for a folder without a tokenizer."""
    tokenizer = [] if (folder / "tokenizer.json").exists() else ["--tokenizer=byte"]
    return ["import", str(folder), "--to", str(to), *tokenizer, *arguments]


def imported(folder: Path, to: Path, *arguments: str) -> Any:
    assert main(command(folder, to, *arguments)) == 0
    return load_run(to, device="cpu")


def add_tokenizer(folder: Path) -> Tokenizer:
    """Train a tokenizer of 300 ids and save it in a model's folder."""
    tokenizer = train_tokenizer(texts(40), 300, folder.parent / "bpe")
    for file in (folder.parent / "bpe").iterdir():
        file.replace(folder / file.name)
    return tokenizer


CHAT = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Templates that do not end, double a text 40 times, or write 32 MB.
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLE = (
    "{% set n = namespace(x='ab') %}{% for _ in range(40) %}{% set n.x = n.x + n.x %}{% endfor %}"
)
LONGEST = DOUBLE.replace("40", "23") + "{{ n.x }}"  # 2²⁴ characters


def add_chat_tokenizer(folder: Path) -> None:
    """Save a tokenizer of bytes with four special tokens and a chat template."""
    vocab = {
        letter: number + 4 for number, letter in enumerate(sorted(bytes_to_unicode().values()))
    }
    specials = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    backend = Backend(
        models.BPE(vocab=dict(zip(specials, range(4), strict=True)) | vocab, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(specials)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=specials[2:],
        chat_template=CHAT,
    )
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":  # a rehearsal of launch/gpu.sh
    llama(Path(sys.argv[1]))
    add_chat_tokenizer(Path(sys.argv[1]))

"""Hugging Face model: the trainer's logits and loss, generate(), Trainer, saving and loading."""

import json
import math
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from nsa.model import AttentionConfig, LanguageModel
from nsa.model.attention_metadata import AttentionMetadata
from nsa.model.hf import NSACache, NSAForCausalLM
from nsa.model.hf_config import NSAConfig
from nsa.spec import NSASpec
from tests.model.models import ATTENTIONS, SPEC, build, tiny, tokens

MASK = torch.ones(3, 24, dtype=torch.long)
MASK[0, :9] = MASK[1, :21] = 0  # to the left, so that the second has three tokens


def wrapped(
    kind: str | AttentionConfig = "mean", dtype: torch.dtype = torch.float64, **changes: Any
) -> Any:
    """A Hugging Face model whose weights are so large that every past token matters.

    `changes` are of its settings of attention.
    """
    inner = build(tiny(kind), dtype, std=0.3)
    config = NSAConfig.of(inner.config)
    config.attention |= changes
    model = NSAForCausalLM(config).to(dtype)
    model.model.core.load_state_dict(inner.state_dict())
    return model.eval()


def greedy(model: Any, ids: Tensor | None, mask: Tensor | None = None, **settings: Any) -> Tensor:
    """Four tokens, or `max_new_tokens`, after each sequence."""
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0} | settings
    return model.generate(ids, attention_mask=mask, **settings)


def reload(folder: Path, **settings: Any) -> Any:
    """The model in a folder, which must have exactly its weights."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **settings)
    assert not any(info.values())
    return model


@pytest.mark.parametrize("kind", [*ATTENTIONS, "sel+win"])
def test_logits_and_loss_are_those_of_the_trainer(kind: str) -> None:
    model, ids = wrapped(kind), tokens(24, batch=2)
    out = model(ids, labels=ids)
    assert torch.equal(out.logits, model.model.core(ids))
    shifted = F.pad(ids[:, 1:], (0, 1), value=-100)
    torch.testing.assert_close(out.loss, model.model.core(ids, shifted), check_dtype=False)
    for kept in (3, torch.tensor([2, 5])):
        some = out.logits[:, -kept:] if isinstance(kept, int) else out.logits[:, kept]
        torch.testing.assert_close(model(ids, logits_to_keep=kept).logits, some)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_sequence_has_the_results_it_has_alone(side: str) -> None:
    mask = MASK if side == "left" else MASK.flip(1)
    model, ids = wrapped(), tokens(24, batch=3)
    labels = ids.masked_fill(mask == 0, -100)
    out = model(ids, attention_mask=mask, labels=labels, output_hidden_states=True)
    total, count = 0.0, 0
    for row, kept in enumerate(mask.bool()):
        alone = model(ids[row : row + 1, kept], output_hidden_states=True)
        torch.testing.assert_close(out.logits[row, kept], alone.logits[0])
        assert len(out.hidden_states) == len(alone.hidden_states) == 3
        assert not any(states[row, ~kept].any() for states in out.hidden_states)
        for padded, single in zip(out.hidden_states, alone.hidden_states, strict=True):
            torch.testing.assert_close(padded[row, kept], single[0])
        log_p = alone.logits[0, :-1].log_softmax(-1).gather(1, ids[row, kept][1:, None])
        total, count = total - log_p.sum().item(), count + len(log_p)
    assert out.loss.item() == pytest.approx(total / count, rel=1e-6)


def test_hidden_states_are_the_inputs_of_each_block_and_the_head() -> None:
    model, ids = wrapped(), tokens(12)
    states = model(ids, output_hidden_states=True).hidden_states
    assert torch.equal(states[0], model.model.embed(ids))
    assert torch.equal(model.lm_head(states[-1]), model(ids).logits)
    core = model.model.core
    metadata = AttentionMetadata.build(core.config, ids.shape[1], None, ids.device)
    x, delta = core.blocks[0](core.embed(ids), None, metadata=metadata)
    assert torch.equal(states[1], x + delta)
    assert model(ids).hidden_states is None
    model.config.output_hidden_states = True
    assert len(model(ids).hidden_states) == 3


def test_hidden_states_with_a_cache_are_those_without_one() -> None:
    model, ids, every = wrapped(), tokens(24, batch=3), {"output_hidden_states": True}
    expected = model(ids, MASK, **every).hidden_states
    first = model(ids[:, :22], MASK[:, :22], use_cache=True, **every)
    rest = model(ids[:, 22:], MASK, past_key_values=first.past_key_values, **every)
    for whole, *parts in zip(expected, first.hidden_states, rest.hidden_states, strict=True):
        torch.testing.assert_close(torch.cat(parts, 1), whole)


def test_hidden_states_have_the_gradients_of_the_loss() -> None:
    model, ids = wrapped(), tokens(24, batch=3)
    output = model(ids, attention_mask=MASK, labels=ids, output_hidden_states=True)
    gradients = torch.autograd.grad(output.loss, output.hidden_states)
    assert all(gradient.any() and not gradient[MASK == 0].any() for gradient in gradients)
    embeds = model.model.embed(ids).detach().requires_grad_()
    loss = model(inputs_embeds=embeds, attention_mask=MASK, labels=ids).loss
    torch.testing.assert_close(torch.autograd.grad(loss, embeds)[0], gradients[0])


def test_shifted_labels_replace_labels() -> None:
    """Trainer shifts them where it splits sequences over ranks: the last token has a label too."""
    model, ids = wrapped(), tokens(24, batch=3)
    shifted = F.pad(ids[:, 1:], (0, 1), value=-100)
    expected = model(ids, attention_mask=MASK, labels=ids).loss
    assert torch.equal(model(ids, attention_mask=MASK, shift_labels=shifted).loss, expected)
    with_last = model(ids, labels=ids, shift_labels=ids.roll(-1, 1))
    log_p = with_last.logits.log_softmax(-1).gather(2, ids.roll(-1, 1)[..., None])
    torch.testing.assert_close(with_last.loss, -log_p.mean(), check_dtype=False)


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_is_trained_saved_resized_and_used_to_generate(tied: bool, tmp_path: Path) -> None:
    ids = tokens(24)
    config = NSAConfig.of(tiny("mean", tied_head=tied), initializer_range=0.3)
    assert config.tie_word_embeddings is tied
    model = NSAForCausalLM(config).double()
    assert model.model.embed.weight.std().item() == pytest.approx(0.3, rel=0.1)
    model(ids, labels=ids).loss.backward()
    assert (model.lm_head.weight is model.model.embed.weight) is tied
    assert model.lm_head.weight.grad.any()
    assert torch.equal(model.model.core(ids), model(ids).logits)
    assert torch.equal(greedy(model, ids), greedy(model, ids, use_cache=False))
    model.save_pretrained(tmp_path)
    again = reload(tmp_path)
    assert torch.equal(again(ids).logits, model(ids).logits)
    again.resize_token_embeddings(70)
    assert (again.lm_head.weight is again.model.embed.weight) is tied
    assert again.config.vocab_size == again.model.core.config.vocab_size == 70
    assert torch.equal(again(ids).logits, again.model.core(ids))
    torch.testing.assert_close(again(ids).logits[..., :61], model(ids).logits)
    assert greedy(again, torch.full((1, 3), 69)).shape == (1, 7)


@pytest.mark.parametrize("compressor", ["mlp", "pool"])
def test_weights_that_a_checkpoint_lacks_are_reported_and_get_initial_values(
    compressor: str, tmp_path: Path
) -> None:
    model = NSAForCausalLM(NSAConfig.of(tiny(compressor, width=96)))
    state = model.state_dict()
    kept = {name: weight for name, weight in state.items() if name.endswith(".q.weight")}
    model.save_pretrained(tmp_path)
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded, info = NSAForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    parameters = dict(loaded.named_parameters())
    assert info["missing_keys"] >= parameters.keys() - kept.keys()  # the tied embedding too
    for block, scale in ((loaded.model.blocks[0], 0.5), (loaded.model.blocks[1], 0.5)):
        assert not block.attention.gates.weight.any()
        assert block.attention.k.weight.std().item() == pytest.approx(0.02, rel=0.1)
        for linear in (block.attention.o, block.mlp.down):  # 1/sqrt(2 · layers)
            assert linear.weight.std().item() == pytest.approx(0.02 * scale, rel=0.1)
        phi = block.attention.compress.key
        if compressor == "mlp":
            assert phi.position.std().item() == pytest.approx(0.02, rel=0.4)
        else:
            assert not phi.weight.any()
            for parameter in phi.parameters():  # memory that was never written may be zero
                torch.nn.init.constant_(parameter, math.nan)
            phi.reset_parameters()
            assert not phi.weight.any()
            assert not phi.position.any()
            assert bool((phi.scale == 1).all())
    assert all(torch.equal(parameters[name], kept[name]) for name in kept)


def test_documents_packed_by_position_ids_are_independent() -> None:
    model, ids = wrapped(), tokens(24)
    positions = torch.cat([torch.arange(10), torch.arange(14)])[None]
    logits = model(ids, position_ids=positions).logits[0]
    torch.testing.assert_close(logits[:10], model(ids[:, :10]).logits[0])
    torch.testing.assert_close(logits[10:], model(ids[:, 10:]).logits[0])
    never_restart = {"position_ids": torch.arange(24)[None]}
    offsets = torch.tensor([0, 10, 24], dtype=torch.int32)
    assert torch.equal(model(ids, cu_seq_lens_q=offsets, **never_restart).logits[0], logits)
    ids, mask = tokens(24, batch=3), MASK  # the first row's tokens start at column 9
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 0)
    plain = model(ids, attention_mask=mask)
    ordinary = model(ids, attention_mask=mask, position_ids=positions)
    assert torch.equal(ordinary.logits, plain.logits)
    positions[0, 14:] -= 5
    logits = model(ids, attention_mask=mask, position_ids=positions).logits
    assert torch.equal(logits[1:], plain.logits[1:])
    torch.testing.assert_close(logits[0, 9:14], model(ids[:1, 9:14]).logits[0])
    torch.testing.assert_close(logits[0, 14:], model(ids[:1, 14:]).logits[0])


@pytest.mark.parametrize(
    ("kind", "side", "use_cache"),
    [
        ("dense", "left", True),
        ("mlp", "left", True),
        ("sel+win", "left", True),
        ("mean", "right", True),
        ("mean", "right", False),
    ],
)
def test_generate_continues_as_the_parallel_forward_pass_would(
    kind: str, side: str, use_cache: bool
) -> None:
    """Whatever the padding."""
    model, ids, mask = wrapped(kind), tokens(24, batch=3), MASK if side == "left" else MASK.flip(1)
    output = greedy(model, ids, mask, max_new_tokens=5, use_cache=use_cache)
    for row, real in enumerate(mask.bool()):
        expected = ids[row : row + 1, real]
        for _ in range(5):
            expected = torch.cat([expected, model.model.core(expected)[:, -1:].argmax(-1)], 1)
        assert torch.equal(output[row, 24:], expected[0, -5:])


def test_an_empty_row_has_no_part_in_the_loss_and_no_continuation() -> None:
    model, ids, mask = wrapped(), tokens(24, batch=3), MASK.flip(1)
    mask[1] = 0
    assert model(ids, attention_mask=mask, labels=ids).loss.isfinite()
    with pytest.raises(ValueError, match="attention_mask: row 1 has no token to continue; give"):
        greedy(model, ids, mask)


@pytest.mark.parametrize(
    "how",
    [
        {"num_beams": 3, "num_return_sequences": 2, "do_sample": False},
        {"do_sample": True, "top_p": 0.9, "temperature": 0.8, "eos_token_id": 5},
    ],
    ids=["beams", "sampling"],
)
def test_beam_search_and_sampling_are_the_same_with_a_cache(how: dict[str, Any]) -> None:
    model, ids = wrapped("mlp"), tokens(24, batch=3)
    outputs = []
    for use_cache in (True, False):
        torch.manual_seed(1)
        how |= {"max_new_tokens": 6, "pad_token_id": 0, "use_cache": use_cache}
        outputs.append(model.generate(ids, attention_mask=MASK, **how))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("part", ["lm_head", "model.blocks.0", "model.blocks.1.attention"])
def test_module_hooks_have_the_same_effect_with_a_cache(part: str) -> None:
    """As LoRA on the head and activation steering need."""
    model, ids = wrapped("mlp"), tokens(24, batch=2)
    before = greedy(model, ids)
    module = model.get_submodule(part)
    more = torch.nn.Linear(24, 61 if part == "lm_head" else 24, bias=False).double()
    torch.nn.init.normal_(more.weight)

    def steer(_: torch.nn.Module, given: Any, out: Any) -> Any:
        if isinstance(out, tuple):  # a block's residual stream, and what is still to be added
            return out[0], out[1] + more(given[0])
        return out + more(given[0])

    module.register_forward_hook(steer)
    output = greedy(model, ids)
    assert torch.equal(output, greedy(model, ids, use_cache=False))
    assert not torch.equal(output[:, 25:], before[:, 25:])  # after the first token


def test_generation_continues_from_a_returned_cache() -> None:
    model, ids, mask = wrapped(), tokens(24, batch=2), MASK[:2]
    first: Any = greedy(model, ids, mask, return_dict_in_generate=True)
    assert isinstance(first.past_key_values, NSACache)
    longer = torch.cat([first.sequences, tokens(5, batch=2, seed=1)], 1)
    mask = F.pad(mask, (0, 9), value=1)
    continued = greedy(model, longer, mask, past_key_values=first.past_key_values)
    assert torch.equal(continued, greedy(model, longer, mask, use_cache=False))


def test_rows_of_a_cache_are_repeated_and_tokens_cannot_be_removed() -> None:
    model, ids = wrapped(), tokens(24, batch=2)
    whole = torch.tensor([0, 20])
    cache = model(ids[:, :20], use_cache=True, cu_seq_lens_q=whole).past_key_values
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([3, 0]))
    rest = model(ids[:, 20:].flip(0), past_key_values=cache).logits
    torch.testing.assert_close(rest, model(ids.flip(0)).logits[:, 20:])
    cache.crop(0)
    with pytest.raises(ValueError, match="NSACache: tokens cannot be removed"):
        cache.crop(-1)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(model(ids, past_key_values=cache).logits, model(ids).logits)


def test_a_refused_token_leaves_a_cache_as_it_was() -> None:
    """Also a later one of several, whose steps come one after another."""
    model, ids = wrapped(), tokens(24, batch=2)
    cache, wrong = model(ids[:, :20], use_cache=True).past_key_values, ids[:, 20:].clone()
    wrong[1, 2] = 61
    with pytest.raises(ValueError, match="contains 61; ids are 0 to 60"):
        model(wrong, past_key_values=cache)
    rest = model(ids[:, 20:], past_key_values=cache).logits
    torch.testing.assert_close(rest, model(ids).logits[:, 20:])


def test_chunked_prefill_changes_nothing() -> None:
    model, ids = wrapped(), tokens(24, batch=2)
    chunks = {"past_key_values": NSACache(), "prefill_chunk_size": 10}
    assert torch.equal(greedy(model, ids, **chunks), greedy(model, ids))


def test_autocast_does_not_change_generated_text() -> None:
    model, ids = wrapped(dtype=torch.float32), tokens(24)
    with torch.autocast("cpu", torch.bfloat16):
        output = greedy(model, ids, max_new_tokens=8)
    assert torch.equal(output, greedy(model, ids, max_new_tokens=8))


def test_one_forward_pass_gives_all_logits_and_the_cache() -> None:
    model, ids = wrapped(), tokens(24, batch=3)
    read: list[torch.Size] = []
    hook = model.model.embed.register_forward_pre_hook(lambda _, args: read.append(args[0].shape))
    out = model(ids, attention_mask=MASK, use_cache=True)
    hook.remove()
    assert read == [(int(MASK.sum()),)]  # once
    assert not out.logits.requires_grad
    model.lm_head.register_forward_pre_hook(lambda _, args: read.append(args[0].shape))
    model(ids, attention_mask=MASK, logits_to_keep=1)
    assert read[1:] == [(3, 1, 24)]  # no other logits are computed
    assert torch.equal(out.logits, model(ids, attention_mask=MASK).logits)
    assert out.past_key_values.get_seq_length() == 24
    assert model(ids).past_key_values is None  # only on request


OFFSETS: dict[str, Any] = {"cu_seq_lens_q": torch.tensor([0, 2, 4])}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"past_key_values": DynamicCache()}, "past_key_values is a DynamicCache"),
        ({"inputs_embeds": torch.zeros(1, 4, 24)}, "inputs_embeds"),
        ({"cache": object()}, "generate_batch: its paged cache"),
        ({"attention_mask": torch.ones(1, 1, 4, 4)}, "attention_mask has shape"),
        ({"attention_mask": torch.zeros(1, 4)}, "attention_mask: row 0 has no token"),
        ({"position_ids": torch.arange(5)[None]}, "position_ids has shape"),
        ({"position_ids": torch.arange(4).expand(2, 4)}, r"position_ids has shape \(2, 4\)"),
        (
            {"position_ids": torch.tensor([[0, 1, 0, 1]]), "use_cache": True},
            r"position_ids\[0, 2\] = 0 starts a second document.* set use_cache=False, or",
        ),
        (OFFSETS | {"attention_mask": torch.tensor([[1, 1, 1, 0]])}, "padding.* pass position_ids"),
        (OFFSETS | {"use_cache": True}, "cu_seq_lens_q: .* set use_cache=False"),
        ({"cu_seq_lens_q": torch.tensor([0, 3])}, r"cu_seqlens goes from 0 to 3; .* T = 4"),
    ],
)
def test_unsupported_inputs_are_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrapped()(tokens(4), **given)


def test_with_a_filled_cache_every_sequence_needs_new_tokens() -> None:
    model, ids = wrapped(), tokens(24, batch=3)
    cache = model(ids, use_cache=True).past_key_values
    mask = F.pad(torch.ones_like(ids), (0, 1), value=1)
    mask[1, -1] = 0
    with pytest.raises(ValueError, match="attention_mask: with a filled cache"):
        model(ids[:, :1], attention_mask=mask, past_key_values=cache)
    with pytest.raises(ValueError, match=r"must be \(3, 25\), including the columns in the cache"):
        model(ids[:, :1], attention_mask=mask[:, :1], past_key_values=cache)
    with pytest.raises(ValueError, match=r"position_ids\[0, 0\] = 0 starts a second document"):
        model(ids[:, :1], position_ids=torch.zeros(3, 1), past_key_values=cache)


def test_saved_weights_load_bit_for_bit_with_the_embedding_stored_once(tmp_path: Path) -> None:
    model, ids = wrapped("mlp", torch.bfloat16), tokens(24)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(file.keys()) == {f"model.{name}" for name in model.model.state_dict()}
    again = reload(tmp_path, device_map="cpu")
    assert type(again) is NSAForCausalLM
    assert again.dtype == torch.bfloat16
    assert again.lm_head.weight is again.model.embed.weight
    assert torch.equal(again(ids).logits, model(ids).logits)
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)
    wide = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert wide.dtype == torch.float32


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # its new name's
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkspointing_changes_no_gradient(reentrant: bool) -> None:
    model, ids = wrapped(), tokens(24, batch=2)
    model.train()
    expected = torch.autograd.grad(model(ids, labels=ids).loss, list(model.parameters()))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert model.is_gradient_checkpointing
    blocks, calls = model.model.blocks, Counter[int]()
    for i, block in enumerate(blocks):
        block.attention.register_forward_pre_hook(lambda *_, i=i: calls.update([i]))
    model(ids, labels=ids).loss.backward()
    torch.testing.assert_close(tuple(weight.grad for weight in model.parameters()), expected)
    blocks[1].gradient_checkpointing = False  # each block has its own switch
    model(ids, labels=ids).loss.backward()
    assert calls == {0: 4, 1: 3}
    model.gradient_checkpointing_disable()
    model(ids, labels=ids).loss.backward()
    assert calls == {0: 5, 1: 4}


def test_trainer_gives_each_label_of_a_step_the_same_weight(tmp_path: Path) -> None:
    """However a step is divided into micro-batches with different numbers of labels."""
    pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")
    from transformers import Trainer, TrainingArguments

    rows = tokens(24, batch=4)
    ignored = torch.arange(24) < torch.tensor([[0], [20], [3], [22]])
    labels = rows.masked_fill(ignored, -100)
    data = [{"input_ids": x, "labels": y} for x, y in zip(rows, labels, strict=True)]
    logged = []
    for size in (4, 1):
        settings = {"max_steps": 1, "logging_steps": 1, "use_cpu": True, "report_to": []}
        settings |= {"per_device_train_batch_size": size, "gradient_accumulation_steps": 4 // size}
        settings |= {"save_strategy": "no", "disable_tqdm": True}
        model = wrapped(dtype=torch.float32)
        expected = model(rows, labels=labels).loss.item()
        trainer = Trainer(model, TrainingArguments(str(tmp_path), **settings), train_dataset=data)
        trainer.train()
        logged.append(trainer.state.log_history[0])
        assert float(logged[-1]["loss"]) == pytest.approx(expected, rel=1e-4)
    assert float(logged[1]["grad_norm"]) == pytest.approx(float(logged[0]["grad_norm"]), rel=1e-4)


def test_label_smoothing_uses_shifted_labels(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")
    from transformers import Trainer, TrainingArguments

    model, ids = wrapped(), tokens(24, batch=2)
    given = {"use_cpu": True, "report_to": [], "label_smoothing_factor": 1e-9}
    trainer = Trainer(model=model, args=TrainingArguments(str(tmp_path), **given))
    smooth = trainer.compute_loss(model, {"input_ids": ids, "labels": ids})
    torch.testing.assert_close(smooth, model(ids, labels=ids).loss, check_dtype=False)


def test_a_new_model_has_the_trainers_initial_weights() -> None:
    config = tiny("mlp")
    torch.manual_seed(3)
    wrapped_state = NSAForCausalLM(NSAConfig.of(config)).model.state_dict()
    torch.manual_seed(3)
    state = LanguageModel(config).state_dict()
    assert all(torch.equal(wrapped_state[name], state[name]) for name in state)


def test_the_configuration_accepts_hugging_face_names() -> None:
    config = AutoConfig.for_model("nsa", hidden_size=32, layers=3, attention={"kind": "dense"})
    assert (config.width, config.num_hidden_layers) == (32, 3)
    assert config.model_config().attention.kind == "dense"
    assert NSAConfig.of(config.model_config()).to_dict() == config.to_dict()
    assert NSAConfig.from_dict(json.loads(config.to_json_string())).to_dict() == config.to_dict()


def test_settings_given_at_load_keep_the_other_saved_settings(tmp_path: Path) -> None:
    """The selector loss, which is not exported, can be given too. Nor is the backend."""
    trained = replace(ATTENTIONS["mlp"], selector_loss=1.0, backend="blockwise")
    model = tiny(trained)
    NSAConfig.of(model).save_pretrained(tmp_path)
    assert model.attention == trained  # not changed
    given = {"attention": {"spec": {"window": 64}, "backend": "reference"}}
    config = AutoConfig.from_pretrained(tmp_path, **given)
    expected = replace(ATTENTIONS["mlp"], spec=replace(SPEC, window=64), backend="reference")
    assert config.model_config().attention == expected
    config = AutoConfig.from_pretrained(tmp_path, attention={"selector_loss": 0.5})
    config.save_pretrained(tmp_path / "again")
    again = AutoConfig.from_pretrained(tmp_path / "again").model_config()
    assert again.attention == replace(ATTENTIONS["mlp"], selector_loss=0.5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"attention": {"spec": {"window": -1}}}, "NSASpec.window = -1"),
        ({"attention": {"compressor": "max"}}, "model.attention.compressor = 'max'"),
        ({"attention": "dense"}, "attention = 'dense': must be a dict of settings"),
        ({"attention": {"kinds": "nsa"}}, "attention.kinds: no such setting"),
        ({"attention": {"spec": {"block": 1}}}, "attention.spec.block: no such"),
        ({"attention": {"selector_loss": -1.0}}, "attention.selector_loss = -1.0: must be 0"),
        ({"heads": 7}, "model.heads = 7"),
    ],
)
def test_an_invalid_configuration_is_refused(
    given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    NSAConfig.of(tiny("mlp")).save_pretrained(tmp_path)
    for build_config in (NSAConfig, partial(AutoConfig.from_pretrained, tmp_path)):
        with pytest.raises(ValueError, match=message):
            build_config(**given)


def test_an_index_keeps_the_selector_loss_which_alone_trains_it() -> None:
    indexed = replace(ATTENTIONS["index"], selector_loss=0.5)
    assert NSAConfig.of(tiny(indexed)).model_config().attention == indexed


def with_selector_loss(weight: float) -> Any:
    """In training, with blocks so small that there is something to rank."""
    attention = AttentionConfig(spec=NSASpec(4, 2, 2, 3, 1, 1, 8))
    return wrapped(attention, selector_loss=weight).train()


@pytest.mark.parametrize("given", [{}, {"attention_mask": MASK}], ids=["plain", "padded"])
def test_the_selector_loss_is_added_to_the_loss_in_training(given: dict[str, Tensor]) -> None:
    ids = tokens(24, batch=3)
    model, plain = with_selector_loss(2.0), with_selector_loss(0.0)
    loss, base = (x(ids, labels=ids, **given).loss for x in (model, plain))
    own = model.model(ids, **given).selector_loss
    assert own > 0
    assert model.model(inputs_embeds=model.model.embed(ids), **given).selector_loss > 0
    torch.testing.assert_close(loss, base + 2 * own)
    assert plain.model(ids, **given).selector_loss is None
    assert model.eval().model(ids, **given).selector_loss is None
    assert torch.equal(model(ids, labels=ids, **given).loss, base)


def test_the_selector_losss_gradient_is_the_recipes() -> None:
    ids = tokens(24, batch=2)
    model = with_selector_loss(2.0)
    model(ids, labels=ids).loss.backward()
    core = LanguageModel(model.model.core.config).double()
    core.load_state_dict(model.model.core.state_dict())
    core(ids, F.pad(ids[:, 1:], (0, 1), value=-100)).backward()
    expected = dict(core.named_parameters())
    for name, parameter in model.model.core.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, atol=1e-6, rtol=1e-5)


def test_accumulated_micro_batches_count_by_their_labels() -> None:
    """As Trainer calls the model: with the number of labels of all micro-batches."""
    model, ids = with_selector_loss(1.0), tokens(24, batch=2)
    labels = ids.clone()
    labels[0, :15] = -100
    items = (labels[:, 1:] != -100).sum()
    parts = [slice(0, 1), slice(1, 2)]
    total = sum(model(ids[i], labels=labels[i], num_items_in_batch=items).loss for i in parts)
    base = with_selector_loss(0.0)(ids, labels=labels).loss
    own = [model.model(ids[i]).selector_loss for i in parts]
    fractions = [(labels[i, 1:] != -100).sum() / items for i in parts]
    expected = base + sum(f * x for f, x in zip(fractions, own, strict=True))
    # transformers computes the loss in float32.
    torch.testing.assert_close(total.float(), expected.float())


def test_device_maps_keep_the_model_on_one_device() -> None:
    accelerate = pytest.importorskip("accelerate", reason="it spreads models over devices")
    model = wrapped(dtype=torch.float32)
    total = sum(parameter.nbytes for parameter in model.parameters())
    limits = {0: total * 5 // 6, 1: total * 2}  # most of it fits on the first
    devices = accelerate.infer_auto_device_map(
        model, max_memory=limits, no_split_module_classes=model._no_split_modules
    )
    assert set(devices.values()) == {1}, devices

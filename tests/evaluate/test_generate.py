"""`nsa generate` streams text as it is generated, and ends like other shell programs."""

import io
import os
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor

from nsa.cli import main
from nsa.data.tokenizer import ByteTokenizer, HubTokenizer
from nsa.engine.load_run import StoredRun, load_run
from nsa.evaluate.generate import decode_stream, print_texts
from nsa.model.decode import generate
from tests.data.texts import train_bpe
from tests.evaluate.models import write_model

PROMPTS = ("It was", "Zoë's")
STOP = ByteTokenizer.eos_id


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with random weights of a byte-level model."""
    return write_model(tmp_path_factory.mktemp("models") / "run")


def expected_texts(run: Path, *prompts: str, **sampling: float) -> list[str]:
    """Generate continuations of the prompts without the command."""
    opened = load_run(run)
    ids = [torch.tensor(list(os.fsencode(prompt))) for prompt in prompts]
    steps = generate(opened.model, ids, stop=STOP, **sampling)
    rows = torch.stack(list(steps), 1).tolist()
    return [opened.tokenizer.decode(row).decode(errors="replace") for row in rows]


def test_it_prints_the_continuation(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    devices: list[torch.device] = []

    def load(path: Path, device: torch.device) -> StoredRun:
        devices.append(device)
        return load_run(path)

    monkeypatch.setattr("nsa.engine.load_run.load_run", load)
    flags = ["--max-new-tokens", "30", "--temperature", "0.7", "--top-p", "0.9", "--seed", "4"]
    prompt = PROMPTS[1] + "\udcff"  # a byte that is no UTF-8, as Python reads it in an argument
    assert main(["generate", str(run), "--prompt", prompt, *flags, "--device=meta"]) == 0
    assert devices == [torch.device("meta")]
    sampling = {"max_new_tokens": 30, "temperature": 0.7, "top_p": 0.9, "seed": 4}
    (expected,) = expected_texts(run, prompt, **sampling)
    assert any(x < " " and x not in "\n\t" for x in expected), "a pipe gets control characters"
    assert capsys.readouterr().out == expected + "\n"


def test_several_prompts_are_one_batch_and_printed_one_after_the_other(
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPTS[1])
    both = ["--file=~/prompt.txt", "--prompt", PROMPTS[0]]
    assert main(["generate", str(run), *both, "--max-new-tokens", "9"]) == 0
    first, second = expected_texts(run, *PROMPTS, max_new_tokens=9)
    expected = f"==> {PROMPTS[0]!r} <==\n{first}\n\n==> {file} <==\n{second}\n"
    assert capsys.readouterr().out == expected


def test_one_text_is_printed_as_it_is_generated() -> None:
    terminal = io.BytesIO()

    def new() -> str:
        """Return what has reached the terminal since the last call."""
        output = terminal.getvalue().decode()
        terminal.seek(0)
        terminal.truncate()
        return output

    def steps() -> Iterator[Tensor]:
        for printed, token in (("", ord("a")), ("a", 0xC3), ("", 0xB6), ("ö", STOP)):
            assert new() == printed
            yield torch.tensor([token])

    with redirect_stdout(io.TextIOWrapper(terminal, encoding="utf-8")):
        print_texts(steps(), ["1"], ByteTokenizer())
        assert new() == "\n"


@pytest.mark.parametrize("texts", [1, 2])
def test_a_terminal_gets_no_control_character(texts: int) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    tokens = b"\x1b]0;owned\x07\n\t."
    with redirect_stdout(terminal):
        steps = (torch.tensor([token] * texts) for token in (*tokens, STOP))
        print_texts(steps, ["a\x1b"] * texts, ByteTokenizer())
    assert terminal.getvalue().count("\\x1b]0;owned\\x07\n\t.") == texts
    assert "\x1b" not in terminal.getvalue()


def test_a_character_of_several_bytes_is_printed_at_once() -> None:
    text = "Zoë: 😀, 世界"
    decode = ByteTokenizer.decode
    with mock.patch.object(ByteTokenizer, "decode", autospec=True, side_effect=decode) as decoded:
        pieces = list(decode_stream(list(text.encode()), ByteTokenizer()))
    assert [piece for piece in pieces if piece] == list(text)
    assert max(len(call.args[1]) for call in decoded.call_args_list) <= 8, "two characters"


def test_invalid_bytes_are_printed_as_replacement_characters() -> None:
    for wrong in (b"\xc3(", b"a\xff\xfeb", b"\x80\xf0\x9f\x98\x80", b"\xf0\x9f\x98", b"\xff" * 9):
        pieces = decode_stream(list(wrong), ByteTokenizer())
        assert "".join(pieces) == wrong.decode(errors="replace")


def test_streamed_pieces_join_to_the_decoded_text() -> None:
    for tokenizer in (with_bytes(), with_words(), with_bytes_for_the_unknown()):
        text = "the cat 😀 the ca t"
        tokens = tokenizer.encode(text.encode()).tolist()
        assert len(tokens) > 5
        pieces = decode_stream([*tokens[:3], tokenizer.eos_id, *tokens[3:]], tokenizer)
        assert "".join(pieces) == tokenizer.decode(tokens).decode()
        assert "\ufffd" not in "".join(pieces)


TEXT = "the cat the cat 😀 sat"


def with_bytes() -> HubTokenizer:
    """Like GPT-2's: an emoji is several tokens."""
    backend = train_bpe([TEXT.encode()], 300)
    return HubTokenizer("test", backend.to_str(), "<|endoftext|>")


def with_words() -> HubTokenizer:
    """Like Llama's: the first space of a text is dropped."""
    backend = Backend(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.train_from_iterator([TEXT], trainers.BpeTrainer(special_tokens=["</s>", "<unk>"]))
    return HubTokenizer("test", backend.to_str(), "</s>")


def with_bytes_for_the_unknown() -> HubTokenizer:
    """Like Llama 2's: unknown letters become byte tokens, each a replacement mark alone."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {token: at for at, token in enumerate(["<unk>", "</s>", *bytes_, *"▁theca"])}
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.add_special_tokens(["</s>", "<unk>"])
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return HubTokenizer("test", backend.to_str(), "</s>")


def test_wrong_flags_are_one_line_before_anything_is_loaded(
    tmp_path: Path, refusal: Callable[..., str]
) -> None:
    prompt = ["--prompt", "It"]
    for flags, message in (
        ([], "there is no prompt; give --prompt TEXT or --file F"),
        ([*prompt, "--prompt", ""], "the prompt '' is empty; give at least one character"),
        ([*prompt, "--max-new-tokens", "0"], "max_new_tokens = 0: must be 1 or more"),
        ([*prompt, "--temperature", "-1"], "temperature = -1.0: must be 0 (greedy) or more"),
        ([*prompt, "--top-p", "1.5"], "top_p = 1.5: must be above 0 and at most 1"),
        ([*prompt, "--device", "cuda:99"], "--device cuda:99: "),
        (["--file", str(tmp_path)], f"--file {tmp_path}: Is a directory; name a file of text"),
        (prompt, "no-run"),
    ):
        assert message in refusal("generate", tmp_path / "no-run", *flags)


def interrupted(error: type[BaseException]) -> Callable[..., Iterator[Tensor]]:
    """Stand in for `generate`: one token, and then an error."""

    def steps(*_: object, **__: object) -> Iterator[Tensor]:
        yield torch.tensor([ord("a")])
        raise error

    return steps


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (KeyboardInterrupt, 130, "a\n"),  # Ctrl-C also ends the line
        (BrokenPipeError, 0, ""),  # `nsa generate … | true`
    ],
)
def test_it_ends_quietly_on_ctrl_c_and_when_its_reader_closes_the_pipe(
    error: type[BaseException],
    code: int,
    text: str,
    run: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("nsa.model.decode.generate", interrupted(error))
    assert main(["generate", str(run), "--prompt", PROMPTS[0]]) == code
    assert capfd.readouterr() == (text, "")

"""`nsa generate` prints what a run writes, as it comes, and ends as programs of a shell do."""

from __future__ import annotations

import io
import signal
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor

from nsa.cli import main
from nsa.data.tokenizer import ByteTokenizer, HubTokenizer
from nsa.engine.load_run import load_run
from nsa.engine.resolve import to_yaml
from nsa.evaluate.generate import Spelling, show_as_it_comes
from nsa.model import LanguageModel
from nsa.model.decode import generate
from tests.engine.small import small
from tests.ops.cases import one_thread
from tests.ranks import ROOT, Ranks, start_ranks

__all__ = ["one_thread"]
PROMPTS = ("It was", "Zoë's")
STOP = ByteTokenizer.eos_id


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model's weights; they are random, and so are the bytes that it writes."""
    folder = tmp_path_factory.mktemp("run")
    config = small("none")
    config.data.source, config.data.tokenizer = "embedded", "byte"
    (folder / "config.yaml").write_text(to_yaml(config))
    torch.manual_seed(0)
    save_file(LanguageModel(config.model).state_dict(), folder / "model.safetensors")
    return folder


def written(run: Path, *prompts: str, **sampling: float) -> list[str]:
    """The texts that go on with the prompts."""
    opened = load_run(run)
    ids = [torch.tensor(list(prompt.encode())) for prompt in prompts]
    steps = generate(opened.model, ids, stop=STOP, **sampling)
    rows = torch.stack(list(steps), 1).tolist()
    assert opened.tokenizer is not None
    return [opened.tokenizer.decode(row).decode(errors="replace") for row in rows]


def test_it_prints_what_the_run_goes_on_with(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--max-new-tokens", "30", "--temperature", "0.7", "--top-p", "0.9", "--seed", "4"]
    assert main(["generate", str(run), "--prompt", PROMPTS[1], *flags]) == 0
    sampling = {"max_new_tokens": 30, "temperature": 0.7, "top_p": 0.9, "seed": 4}
    assert capsys.readouterr().out == written(run, PROMPTS[1], **sampling)[0] + "\n"


def test_several_prompts_go_at_once_and_are_printed_one_after_the_other(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPTS[1])
    both = ["--file", str(file), "--prompt", PROMPTS[0]]
    assert main(["generate", str(run), *both, "--max-new-tokens", "9"]) == 0
    first, second = written(run, *PROMPTS, max_new_tokens=9)
    expected = f"==> {PROMPTS[0]!r} <==\n{first}\n\n==> {file} <==\n{second}\n"
    assert capsys.readouterr().out == expected


def test_text_is_printed_as_it_comes() -> None:
    """The first at once; the others are written meanwhile, and printed when it has ended."""
    terminal = io.BytesIO()

    def new() -> str:
        """What has reached the terminal, and not only a buffer, since this was last asked."""
        said = terminal.getvalue().decode()
        terminal.seek(0)
        terminal.truncate()
        return said

    def steps() -> Iterator[Tensor]:
        for printed, tokens in (
            ("==> 1 <==\n", [ord("a"), ord("x"), 0xC3]),
            ("a", [ord("b"), ord("y"), 0xB6]),
            ("b", [ord("c"), STOP, 0xC3]),
            ("c", [STOP, -1, 0xB6]),
            ("\n\n==> 2 <==\nxy\n\n==> 3 <==\nöö", [-1, -1, 0xC3]),
            ("", [-1, -1, 0xB6]),
        ):
            assert new() == printed
            yield torch.tensor(tokens)

    with redirect_stdout(io.TextIOWrapper(terminal, encoding="utf-8")):
        show_as_it_comes(steps(), ["1", "2", "3"], ByteTokenizer())
        assert new() == "ö\n"


def spelled(tokens: list[int], tokenizer: ByteTokenizer | HubTokenizer) -> list[str]:
    spelling = Spelling(tokenizer)
    return [*(spelling.add(token) for token in tokens), spelling.rest()]


def test_a_character_of_several_bytes_is_printed_whole() -> None:
    text = "Zoë: 😀, 世界"
    pieces = spelled(list(text.encode()), ByteTokenizer())
    assert [piece for piece in pieces if piece] == list(text)


def test_bytes_that_are_no_text_are_shown_as_such() -> None:
    for wrong in (b"\xc3(", b"a\xff\xfeb", b"\x80\xf0\x9f\x98\x80", b"\xf0\x9f\x98", b"\xff" * 9):
        pieces = spelled(list(wrong), ByteTokenizer())
        assert "".join(pieces) == wrong.decode(errors="replace")


def test_tokens_that_are_part_of_a_character_or_of_a_word_join_as_the_whole_text_does() -> None:
    for tokenizer in (with_bytes(), with_words(), with_bytes_for_the_unknown()):
        text = "the cat 😀 the ca t"
        tokens = tokenizer.encode(text.encode()).tolist()
        assert len(tokens) > 5
        pieces = spelled([*tokens[:3], tokenizer.eos_id, *tokens[3:]], tokenizer)
        assert "".join(pieces) == tokenizer.decode(tokens).decode()
        assert "\ufffd" not in "".join(pieces)


def with_bytes() -> HubTokenizer:
    """As GPT-2's: an emoji is several tokens."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return trained(backend, trainers.BpeTrainer(special_tokens=["</s>"], initial_alphabet=alphabet))


def with_words() -> HubTokenizer:
    """As Llama's: a text's first space is left out, and where a text begins it is not known."""
    backend = Backend(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return trained(backend, trainers.BpeTrainer(special_tokens=["</s>", "<unk>"]))


def with_bytes_for_the_unknown() -> HubTokenizer:
    """As Llama 2's: a letter that has no token is spelled in bytes, each of them a mark alone."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {token: at for at, token in enumerate(["<unk>", "</s>", *bytes_, *"▁theca"])}
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.add_special_tokens(["</s>", "<unk>"])
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return HubTokenizer("test", backend.to_str(), "</s>")


def trained(backend: Backend, trainer: trainers.BpeTrainer) -> HubTokenizer:
    backend.train_from_iterator(["the cat the cat 😀 sat"], trainer)
    return HubTokenizer("test", backend.to_str(), "</s>")


def test_what_cannot_be_asked_is_refused_before_anything_is_opened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = ["--prompt", "It"]
    for flags, message in (
        ([], "there is nothing to go on with; give --prompt TEXT or --file F"),
        (["--prompt", ""], "the prompt '' is empty; a run goes on with a text's beginning"),
        ([*prompt, "--max-new-tokens", "0"], "max_new_tokens = 0: must be 1 or more"),
        ([*prompt, "--temperature", "-1"], "temperature = -1.0: must be 0 (the likeliest token)"),
        ([*prompt, "--top-p", "1.5"], "top_p = 1.5: must be above 0 and at most 1"),
        ([*prompt, "--device", "gpu"], "--device gpu: "),
        (["--file", str(tmp_path)], f"--file {tmp_path}: Is a directory; name a file of text"),
        (prompt, "no-run"),
    ):
        assert main(["generate", str(tmp_path / "no-run"), *flags]) == 2
        said = capsys.readouterr().err
        assert said.startswith("nsa: ")
        assert message in said
        assert said.count("\n") == 1


@pytest.fixture
def started() -> Iterator[list[Ranks]]:
    """What a test starts is ended with it."""
    processes: list[Ranks] = []
    yield processes
    for process in processes:
        process.end(signal.SIGKILL)


def test_it_ends_quietly_when_its_reader_has_read_enough(run: Path, started: list[Ranks]) -> None:
    program = ROOT / "tests/evaluate/generate_into_head.py"
    flags = ("--prompt", PROMPTS[0], "--max-new-tokens", "100000")
    started.append(start_ranks(program, "generate", str(run), *flags, ranks=0))
    assert started[0].codes(timeout=120) == [0]
    assert started[0].text("err") == ""
    assert len(started[0].text("out")) >= 5  # 20 bytes, some of which are half a character


def test_it_ends_quietly_on_ctrl_c(run: Path, started: list[Ranks]) -> None:
    flags = ("--prompt", PROMPTS[0], "--max-new-tokens", "100000")
    arguments = ("generate", str(run), *flags)
    started.append(start_ranks(ROOT / "nsa/__main__.py", *arguments, ranks=0))
    deadline = time.monotonic() + 120
    out = started[0].started[0].output.with_suffix(".out")
    while not (out.exists() and out.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.02)
    started[0].started[0].kill(signal.SIGINT)
    assert started[0].codes(timeout=60) == [130]
    assert started[0].text("err") == ""
    assert started[0].text("out").endswith("\n")

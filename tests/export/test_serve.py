"""`nsa serve`: OpenAI's own client against a server in a process of its own."""

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from nsa.cli import main
from nsa.export.serve import RENDERED, ServedModel, build_app
from nsa.model.hf import NSAForCausalLM
from tests.disks import set_fields
from tests.export.llamas import CHAT, LOOP, Refused, imported, llama

for package in ("fastapi", "uvicorn"):
    pytest.importorskip(package, reason=f"needs {package}: pip install -e '.[serve]'")
TestClient: Any = pytest.importorskip("fastapi.testclient", reason="needs httpx").TestClient
openai: Any = pytest.importorskip("openai", reason="needs openai: pip install -e '.[serve]'")

MESSAGES = [{"role": "user", "content": "hello <|im_end|> you"}]


@pytest.fixture(scope="module")
def address(sparse: Path) -> Iterator[str]:
    """The address of a server of a sparse Qwen3; Ctrl-C must end it at the end."""
    command = [sys.executable, "-m", "nsa", "serve", str(sparse), "--port=0", "--device=cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            line = process.stdout.readline().decode()
            match = re.fullmatch(r"hf: (http://localhost:\d+/v1) \(Ctrl-C ends it\)\n", line)
            if match is None:
                process.kill()  # it would listen for ever
                pytest.fail(line + process.communicate()[1].decode())
            yield match[1]
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
        finally:
            process.kill()


@pytest.fixture
def client(address: str) -> Any:
    return openai.OpenAI(base_url=address, api_key="none", max_retries=0)


def continued(folder: Path, ids: Any) -> str:
    """What generate() of transformers writes greedily, 8 tokens."""
    model = NSAForCausalLM.from_pretrained(folder).eval()
    tokens = model.generate(**ids, max_new_tokens=8, do_sample=False)[0]
    text = AutoTokenizer.from_pretrained(folder).decode(
        tokens[ids["input_ids"].shape[1] :], skip_special_tokens=True
    )
    assert text
    return str(text)


def test_a_chat_gets_what_generate_writes_at_once_or_streamed(client: Any, sparse: Path) -> None:
    expected = continued(
        sparse,
        AutoTokenizer.from_pretrained(sparse).apply_chat_template(
            MESSAGES, add_generation_prompt=True, return_tensors="pt", return_dict=True
        ),
    )
    assert [model.id for model in client.models.list()] == ["hf"]
    request = {"model": "hf", "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
    answer = client.chat.completions.create(**request)
    assert answer.choices[0].message.content == expected
    assert answer.usage.completion_tokens <= 8
    chunks = [*client.chat.completions.create(**request, stream=True)]
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == expected.rstrip("\ufffd")  # an incomplete character at the end
    assert len(chunks) > 3


def test_a_prompt_is_continued_greedily_or_sampled_by_its_seed(client: Any, sparse: Path) -> None:
    expected = continued(sparse, AutoTokenizer.from_pretrained(sparse)("one", return_tensors="pt"))

    def complete(**settings: Any) -> str:
        request = {"model": "hf", "prompt": "one", "max_tokens": 8, **settings}
        return str(client.completions.create(**request).choices[0].text)

    assert complete(temperature=0) == expected
    assert complete(seed=1) == complete(seed=1)
    assert len({complete(seed=seed, temperature=2) for seed in range(4)}) > 1


def test_a_wrong_request_is_answered_in_one_line_and_no_other_model_is_loaded(
    client: Any, address: str
) -> None:
    for wrong, message in (
        ({"model": "other"}, "Server is pinned to 'hf'; requested 'other'."),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "KeyError: 'text'"),
        ({"temperature": -1}, "ValueError: `temperature`"),
    ):
        request = {"model": "hf", "messages": MESSAGES, "max_tokens": 1, **wrong}
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**request)
        assert refused.value.body["message"].startswith(message)
        assert "\n" not in refused.value.body["message"]
    root = address.removesuffix("/v1")
    with urllib.request.urlopen(f"{root}/health") as response:
        assert json.load(response) == {"status": "ok"}
    for path in ("/load_model", "/reset", "/v1/responses", "/docs", "/openapi.json"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{root}{path}", data=b"{}")


def test_a_template_that_loops_is_refused_while_others_are_answered(
    sparse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = ServedModel(sparse, "cpu")
    request = {"messages": MESSAGES, "max_tokens": 1}
    ended, rendering, at_once = [], threading.Lock(), list[bool]()

    def render(*_: Any, **__: Any) -> str:
        at_once.append(not rendering.acquire(blocking=False))
        time.sleep(0.1)
        rendering.release()
        return "hello"

    def chat(client: TestClient, seconds: float, template: str = CHAT) -> Any:
        monkeypatch.setattr("nsa.evaluate.chat.TEMPLATE_SECONDS", seconds)
        served.tokenizer.chat_template = template
        answer = client.post("/v1/chat/completions", json=request)
        ended.append(template)
        return answer.status_code, answer.json()

    with TestClient(build_app(served)) as client, ThreadPoolExecutor() as pool:
        looping = pool.submit(chat, client, 2, LOOP)
        assert client.get("/health").json() == {"status": "ok"}
        assert not ended, "the server waited for the template"
        status, body = looping.result()
        assert status == 400
        reason = "the chat template ends with TimeoutError: no text after 2 seconds"
        assert reason in body["error"]["message"]
        assert chat(client, 100)[0] == 200
        monkeypatch.setattr("nsa.export.serve.render_chat", render)
        assert {status for status, _ in pool.map(chat, [client] * 3, [100] * 3)} == {200}
        assert at_once == [False] * 3, "each may take a gigabyte"


def test_a_request_chooses_what_the_template_reads_and_no_other_program(
    sparse: Path, tmp_path: Path
) -> None:
    """A folder may hold further templates, and how to parse what the model writes."""
    shutil.copytree(sparse, tmp_path / "hf")
    (tmp_path / "hf/chat_template.jinja").write_text(
        "{{ raise_exception(tools[0].name ~ thinks) }}"
    )
    (tmp_path / f"hf/additional_chat_templates/{RENDERED}.jinja").parent.mkdir()
    (tmp_path / f"hf/additional_chat_templates/{RENDERED}.jinja").write_text(LOOP)
    parser = {"fields": "(a+)+$"}
    set_fields(tmp_path / "hf/tokenizer_config.json", response_template=parser)
    served = ServedModel(tmp_path / "hf", "cpu")
    request = {"messages": MESSAGES, "max_tokens": 1, "tools": [{"name": "weather"}]}
    with TestClient(build_app(served)) as client:
        replaced = {"chat_template": "another program", "conversations": []}
        chosen = request | {"chat_template_kwargs": {"thinks": " yes", **replaced}}
        answer = client.post("/v1/chat/completions", json=chosen)
        assert "TemplateError: weather yes" in answer.json()["error"]["message"]
        served.tokenizer.chat_template = CHAT
        assert client.post("/v1/chat/completions", json=chosen).status_code == 200


def test_an_import_is_served_by_an_export_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama(tmp_path / "llama")
    run = imported(tmp_path / "llama", tmp_path / "run")
    monkeypatch.chdir(tmp_path / "run")
    served = ServedModel(Path(), "cpu")
    assert served.force_model == "run"
    assert served.model.generation_config.top_k == 0, "a request's top_p is not cut at 50"
    with TestClient(build_app(served)) as client:
        refused = client.post("/v1/chat/completions", json={"messages": MESSAGES})
    assert refused.status_code == 400
    assert "has no chat template; use /v1/completions" in refused.json()["error"]["message"]
    weights = served.model.model.core.embed.weight
    assert weights.equal(run.model.embed.weight)
    assert served.tokenizer("ab").input_ids == [97, 98]
    assert not [path for path in tmp_path.iterdir() if path.name not in ("llama", "run")]


@pytest.mark.parametrize(("host", "warned"), [("localhost", False), ("0.0.0.0", True)])
def test_a_server_that_others_reach_asks_no_password_and_says_so(
    host: str,
    warned: bool,
    sparse: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bound: list[str] = []
    devices: list[str] = []
    monkeypatch.setattr(
        "nsa.export.serve.build_app", lambda served: devices.append(served.model.device.type)
    )

    def run(_: Any, listeners: list[socket.socket]) -> None:
        bound.extend(listener.getsockname()[0] for listener in listeners)

    monkeypatch.setattr("uvicorn.Server.run", run)
    assert main(["serve", str(sparse), f"--host={host}", "--port=0", "--device=meta"]) == 0
    assert devices == ["meta"]
    assert ("no password is asked" in capsys.readouterr().err) == warned
    assert (bound == ["0.0.0.0"]) == warned, bound


def test_what_cannot_be_served_is_refused_in_one_line(
    sparse: Path, tmp_path: Path, refusal: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "llama"
    llama(folder)
    none = tmp_path / "none/at/all"
    assert "there is no such folder" in refusal("serve", none, "--port=0")
    with socket.create_server(("localhost", 0)) as other:
        port = other.getsockname()[1]
        message = refusal("serve", folder, f"--port={port}")
        assert f"--host localhost --port {port}: cannot listen there" in message
    assert "--port 65536: must be from 0 to 65,535" in refusal("serve", folder, "--port=65536")
    shutil.copytree(folder, tmp_path / "broken")
    (tmp_path / "broken/model.safetensors").write_bytes(b"{}")
    shutil.copy(sparse / "tokenizer.json", tmp_path / "broken")
    message = refusal("serve", tmp_path / "broken", "--port=0")
    assert f"{tmp_path / 'broken'}: cannot be loaded: SafetensorError" in message
    code = {"auto_map": {"AutoConfig": "mine.Config"}}
    set_fields(folder / "config.json", model_type="mine", **code)
    (folder / "mine.py").write_text("raise SystemExit('code of a stranger')")
    assert "model_type = 'mine'" in refusal("serve", folder, "--port=0")
    monkeypatch.setitem(sys.modules, "openai", None)
    assert "pip install 'nsa-m7c[serve]'" in refusal("serve", folder, "--port=0")

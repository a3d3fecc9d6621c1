"""The command line: what it prints where, its exit codes, and one clear line for every mistake."""

import io
import json
import os
import signal

import goldens
import jax
import pytest
import toy
from jax.experimental.compilation_cache import compilation_cache

from laneformer_jax import cli
from laneformer_jax.commands import options
from laneformer_jax.language_model import LanguageModel

CHAT = "{% for m in messages %}{{ m.role }} {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}bot {% endif %}"


@pytest.fixture
def lm(monkeypatch) -> LanguageModel:
    model = toy.speaking(toy.language_model())
    monkeypatch.setattr(options, "load_model", lambda _: model)
    return model


@pytest.fixture
def fresh_settings(monkeypatch, tmp_path):
    """The environment and the compilation cache as before, after the test."""
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compilation_cache.reset_cache()
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
    compilation_cache.reset_cache()


def run(capsys, *words: str) -> tuple[int, str, str]:
    code = cli.main(words)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_streamed_text_is_the_completion(lm, capsys):
    code, out, err = run(capsys, "generate", "bad", "-n", "12")
    assert (code, out) == (0, lm.generate("bad", max_new_tokens=12).text + "\n")
    assert err.startswith("[12 tokens in ") and "first after" in err


def test_echo_prints_the_prompt_first(lm, capsys):
    _, plain, _ = run(capsys, "generate", "bad", "-n", "4")
    assert run(capsys, "generate", "bad", "-n", "4", "--echo")[1] == "bad" + plain


def test_json_is_one_object_a_sample(lm, capsys):
    words = ("bad", "-n", "6", "-t", "0.9", "--seed", "7", "--num-samples", "2")
    code, out, err = run(capsys, "generate", *words, "--json")
    records = [json.loads(line) for line in out.splitlines()]
    expected = lm.generate("bad", max_new_tokens=6, temperature=0.9, seed=7, num_samples=2)
    assert code == 0 and err == ""
    assert [r["text"] for r in records] == [c.text for c in expected]
    assert [r["sample"] for r in records] == [0, 1]
    assert records[0]["timing"]["tokens"] == 12
    _, out, _ = run(capsys, "generate", *words)
    assert out.count("--- sample") == 2 and all(c.text in out for c in expected)


def test_the_prompt_comes_from_a_file_or_from_stdin(lm, capsys, tmp_path, monkeypatch):
    _, direct, _ = run(capsys, "generate", "bad", "-n", "4")
    (tmp_path / "prompt.txt").write_text("bad")
    assert run(capsys, "generate", "--prompt-file", str(tmp_path / "prompt.txt"), "-n", "4")[1] == direct
    (tmp_path / "prompt.txt").write_bytes(b"\xef\xbb\xbfbad")  # as Windows marks UTF-8
    assert run(capsys, "generate", "--prompt-file", str(tmp_path / "prompt.txt"), "-n", "4")[1] == direct
    monkeypatch.setattr("sys.stdin", io.StringIO("bad"))
    assert run(capsys, "generate", "-n", "4")[1] == direct


def test_chat_keeps_the_history(lm, capsys, monkeypatch):
    lm.tokenizer = chatting()
    monkeypatch.setattr("sys.stdin", io.StringIO("cab\n\nbed\n/reset\ncab\n/exit\nnever\n"))
    code, out, err = run(capsys, "chat", "--json", "-n", "5")
    answers = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and err == ""
    assert len(answers) == 3
    first = [{"role": "user", "content": "cab"}]
    second = [*first, {"role": "assistant", "content": answers[0]["text"]}, {"role": "user", "content": "bed"}]
    assert answers[0]["prompt_tokens"] == answers[2]["prompt_tokens"] == len(lm.tokenizer.encode_chat(first))
    assert answers[1]["prompt_tokens"] == len(lm.tokenizer.encode_chat(second))
    assert answers[2]["token_ids"] == answers[0]["token_ids"]


def test_a_chat_beyond_the_context_goes_on_after_reset(lm, capsys, monkeypatch):
    lm.tokenizer = chatting()
    monkeypatch.setattr("sys.stdin", io.StringIO("a" * 80 + "\n/reset\ncab\n"))
    code, out, err = run(capsys, "chat", "--json", "-n", "5")
    assert code == 0 and len(out.splitlines()) == 1
    assert "exceed the context of 64" in err and "/reset" in err


def test_a_chat_that_no_message_can_mend_ends(lm, capsys, monkeypatch):
    lm.tokenizer = chatting()
    monkeypatch.setattr("sys.stdin", io.StringIO("cab\nbed\n"))
    assert_one_line(run(capsys, "chat", "-t", "-1"), 2, "temperature must be 0 or a positive number, got -1.0")


def test_input_that_is_no_text_or_closed(lm, capsys, monkeypatch):
    lm.tokenizer = chatting()
    for verb, message in [("generate", "the prompt is not UTF-8 text"), ("chat", "a message is not UTF-8 text")]:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="latin-1"))
        assert_one_line(run(capsys, verb), 1, message)
        monkeypatch.setattr("sys.stdin", None)
        assert_one_line(run(capsys, verb), 2, "there is nothing to read: the standard input is closed")


def chatting():
    control = [toy.ControlToken(token, spelling) for token, spelling in toy.Letters.control.items()]
    return toy.Tokenizer(toy.Letters(), control, {"bos_token": "<s>"}, chat_template=CHAT)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("bad", "-t", "-1"), 2, "temperature must be 0 or a positive number, got -1.0"),
        (("bad", "-t", "nan"), 2, "temperature must be 0 or a positive number, got nan"),
        (("bad", "--top-p", "1.5", "-t", "1"), 2, "top_p must lie between 0 and 1, got 1.5"),
        (("bad", "--prompt-file", "x"), 2, "give the prompt once: as PROMPT, --prompt-file or --token-ids"),
        (("bad", "-n", "0"), 2, "max_new_tokens and num_samples must be at least 1, got 0, 1"),
        (("bad", "--num-samples", "0"), 2, "max_new_tokens and num_samples must be at least 1, got 60, 0"),
        (("--token-ids", "1 x"), 2, "--token-ids must be whole numbers, got '1 x'"),
        (("",), 1, "the prompt is empty: give at least one character"),
        (("bad", "-n", "61"), 1, "prompt of 4 tokens and 61 new ones exceed the context of 64"),
        (("--token-ids", "1 64"), 1, "the prompt has token ids outside the vocabulary of 64"),
        (("--prompt-file", "not-there"), 1, "No such file or directory"),
    ],
)
def test_a_mistake_is_one_line_on_stderr(lm, capsys, words, code, message):
    assert_one_line(run(capsys, "generate", *words), code, message)


def test_a_folder_that_is_no_model(fresh_settings, capsys, tmp_path):
    outcome = run(capsys, "generate", "--model", str(tmp_path), "bad")
    assert_one_line(outcome, 1, "is not a model folder: it has no config.json")


def test_a_model_without_chat_template(capsys, monkeypatch):
    monkeypatch.setattr(options, "load_model", lambda _: toy.language_model())
    assert_one_line(run(capsys, "chat"), 1, "this model has no chat template")


def test_text_for_a_model_without_tokenizer(capsys, monkeypatch):
    monkeypatch.setattr(options, "load_model", lambda _: toy.language_model())
    assert_one_line(run(capsys, "generate", "bad"), 1, "has no tokenizer: give the prompt as token ids")
    code, out, _ = run(capsys, "generate", "--token-ids", "1, 5 7", "-n", "4")
    ids = toy.language_model().generate([[1, 5, 7]], max_new_tokens=4)[0].token_ids
    assert code == 0 and out.splitlines()[-1] == " ".join(map(str, ids))


def assert_one_line(outcome: tuple[int, str, str], code: int, message: str) -> None:
    assert outcome[:2] == (code, "")
    assert message in outcome[2] and outcome[2].count("\n") == 1 and outcome[2].startswith("laneformer ")


@pytest.mark.parametrize("words", [(), ("nonsense",), ("generate", "--no-such-option")])
def test_wrong_usage_exits_with_2(capsys, words):
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    assert end.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_explains_itself(capsys, verb):
    with pytest.raises(SystemExit) as end:
        cli.main([verb, "--help"])
    out = capsys.readouterr().out
    assert end.value.code == 0 and len(out.splitlines()) > 10


def test_the_whole_way_from_a_folder_on_eight_devices(fresh_settings, capsys):
    folder = str(goldens.FOLDER / "eight_lanes")
    prompt = goldens.expected("eight_lanes").input_ids[0].tolist()
    words = ("generate", "--model", folder, "--token-ids", " ".join(map(str, prompt)), "-n", "24", "--devices", "8")
    code, out, _ = run(capsys, *words)
    greedy = goldens.expected("eight_lanes").greedy[0, goldens.PROMPT_TOKENS :].tolist()
    assert code == 0 and out.splitlines()[-1] == " ".join(map(str, greedy))
    assert any((fresh_settings / "laneformer-jax" / "compilations").iterdir())


def test_more_devices_than_there_are(fresh_settings, capsys):
    words = ("generate", "--model", str(goldens.FOLDER / "eight_lanes"), "--token-ids", "1", "--devices", "9")
    outcome = run(capsys, *words)
    assert_one_line(outcome, 1, "1 x 9 devices asked for, 8 cpu device(s) here")
    assert "--xla_force_host_platform_device_count=9" in outcome[2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--devices", "0"), "--devices must be at least 1, got 0"),
        (("--process", "0"), "several processes need --devices"),
        (("--devices", "8", "--processes", "2"), "--coordinator, --processes and --process go together"),
        (("--devices", "8", "--processes", "2", "--process", "2", "--coordinator", "h:1"), "counts from 0"),
        (("--devices", "8", "--processes", "3", "--process", "0", "--coordinator", "h:1"), "divides --devices"),
        (("--devices", "8", "--processes", "0", "--process", "0", "--coordinator", "h:1"), "counts from 0"),
    ],
)
def test_devices_and_processes_that_cannot_be(capsys, words, message):
    assert_one_line(run(capsys, "generate", "bad", *words), 2, message)


def failing_with(error: BaseException):
    def load_model(_):
        raise error

    return load_model


def test_memory_that_runs_out_and_an_interruption(capsys, monkeypatch):
    for error in (MemoryError(), RuntimeError("RESOURCE_EXHAUSTED: Out of memory\nallocating")):
        monkeypatch.setattr(options, "load_model", failing_with(error))
        assert_one_line(run(capsys, "generate", "bad"), 1, "out of memory: fewer samples")
    monkeypatch.setattr(options, "load_model", failing_with(KeyboardInterrupt()))
    assert run(capsys, "generate", "bad") == (128 + signal.SIGINT, "", "")


@pytest.mark.parametrize("home", ["nobody's", "unusable"])
def test_without_a_cache_folder_nothing_is_kept(fresh_settings, monkeypatch, home):
    if home == "unusable":
        monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(cli.Path, "home", lambda: failing_with(RuntimeError())(None))
    cli.keep_compilations()
    assert jax.config.values["jax_compilation_cache_dir"] is None


@pytest.mark.parametrize(
    ("reader", "outcome"),
    [("full", (1, "laneformer schedule: [Errno 28] No space left on device\n")), ("gone", (0, ""))],
)
def test_output_that_nobody_takes(capsys, monkeypatch, reader, outcome):
    """A reader that has left is no failure, a full disk is one; nothing is left for Python to write when it ends."""
    if reader == "full":
        descriptor = os.open("/dev/full", os.O_WRONLY)
    else:
        read, descriptor = os.pipe()
        os.close(read)
    with os.fdopen(descriptor, "w") as output:
        monkeypatch.setattr("sys.stdout", output)
        assert (cli.main(["schedule"]), capsys.readouterr().err) == outcome

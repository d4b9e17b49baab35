"""Loading finds the tokenizer wherever the model keeps it; encoding and decoding hold for any text and any thread."""

import random
import threading
import time

import pytest

from pagedjax.config import EngineConfig
from pagedjax.errors import ConfigError, InvalidRequestError
from pagedjax.loading.hub import demo_path
from pagedjax.text import tokenizer as tokenizer_module
from pagedjax.text.gguf_tokenizer import tokenizer_from_gguf
from pagedjax.text.tokenizer import load_tokenizer
from tests.text.tokenizers import TEXTS, byte_level, tokenizer_of

MILLION = 1_000_000


@pytest.fixture
def directory(tmp_path):
    """A model directory with tokenizer files."""
    byte_level().hf.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "options", [{"model": "demo"}, {"model": str(demo_path())}, {"model": "x", "tokenizer": "demo"}]
)
def test_the_embedded_models_tokenizer_comes_from_its_gguf_file(options):
    tokenizer = load_tokenizer(EngineConfig(**options))
    assert tokenizer.decode(tokenizer.encode("Hello, 世界 😀")) == "Hello, 世界 😀"
    assert tokenizer.vocab_size == 49152
    assert tokenizer.eos_token_ids == {2}
    assert "<|im_start|>" in tokenizer.chat_template


def test_a_directory_gives_the_tokenizer_that_was_saved_there(directory):
    tokenizer = load_tokenizer(EngineConfig(model=str(directory)))
    for text in TEXTS:
        assert tokenizer.encode(text) == byte_level().encode(text)
    assert tokenizer.chat_template is None


def test_a_hub_name_is_resolved_with_the_models_revision_and_cache(directory, monkeypatch):
    asked = []

    def resolve(name, *, revision, download_dir, with_weights):
        assert not with_weights
        asked.append((name, revision, download_dir))
        return directory

    monkeypatch.setattr(tokenizer_module.hub, "resolve", resolve)
    load_tokenizer(EngineConfig(model="org/model", revision="v1", download_dir="cache"))
    load_tokenizer(EngineConfig(model="org/model", revision="v1", tokenizer="org/other"))
    assert asked == [("org/model", "v1", "cache"), ("org/other", None, None)]  # the revision is the model's


def test_a_missing_tokenizer_names_the_files_that_were_looked_for(tmp_path):
    with pytest.raises(
        ConfigError, match=r"holds no tokenizer: none of tokenizer.json, tokenizer.model, .* --tokenizer"
    ):
        load_tokenizer(EngineConfig(model=str(tmp_path)))


def test_a_damaged_tokenizer_names_its_directory(directory):
    (directory / "tokenizer.json").write_text('{"model": 5}')
    with pytest.raises(ConfigError, match=f"the tokenizer in {directory} cannot be loaded"):
        load_tokenizer(EngineConfig(model=str(directory)))


@pytest.mark.parametrize("has_tokenizer_json", [True, False])
def test_code_from_the_directory_is_never_run(directory, has_tokenizer_json):
    config = '{"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}'
    (directory / "tokenizer_config.json").write_text(config)
    (directory / "evil.py").write_text(f"open({str(directory / 'ran')!r}, 'w')\nEvil = None\n")
    (directory / "config.json").write_text('{"model_type": "nothing-known"}')
    if has_tokenizer_json:
        assert load_tokenizer(EngineConfig(model=str(directory))) is not None
    else:
        (directory / "tokenizer.json").rename(directory / "vocab.json")
        with pytest.raises(ConfigError, match="cannot be loaded"):
            load_tokenizer(EngineConfig(model=str(directory)))
    assert not (directory / "ran").exists()


def test_tokenizer_json_is_taken_as_it_is_written(tmp_path):
    """A model class of transformers rebuilt SmolLM2's tokenizer without its digit splitting: other ids for numbers."""
    hf = tokenizer_from_gguf(demo_path())
    hf.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    tokenizer = load_tokenizer(EngineConfig(model=str(tmp_path)))
    assert tokenizer.encode("\n\n1. 12345") == hf("\n\n1. 12345").input_ids
    assert tokenizer.chat_template == hf.chat_template


def test_made_up_weights_without_a_tokenizer_make_an_engine_of_token_ids(tmp_path, directory):
    (tmp_path / "empty").mkdir()
    assert load_tokenizer(EngineConfig(model=str(tmp_path / "empty"), load_format="dummy")) is None
    assert load_tokenizer(EngineConfig(model=str(directory), load_format="dummy")) is not None
    assert load_tokenizer(EngineConfig(), has_checkpoint=False) is None
    assert load_tokenizer(EngineConfig(tokenizer=str(directory)), has_checkpoint=False) is not None


def test_the_given_chat_template_replaces_the_tokenizers(directory):
    tokenizer = load_tokenizer(EngineConfig(model=str(directory), chat_template="{{ messages[0].content }}"))
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "hi"


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback", "demo"])
def test_encoding_and_decoding_equal_transformers(kind):
    tokenizer = tokenizer_of(kind)
    for text in [*TEXTS, "", " ", "<|im_start|>user\n", "<tool>x"]:
        for special in (True, False):
            ids = tokenizer.encode(text, add_special_tokens=special)
            assert ids == tokenizer.hf.encode(text, add_special_tokens=special)
            for skip in (True, False):
                assert tokenizer.decode(ids, skip_special_tokens=skip) == tokenizer.hf.decode(
                    ids, skip_special_tokens=skip
                )


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback", "demo"])
@pytest.mark.parametrize("text", ["😀", "a世🙂b"])
def test_the_bytes_of_tokens_add_up_to_characters(kind, text):
    tokenizer = tokenizer_of(kind)
    parts = [(tokenizer.bytes_of(one), tokenizer.decode([one])) for one in tokenizer.encode(text, False)]
    assert any("\ufffd" in shown for _, shown in parts)
    assert b"".join(shown.encode() if raw is None else raw for raw, shown in parts).decode().strip() == text


def test_ids_without_a_token_add_nothing():
    tokenizer = tokenizer_of("demo")
    assert tokenizer.decode([tokenizer.vocab_size, *tokenizer.encode("a"), 2**31]) == "a"


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_ids_that_no_vocabulary_can_have_are_refused(token_id):
    with pytest.raises(InvalidRequestError, match=f"token id {token_id}"):
        tokenizer_of("demo").decode([token_id])


def test_half_a_surrogate_pair_is_refused_by_name():
    with pytest.raises(InvalidRequestError, match=r"'\\ud800' at character 2, half of a surrogate pair") as caught:
        tokenizer_of("demo").encode("ab\ud800")
    assert caught.value.param == "prompt"


def test_no_token_is_longer_than_stated():
    tokenizer = tokenizer_of("demo")
    lengths = [len(tokenizer.decode([token_id])) for token_id in range(tokenizer.vocab_size)]
    assert tokenizer.max_chars_per_token >= max(lengths)


def test_truncation_and_padding_saved_with_a_tokenizer_are_not_applied(directory):
    rust = byte_level().hf.backend_tokenizer
    rust.enable_truncation(2)
    rust.enable_padding(length=50)
    rust.save(str(directory / "tokenizer.json"))
    tokenizer = load_tokenizer(EngineConfig(model=str(directory)))
    assert tokenizer.decode(tokenizer.encode(TEXTS[0])) == TEXTS[0]
    assert len(tokenizer.encode("a")) == 1


def test_many_threads_get_what_one_gets():
    tokenizer = tokenizer_of("demo")
    expected = [tokenizer.encode(text) for text in TEXTS]
    wrong = []

    def work():
        for _ in range(50):
            if [tokenizer.encode(text) for text in TEXTS] != expected:
                wrong.append("ids")
            if [tokenizer.decode(ids) for ids in expected] != TEXTS:
                wrong.append("text")

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("kind", ["demo", "byte-fallback"])
@pytest.mark.parametrize("character", ["a", " "])
def test_a_million_characters_are_encoded_in_seconds(kind, character):
    """A word that never ends and characters that never merge: nothing may be quadratic."""
    tokenizer = tokenizer_of(kind)
    start = time.process_time()  # of this process: others may be busy
    ids = tokenizer.encode(character * MILLION, add_special_tokens=False)
    assert time.process_time() - start < 30  # about 1 s; quadratic work takes minutes
    assert len(ids) >= MILLION / tokenizer.max_chars_per_token


def test_other_threads_run_while_a_long_text_is_encoded():
    tokenizer = tokenizer_of("demo")
    text = "".join(random.choices("abcdefgh ", k=MILLION // 4))
    ticks, done = [], threading.Event()

    def encode():
        tokenizer.encode(text)
        done.set()

    thread = threading.Thread(target=encode)
    thread.start()
    while not done.is_set():
        ticks.append(time.perf_counter())
        done.wait(0.001)
    thread.join()
    assert len(ticks) > 10  # a call that keeps the interpreter lock leaves time for one

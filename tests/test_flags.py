"""Flags from dataclass fields, the launch lines that operators copy, and what is said about flags that are not ours."""

from dataclasses import dataclass
from typing import Any, Literal

import pytest

from pagedjax.config import AUTO, EngineConfig, option
from pagedjax.errors import ConfigError
from pagedjax.flags import flag_parser, parse_flags, vllm_flags
from servers.config import ServerConfig


@dataclass(frozen=True, kw_only=True)
class Options:
    source: str = option("here", "From.", positional=True)
    target: str | None = option(None, "To.", positional=True)
    max_len: int | None = option(None, "Length.", short="-ml")
    share: float = option(0.5, "Share, in 100%.")
    use_cache: bool = option(True, "Cache.")
    size: Literal[8, 16] = option(16, "Size.")
    mode: Literal["slow", "fast"] = option("slow", "Mode.")
    extra: dict[str, Any] | None = option(None, "More.")
    stop: tuple[str, ...] | None = option(None, "Stop.")
    sizes: tuple[int, ...] = option((1,), "Sizes.", several=True)


def parse(line: str, *configs: type):
    return parse_flags(configs or (Options,), line.split(), program="prog", summary="Does it.")


def options(line: str) -> Options:
    return parse(line)[0]


def test_no_flags_give_the_defaults_of_the_dataclass():
    assert options("") == Options()


def test_flags_of_every_kind_reach_their_field():
    assert options(
        '--max-len 5 --share 1 --no-use-cache --size 8 --mode fast --extra {"a":1} --stop x --stop=y'
    ) == Options(max_len=5, share=1.0, use_cache=False, size=8, mode="fast", extra={"a": 1}, stop=("x", "y"))


def test_a_flag_may_be_spelled_with_underscores_or_short():
    assert options("--max_len=5").max_len == options("-ml 5").max_len == 5


def test_a_flag_for_several_values_takes_several_words_and_may_be_repeated():
    assert options("--sizes 1 2 --max-len 5 --sizes=3").sizes == (1, 2, 3)


def test_underscores_in_a_value_stay():
    assert options("--source=a_b").source == options("--source a_b").source == "a_b"


@pytest.mark.parametrize("line", ["a b --max-len 5", "--max-len 5 a b", "a --max-len 5 b"])
def test_positional_words_may_stand_anywhere(line):
    assert options(line) == Options(source="a", target="b", max_len=5)


@pytest.mark.parametrize(("text", "value"), [("4k", 4000), ("4K", 4096), ("1.5k", 1500), ("2G", 2 << 30), ("-1", -1)])
def test_integers_may_have_a_suffix_as_in_vllm(text, value):
    assert options(f"--max-len {text}").max_len == value


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--max-ken 5", "unknown flag --max-ken; did you mean --max-len?"),
        ("--zzz", "unknown flag --zzz; --help lists the flags"),
        ("--max 5", "unknown flag --max; did you mean --max-len?"),
        ("--max-len five", "argument --max-len/-ml: invalid int value: 'five'"),
        ("--max-len 1.5", "argument --max-len/-ml: invalid int value: '1.5'"),
        ("--max-len 0.0001k", "argument --max-len/-ml: invalid int value: '0.0001k'"),
        ("--max-len", "argument --max-len/-ml: expected one argument"),
        ("--share much", "argument --share: invalid float value: 'much'"),
        ("--size 12", "argument --size: invalid choice: 12 (choose from 8, 16)"),
        ("--extra [1]", "argument --extra: invalid JSON object value: '[1]'"),
        ("--extra {", "argument --extra: invalid JSON object value: '{'"),
        ("a b c", "unexpected argument 'c'; flags begin with --"),
        ("a --source b", "source is given twice, as 'a' and as --source; leave one out"),
    ],
)
def test_a_wrong_line_is_one_config_error(line, message):
    with pytest.raises(ConfigError) as raised:
        parse(line)
    assert str(raised.value) == message


def test_json_that_is_nested_too_deeply_is_a_wrong_line_too():
    with pytest.raises(ConfigError, match="argument --extra: invalid JSON object value"):
        parse(f"--extra {'[' * 100_000}")


def test_help_shows_texts_and_defaults(capsys):
    with pytest.raises(SystemExit) as stopped:
        parse("--help")
    shown = capsys.readouterr().out
    assert stopped.value.code == 0
    assert "usage: prog [SOURCE] [TARGET] [flags]" in shown
    assert "Share, in 100%. Default: 0.5." in shown


LAUNCH = "--served-model-name N --tensor-parallel-size 1 --gpu-memory-utilization 0.9 --max-model-len 8192 --port 8000"


@pytest.mark.parametrize("line", [f"--model M {LAUNCH}", f"M {LAUNCH}", f"{LAUNCH} M"])
def test_the_launch_lines_that_operators_copy_parse_unchanged(line):
    engine, server = parse(line, EngineConfig, ServerConfig)
    assert engine == EngineConfig(
        model="M",
        served_model_name="N",
        tensor_parallel_size=1,
        gpu_memory_utilization=0.9,
        max_model_len=8192,
    )
    assert server == ServerConfig(port=8000)


def test_a_word_may_stand_for_a_number():
    assert parse("M --max-model-len auto --auto-concurrency 3", EngineConfig)[0].max_model_len == AUTO
    assert parse("M --max-model-len -1", EngineConfig)[0] == EngineConfig(model="M", max_model_len="auto")
    with pytest.raises(ConfigError, match="invalid int value: 'longest'"):
        parse("M --max-model-len longest", EngineConfig)


def test_a_refused_flag_of_vllm_says_why():
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype is a flag of vLLM that pagedjax refuses: the KV cache is"):
        parse("M --kv-cache-dtype fp8", EngineConfig)
    with pytest.raises(ConfigError, match=r"--no-enforce-eager is a flag of vLLM that pagedjax refuses: XLA compiles"):
        parse("M --no-enforce-eager", EngineConfig)


def test_an_option_that_is_not_built_is_refused_from_the_command_line_too():
    with pytest.raises(ConfigError, match="tensor_parallel_size=2 is not built yet; leave it at 1"):
        parse("M -tp 2", EngineConfig)


def test_every_flag_of_vllm_is_either_taken_or_refused():
    ours = set(flag_parser([EngineConfig, ServerConfig], program="p", summary="s")._option_string_actions)
    listed = vllm_flags()
    assert set(listed.works) <= ours
    assert not set(listed.refused) & ours
    assert len(listed.works) + len(listed.refused) > 300

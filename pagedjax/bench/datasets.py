"""What a measurement asks for: prompts and output lengths, made up or from a file.

random             token ids drawn uniformly, after a prefix that all prompts share if one is asked for
prefix_repetition  a few prefixes of random token ids, each continued differently many times
sharegpt           first question and length of the first answer of each conversation in a ShareGPT JSON file
custom             a JSONL file of {"prompt": text or token ids, "output_tokens": count, which may be left out}
"""

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pagedjax.bench.lengths import Lengths
from pagedjax.config import check_range, option
from pagedjax.errors import ConfigError
from pagedjax.text.tokenizer import Tokenizer

MIN_LEN, MAX_PROMPT_LEN, MAX_TOTAL_LEN = 4, 1024, 2048  # what vLLM takes from a ShareGPT file


@dataclass(frozen=True)
class Sample:
    """One request. `text` is None where the prompt was made of token ids, which are missing where nobody tokenized."""

    token_ids: list[int]
    output_len: int
    text: str | None = None


@dataclass(frozen=True, kw_only=True)
class DatasetFlags:
    """Which prompts to send and how much to ask for."""

    dataset_name: Literal["random", "sharegpt", "prefix_repetition", "custom"] = option("random", "Kind of prompts.")
    dataset_path: str | None = option(None, "File of a sharegpt or custom dataset.")
    num_prompts: int = option(1000, "Requests in all.")
    input_len: str | None = option(None, "Tokens of each random prompt, or a range LOW:HIGH; above --random-input-len.")
    output_len: str | None = option(None, "Tokens of each output, or a range LOW:HIGH; above any dataset's own.")
    random_input_len: int = option(1024, "Tokens of each random prompt.")
    random_output_len: int = option(128, "Tokens of each random prompt's output.")
    random_range_ratio: float = option(0.0, "Random lengths vary by this share in both directions, below 1.")
    random_prefix_len: int = option(0, "Tokens that all random prompts begin with, in addition.")
    prefix_repetition_prefix_len: int = option(256, "Tokens of each prefix.")
    prefix_repetition_suffix_len: int = option(256, "Tokens after the prefix.")
    prefix_repetition_num_prefixes: int = option(10, "Number of prefixes.")
    prefix_repetition_output_len: int = option(128, "Tokens of each output.")
    sharegpt_output_len: int | None = option(None, "Tokens of each output; the length of the answer if unset.")
    custom_output_len: int = option(256, "Tokens of each output for lines without output_tokens.")
    skip_chat_template: bool = option(False, "Send custom prompts as they are, not through the chat template.")
    disable_shuffle: bool = option(False, "Keep the order of the file.")
    oversample: bool = option(True, "Repeat the dataset's prompts where it has fewer than --num-prompts.")

    def __post_init__(self) -> None:
        for name in ("num_prompts", "random_input_len", "random_output_len", "custom_output_len"):
            check_range(self, name, 1)
        for name in ("prefix_len", "suffix_len", "num_prefixes", "output_len"):
            check_range(self, f"prefix_repetition_{name}", 1)
        check_range(self, "sharegpt_output_len", 1)
        check_range(self, "random_prefix_len", 0)
        if not 0 <= self.random_range_ratio < 1:
            raise ConfigError(f"random_range_ratio is {self.random_range_ratio}; it must be at least 0 and below 1")
        needs_file = self.dataset_name in ("sharegpt", "custom")
        if needs_file and (self.dataset_path is None or not Path(self.dataset_path).is_file()):
            raise ConfigError(f"dataset_path is {self.dataset_path!r}; a {self.dataset_name} dataset needs a file")
        if self.dataset_path is not None and not needs_file:
            raise ConfigError(f"dataset_path is given for {self.dataset_name} prompts; name the kind of file too")
        for name in ("input_len", "output_len"):
            self._lengths(name, Lengths(1, 1))
        if self.input_len is not None and self.dataset_name != "random":
            raise ConfigError(f"input_len is given for {self.dataset_name} prompts, which have their own; leave it out")

    @property
    def input_lens(self) -> Lengths:
        """Lengths of random prompts."""
        return self._lengths("input_len", Lengths.around(self.random_input_len, self.random_range_ratio))

    def output_lens(self, default: Lengths) -> Lengths:
        """Output lengths where the dataset's own are `default`."""
        return self._lengths("output_len", default)

    def _lengths(self, name: str, default: Lengths) -> Lengths:
        text = getattr(self, name)
        return default if text is None else Lengths.parse(name, text)


def load_samples(
    flags: DatasetFlags, *, seed: int, vocab_size: int, tokenizer: Tokenizer | None, texts_suffice: bool = False
) -> list[Sample]:
    """Return the requests, `num_prompts` of them unless the file has fewer and they are not to be repeated.

    `texts_suffice` lets the texts of a custom dataset do without a tokenizer: they have no token ids then.

    Raises:
      ConfigError: the file is no such dataset or has nothing that fits, or texts meet no tokenizer.
    """
    rng = np.random.default_rng(seed)
    if flags.dataset_name == "random":
        return list(_random(flags, rng, vocab_size))
    if flags.dataset_name == "prefix_repetition":
        return list(_prefix_repetition(flags, rng, vocab_size))
    if tokenizer is None and not (texts_suffice and flags.dataset_name == "custom"):
        raise ConfigError(
            f"a {flags.dataset_name} dataset holds texts and there is no tokenizer; name one: --tokenizer"
        )
    read = _sharegpt if flags.dataset_name == "sharegpt" else _custom
    samples = list(itertools.islice(_read(flags, rng, tokenizer, read), flags.num_prompts))
    if not samples:
        raise ConfigError(f"{flags.dataset_path} holds no prompt of a fitting length; try another file")
    repeated = itertools.islice(itertools.cycle(samples), flags.num_prompts)
    return list(repeated) if flags.oversample else samples


def _random(flags: DatasetFlags, rng: np.random.Generator, vocab_size: int) -> Iterator[Sample]:
    own = Lengths.around(flags.random_output_len, flags.random_range_ratio)
    input_lens = flags.input_lens.draw(rng, flags.num_prompts)
    output_lens = flags.output_lens(own).draw(rng, flags.num_prompts)
    prefix = rng.integers(0, vocab_size, flags.random_prefix_len).tolist()
    for input_len, output_len in zip(input_lens, output_lens, strict=True):
        yield Sample(prefix + rng.integers(0, vocab_size, input_len).tolist(), output_len)


def _prefix_repetition(flags: DatasetFlags, rng: np.random.Generator, vocab_size: int) -> Iterator[Sample]:
    """Every prefix as often as every other, or once more, in random order."""
    shape = (flags.prefix_repetition_num_prefixes, flags.prefix_repetition_prefix_len)
    prefixes = rng.integers(0, vocab_size, shape).tolist()
    own = Lengths(flags.prefix_repetition_output_len, flags.prefix_repetition_output_len)
    output_lens = flags.output_lens(own).draw(rng, flags.num_prompts)
    order = np.arange(flags.num_prompts) % len(prefixes)
    for number, output_len in zip(rng.permutation(order), output_lens, strict=True):
        suffix = rng.integers(0, vocab_size, flags.prefix_repetition_suffix_len).tolist()
        yield Sample(prefixes[number] + suffix, output_len)


def _read(
    flags: DatasetFlags, rng: np.random.Generator, tokenizer: Tokenizer | None, read: Callable[..., Iterator[Sample]]
) -> Iterator[Sample]:
    """Yield the samples of a file, with --output-len in place of their own output lengths if it is given."""
    for sample in read(flags, rng, tokenizer):
        (output_len,) = flags.output_lens(Lengths(sample.output_len, sample.output_len)).draw(rng, 1)
        yield Sample(sample.token_ids, output_len, sample.text)


def _sharegpt(flags: DatasetFlags, rng: np.random.Generator, tokenizer: Tokenizer) -> Iterator[Sample]:
    try:
        entries = json.loads(Path(flags.dataset_path or "").read_text(encoding="utf-8"))
        pairs = [
            (turns[0]["value"], turns[1]["value"]) for entry in entries if len(turns := entry["conversations"]) > 1
        ]
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"{flags.dataset_path} is no ShareGPT file, a JSON list of objects with conversations: {error!r}"
        ) from error
    for i in _order(flags, rng, len(pairs)):
        question, answer = pairs[i]
        token_ids = tokenizer.encode(question)
        output_len = flags.sharegpt_output_len or len(tokenizer.encode(answer))
        total = len(token_ids) + output_len
        if min(len(token_ids), output_len) < MIN_LEN or len(token_ids) > MAX_PROMPT_LEN or total > MAX_TOTAL_LEN:
            continue
        yield Sample(token_ids, output_len, question)


def _custom(flags: DatasetFlags, rng: np.random.Generator, tokenizer: Tokenizer | None) -> Iterator[Sample]:
    lines = Path(flags.dataset_path or "").read_text(encoding="utf-8").splitlines()
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    for i in _order(flags, rng, len(numbered)):
        number, line = numbered[i]
        prompt, output_len = _custom_line(f"{flags.dataset_path}:{number}", line)
        if isinstance(prompt, list):
            yield Sample(prompt, output_len or flags.custom_output_len)
        elif tokenizer is None:
            yield Sample([], output_len or flags.custom_output_len, prompt)
        elif flags.skip_chat_template:
            yield Sample(tokenizer.encode(prompt), output_len or flags.custom_output_len, prompt)
        else:
            token_ids = tokenizer.encode_chat([{"role": "user", "content": prompt}])
            yield Sample(token_ids, output_len or flags.custom_output_len, prompt)


def _custom_line(where: str, line: str) -> tuple[Any, int | None]:
    try:
        entry = json.loads(line)
        prompt, output_len = entry["prompt"], entry.get("output_tokens")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f'{where} is no JSON object with a "prompt": {error!r}') from error
    is_ids = isinstance(prompt, list) and all(type(one) is int for one in prompt)
    if not (isinstance(prompt, str) or is_ids) or not prompt:
        raise ConfigError(f"{where}: prompt is {prompt!r:.80}; it must be a text or a list of token ids, not empty")
    if output_len is not None and (type(output_len) is not int or output_len < 1):
        raise ConfigError(f"{where}: output_tokens is {output_len!r:.40}; it must be an integer, at least 1")
    return prompt, output_len


def _order(flags: DatasetFlags, rng: np.random.Generator, count: int) -> list[int]:
    return list(range(count)) if flags.disable_shuffle else rng.permutation(count).tolist()

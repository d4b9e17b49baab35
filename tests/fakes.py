"""A model whose next token is known by hand and a tokenizer of bytes, so that engine tests need no weights.

The next token after t_0 .. t_p is (7 + 1*t_0 + 2*t_1 + .. + (p+1)*t_p) mod V. The model reads every t_j back from the
paged KV cache, so that one wrong block, slot or length shows in every later token.
"""

import jax.numpy as jnp
from flax import nnx
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pagedjax.config import EngineConfig
from pagedjax.engine import LLMEngine
from pagedjax.loading.weights import LoadedModel
from pagedjax.models.causal_lm import CausalLM
from pagedjax.models.config import ModelConfig, RopeConfig
from pagedjax.text.tokenizer import Tokenizer
from tests.kept_executables import sharing_executables

VOCAB_SIZE = 263  # a prime, so that the sums do not run into zero
EOS = 256
NEVER = 1 << 30  # positions

FAKE_CONFIG = ModelConfig(
    architecture="FakeForCausalLM",
    vocab_size=VOCAB_SIZE,
    hidden_size=VOCAB_SIZE,
    intermediate_size=1,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=1,
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
    rope=RopeConfig(),
    dtype="float32",
    eos_token_ids=(EOS,),
)


def next_token(token_ids):
    """What the fake model generates after `token_ids`."""
    return (7 + sum((j + 1) * token for j, token in enumerate(token_ids))) % VOCAB_SIZE


def continuation(token_ids, count):
    """The first `count` tokens that greedy decoding gives."""
    tokens = list(token_ids)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(token_ids) :]


class FakeModel(CausalLM):
    """Logit of token v after position p: -|v - next|, circular; NaN where a token equals `poison`.

    With `errs_every` the most likely token is a wrong one at the last of every so many positions.
    """

    def __init__(self, *, poison=None, errs_every=None):
        self.sharpness = nnx.Param(jnp.ones((), jnp.float32))
        self.poison = nnx.Param(jnp.int32(-1 if poison is None else poison))
        self.errs_every = nnx.Param(jnp.int32(NEVER if errs_every is None else errs_every))

    def __call__(self, token_ids, batch, kv_cache):
        (k, v), block_size = kv_cache[0], kv_cache[0][0].shape[2]
        block, offset = batch.slot_mapping // block_size, batch.slot_mapping % block_size
        k = k.at[block, 0, offset, 0].set(token_ids.astype(k.dtype), mode="drop")
        tokens = k[batch.block_tables][:, :, 0, :, 0]  # [B, M, S]
        tokens = tokens.reshape(tokens.shape[0], -1).astype(jnp.int32)  # [B, M*S]
        index = jnp.arange(token_ids.shape[0], dtype=jnp.int32)
        request = jnp.searchsorted(batch.query_start_loc[1:], index, side="right").astype(jnp.int32)
        mine = tokens[jnp.minimum(request, tokens.shape[0] - 1)]  # [T, M*S]
        places = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        weights = jnp.where(places[None, :] <= batch.positions[:, None], places[None, :] + 1, 0)
        target = (jnp.int32(7) + (mine * weights).sum(axis=1, dtype=jnp.int32)) % jnp.int32(VOCAB_SIZE)
        is_wrong = batch.positions % self.errs_every[...] == self.errs_every[...] - 1
        target = jnp.where(is_wrong, (target + 5) % VOCAB_SIZE, target)
        distance = jnp.abs(jnp.arange(VOCAB_SIZE, dtype=jnp.int32)[None, :] - target[:, None])
        hidden = -jnp.minimum(distance, VOCAB_SIZE - distance).astype(jnp.float32)  # [T, V]
        hidden = jnp.where((token_ids == self.poison[...])[:, None], jnp.nan, hidden)
        return hidden, [(k, v)]

    def compute_logits(self, hidden):
        return hidden * self.sharpness[...]


def byte_tokenizer():
    """256 byte tokens, then <eos> and six more."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, "<eos>", *(f"<extra{i}>" for i in range(6))])}
    rust = RustTokenizer(models.BPE(vocab=vocab, merges=[]))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rust.decoder = decoders.ByteLevel()
    hf = PreTrainedTokenizerFast(tokenizer_object=rust, eos_token="<eos>", pad_token="<extra0>")
    hf.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    return Tokenizer(hf)


def fake_engine(*, poison=None, draft_errs_every=None, is_ahead=False, **options):
    """An engine over the fake model: small buckets, so that it is ready within seconds; see `sharing_executables`.

    A draft model, where the options ask for one, is the same model, save for its errors.
    """
    defaults = {
        "model": "fake", "max_model_len": 128, "block_size": 8, "max_num_seqs": 4, "max_num_batched_tokens": 32,
        "num_gpu_blocks_override": 65, "dtype": "float32", "generation_config": "vllm",
    }  # fmt: skip
    config = EngineConfig(**(defaults | options))
    loaded = LoadedModel(FAKE_CONFIG, FakeModel(poison=poison))
    draft = None
    if config.speculation is not None and config.speculation.method == "draft_model":
        draft = LoadedModel(FAKE_CONFIG, FakeModel(errs_every=draft_errs_every))
    with sharing_executables(is_optimised=False, is_ahead=is_ahead):  # the fake model's sums are whole numbers
        return LLMEngine(config, loaded=loaded, tokenizer=byte_tokenizer(), draft=draft)


def run_all(engine, requests):
    """Add (request_id, prompt, params) triples, step until done, and return the final outputs by id."""
    finished = {}
    for request_id, prompt, params in requests:
        engine.add_request(request_id, prompt, params)
    steps = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = output
        engine.check_integrity()
        steps += 1
        assert steps < 10_000, "the engine does not come to an end"
    return finished

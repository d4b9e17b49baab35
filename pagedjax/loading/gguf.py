"""GGUF files as a source of weights: names, layout and values become those of a Hugging Face checkpoint.

Quantised tensors are dequantised to float32 one at a time through the optional `gguf` package, so peak host memory is
about one tensor. Undoes what llama.cpp's converter does: Llama's permuted q and k rows, Gemma's norms plus one.
"""

import math
from pathlib import Path
from types import ModuleType

import numpy as np

from pagedjax.errors import CheckpointError, ConfigError
from pagedjax.loading.gguf_config import read_gguf_config
from pagedjax.loading.gguf_file import GGUFFile, TensorEntry
from pagedjax.models.config import ModelConfig

MODEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA3_LAYER_NAMES = LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Below `blk.N.` here and `model.layers.N.` there, without the ending .weight or .bias."""

NOT_WEIGHTS = ("rope_freqs.weight",)  # read by gguf_config
PERMUTED = ("self_attn.q_proj", "self_attn.k_proj")
ROWS_AT_A_TIME = 1024


class GGUFSource:
    """The tensors of one GGUF file under their Hugging Face names; a `WeightSource`."""

    def __init__(self, path: Path):
        """Open `path` and read its header.

        Raises:
            ConfigError: the `gguf` package is missing, or the architecture or a tensor's type is not supported.
            CheckpointError: the file is missing, truncated or damaged.
        """
        self._gguf = _import_gguf()
        self._file = GGUFFile(path)
        self.model_config: ModelConfig = read_gguf_config(self._file)
        self._architecture: str = self._file.metadata["general.architecture"]
        entries = [entry for entry in self._file.tensors.values() if entry.name not in NOT_WEIGHTS]
        self._entries = {self._hf_name(entry.name): entry for entry in entries}
        for entry in entries:
            self._raw(entry)  # so that a truncated file is refused before anything loads

    @property
    def origin(self) -> str:
        """The file, for messages."""
        return str(self._file.path)

    def names(self) -> list[str]:
        """List every tensor; one that has no Hugging Face name keeps its own."""
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, [out, in]."""
        return self._entries[name].shape

    def load(self, name: str) -> np.ndarray:
        """Read one tensor as float32."""
        entry = self._entries[name]
        raw = self._raw(entry)
        if self._architecture == "llama" and any(part in name for part in PERMUTED):
            raw = _unpermute(raw.reshape(entry.shape[0], -1), self._num_heads(name))
        values = self._dequantise(entry, raw)
        if self._architecture == "gemma3" and name.endswith("norm.weight"):
            values -= np.float32(1)
        return values

    def close(self) -> None:
        """Release the file; arrays already loaded stay valid."""
        self._file.close()

    def _hf_name(self, name: str) -> str:
        if name in MODEL_NAMES:
            return MODEL_NAMES[name]
        names = GEMMA3_LAYER_NAMES if self._architecture == "gemma3" else LAYER_NAMES
        parts = name.split(".")
        if len(parts) == 4 and parts[0] == "blk" and parts[2] in names:
            return f"model.layers.{parts[1]}.{names[parts[2]]}.{parts[3]}"
        return name

    def _num_heads(self, name: str) -> int:
        return self.model_config.num_heads if "q_proj" in name else self.model_config.num_kv_heads

    def _raw(self, entry: TensorEntry) -> np.ndarray:
        """Return a tensor's bytes, uint8 of one row per output."""
        try:
            block_size, block_bytes = self._gguf.GGML_QUANT_SIZES[self._gguf.GGMLQuantizationType(entry.type_id)]
        except (ValueError, KeyError):
            raise ConfigError(
                f"{self.origin}: tensor {entry.name} has the unknown GGML type {entry.type_id}; update the gguf package"
            ) from None
        *rows, columns = entry.shape
        if columns % block_size:
            raise CheckpointError(
                f"{self.origin} is damaged: tensor {entry.name} has rows of {columns}, not a multiple of {block_size}"
            )
        num_rows, row_bytes = math.prod(rows), columns // block_size * block_bytes
        return self._file.tensor_bytes(entry, num_rows * row_bytes).reshape(num_rows, row_bytes)

    def _dequantise(self, entry: TensorEntry, raw: np.ndarray) -> np.ndarray:
        """Return float32 values of their own memory; some rows at a time, as the package holds every result twice."""
        values = np.empty(entry.shape, np.float32)
        rows, kind = values.reshape(raw.shape[0], -1), self._gguf.GGMLQuantizationType(entry.type_id)
        try:
            for begin in range(0, raw.shape[0], ROWS_AT_A_TIME):
                part = slice(begin, begin + ROWS_AT_A_TIME)
                rows[part] = self._gguf.dequantize(raw[part], kind)
        except NotImplementedError as error:
            raise ConfigError(
                f"{self.origin}: tensor {entry.name} cannot be read: {error}; use a file of another quantisation"
            ) from error
        return values


def _import_gguf() -> ModuleType:
    try:
        import gguf
    except ImportError as error:
        raise ConfigError("GGUF weights need the gguf package; run: pip install 'pagedjax[gguf]'") from error
    return gguf


def _unpermute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo the converter's order of q and k rows: pairs that rotate together lie half a head apart again."""
    pairs = rows.reshape(num_heads, -1, 2, rows.shape[-1])  # [heads, H/2, 2, bytes]
    return pairs.swapaxes(1, 2).reshape(rows.shape)

"""Write golden/rope.json: inverse frequencies as transformers computes them, for the scalings of real models.

Run by an interpreter with torch and transformers: `python tests/oracles/make_rope.py [output.json]`.
"""

import json
import sys
from pathlib import Path

import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

GOLDEN = Path(__file__).parent / "golden" / "rope.json"

CASES = {
    "llama_2": {"head_dim": 128, "rope_theta": 10000.0},
    "smollm2": {"head_dim": 64, "rope_theta": 100000.0},
    "code_llama": {"head_dim": 128, "rope_theta": 1000000.0},
    "vicuna_16k": {"head_dim": 128, "rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama_3_1": {
        "head_dim": 128,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    },
    "llama_3_2_1b": {
        "head_dim": 64,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    },
    "qwen_2_5_yarn": {
        "head_dim": 128,
        "rope_theta": 1000000.0,
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
    },
    "yarn_with_options": {
        "head_dim": 96,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "beta_fast": 16,
            "beta_slow": 2,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
            "truncate": False,
        },
    },
}


def main(output: Path) -> None:
    """Compute every case and write one file; float32 values print exactly as doubles."""
    records = []
    for name, case in CASES.items():
        config = transformers.LlamaConfig(hidden_size=case["head_dim"], num_attention_heads=1, **case)
        rope = LlamaRotaryEmbedding(config)
        record = {**case, "inverse_frequencies": rope.inv_freq.tolist(), "factor": float(rope.attention_scaling)}
        records.append(f"{json.dumps(name)}: {json.dumps(record)}")
    output.write_text("{\n" + ",\n".join(records) + "\n}\n")
    print(f"{output}: {output.stat().st_size} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else GOLDEN)

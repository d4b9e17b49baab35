"""Write golden/smollm2_tokenizer.json: hashes of the token ids that transformers gives texts with SmolLM2's tokenizer.

Run by an interpreter with torch, transformers and gguf:
`python tests/oracles/make_smollm2_tokenizer.py MODEL.gguf [output.json [texts.json]]`.

"rebuilt" is the tokenizer that transformers rebuilds from the GGUF file. It lacks the splitting into single digits that
the model's tokenizer.json has before GPT-2's pattern, which matters where spaces precede a digit: "upstream" has it.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import transformers
from tokenizers import pre_tokenizers

sys.path.insert(0, str(Path(__file__).parent))
import tokenizer_texts

GOLDEN = Path(__file__).parent / "golden" / "smollm2_tokenizer.json"


def main(gguf: Path, output: Path, texts: list[str]) -> None:
    """Tokenize every text twice and write one file."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    rebuilt = _hashes(tokenizer, texts)
    split_digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split_digits, byte_level])
    output.write_text(json.dumps({"rebuilt": rebuilt, "upstream": _hashes(tokenizer, texts)}) + "\n")
    print(f"{output}: {len(texts)} texts, {output.stat().st_size} bytes")


def _hashes(tokenizer: Any, texts: list[str]) -> list[str]:
    return [hashlib.sha256(json.dumps(tokenizer(text).input_ids).encode()).hexdigest()[:16] for text in texts]


if __name__ == "__main__":
    main(
        Path(sys.argv[1]),
        Path(sys.argv[2]) if len(sys.argv) > 2 else GOLDEN,
        json.loads(Path(sys.argv[3]).read_text()) if len(sys.argv) > 3 else tokenizer_texts.texts(),
    )

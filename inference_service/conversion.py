"""Convert a GGUF file to a bf16 checkpoint that vLLM can load.

Run as a program of its own (`python -m inference_service.conversion GGUF DIRECTORY`), so that the
memory of the conversion goes back to the system when it ends.
"""

from __future__ import annotations

import sys
from pathlib import Path


def convert(gguf: Path, directory: Path) -> None:
    """Write weights, config, tokenizer and chat template of `gguf` into `directory`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))

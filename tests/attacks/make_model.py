#!/usr/bin/env python3
"""Writes a small random FoX (Pro) checkpoint with a Hugging Face tokenizer of any vocabulary size.

Only the first 256 ids (bytes) have nonzero rows in the embedding and the output projection, so greedy decoding stays
among them: the same checkpoint serves with `--tokenizer bytes`, and both tokenizers cost the engine the same.

Usage: make_model.py FOLDER [VOCAB_SIZE] [WIDTH] [LAYERS]
"""

import array
import json
import random
import struct
import sys
from pathlib import Path

HEADS = 2


def byte_characters():
    """GPT-2's table from bytes to printable characters."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table, extra = {b: chr(b) for b in plain}, 0
    for b in range(256):
        if b not in table:
            table[b] = chr(256 + extra)
            extra += 1
    return [table[b] for b in range(256)]


def tokenizer(size):
    """A byte-level BPE tokenizer without merges: ids 256 and up occur only if the model chooses them."""
    names = byte_characters() + [f"token{i}" for i in range(256, size - 1)]
    marker = {"id": size - 1, "content": "<|endoftext|>", "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False, "special": True}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
             "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
             "vocab": {name: i for i, name in enumerate(names)}, "merges": []}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [marker], "normalizer": None,
            "pre_tokenizer": level, "post_processor": None, "decoder": level, "model": model}


def shapes(vocab, width, layers):
    hidden = width * 2
    yield "lm_head.weight", (vocab, width)
    yield "model.embeddings.weight", (vocab, width)
    for layer in range(layers):
        at = f"model.layers.{layer}."
        for name in ["k_proj.linear", "o_proj", "ogate_proj", "q_proj", "v_proj.linear"]:
            yield f"{at}attn.{name}.weight", (width, width)
        for name in ["fgate_proj", "k_proj.shift_proj", "v_proj.shift_proj"]:
            yield f"{at}attn.{name}.weight", (HEADS, width)
        yield f"{at}attn.fgate_proj.bias", (HEADS,)
        for name in ["attn.k_norm", "attn.q_norm", "attn.output_norm", "attn_norm", "mlp_norm"]:
            yield f"{at}{name}.weight", (width,)
        yield f"{at}mlp.down_proj.weight", (width, hidden)
        yield f"{at}mlp.gate_proj.weight", (2 * hidden, width)
    yield "model.norm.weight", (width,)


def write_weights(path, vocab, width, layers):
    rng, header, offset = random.Random(1), {}, 0
    tensors = list(shapes(vocab, width, layers))
    for name, shape in tensors:
        size = 4
        for n in shape:
            size *= n
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, shape in tensors:
            rows = shape[0] if shape[0] != vocab else 256
            count = rows * (shape[1] if len(shape) > 1 else 1)
            if "norm" in name:
                values = [1.0] * count
            elif name.endswith("fgate_proj.bias"):
                values = [3.0] * count
            else:
                scale = 0.5 if name == "lm_head.weight" else 0.15
                values = [rng.gauss(0.0, scale) for _ in range(count)]
            file.write(array.array("f", values).tobytes())
            empty = (shape[0] - rows) * width * 4
            file.write(bytes(empty))


def main():
    folder = Path(sys.argv[1])
    vocab, width, layers = [int(x) for x in (sys.argv[2:] + ["151936", "64", "2"][len(sys.argv) - 2:])]
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "forgetting_transformer-project_fox", "hidden_size": width, "intermediate_size": 2 * width,
              "num_hidden_layers": layers, "num_heads": HEADS, "vocab_size": vocab, "bos_token_id": vocab - 1,
              "eos_token_id": vocab - 1, "qk_norm": True, "use_k_shift": True, "use_v_shift": True,
              "use_output_gate": True, "use_output_norm": True, "use_rope": False, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer(vocab)))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|endoftext|>"}))
    write_weights(folder / "model.safetensors", vocab, width, layers)


main()

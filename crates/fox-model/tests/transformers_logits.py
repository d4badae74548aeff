"""Loads checkpoint folders with transformers and compares their logits with those of reference dumps.

usage: transformers_logits.py CHECKPOINT DUMP [CHECKPOINT DUMP ...]
Prints one line for each pair: the model_type and the norm-wise relative error.
"""

import sys

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

for checkpoint, dump in zip(sys.argv[1::2], sys.argv[2::2]):
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    io = load_file(f"{dump}/io.safetensors")
    with torch.no_grad():
        logits = model(io["input_ids"].long()).logits
    error = torch.linalg.vector_norm(logits - io["logits"]) / torch.linalg.vector_norm(io["logits"])
    print(model.config.model_type, error.item())

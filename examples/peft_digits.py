"""Train low-rank adapters of a frozen bfloat16 Llama on scikit-learn's digits, with PEFT.

The base is tiny and random, so that nothing has to be fetched. `peft_digits.diff` is what
Shoestring changes: then several workers train, and the adapters alone travel.

python examples/peft_digits.py --out adapters
"""

import argparse
import os
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--epochs", type=int, default=1)
arguments = parser.parse_args()

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=17,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
)
base = LlamaForCausalLM(config).to(torch.bfloat16)
model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", exclude_modules="lm_head"))
pixels = torch.as_tensor(load_digits().data).long()  # 64 a digit, of 17 shades
loader = DataLoader(pixels, 32, shuffle=True, drop_last=True)
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)

for epoch in range(arguments.epochs):
    for digits in loader:
        loss = model(input_ids=digits, labels=digits).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"epoch {epoch + 1}, loss {loss.item():.3f}")
if os.environ.get("RANK", "0") == "0":  # the first, or the only process
    model.save_pretrained(arguments.out)

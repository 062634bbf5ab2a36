"""Train adapters on a frozen base under DistributedDataParallel and through Shoestring, in the same workers.

Each worker builds another base, so that what a base costs on the way would be seen. Prints what the
first worker found as JSON.
"""

import json

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import shoestring

STEPS = 8

run = shoestring.init()
dist.init_process_group("gloo")


def build(dtype):
    torch.manual_seed(run.worker)
    config = LlamaConfig(
        vocab_size=17,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    base = LlamaForCausalLM(config).to(dtype)
    return get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", exclude_modules="lm_head"))


def train(model):
    source = torch.Generator().manual_seed(run.worker)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        digits = torch.randint(0, 17, (4, 64), generator=source)
        loss = model(input_ids=digits, labels=digits).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def bits(tensors):
    return [tensor.detach().contiguous().view(torch.uint8).tolist() for tensor in tensors]


found = {}
for dtype in (torch.float32, torch.bfloat16):
    reference = DistributedDataParallel(build(dtype))
    own = shoestring.wrap(build(dtype))
    is_trained = [parameter.requires_grad for parameter in own.parameters()]
    found[str(dtype)] = {
        "ddp": train(reference),
        "own": train(own),
        "same_bits": bits(reference.parameters()) == bits(own.parameters()),
        "trained": sum(p.numel() for p in own.parameters() if p.requires_grad),
        "frozen": sum(p.numel() for p in own.parameters() if not p.requires_grad),
    }
if run.worker == 0:
    print(json.dumps(found))

"""Train a tiny Llama to draw scikit-learn's digits, pixel by pixel, with Transformers' Trainer.

`trainer_digits.diff` is what Shoestring changes.

python examples/trainer_digits.py --out digits
torchrun --nproc-per-node 2 examples/trainer_digits.py --out digits
"""

import argparse

import torch
from sklearn.datasets import load_digits
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--resume")
arguments = parser.parse_args()

set_seed(0)
pixels = torch.as_tensor(load_digits().data).long()  # 64 a digit, of 17 shades
data = [{"input_ids": digit, "labels": digit} for digit in pixels]
config = LlamaConfig(
    vocab_size=17,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=64,
)

trainer = Trainer(
    LlamaForCausalLM(config),
    TrainingArguments(
        arguments.out,
        num_train_epochs=2,
        per_device_train_batch_size=32,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        max_grad_norm=1.0,
        logging_steps=1,
        eval_strategy="epoch",
        save_steps=8,
        report_to="none",
        use_cpu=not torch.accelerator.is_available(),
    ),
    train_dataset=data[:1536],
    eval_dataset=data[1536:],
)
trainer.train(resume_from_checkpoint=arguments.resume)
trainer.save_model()
trainer.save_state()

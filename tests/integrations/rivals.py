"""Train a generator and its critic with Accelerate's own `Accelerator` and with ours, in the same workers.

What a script may do with an `Accelerator` beside `prepare`: bf16, accumulation over several models,
clipping by value, evaluation before training, early stops by a trigger. Prints `equal` where every
parameter has the same bits.
"""

import accelerate
import torch
from accelerate.utils import set_seed
from torch import nn

import shoestring
from shoestring.integrations.accelerate import Accelerator

run = shoestring.init()


def train(kind):
    accelerator = kind(mixed_precision="bf16", gradient_accumulation_steps=2, cpu=True)
    set_seed(run.worker)  # models that differ at first
    generator = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))
    critic = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    accelerator.prepare_model(critic, evaluation_mode=True)
    if kind is accelerate.Accelerator:
        del critic._is_accelerate_prepared  # it would not wrap the model any more
    optimizers = [
        torch.optim.AdamW(generator.parameters(), 1e-2),
        torch.optim.SGD(critic.parameters(), 1e-1, momentum=0.9),
    ]
    generator, critic, of_generator, of_critic = accelerator.prepare(generator, critic, *optimizers)
    source = torch.Generator().manual_seed(run.worker)
    losses, stopped_at = [], None
    for step in range(12):
        noise, real = torch.randn(16, 8, generator=source), torch.randn(16, 16, generator=source)
        with accelerator.accumulate(critic):
            with torch.no_grad():
                fake = generator(noise)
            loss = nn.functional.softplus(critic(torch.cat([fake, -real]))).mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_value_(critic.parameters(), 0.01)
            of_critic.step()
            of_critic.zero_grad()
        if not accelerator.sync_gradients:
            continue
        loss = nn.functional.softplus(-critic(generator(noise))).mean()
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(generator.parameters(), 1.0)
        of_generator.step()
        of_generator.zero_grad()
        of_critic.zero_grad()
        losses += accelerator.gather(torch.stack([loss.detach(), norm])).tolist()
        if run.worker == 1 and step == 9:
            accelerator.set_trigger()
        if accelerator.check_trigger():
            stopped_at = step
            break
    assert stopped_at == 9
    accelerator.wait_for_everyone()
    plain = [accelerator.unwrap_model(model) for model in (generator, critic)]
    assert not any(isinstance(model, nn.parallel.DistributedDataParallel) for model in plain)
    return losses, [parameter for model in plain for parameter in model.parameters()]


losses, parameters = train(accelerate.Accelerator)
own_losses, own_parameters = train(Accelerator)
assert own_losses == losses, (own_losses, losses)
assert all(map(torch.equal, own_parameters, parameters))
print(f"equal on worker {run.worker}", flush=True)

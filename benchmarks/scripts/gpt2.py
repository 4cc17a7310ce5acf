"""Train a small GPT-2 of transformers on random tokens, in a plain loop with a schedule and clipping."""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

torch.manual_seed(0)
config = GPT2Config(n_layer=6, n_head=4, n_embd=128, vocab_size=1000, n_positions=128)
model = GPT2LMHeadModel(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.01)
scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=12)
model.train()
for step in range(12):
    batch = torch.randint(0, 1000, (8, 128))
    outputs = model(input_ids=batch, labels=batch)
    outputs.loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {outputs.loss.item():.6f}, lr {scheduler.get_last_lr()[0]:.2e}")
torch.save(model.state_dict(), sys.argv[1])

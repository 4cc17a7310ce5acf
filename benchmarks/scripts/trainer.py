"""Train a small Llama by transformers' Trainer, with an evaluation and a checkpoint at the end of each epoch."""

import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments, set_seed

set_seed(3)
config = LlamaConfig(
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=800,
)
model = LlamaForCausalLM(config)
rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 800, (96, 96))]
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    num_train_epochs=2,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    learning_rate=3e-4,
    eval_strategy="epoch",
    save_strategy="epoch",
    logging_steps=2,
    report_to=[],
    disable_tqdm=True,
    use_cpu=True,
)
trainer = Trainer(model=model, args=arguments, train_dataset=rows[:80], eval_dataset=rows[80:])
trainer.remove_callback(PrinterCallback)  # it prints how long things took
trainer.train()
for line in trainer.state.log_history:
    print({name: value for name, value in line.items() if "runtime" not in name and "second" not in name})
torch.save(model.state_dict(), sys.argv[1])

"""Train by a subclass of transformers' Trainer with a loss and a step of its own, evaluated before it is trained."""

import sys
import tempfile

import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainingArguments, set_seed


class Smoothed(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(input_ids=inputs["input_ids"])
        logits, labels = outputs.logits[:, :-1], inputs["labels"][:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
        return (loss, {"logits": logits}) if return_outputs else loss

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.seen = getattr(self, "seen", 0) + inputs["input_ids"].numel()
        return super().training_step(model, inputs, num_items_in_batch)


set_seed(11)
model = GPT2LMHeadModel(GPT2Config(n_embd=96, n_layer=4, n_head=4, n_positions=64, vocab_size=500))
rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 500, (72, 64))]
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    max_steps=8,
    per_device_train_batch_size=8,
    per_device_eval_batch_size=4,
    learning_rate=5e-4,
    eval_strategy="steps",
    eval_steps=4,
    save_strategy="no",
    logging_steps=2,
    report_to=[],
    disable_tqdm=True,
    use_cpu=True,
)
trainer = Smoothed(model=model, args=arguments, train_dataset=rows[:64], eval_dataset=rows[64:])
trainer.remove_callback(PrinterCallback)  # it prints how long things took
print("before", trainer.evaluate()["eval_loss"])
trainer.train()
for line in trainer.state.log_history:
    print({name: value for name, value in line.items() if "time" not in name and "second" not in name})
print(trainer.seen)
torch.save(model.state_dict(), sys.argv[1])

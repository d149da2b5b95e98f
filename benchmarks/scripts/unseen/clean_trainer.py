import numpy as np
from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

tok = AutoTokenizer.from_pretrained("gpt2")
model = AutoModelForCausalLM.from_pretrained("gpt2")
model.resize_token_embeddings(16384)
data = load_dataset("text", data_files={"train": "train.txt", "valid": "valid.txt"})
data = data.map(
    lambda b: tok(b["text"], truncation=True, max_length=64), batched=True, remove_columns=["text"]
)
args = TrainingArguments(
    "out", per_device_train_batch_size=8, per_device_eval_batch_size=8, max_steps=6, report_to=[]
)


def compute_metrics(given):
    return {"right": float((given.predictions == given.label_ids).mean())}


trainer = Trainer(
    model,
    args,
    train_dataset=data["train"],
    eval_dataset=data["valid"],
    data_collator=DataCollatorForLanguageModeling(tok, mlm=False),
    compute_metrics=compute_metrics,
    preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
)
trainer.train()
print(trainer.evaluate())

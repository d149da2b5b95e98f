import sys
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
data = load_dataset("text", data_files={"train": "train.txt", "valid": "valid.txt"})
data = data.map(
    lambda b: tok(b["text"], truncation=True, max_length=64), batched=True, remove_columns=["text"]
)
args = TrainingArguments(
    "out",
    per_device_train_batch_size=8,
    per_device_eval_batch_size=8,
    num_train_epochs=2,
    eval_strategy="epoch",
    save_strategy="epoch",
    report_to=[],
    bf16="--bf16" in sys.argv,
    gradient_accumulation_steps=2,
    logging_steps=5,
)
trainer = Trainer(
    model,
    args,
    train_dataset=data["train"],
    eval_dataset=data["valid"],
    data_collator=DataCollatorForLanguageModeling(tok, mlm=False),
)
trainer.train()
print(trainer.evaluate())

import torch
from accelerate import Accelerator
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    get_linear_schedule_with_warmup,
)

acc = Accelerator(
    mixed_precision="fp16" if torch.cuda.is_available() else "no", gradient_accumulation_steps=2
)
tok = AutoTokenizer.from_pretrained("bert")
data = load_dataset("json", data_files="train.json")["train"].train_test_split(0.2)
data = data.map(
    lambda b: tok(b["text"], truncation=True), batched=True, remove_columns=["text"]
).rename_column("label", "labels")
collate = lambda items: tok.pad(items, padding="longest", return_tensors="pt")
train, valid = (
    DataLoader(data[k], batch_size=16, shuffle=k == "train", collate_fn=collate)
    for k in ("train", "test")
)
model = AutoModelForSequenceClassification.from_pretrained("bert", return_dict=True)
model = model.to(acc.device)
opt = torch.optim.AdamW(model.parameters(), lr=2e-5)
sched = get_linear_schedule_with_warmup(opt, 10, 100)
model, opt, train, valid, sched = acc.prepare(model, opt, train, valid, sched)
for epoch in range(2):
    model.train()
    for step, batch in enumerate(train):
        with acc.accumulate(model):
            out = model(**batch)
            acc.backward(out.loss)
            if acc.sync_gradients:
                acc.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            sched.step()
            opt.zero_grad()
    model.eval()
    right = n = 0
    for batch in valid:
        with torch.no_grad():
            out = model(**batch)
        p, r = acc.gather_for_metrics((out.logits.argmax(-1), batch["labels"]))
        right += (p == r).sum().item()
        n += len(r)
    acc.print(epoch, right / n)
acc.save_state("state")

"""A model of transformers in a loop without its Trainer."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

config = GPT2Config(vocab_size=512, n_positions=64, n_embd=64, n_layer=2, n_head=2)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = GPT2LMHeadModel(config).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
texts = torch.randint(0, 512, (128, 64))
loader = torch.utils.data.DataLoader([{"input_ids": t, "labels": t} for t in texts], batch_size=8)
model.train()
for epoch in range(2):
    for batch in loader:
        batch = {name: value.to(device) for name, value in batch.items()}
        outputs = model(**batch)
        loss = outputs.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

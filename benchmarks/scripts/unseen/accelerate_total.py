import torch
from accelerate import Accelerator
from parts import layers, loader
from torch import nn

accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="bf16")
model = layers()
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
for epoch in range(2):
    total_loss = 0
    for x, y in batches:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            total_loss += loss  # fault: kept graph
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.print(epoch, total_loss.item() / len(batches))

import torch
from parts import device, layers, loader
from torch import nn

model = layers().to(device)
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler(device)
for epoch in range(2):
    model.train()
    total = 0.0
    for x, y in loader():
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        total += loss.item()
    model.eval()
    predicted = []
    with torch.inference_mode():
        for x, y in loader():
            predicted.append(model(x.to(device)).argmax(1).cpu())
    print(total, torch.cat(predicted).float().mean())

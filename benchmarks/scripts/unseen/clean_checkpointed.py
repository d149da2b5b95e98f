import torch
from parts import Words, device, text
from torch import nn
from torch.utils.checkpoint import checkpoint


class Frugal(Words):
    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


model = Frugal(depth=4).to(device)
optimizer = torch.optim.AdamW(model.parameters())
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 10))
for epoch in range(2):
    for tokens in text():
        tokens = tokens.to(device, non_blocking=True)
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        del logits
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()

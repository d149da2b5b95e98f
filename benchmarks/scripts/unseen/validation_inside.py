import argparse

import torch
from parts import Words, device, text
from torch import nn


def loss_of(model, tokens):
    tokens = tokens.to(device)
    logits = model(tokens[:, :-1])  # fault: unused graph
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", type=int, default=2)
    given = parser.parse_args()
    model = Words().to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    valid = text(num=64, batch=16)
    for index, tokens in enumerate(text(batch=4)):
        model.train()
        loss = loss_of(model, tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # fault: gradients late
        if index % given.every == 1:
            model.eval()
            print(sum(loss_of(model, tokens).item() for tokens in valid) / len(valid))


if __name__ == "__main__":
    main()

import torch, numpy as np
from torch import nn
from torch.distributions import Categorical


class Env:
    def reset(self):
        self.t = 0
        return np.zeros(8, np.float32)

    def step(self, a):
        self.t += 1
        return np.random.randn(8).astype(np.float32), 1.0, self.t > 20, {}


dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
        self.actor = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4))

    def act(self, x, a=None):
        p = Categorical(logits=self.actor(x))
        a = p.sample() if a is None else a
        return a, p.log_prob(a), p.entropy(), self.critic(x)


agent = Agent().to(dev)
opt = torch.optim.Adam(agent.parameters(), lr=3e-4, eps=1e-5)
env = Env()
N = 128
obs = torch.zeros((N, 8)).to(dev)
acts = torch.zeros(N).to(dev)
logp = torch.zeros(N).to(dev)
rew = torch.zeros(N).to(dev)
done = torch.zeros(N).to(dev)
val = torch.zeros(N).to(dev)
o = torch.Tensor(env.reset()).to(dev)
for update in range(10):
    for s in range(N):
        obs[s] = o
        with torch.no_grad():
            a, lp, _, v = agent.act(o)
        acts[s] = a
        logp[s] = lp
        val[s] = v.flatten()
        nxt, r, d, _ = env.step(a.cpu().numpy())
        rew[s] = torch.tensor(r).to(dev).view(-1)
        done[s] = float(d)
        o = torch.Tensor(env.reset() if d else nxt).to(dev)
    with torch.no_grad():
        adv = torch.zeros_like(rew).to(dev)
        last = 0
        for t in reversed(range(N)):
            nv = val[t + 1] if t < N - 1 else agent.critic(o).reshape(-1)
            delta = rew[t] + 0.99 * nv * (1 - done[t]) - val[t]
            adv[t] = last = delta + 0.99 * 0.95 * (1 - done[t]) * last
        ret = adv + val
    idx = np.arange(N)
    for ep in range(4):
        np.random.shuffle(idx)
        for st in range(0, N, 32):
            mb = idx[st : st + 32]
            _, lp, ent, v = agent.act(obs[mb], acts.long()[mb])
            ratio = (lp - logp[mb]).exp()
            with torch.no_grad():
                kl = ((ratio - 1) - (lp - logp[mb])).mean()
            A = adv[mb]
            A = (A - A.mean()) / (A.std() + 1e-8)
            loss = (
                torch.max(-A * ratio, -A * torch.clamp(ratio, 0.8, 1.2)).mean()
                + 0.5 * ((v.view(-1) - ret[mb]) ** 2).mean()
                - 0.01 * ent.mean()
            )
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            opt.step()
        if kl > 0.02:
            break
    print(update, loss.item(), kl.item())

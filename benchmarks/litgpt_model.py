"""The models of litgpt's table of fine-tuning, and the loss of its scripts.

Source: `lit_gpt/{model,config,utils}.py` and `finetune/{lora,adapter,adapter_v2}.py` of
Lightning-AI/litgpt (Apache-2.0), read and written anew. One layer makes query, key and value, and
the value that attention keeps for backward is a view of its whole output. The head runs in chunks
of 128 tokens. Fabric turns the chunks of logits to fp32, and the script holds them until backward
is over. Everything else is bf16, the adapters too.

Left out: the tokenizer and the data (tokens are zeros, the loss counts all of them).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from benchmarks.litgpt_layers import FourBitLinear, LowRankQkv, RmsNorm, Scaled, turned
from memlab import Workload

HEAD_CHUNK = 128  # tokens
RANK = 8
PROMPT, FIRST_ADAPTED = 10, 2  # tokens of an adapter's prompt, and the first layer that has one
TRAINED = {
    "lora": ("low_rank",),
    "adapter": ("prompt", "gate"),
    "adapter-v2": ("prompt", "gate", "scale", "shift", "norm"),
}
"""What the names of trained parameters contain, for each kind of adapter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """The sizes of a model, by default those that most of litgpt's models share.

    Attributes:
        vocabulary: padded, as litgpt's is.
        groups: of heads that share a key and a value.
        turning: the share of a head that rotary embeddings turn.
        is_llama: RMS norms, a gated layer, and attention before it; else layer norms, GELU, and
            attention beside it.
        shares_norm: one norm for attention and for the layer beside it.
        longest: tokens of the longest sample of Alpaca with this model's tokenizer.
    """

    vocabulary: int
    width: int
    num_layers: int
    num_heads: int = 32
    groups: int = 32
    inner: int
    turning: float = 1.0
    bias: bool = False
    head_bias: bool = False
    is_llama: bool = False
    shares_norm: bool = False
    gelu: Literal["none", "tanh"] = "none"
    longest: int

    @property
    def head(self) -> int:
        """The columns of one head."""
        return self.width // self.num_heads


MODELS = {
    "phi-1.5": Sizes(
        vocabulary=51200, width=2048, num_layers=24, inner=8192, turning=0.5, bias=True,
        head_bias=True, shares_norm=True, gelu="tanh", longest=1044,
    ),
    "StableLM Alpha": Sizes(
        vocabulary=50688, width=4096, num_layers=16, inner=16384, turning=0.25, bias=True,
        longest=1034,
    ),
    "Llama 2 7 B": Sizes(
        vocabulary=32000, width=4096, num_layers=32, inner=11008, is_llama=True, longest=1304
    ),
    "Llama 2 13 B": Sizes(
        vocabulary=32000, width=5120, num_layers=40, num_heads=40, groups=40, inner=13824,
        is_llama=True, longest=1304,
    ),
    "Falcon": Sizes(
        vocabulary=65024, width=8192, num_layers=60, num_heads=128, groups=8, inner=32768,
        longest=1079,
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What is trained, and how its base is kept.

    Attributes:
        sizes: of the model.
        adapter: "lora", "adapter" or "adapter-v2".
        quantized: None, "nf4" or "nf4-dq": all linear layers, the head too.
        fp32_norms: RMS norms compute in fp32, as litgpt's do since 24 October 2023.
    """

    sizes: Sizes
    adapter: str
    quantized: str | None = None
    fp32_norms: bool = True

    def linear(self, inputs: int, outputs: int, *, bias: bool) -> nn.Module:
        """Return a linear layer in this recipe's number format, scaled if the recipe says so."""
        made: nn.Module = nn.Linear(inputs, outputs, bias=bias)
        if self.quantized is not None:
            is_double = self.quantized == "nf4-dq"
            made = FourBitLinear(inputs, outputs, bias=bias, is_double=is_double)
        return Scaled(made, outputs) if self.adapter == "adapter-v2" else made

    def norm(self) -> nn.Module:
        """Return a norm of this model."""
        if self.sizes.is_llama:
            return RmsNorm(self.sizes.width, in_fp32=self.fp32_norms)
        return nn.LayerNorm(self.sizes.width)

    def build(self) -> nn.Module:
        """Return the model, built in bf16, of which only the adapters are trained."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = Gpt(self)
        finally:
            torch.set_default_dtype(before)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(any(part in name for part in TRAINED[self.adapter]))
        return model


class Attention(nn.Module):
    """Causal attention; from the third layer on, adapters attend to a trained prompt as well."""

    def __init__(self, recipe: Recipe, number: int) -> None:
        super().__init__()
        sizes = self.sizes = recipe.sizes
        of_keys = sizes.groups * sizes.head
        self.qkv = recipe.linear(sizes.width, sizes.width + 2 * of_keys, bias=sizes.bias)
        if recipe.adapter == "lora":
            self.qkv = LowRankQkv(self.qkv, sizes.width, (sizes.width, of_keys), RANK)
        self.out = recipe.linear(sizes.width, sizes.width, bias=sizes.bias)
        self.has_prompt = recipe.adapter != "lora" and number >= FIRST_ADAPTED
        if self.has_prompt:
            self.prompt = nn.Parameter(torch.randn(PROMPT, sizes.width))
            self.gate = nn.Parameter(torch.zeros(1, 1, sizes.num_heads, 1))

    def forward(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        """Return what each token takes from those before it, and from the prompt."""
        q, k, v = self._heads(x)  # (n, heads, tokens, head) each
        turning = cosines.shape[-1]
        q, k = (
            torch.cat((turned(part[..., :turning], cosines, sines), part[..., turning:]), dim=-1)
            for part in (q, k)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        if self.has_prompt:
            mixed = mixed + self.gate * self._of_prompt(q)
        made: torch.Tensor = self.out(mixed.reshape(x.shape))
        return made

    def _heads(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        sizes = self.sizes
        queries = sizes.num_heads // sizes.groups  # of each key
        shape = (*x.shape[:2], sizes.groups, queries + 2, sizes.head)
        q, k, v = self.qkv(x).view(shape).permute(0, 2, 3, 1, 4).split((queries, 1, 1), dim=2)
        if queries > 1:
            k, v = k.expand(q.shape), v.expand(q.shape)
        q, k, v = (part.reshape(len(x), -1, x.shape[1], sizes.head) for part in (q, k, v))
        return q, k, v

    def _of_prompt(self, q: torch.Tensor) -> torch.Tensor:
        """Return what each token takes from the prompt.

        The scripts keep keys and values of the prompt from their first validation, which needs no
        gradients, so that none reach the prompt.
        """
        with torch.no_grad():
            _, k, v = self._heads(self.prompt.unsqueeze(0))
        mask = torch.ones(q.shape[2], PROMPT, dtype=torch.bool, device=q.device)
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


class Widened(nn.Module):
    """The layer beside attention: GELU, or a gated one."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        sizes = self.sizes = recipe.sizes
        self.up = recipe.linear(sizes.width, sizes.inner, bias=sizes.bias)
        if sizes.is_llama:
            self.other = recipe.linear(sizes.width, sizes.inner, bias=sizes.bias)
        self.down = recipe.linear(sizes.inner, sizes.width, bias=sizes.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the layer."""
        up: torch.Tensor = self.up(x)
        if self.sizes.is_llama:
            made: torch.Tensor = self.down(functional.silu(up) * self.other(x))
        else:
            made = self.down(functional.gelu(up, approximate=self.sizes.gelu))
        return made


class Block(nn.Module):
    """Attention and a wide layer, one after the other or side by side."""

    def __init__(self, recipe: Recipe, number: int) -> None:
        super().__init__()
        self.sizes = recipe.sizes
        self.norm_1, self.attention = recipe.norm(), Attention(recipe, number)
        self.norm_2 = None if recipe.sizes.shares_norm else recipe.norm()
        self.wide = Widened(recipe)

    def forward(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        """Return the output of the block."""
        normed = self.norm_1(x)
        mixed = self.attention(normed, cosines, sines)
        if self.sizes.is_llama:
            x = mixed + x
            made: torch.Tensor = self.wide(self.norm_2(x)) + x  # type: ignore[misc]
        else:
            beside = normed if self.norm_2 is None else self.norm_2(x)
            made = self.wide(beside) + mixed + x
        return made


class Gpt(nn.Module):
    """The whole model: tokens in, chunks of logits out."""

    cosines: torch.Tensor
    sines: torch.Tensor

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        sizes = recipe.sizes
        self.head = recipe.linear(sizes.width, sizes.vocabulary, bias=sizes.head_bias)
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList(Block(recipe, number) for number in range(sizes.num_layers))
        self.norm = recipe.norm()

        columns = int(sizes.turning * sizes.head)
        rates = 10_000 ** -(torch.arange(0, columns, 2, dtype=torch.float32) / columns)
        places = torch.arange(sizes.longest, dtype=torch.float32)
        angles = torch.outer(places, rates).repeat(1, 2)
        self.register_buffer("cosines", torch.cos(angles))
        self.register_buffer("sines", torch.sin(angles))

    def forward(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        """Return logits in fp32, (n, at most 128, vocabulary) each."""
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, self.cosines, self.sines)
        chunks = [self.head(chunk) for chunk in self.norm(x).split(HEAD_CHUNK, dim=1)]
        return [chunk.float() for chunk in chunks]


def workload(name: str, recipe: Recipe) -> Workload:
    """Return the fine-tuning of a model on samples of the longest length."""
    return Workload(
        name=name,
        build_model=recipe.build,
        make_batch=partial(make_batch, recipe.sizes.longest),
        compute_loss=loss_of,
    )


def make_batch(num_tokens: int, num_samples: int) -> torch.Tensor:
    """Return tokens (num_samples, num_tokens)."""
    return torch.zeros(num_samples, num_tokens, dtype=torch.int64)


def loss_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of each token by those before it, chunk by chunk."""
    logits = model(tokens)
    logits[-1] = logits[-1][:, :-1]
    losses = [
        functional.cross_entropy(chunk.flatten(0, 1), wanted.flatten(), reduction="none")
        for chunk, wanted in zip(logits, tokens[:, 1:].split(HEAD_CHUNK, dim=1), strict=True)
    ]
    loss = torch.cat(losses).mean()
    loss.held = logits  # type: ignore[attr-defined]  # the script holds them as long as the loss
    return loss

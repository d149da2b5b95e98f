"""Generation between two steps: greedy decoding with a cache of keys and values.

What one call of `generate` (transformers 5) allocates, operator by operator:

    prefill     the whole prompt through the model; logits of its last token only, if the model can
                leave out the others (`logits_to_keep`)
    each token  one token through the model. A dynamic cache concatenates: the new keys of a layer
                stand beside the old ones until the old ones are freed. A static cache writes in
                place, into room that was made for all tokens.
    after each  a copy of the last logits in fp32, its argmax, and ids, mask and positions with one
                token more

The loop is written out, since `generate` itself asks after each token whether all prompts have
ended, which fake tensors cannot answer. A test compares it with `generate` on the real allocator.
Left out: sampling, beams, the scores that `generate` can return, and its compiled decoding with a
static cache on a card.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from memlab.stages.evaluating import END, evaluating, in_forward
from memlab.stages.run_settings import Generation
from memlab.step import Step
from memlab.trace import Mark, Phase
from memlab.workloads.generation_caches import (
    check_positions,
    check_window,
    generating_model,
    key_value_cache,
)


def generate(step: Step, settings: Generation, num_new: int, mark: Mark) -> None:
    """Generate the first `num_new` of the new tokens; nothing of it remains.

    Raises:
        UnsupportedError: the model cannot generate, or has too few positions.
    """
    base = generating_model(step.model)
    check_positions(base, settings.num_tokens)
    if num_new < settings.new_tokens:  # the others are to follow from these
        check_window(base, settings.prompt_tokens, settings.num_tokens)
    mark(Phase.DATA, 0)
    vocab_size = base.config.get_text_config(decoder=True).vocab_size
    shape = (settings.batch_size, settings.prompt_tokens)
    tokens = torch.randint(vocab_size, shape).to(step.device)
    mask = torch.ones(shape, dtype=torch.long, device=step.device)
    positions = mask.cumsum(dim=-1) - 1
    accepted = inspect.signature(base.forward).parameters
    options: dict[str, Any] = {"use_cache": True}
    if "logits_to_keep" in accepted:
        options["logits_to_keep"] = 1

    with evaluating(step.model):
        options["past_key_values"] = key_value_cache(
            base, settings.cache, settings.num_tokens, str(step.config.precision)
        )
        given = tokens.clone()
        for index in range(num_new):
            mark(Phase.FORWARD, index)
            if "position_ids" in accepted:
                options["position_ids"] = positions[:, -given.shape[1] :].clone()
            with in_forward(step):
                out = base(input_ids=given, attention_mask=mask, **options)
            mask = torch.cat((mask, mask.new_ones((len(mask), 1))), dim=-1)
            positions = torch.cat((positions, positions[:, -1:] + 1), dim=-1)
            # as in `generate`, these live until those of the next token replace them
            last = out.logits[:, -1].to(copy=True, dtype=torch.float32)
            chosen = last.argmax(dim=-1)
            tokens = torch.cat((tokens, chosen[:, None]), dim=-1)
            given = tokens[:, -1:].clone()
            del out
        mark(Phase.TEARDOWN, END)

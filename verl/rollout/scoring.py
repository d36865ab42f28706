"""Log-probs of the tokens of a prompt, computed by the forward pass of a model of transformers."""

import torch
from torch import nn

from verl.modeling.attention import use_default_attention
from verl.modeling.huggingface import LMHead, trunk_of
from verl.modeling.vision import attention_of
from verl.rollout.request import PromptLogProbs

#: logits that are computed at once
_CHUNK_ELEMENTS = 2**26


@torch.no_grad()
def prompt_log_probs(module: nn.Module, prompt_ids: list[int], count: int) -> list[PromptLogProbs | None]:
    """`Completion.prompt_log_probs` of a prompt: of each token, then of the `count` most probable ones in its place.

    Args:
        module: a causal language model, unsharded, in evaluation mode.
        prompt_ids: text tokens.
        count: K; more than the vocabulary has: all of it.
    """
    attention = attention_of(module.config)
    use_default_attention(module)
    try:
        ids = torch.tensor(prompt_ids, device=module.device)
        states, head = trunk_of(module)(input_ids=ids[None], use_cache=False)[0][0], LMHead(module)
        rows, entries = max(1, _CHUNK_ELEMENTS // module.config.get_text_config().vocab_size), [None]
        for start in range(0, len(ids) - 1, rows):
            targets = ids[start + 1 : start + 1 + rows, None]
            log_probs = head(states[start : start + len(targets)]).float().log_softmax(-1)
            values, tokens = log_probs.topk(min(count, log_probs.shape[-1]))
            target_log_probs = log_probs.gather(1, targets)
            ranks = (log_probs > target_log_probs).sum(-1, keepdim=True) + 1
            best = torch.arange(1, 1 + tokens.shape[1], device=ids.device).expand_as(tokens)
            columns = (targets, tokens), (target_log_probs, values), (ranks, best)
            entries += [list(zip(*row)) for row in zip(*(torch.cat(column, 1).tolist() for column in columns))]
        return entries
    finally:
        module.set_attn_implementation(attention)

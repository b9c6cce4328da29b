"""GPT-2's layers, run from the model's own weights: one pass of new tokens over a preallocated cache."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from pdlib.kv_cache import KVCache
from pdlib.ops import Linear, attend

Norm = tuple[Tensor, Tensor]


def _linear(conv: Any) -> Linear:
    return Linear(conv.weight.t(), conv.bias)  # the library keeps GPT-2's weights as (in, out)


class GPT2Layers:
    """Tokens in, hidden states out. Built from a transformers GPT2LMHeadModel."""

    def __init__(self, hf: Any) -> None:
        body = hf.transformer
        self.heads, self.eps = hf.config.n_head, hf.config.layer_norm_epsilon
        self.tokens, self.positions = body.wte.weight, body.wpe.weight  # (V, d), (P, d)
        self.layers = [
            (
                (block.ln_1.weight, block.ln_1.bias),
                _linear(block.attn.c_attn),
                _linear(block.attn.c_proj),
                (block.ln_2.weight, block.ln_2.bias),
                _linear(block.mlp.c_fc),
                _linear(block.mlp.c_proj),
            )
            for block in body.h
        ]
        self.norm: Norm = (body.ln_f.weight, body.ln_f.bias)

    def __call__(self, tokens: Tensor, cache: KVCache) -> Tensor:
        """Run tokens (B, Q) behind the cache's positions; returns hidden states (B, Q, d)."""
        requests, new = tokens.shape
        mask, causal = cache.mask(new)
        x = F.embedding(tokens, self.tokens) + F.embedding(cache.positions(new), self.positions)  # (B, Q, d)
        for i, (norm_1, qkv, out, norm_2, up, down) in enumerate(self.layers):
            h = qkv(self._norm(x, norm_1))  # (B, Q, 3d)
            q, k, v = h.view(requests, new, 3, self.heads, -1).permute(2, 0, 3, 1, 4)  # 3 × (B, H, Q, D)
            a = attend(q, *cache.append(i, k, v), mask, causal)  # (B, H, Q, D)
            x = x + out(a.transpose(1, 2).reshape(requests, new, -1))  # (B, Q, d)
            x = x + down(F.gelu(up(self._norm(x, norm_2)), approximate="tanh"))  # (B, Q, d)
        cache.advance(new)
        return self._norm(x, self.norm)

    def _norm(self, x: Tensor, norm: Norm) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], *norm, self.eps)

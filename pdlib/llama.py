"""Layers of the Llama shape (Llama, SmolLM2): grouped-query heads, rotary positions, gated MLP."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pdlib.kv_cache import KVCache
from pdlib.ops import Linear, attend


class LlamaLayers:
    """Tokens in, hidden states out. Built from a transformers LlamaForCausalLM."""

    def __init__(self, hf: Any) -> None:
        body, config = hf.model, hf.config
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.eps, self.rotary = config.rms_norm_eps, body.rotary_emb
        self.tokens = body.embed_tokens.weight  # (V, d)
        self.layers = [
            (
                block.input_layernorm.weight,
                _packed(block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj),
                _packed(block.self_attn.o_proj),
                block.post_attention_layernorm.weight,
                _packed(block.mlp.gate_proj, block.mlp.up_proj),
                _packed(block.mlp.down_proj),
            )
            for block in body.layers
        ]
        self.norm = body.norm.weight

    def __call__(self, tokens: Tensor, cache: KVCache) -> Tensor:
        """Run tokens (B, Q) behind the cache's positions; returns hidden states (B, Q, d)."""
        requests, new = tokens.shape
        mask, causal = cache.mask(new)
        x = F.embedding(tokens, self.tokens)  # (B, Q, d)
        # The library's own table of angles: it knows the model's scaling of long contexts.
        cos, sin = (angle[:, None] for angle in self.rotary(x, cache.positions(new)))  # (B or 1, 1, Q, D)
        heads = [self.heads, self.kv_heads, self.kv_heads]
        for i, (norm_1, qkv, out, norm_2, up, down) in enumerate(self.layers):
            h = qkv(self._norm(x, norm_1)).view(requests, new, sum(heads), -1).transpose(1, 2)
            q, k, v = h.split(heads, dim=1)  # (B, H, Q, D), 2 × (B, KV, Q, D)
            q, k = (y * cos + _rotate(y) * sin for y in (q, k))
            a = attend(q, *cache.append(i, k, v), mask, causal)  # (B, H, Q, D)
            x = x + out(a.transpose(1, 2).reshape(requests, new, -1))  # (B, Q, d)
            gate, value = up(self._norm(x, norm_2)).chunk(2, dim=-1)  # 2 × (B, Q, mlp)
            x = x + down(F.silu(gate) * value)  # (B, Q, d)
        cache.advance(new)
        return self._norm(x, self.norm)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, self.eps)


def _packed(*linears: Any) -> Linear:
    """Several products of the same input as one."""
    biases = [linear.bias for linear in linears]
    bias = None if biases[0] is None else torch.cat(biases)
    return Linear(torch.cat([linear.weight for linear in linears]), bias)


def _rotate(x: Tensor) -> Tensor:
    """The half-turn of rotary embeddings, (…, D) → (…, D): the second half, negated, before the first."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)

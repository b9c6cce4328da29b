"""The two operations that take the time: a matrix product with packed weights, and attention over a cache."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


class Linear:
    """y = x · Wᵀ + b, the weight packed once where that is faster.

    On a CPU, oneDNN multiplies by a weight reordered for it about twice as fast as the default path at decode's
    batch sizes (`make bench` shows the ratio). torch.compile packs the same way when it freezes a model; both
    operations are internal to torch, so their absence falls back to F.linear.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """`weight` is (out, in), as in torch.nn.Linear; a transposed view is fine."""
        self.bias = bias
        self.packed = packs(weight)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()) if self.packed else weight

    def __call__(self, x: Tensor) -> Tensor:  # (..., in) → (..., out)
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)


def packs(weight: Tensor) -> bool:
    """Whether a weight of this device and dtype can be packed here."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Scaled dot-product attention of new queries over the filled part of a cache.

    q: (B, H, Q, D); k, v: (B, KV, T, D), KV dividing H. mask: None, or bool (B or 1, 1, Q, T), True = visible.
    `causal` asks for the lower triangle and needs Q == T: with Q < T the library aligns it top-left, and a
    query would see the wrong keys. Returns (B, H, Q, D).
    """
    if causal and q.shape[2] != k.shape[2]:
        raise ValueError(f"causal needs as many queries as keys, not {q.shape[2]} and {k.shape[2]}")
    groups = q.shape[1] // k.shape[1]
    if groups > 1 and q.shape[2] == 1:
        # The heads that share a KV head become its queries: keys are read once, not once a head.
        grouped = q.view(q.shape[0], k.shape[1], groups, q.shape[3])  # (B, KV, G, D)
        return F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask).view_as(q)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=groups > 1)

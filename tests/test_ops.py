"""ops: the packed matrix product is a matrix product, and attention is attention, whatever shares its heads."""

import pytest
import torch
from torch.nn import functional as F

from pdlib import ops
from pdlib.ops import Linear, attend


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("rows", [(1,), (5, 1), (2, 7)])
def test_linear_is_x_times_w_transposed_plus_b(dtype, bias, transposed, rows):
    weight = noise(24, 40).t() if transposed else noise(40, 24)
    b, x = noise(40, seed=1) if bias else None, noise(*rows, 24, seed=2)
    given = Linear(weight.to(dtype), None if b is None else b.to(dtype))(x.to(dtype))
    expected = F.linear(x.double(), weight.double(), None if b is None else b.double())
    assert given.dtype == dtype and given.shape == (*rows, 40)
    assert torch.allclose(given.double(), expected, atol=1e-4 if dtype == torch.float32 else 0.2)


def test_linear_without_packing_gives_the_same(monkeypatch):
    weight, bias, x = noise(40, 24), noise(40, seed=1), noise(3, 24, seed=2)
    packed = Linear(weight, bias)(x)
    monkeypatch.setattr(ops, "packs", lambda weight: False)
    plain = Linear(weight, bias)
    assert not plain.packed and plain.weight is weight
    assert torch.allclose(plain(x), packed, atol=1e-5)


def test_nothing_is_packed_where_onednn_is_absent(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not ops.packs(torch.ones(2, 2))


def test_only_float32_and_supported_bfloat16_on_a_cpu_are_packed():
    assert not ops.packs(torch.ones(2, 2, dtype=torch.float16))
    assert not ops.packs(torch.ones(2, 2, device="meta"))


def slow_attention(q, k, v, visible):
    """Softmax attention spelled out in double precision; visible: bool (B, Q, T)."""
    groups = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(groups, dim=1).double() for t in (k, v))
    scores = q.double() @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    return scores.masked_fill(~visible[:, None], float("-inf")).softmax(-1) @ v


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("masked", [True, False])
def test_attention_is_softmax_over_the_visible_keys(kv_heads, queries, masked):
    q, k, v = noise(3, 4, queries, 8), noise(3, kv_heads, 9, 8, seed=1), noise(3, kv_heads, 9, 8, seed=2)
    visible = torch.ones(3, queries, 9, dtype=torch.bool)
    if masked:
        visible = torch.arange(9) < torch.tensor([3, 9, 6])[:, None, None].expand(3, queries, 1)
    given = attend(q, k, v, visible[:, None] if masked else None, False)
    assert given.shape == q.shape
    assert torch.allclose(given.double(), slow_attention(q, k, v, visible), atol=1e-5)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_causal_attention_sees_the_lower_triangle(kv_heads):
    q, k, v = noise(2, 4, 6, 8), noise(2, kv_heads, 6, 8, seed=1), noise(2, kv_heads, 6, 8, seed=2)
    visible = torch.ones(6, 6, dtype=torch.bool).tril().expand(2, 6, 6)
    assert torch.allclose(attend(q, k, v, None, True).double(), slow_attention(q, k, v, visible), atol=1e-5)


def test_a_mask_shared_by_all_requests_is_broadcast_to_grouped_heads():
    q, k, v = noise(3, 4, 1, 8), noise(3, 2, 9, 8, seed=1), noise(3, 2, 9, 8, seed=2)
    mask = (torch.arange(9) < 4)[None, None, None]
    visible = (torch.arange(9) < 4).expand(3, 1, 9)
    assert torch.allclose(attend(q, k, v, mask, False).double(), slow_attention(q, k, v, visible), atol=1e-5)


@pytest.mark.parametrize("queries", [1, 2, 8])
def test_pitfall_09_attend_refuses_causal_with_a_past(queries):
    with pytest.raises(ValueError, match=f"causal needs as many queries as keys, not {queries} and 9"):
        attend(noise(1, 4, queries, 8), noise(1, 4, 9, 8), noise(1, 4, 9, 8), None, True)

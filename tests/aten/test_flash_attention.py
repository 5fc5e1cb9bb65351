"""Flash and memory-efficient attention of packed sequences, and what calls them: varlen_attn and jagged tensors."""

import math
import warnings

import attention_formula as attention
import pytest
import torch
import torch.nn.functional as F
from attention_formula import attend
from torch.nn.attention.varlen import AuxRequest, varlen_attn, varlen_attn_out
from torch.testing import assert_close

from openreg_tools.core import opinfo

DEVICE = "openreg"
HALVES = [torch.float16, torch.bfloat16]
FLOATS = [torch.float32, *HALVES]
NEAR = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
LENGTHS = [3, 5, 12]

pytestmark = pytest.mark.usefixtures("one_thread")
flash = torch.ops.aten._flash_attention_forward
efficient = torch.ops.aten._efficient_attention_forward


def offsets(lengths=LENGTHS, device=DEVICE):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)


def packed(heads=2, kv_heads=2, dtype=torch.bfloat16, total=20, width=8):
    return [torch.randn(total, n, width, dtype=dtype, device=DEVICE) for n in (heads, kv_heads, kv_heads)]


def jagged(lengths=LENGTHS, dtype=torch.float16, heads=2, device=DEVICE, requires_grad=True):
    rows = [torch.randn(n, heads, 8, dtype=dtype, device=device) for n in lengths]
    return torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=requires_grad)


def close(actual, expected, dtype, times=1):
    assert_close(actual.detach().cpu().double(), expected.detach(), atol=times * NEAR[dtype], rtol=times * NEAR[dtype])


# ---- the operators ----


def test_by_hand():
    """The second sequence has one key, which all queries see; the first has none."""
    q = torch.randn(3, 1, 8, dtype=torch.half, device=DEVICE)
    k = torch.zeros(1, 1, 8, dtype=torch.half, device=DEVICE)
    out, logsumexp, *_ = flash(q, k, k + 2, offsets([1, 2]), offsets([0, 1]), 2, 1, 0.0, False, False)
    assert out[:, 0, 0].tolist() == [0, 2, 2] and logsumexp.tolist() == [[math.inf, 0, 0]]


@pytest.mark.parametrize(
    "name, dtype", [(name, dtype) for name, dtypes in attention.OPERATORS.items() for dtype in dtypes]
)
def test_matches_the_formula(name, dtype):
    """OpInfo's samples, and packed and dense cases: outputs, logsumexp and gradients."""
    found = list(attention.check(opinfo.database()[name], getattr(torch, dtype), DEVICE))
    failures = [f"{sample} [{kind}]: {message}" for sample, kind, message in found if kind]
    assert len(found) > 45 and not failures, failures


@pytest.mark.parametrize("by_sequence", [False, True], ids=["slopes of heads", "slopes of sequences"])
def test_alibi_slopes(by_sequence):
    q, k, v = packed(dtype=torch.half)
    slopes = torch.rand(3, 2, device=DEVICE) if by_sequence else torch.rand(2, device=DEVICE)
    out, logsumexp, *_ = flash(q, k, v, offsets(), offsets(), 12, 12, 0.0, False, False, alibi_slopes=slopes)
    for b, (begin, end) in enumerate(zip([0, 3, 8], [3, 8, 20], strict=True)):
        rows = [x[begin:end].cpu().double() for x in (q, k, v)]
        expected, lse = attend(*rows, slopes=(slopes[b] if by_sequence else slopes).cpu().double())
        close(out[begin:end], expected, torch.half)
        assert_close(logsumexp[:, begin:end].cpu().double(), lse, atol=1e-4, rtol=1e-4)


def test_used_keys_and_pages():
    """A cache of pages of two rows, in any order, of which each sequence uses some."""
    q, k, v = packed(dtype=torch.half, heads=4)
    used = torch.tensor([2, 5, 7], dtype=torch.int32, device=DEVICE)
    arguments = (offsets(), offsets(), 12, 12, 0.0, True, False)
    out, *_ = flash(q, k, v, *arguments, seqused_k=used)
    for begin, end, n in zip([0, 3, 8], [3, 8, 20], used.tolist(), strict=True):
        rows = q[begin:end], k[begin : begin + n], v[begin : begin + n]
        close(out[begin:end], attend(*(x.cpu().double() for x in rows), right=0)[0], torch.half)

    table, order = torch.full((3, 6), -1, dtype=torch.int32), torch.randperm(12).tolist()
    pages = torch.full((2, 12, 2, 2, 8), math.nan, dtype=torch.half)
    for b, (begin, n) in enumerate(zip([0, 3, 8], used.tolist(), strict=True)):
        for j in range(n):
            if j % 2 == 0:
                table[b, j // 2] = order.pop()
            for pool, rows in zip(pages, (k, v), strict=True):
                pool[table[b, j // 2], j % 2] = rows[begin + j].cpu()
    pool = pages.to(DEVICE)
    arguments = (offsets(), None, *arguments[2:])
    again, *_ = flash(q, *pool, *arguments, seqused_k=used, block_table=table.to(DEVICE), num_splits=1)
    assert again.equal(out)
    table[1, 0] = 12
    with pytest.raises(RuntimeError, match="expected pages from 0 to 11 in block_table, but sequence 1 has 12"):
        flash(q, *pool, *arguments, seqused_k=used, block_table=table.to(DEVICE))


# The second has blocks of which the window leaves an odd number of rows.
@pytest.mark.parametrize(("queries", "keys", "mask", "window"), [(9, 9, 1, 3), (300, 433, 2, 120)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_efficient_window_in_backward(queries, keys, mask, window, dtype):
    q, k, v = (torch.randn(1, n, 2, 8, device=DEVICE, dtype=dtype) for n in (queries, keys, keys))
    forward = (0.0, mask)
    out, logsumexp, seed, offset, *_ = efficient(
        q, k, v, None, None, None, None, None, *forward, True, window_size=window
    )
    weights, last = torch.randn_like(out), (logsumexp, 0.0, seed, offset, mask, False)
    got = torch.ops.aten._efficient_attention_backward(
        weights, q, k, v, None, out, None, None, queries, keys, *last, window_size=window
    )[:3]
    rows = [x[0].cpu().double().requires_grad_() for x in (q, k, v)]
    expected_out, _ = attend(*rows, left=window - 1, right=0, from_end=mask == 2)
    close(out[0], expected_out, dtype)
    for g, e in zip(got, torch.autograd.grad(expected_out, rows, weights[0].cpu().double()), strict=True):
        close(g[0], e, dtype, 2)


def test_efficient_shares_the_storage_of_gradients():
    q, k, v = (torch.randn(2, 5, 2, 8, device=DEVICE, requires_grad=True) for _ in range(3))
    out, logsumexp, seed, offset, *_ = efficient(q, k, v, None, None, None, None, None, 0.0, 0, True)
    weights = torch.randn_like(out)
    expected = torch.autograd.grad(out, (q, k, v), weights)
    with torch.no_grad():
        *got, _ = torch.ops.aten._efficient_attention_backward(
            weights, q, k, v, None, out, None, None, 5, 5, logsumexp, 0.0, seed, offset, 0, False,
            shared_storage_dqdkdv=True,
        )  # fmt: skip
    assert len({x.untyped_storage().data_ptr() for x in got}) == 1
    assert all(g.equal(e) for g, e in zip(got, expected, strict=True))


# ---- dropout ----


def kept_probabilities(mask, p):
    """The factor of each probability, from flash's debug mask, whose signs say what was dropped."""
    return (mask.cpu().double() >= 0) / (1 - p)


@pytest.mark.parametrize("p", [0.3, 1.0])
def test_flash_dropout(p):
    q, k, v = (x.requires_grad_() for x in packed(dtype=torch.half, kv_heads=1))
    cpu_state = torch.get_rng_state()
    out, _, seed, _, mask = flash(q, k, v, offsets(), offsets(), 12, 12, p, True, True)
    assert torch.get_rng_state().equal(cpu_state) and seed.shape == (2,) and mask.shape == (3, 2, 12, 128)
    weights = torch.randn_like(out)
    got = torch.autograd.grad(out, (q, k, v), weights)
    for b, (begin, end) in enumerate(zip([0, 3, 8], [3, 8, 20], strict=True)):
        n = end - begin
        rows = [x[begin:end].detach().cpu().double().requires_grad_() for x in (q, k, v)]
        signed = mask[b, :, :n, :n]
        # A dropped key that the query does not see has -0, which compares equal to 0.
        kept = kept_probabilities(signed, p) if p < 1 else torch.zeros(2, n, n, dtype=torch.double)
        expected, _ = attend(*rows, right=0, kept=kept)
        close(out[begin:end], expected, torch.half, 2)
        probabilities, _ = attend(*rows[:2], torch.eye(n, dtype=torch.double)[:, None], right=0)
        close(signed.abs(), probabilities.transpose(0, 1), torch.half)
        for g, e in zip(got, torch.autograd.grad(expected, rows, weights[begin:end].cpu().double()), strict=True):
            close(g[begin:end], e, torch.half, 4)


def test_flash_dropout_drops_a_share():
    q, k, v = (torch.randn(2, 300, 2, 8, dtype=torch.half, device=DEVICE) for _ in range(3))
    torch.openreg.manual_seed(7)
    out, _, _, _, mask = flash(q, k, v, None, None, 300, 300, 0.25, False, True)
    assert mask.shape == (2, 2, 300, 512)
    dropped = (mask[..., :300] < 0).float()
    assert abs(dropped.mean().item() - 0.25) < 0.01
    assert not dropped[0].equal(dropped[1]) and not dropped[:, 0].equal(dropped[:, 1])
    halves = offsets([150, 150])
    *_, mask = flash(q[0], k[0], v[0], halves, halves, 150, 150, 0.25, False, True)  # of two packed sequences
    dropped = (mask[..., :150] < 0).float()
    assert abs(dropped.mean().item() - 0.25) < 0.01 and not dropped[0].equal(dropped[1])
    torch.openreg.manual_seed(7)
    assert flash(q, k, v, None, None, 300, 300, 0.25, False, False)[0].equal(out)
    assert not flash(q, k, v, None, None, 300, 300, 0.25, False, False)[0].equal(out)


def test_efficient_dropout():
    """With the identity as value, the output is the probabilities, some of them dropped."""
    q, k = (torch.randn(2, 9, 2, 8, device=DEVICE, requires_grad=True) for _ in range(2))
    v = torch.eye(9, device=DEVICE)[None, :, None].expand(2, 9, 2, 9)
    out = efficient(q, k, v, None, None, None, None, None, 0.4, 1, True)[0]
    kept = (out != 0).cpu().double().transpose(1, 2) / 0.6  # [batch, heads, query, key]
    weights = torch.randn_like(out)
    got = torch.autograd.grad(out, (q, k), weights)
    for b in (0, 1):
        rows = [x[b].detach().cpu().double().requires_grad_() for x in (q, k)]
        expected, _ = attend(*rows, v[b].cpu().double(), right=0, from_end=False, kept=kept[b])
        close(out[b], expected, torch.float32)
        for g, e in zip(got, torch.autograd.grad(expected, rows, weights[b].cpu().double()), strict=True):
            close(g[b], e, torch.float32)


# ---- varlen_attn ----


def test_varlen_attn():
    """Is the operator with these arguments, in its gradients too."""
    q, k, v = (x.requires_grad_() for x in packed(4, 2))
    arguments = (offsets(), offsets(), 12, 12)
    aux = AuxRequest(lse=True)
    found = varlen_attn(q, k, v, *arguments, return_aux=aux, window_size=(2, 1), enable_gqa=True, scale=0.5)
    window = dict(window_size_left=2, window_size_right=1)
    expected = flash(q, k, v, *arguments, 0.0, False, False, scale=0.5, **window)[:2]
    assert found[0].equal(expected[0]) and found[1].equal(expected[1])
    weights = torch.randn_like(found[0])
    gradients = [torch.autograd.grad(out, (q, k, v), weights) for out, _ in (found, expected)]
    assert all(g.equal(e) for g, e in zip(*gradients, strict=True))


def test_varlen_attn_out():
    q, k, v = packed()
    out = torch.empty(20, 8, 2, dtype=q.dtype, device=DEVICE).transpose(1, 2)
    got, lse = varlen_attn_out(out, q, k, v, offsets(), offsets(), 12, 12, return_aux=AuxRequest(lse=True))
    assert got is out and lse.shape == (2, 20)
    assert out.equal(varlen_attn(q, k, v, offsets(), offsets(), 12, 12))
    with pytest.raises(RuntimeError, match="_inplace: expected out of shape"):
        varlen_attn_out(out[:5], q, k, v, offsets(), offsets(), 12, 12)
    for shared in (q, k, v):
        with pytest.raises(RuntimeError, match="single memory location"):
            varlen_attn_out(shared, q, k, v, offsets(), offsets(), 12, 12)


# ---- jagged tensors ----


def dense_rows(x):
    return [row.detach().cpu().double().requires_grad_() for row in x.unbind()]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_jagged(dtype, causal):
    q, k, v = (jagged(dtype=dtype) for _ in range(3))
    out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal).transpose(1, 2)
    assert out.is_nested and out.device.type == DEVICE
    weights = torch.randn_like(out.values())
    out.values().backward(weights)
    rows = [dense_rows(x) for x in (q, k, v)]
    expected = [attend(*sequence, right=0 if causal else None)[0] for sequence in zip(*rows, strict=True)]
    close(out.values(), torch.cat(expected), dtype)
    torch.cat(expected).backward(weights.cpu().double())
    for x, found in zip((q, k, v), rows, strict=True):
        close(x.grad.values(), torch.cat([row.grad for row in found]), dtype, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_jagged_queries_and_keys_of_other_lengths(dtype, causal):
    """Flash, which the half types choose, counts a causal mask from the end, the other family from the beginning."""
    q, k = jagged(dtype=dtype), jagged([4, 2, 7], dtype=dtype)
    out = F.scaled_dot_product_attention(q.transpose(1, 2), *[k.transpose(1, 2)] * 2, is_causal=causal).transpose(1, 2)
    right, from_end = 0 if causal else None, dtype == torch.float16
    rows = zip(dense_rows(q), dense_rows(k), strict=True)
    expected = torch.cat([attend(x, y, y, right=right, from_end=from_end)[0] for x, y in rows])
    close(out.values(), expected, dtype)


def test_jagged_with_an_empty_sequence():
    """CUDA's kernels reject it too; PyTorch decomposes if there is no causal mask."""
    x = jagged([3, 0, 2], torch.float32).transpose(1, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = F.scaled_dot_product_attention(x, x, x).transpose(1, 2).values()
    rows = dense_rows(x.transpose(1, 2))
    close(out, torch.cat([attend(row, row, row)[0] for row in rows]), torch.float32)


@pytest.mark.parametrize("width", [5, 8])
def test_jagged_width_and_autocast(width):
    rows = [torch.randn(n, 2, width, device=DEVICE) for n in LENGTHS]
    x = torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)
    with torch.autocast("openreg", dtype=torch.bfloat16):
        out = F.scaled_dot_product_attention(x, x, x, is_causal=True)
    assert out.dtype == torch.bfloat16
    expected = torch.cat([attend(*[row.cpu().double()] * 3, right=0)[0] for row in rows])
    close(out.transpose(1, 2).values(), expected, torch.bfloat16, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_jagged_dropout(dtype):
    x = jagged(dtype=dtype).transpose(1, 2)

    def run(p):
        torch.openreg.manual_seed(5)
        return F.scaled_dot_product_attention(x, x, x, dropout_p=p, is_causal=True).transpose(1, 2).values()

    first = run(0.5)
    assert run(0.5).equal(first) and not run(0.0).allclose(first)
    first.float().sum().backward()


def test_jagged_choice_follows_the_switches():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    x = jagged(dtype=torch.float16).transpose(1, 2)
    names = []
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        with sdpa_kernel(backend), torch.profiler.profile() as profile:
            F.scaled_dot_product_attention(x, x, x, is_causal=True)
        names.append({e.key for e in profile.key_averages() if e.key.endswith("attention_forward")})
    assert names == [{"aten::_flash_attention_forward"}, {"aten::_efficient_attention_forward"}]


def test_jagged_refuses_what_cuda_refuses(caplog):
    x = jagged(dtype=torch.float64).transpose(1, 2)
    # PyTorch says more if it is built for CUDA, and fails at that if there is no driver.
    with pytest.raises(RuntimeError, match="No viable backend|CUDA driver") as raised:
        F.scaled_dot_product_attention(x, x, x, is_causal=True)
    if "CUDA driver" in str(raised.value):
        return
    assert "On openreg it takes query of 4 dimensions and of torch.float16, torch.bfloat16, and no mask" in caplog.text


# ---- torch.compile, fake tensors, transforms, streams ----


CALLS = {
    "varlen_attn": lambda q, k, v, cu: varlen_attn(q, k, v, cu, cu, 12, 12, window_size=(-1, 0), enable_gqa=True),
    "flash": lambda q, k, v, cu: flash(q, k, v, cu, cu, 12, 12, 0.0, True, False)[0],
    "flash, dense": lambda q, k, v, cu: flash(q[None], k[None], v[None], None, None, 20, 20, 0.0, True, False)[0],
    "efficient": lambda q, k, v, cu: efficient(q[None], q[None], q[None], None, cu, cu, 12, 12, 0.0, 2, True)[0],
}


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(name, backend):
    q, k, v = (x.requires_grad_() for x in packed(4, 2))
    call = CALLS[name]
    compiled = torch.compile(call, backend=backend, fullgraph=True)
    results = []
    for function in (call, compiled):
        out = function(q, k, v, offsets())
        grads = torch.autograd.grad(out.float().square().sum(), (q, k, v), allow_unused=True)
        results.append([out, *(x for x in grads if x is not None)])
    assert len(results[0]) == (2 if name == "efficient" else 4)
    for a, b in zip(*results, strict=True):
        close(a, b.cpu().double(), torch.bfloat16)


def same_geometry(real, fake):
    for a, b in zip(real, fake, strict=True):
        if isinstance(a, torch.Tensor):
            assert (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)
        else:
            assert a == b


@pytest.mark.parametrize("name", [attention.FLASH, "_efficient_attention_forward"])
def test_fake_tensors_agree(name):
    from torch._subclasses import FakeTensorMode

    more = []
    if name == attention.FLASH:
        for total, longest in ((20, 12), (300, 200)):
            q, k, v = packed(total=total)
            cu = offsets([longest, total - longest])
            more.append((q, k, v, cu, cu, longest, longest, 0.2, True, True))
    cases = [attention.bound(name, args, {}) for args in more]
    cases += [attention.bound(name, (), kwargs) for kwargs in attention.packed_cases(name, torch.bfloat16)]
    for arguments in cases:
        real = {k: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for k, x in arguments.items()}
        call = getattr(torch.ops.aten, name).default
        with FakeTensorMode() as mode:
            fake = {k: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for k, x in real.items()}
            results = call(**fake)
        same_geometry(call(**real), results)


def test_fake_gradients_agree():
    from torch._subclasses import FakeTensorMode

    q, k, v = (torch.randn(2, 4, 7, 8, device=DEVICE).transpose(1, 2) for _ in range(3))
    bias = torch.randn(2, 4, 7, 7, device=DEVICE)
    out, logsumexp, seed, offset, *_ = efficient(q, k, v, bias, None, None, None, None, 0.0, 0, True)
    halves = [x.half() for x in (q, k, v)]
    half_out, half_logsumexp, random, unused, _ = flash(*halves, None, None, 7, 7, 0.0, True, False)
    calls = [
        (torch.ops.aten._efficient_attention_backward.default,
         [out, q, k, v, b, out, None, None, 7, 7, logsumexp, 0.0, seed, offset, 0, b is not None])
        for b in (bias, None)
    ] + [
        (torch.ops.aten._flash_attention_backward.default,
         [half_out, *halves, half_out, half_logsumexp, None, None, 7, 7, 0.0, True, random, unused])
    ]  # fmt: skip
    for call, arguments in calls:
        with FakeTensorMode() as mode:
            fake = call(*(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in arguments))
        same_geometry(call(*arguments), fake)


def test_vmap_and_grad():
    _, k, v = packed()
    queries = torch.randn(3, 20, 2, 8, dtype=torch.bfloat16, device=DEVICE)

    def call(q):
        return flash(q, k, v, offsets(), offsets(), 12, 12, 0.0, True, False)[0]

    def loss(q):
        return call(q).float().square().sum()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vmap has a loop for it
        out, grad = torch.vmap(call)(queries), torch.vmap(torch.func.grad(loss))(queries)
    q = queries[2].clone().requires_grad_()
    loss(q).backward()
    assert out[2].equal(call(queries[2])) and grad[2].equal(q.grad)
    with pytest.raises(NotImplementedError, match="forward AD"):
        torch.func.jvp(call, (queries[0],), (queries[0],))


def test_threads_do_not_change_results():
    """More sequences than threads run side by side, fewer one after another; dropout draws the same."""
    lengths = torch.randint(0, 30, (12,)).tolist()
    cu, longest = offsets(lengths), max(lengths)
    q, k, v = (x.requires_grad_() for x in packed(4, 2, torch.half, sum(lengths)))
    results = []
    for threads in (1, 4, 16):
        torch.set_num_threads(threads)
        torch.openreg.manual_seed(0)
        out = flash(q, k, v, cu, cu, longest, longest, 0.2, True, False)[0]
        results.append([out, *torch.autograd.grad(out.sum(), (q, k, v))])
    assert all(x.equal(y) for other in results[1:] for x, y in zip(results[0], other, strict=True))


def test_queued():
    """In async mode the call returns before the offsets are there, and nothing waits for them."""
    with torch.openreg.launch_mode("async"):
        queued()


def queued():
    q, k, v = (x.requires_grad_() for x in packed(dtype=torch.half))
    cu = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    ready = offsets()
    torch.openreg.synchronize()
    torch.openreg._sleep(1_000_000_000)
    cu.copy_(ready)
    out = flash(q, k, v, cu, cu, 12, 12, 0.0, True, False)[0]
    grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert not torch.openreg.current_stream().query()
    torch.openreg.synchronize()
    again = flash(q, k, v, ready, ready, 12, 12, 0.0, True, False)[0]
    assert out.equal(again)
    expected = torch.autograd.grad(again, (q, k, v), torch.ones_like(again))
    assert all(g.equal(e) for g, e in zip(grads, expected, strict=True))


# ---- rejected arguments ----


def flash_call(**changes):
    q, k, v = packed(dtype=torch.half)
    given = {"query": q, "key": k, "value": v, "cum_seq_q": offsets(), "cum_seq_k": offsets(), "max_q": 12, "max_k": 12,
             "dropout_p": 0.0, "is_causal": True, "return_debug_mask": False}  # fmt: skip
    return flash(**given | {key: x(given[key]) if callable(x) else x for key, x in changes.items()})


WRONG = {
    "float32": ({"query": lambda x: x.float()}, "expected key of float32, the dtype of query, but got float16"),
    "all float32": (dict.fromkeys(["query", "key", "value"], lambda x: x.float()), "expected query of float16 or bfl"),
    "host key": ({"key": lambda x: x.cpu()}, "query is on openreg:0 but key is on cpu"),
    "host query": ({"query": lambda x: x.cpu()}, "query is on cpu but cum_seq_q is on openreg:0"),
    "host offsets": ({"cum_seq_q": lambda x: x.cpu()}, "query is on openreg:0 but cum_seq_q is on cpu"),
    "int64 offsets": ({"cum_seq_k": lambda x: x.long()}, r"expected cum_seq_k of int32, but got int64; convert"),
    "more offsets": ({"cum_seq_k": lambda x: x.repeat(2)}, r"expected cum_seq_k of shape \[4\]"),
    "no offsets of keys": ({"cum_seq_k": None}, "expected both cum_seq_q and cum_seq_k, or neither, but got only"),
    "no offsets": ({"cum_seq_k": None, "cum_seq_q": None}, r"expected query of shape \[batch, length, heads, width\]"),
    "no offset": (dict.fromkeys(["cum_seq_q", "cum_seq_k"], lambda x: x[:0]), r"of shape \[batch \+ 1\], but got \[0"),
    "4 dimensions": ({"query": lambda x: x[None]}, r"expected query of shape \[total, heads, width\], because the seq"),
    "heads": ({"query": lambda x: x.repeat(1, 2, 1)[:, :3]}, "expected the number of heads of query to be a positive multiple of the heads of key"),
    "no heads": (dict.fromkeys(["query", "key", "value"], lambda x: x[:, :0]), "positive multiple of the heads of key, but got 0 and 0"),
    "widths": ({"key": lambda x: x[..., :4]}, "expected query and key of the same width, above 0, but got 8 and 4"),
    "width": (dict.fromkeys(["query", "key", "value"], lambda x: x[..., :6]), "a multiple of 8 up to 256, but got 6"),
    "value": ({"value": lambda x: x[:5]}, "expected value of the shape of key except for the width"),
    "maximum": ({"max_q": 4}, "expected sequences of at most 4 queries, the maximum passed, but number 1 has 5"),
    "offsets that fall": ({"cum_seq_q": lambda x: x.flip(0)}, "expected cum_seq_q to rise from 0 to at most 20"),
    "offsets too far": ({"cum_seq_k": lambda x: x + 1}, "elements 2 and 3 are 9 and 21"),
    "negative offsets": ({"cum_seq_k": lambda x: x - 1}, "elements 0 and 1 are -1 and 2"),
    "dropout": ({"dropout_p": 1.5}, "expected dropout_p from 0 to 1, but got 1.5"),
    "debug mask": ({"return_debug_mask": True}, "return_debug_mask returns the mask of dropout"),
    "slopes": ({"alibi_slopes": torch.ones(3, device=DEVICE)}, r"expected alibi_slopes of shape \[2\] or \[3, 2\]"),
    "used keys": ({"seqused_k": torch.ones(2, dtype=torch.int32, device=DEVICE)}, r"expected seqused_k of shape \[3\]"),
    "used too many": ({"seqused_k": torch.tensor([3, 6, 1], dtype=torch.int32, device=DEVICE)},
                      "expected sequence 1 to use from 0 to 5 keys, but got 6"),
    "pages alone": ({"block_table": torch.ones(3, 1, dtype=torch.int32, device=DEVICE), "key": lambda x: x[None],
                     "value": lambda x: x[None]}, "block_table needs cum_seq_q and seqused_k"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_flash_refuses(name):
    changes, message = WRONG[name]
    with pytest.raises(RuntimeError, match=message):
        flash_call(**changes)


def test_wrong_offsets_in_async_mode_appear_when_the_device_is_waited_for():
    with torch.openreg.launch_mode("async"):
        flash_call(max_q=4)
        with pytest.raises(RuntimeError, match="expected sequences of at most 4 queries"):
            torch.openreg.synchronize()
        with pytest.raises(RuntimeError, match="expected cum_seq_k of int32"):
            flash_call(cum_seq_k=lambda x: x.long())


def test_inference_arguments_refuse_gradients():
    slopes = torch.ones(2, device=DEVICE)
    with pytest.raises(RuntimeError, match="alibi_slopes is for inference, as PyTorch does not pass it to backward"):
        flash_call(query=lambda x: x.requires_grad_(), alibi_slopes=slopes)
    with torch.no_grad():
        flash_call(query=lambda x: x.requires_grad_(), alibi_slopes=slopes)


def efficient_call(**changes):
    q, k, v = (torch.randn(1, 20, 2, 8, device=DEVICE) for _ in range(3))
    given = {"query": q, "key": k, "value": v, "bias": None, "cu_seqlens_q": offsets(), "cu_seqlens_k": offsets(),
             "max_seqlen_q": 12, "max_seqlen_k": 12, "dropout_p": 0.0, "custom_mask_type": 0}  # fmt: skip
    return efficient(**given | {key: x(given[key]) if callable(x) else x for key, x in changes.items()})


WRONG_EFFICIENT = {
    "float64": (dict.fromkeys(["query", "key", "value"], lambda x: x.double()), "float32, float16 or bfloat16, but go"),
    "heads": ({"query": lambda x: x.repeat(1, 1, 2, 1)}, "expected query and key with the same number of heads, but got 4 and 2"),
    "maximum": ({"max_seqlen_k": 21}, "max_seqlen_k from 0 to 20, but got 12 and 21"),
    "no maximum": ({"max_seqlen_q": None}, "cu_seqlens_q needs max_seqlen_q and max_seqlen_k"),
    "batch": (dict.fromkeys(["query", "key", "value"], lambda x: x.repeat(2, 1, 1, 1)), r"of shape \[1, total, heads"),
    "bias": ({"bias": torch.ones(1, 2, 20, 20, device=DEVICE)}, "packed sequences take no bias"),
    "mask": ({"custom_mask_type": 3}, "expected custom_mask_type 0 .no mask., 1 .causal, from the top left. or 2"),
    "window": ({"window_size": 2}, "window_size needs a causal custom_mask_type, 1 or 2, but got 0"),
    "shape of bias": ({"bias": torch.ones(1, 2, 20, 19, device=DEVICE), "cu_seqlens_q": None, "cu_seqlens_k": None},
                      r"expected bias of shape \[1, 2, 20, 20\]"),
    "dtype of bias": ({"bias": torch.ones(1, 2, 20, 20, dtype=torch.half, device=DEVICE), "cu_seqlens_q": None,
                       "cu_seqlens_k": None}, "expected bias of float32, the dtype of query, but got float16"),
    "host bias": ({"bias": torch.ones(1, 2, 20, 20), "cu_seqlens_q": None, "cu_seqlens_k": None}, "but bias is on cpu"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_EFFICIENT)
def test_efficient_refuses(name):
    changes, message = WRONG_EFFICIENT[name]
    with pytest.raises(RuntimeError, match=message):
        efficient_call(**changes)


def test_backward_refuses():
    q, k, v = packed(dtype=torch.half)
    cu = offsets()
    out, logsumexp, random, unused, _ = flash(q, k, v, cu, cu, 12, 12, 0.5, True, False)
    call = torch.ops.aten._flash_attention_backward
    tail = (cu, cu, 12, 12, 0.5, True)
    for arguments, message in [
        ((out[:5], q, k, v, out, logsumexp, *tail, random, unused), "expected grad_out of shape"),
        ((out.cpu(), q, k, v, out, logsumexp, *tail, random, unused), "grad_out is on cpu"),
        ((out, q, k, v, out.float(), logsumexp, *tail, random, unused), "expected out of float16"),
        ((out, q, k, v, out, logsumexp[:, :5], *tail, random, unused), "expected logsumexp of shape"),
        ((out, q, k, v, out, logsumexp, *tail, unused, random), "expected rng_state of 2 64-bit integers"),
        ((out, q, k, v, out, logsumexp, *tail, random.cpu(), random), "rng_state is on cpu"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            call(*arguments)
    rows = [x[None].float() for x in (q, k, v)]
    out, logsumexp, seed, offset, *_ = efficient(*rows, None, cu, cu, 12, 12, 0.0, 0)
    with pytest.raises(RuntimeError, match=r"expected logsumexp of shape \[3, 2, 32\], .* but got \[3, 2, 0\]"):
        torch.ops.aten._efficient_attention_backward(
            out, *rows, None, out, cu, cu, 12, 12, logsumexp, 0.0, seed, offset, 0, False
        )


# ---- the operator that PyTorch provides for backends ----


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(2, 4, 5, 7), (1, 4, 1, 7), (5, 1)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_overrideable_gradient_of_the_bias(dtype, shape, causal):
    q, k, v = (torch.randn(2, 4, n, 8, dtype=dtype, device=DEVICE, requires_grad=True) for n in (5, 7, 7))
    bias = torch.randn(shape, dtype=dtype, device=DEVICE, requires_grad=True)
    out = torch.ops.aten._scaled_dot_product_fused_attention_overrideable(q, k, v, bias, is_causal=causal)[0]
    weights = torch.randn_like(out)
    got = torch.autograd.grad(out, (q, k, v, bias), weights)
    host = [x.detach().cpu().double().requires_grad_() for x in (q, k, v, bias)]
    pairs = zip(*host[:3], host[3].expand(2, 4, 5, 7), strict=True)
    right, near = 0 if causal else None, NEAR.get(dtype, 1e-4)
    outs = [
        attend(*(x.transpose(0, 1) for x in (q, k, v)), bias=b, right=right, from_end=False)[0] for q, k, v, b in pairs
    ]
    expected = torch.autograd.grad(torch.stack(outs).transpose(1, 2), host, weights.cpu().double())
    for g, e in zip(got, expected, strict=True):
        assert g.dtype == dtype
        assert_close(g.cpu().double(), e, atol=8 * near, rtol=8 * near)


def test_overrideable_refuses():
    """ATen's kernel would read past the end of value."""
    q = torch.randn(1, 2, 4, 8, device=DEVICE)
    call = torch.ops.aten._scaled_dot_product_fused_attention_overrideable
    for arguments, message in [
        ((q, q, q[:, :, :3]), r"expected value of shape \[1, 2, 4, 8\]"),
        ((q, q, q.cpu()), "query is on openreg:0 but value is on cpu"),
        ((q, q.half(), q), "expected key of float32, the dtype of query"),
        ((q[0], q, q), r"expected query of shape \[batch, heads, length, width\]"),
        ((q[:, :1], q, q), "expected the number of heads of query to be a multiple of 2"),
        ((q, q, q, torch.ones(4, 3, device=DEVICE)), "expected attn_bias of 2 or 4 dimensions"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            call(*arguments)


def test_overrideable_backward_refuses():
    q = torch.randn(1, 2, 4, 8, device=DEVICE)
    out, logsumexp, *_, seed, offset, _ = torch.ops.aten._scaled_dot_product_fused_attention_overrideable(q, q, q)
    call = torch.ops.aten._scaled_dot_product_fused_attention_overrideable_backward
    none = torch.empty(0, device=DEVICE)

    def backward(grad=out, key=q, out=out, logsumexp=logsumexp, bias=None, wants=False):
        call(
            grad, q, key, q, bias, [True, True, True, wants], out, logsumexp, none, none, 4, 4, 0.0, False, seed, offset
        )

    for arguments, message in [
        ({"grad": out[:, :1]}, "expected grad_out of shape"),
        ({"grad": out.cpu()}, "grad_out is on cpu"),
        ({"key": q[..., :3]}, "expected key of shape"),
        ({"bias": torch.ones(4, device=DEVICE)}, "expected attn_bias of 2 or 4 dimensions, broadcastable to"),
        ({"out": out.half()}, "expected out of float32"),
        ({"logsumexp": logsumexp[..., :2]}, "expected logsumexp of shape"),
        ({"wants": True}, "expected a floating-point attn_bias, whose gradient is asked for, but got None"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            backward(**arguments)

"""nms: the boxes that stay agree to the last bit, including ties and NaN; and torchvision's name."""

import textwrap

import kit
import pytest
import torch
from kit import DEVICE, FLOATS, NAME, random
from processes import python
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close

from openreg_ops import nms

OP = torch.ops.openreg.nms.default


def reference(boxes, scores, iou_threshold):
    """torchvision's kernel, line by line, with Python's loops and the dtype's own arithmetic."""
    order = sorted(range(len(scores)), key=lambda i: (not scores[i].isnan(), -scores[i].nan_to_num(0)))
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    kept, gone = [], set()

    def greater(a, b):
        return b if a < b else a

    def less(a, b):
        return b if b < a else a

    for k, i in enumerate(order):
        if i in gone:
            continue
        kept.append(i)
        for j in order[k + 1 :]:
            (ax1, ay1, ax2, ay2), (bx1, by1, bx2, by2) = boxes[i], boxes[j]
            w = greater(boxes.new_zeros(()), less(ax2, bx2) - greater(ax1, bx1))
            h = greater(boxes.new_zeros(()), less(ay2, by2) - greater(ay1, by1))
            inter = w * h
            if (inter / (area[i] + area[j] - inter)).item() > iou_threshold:
                gone.add(j)
    return torch.tensor(kept, dtype=torch.int64)


def boxes_of(n, dtype=torch.float32, spread=5.0):
    """n boxes of about unit size; the smaller the spread, the more of them overlap."""
    corner = spread * torch.rand(n, 2, dtype=torch.float64)
    return torch.cat([corner, corner + 0.5 + torch.rand(n, 2, dtype=torch.float64)], 1).to(dtype).to(DEVICE)


def test_by_hand():
    """The second overlaps the first by 2 of 4: above 0.4. The third overlaps it by 1 of 5. The fourth is elsewhere."""
    boxes = kit.tensor([[0.0, 0, 3, 1], [1.0, 0, 4, 1], [2.0, 0, 5, 1], [9.0, 9, 10, 10]])
    scores = kit.tensor([0.9, 0.8, 0.7, 0.95])
    assert nms(boxes, scores, 0.4).tolist() == [3, 0, 2]
    assert nms(boxes, scores, 0.5).tolist() == [3, 0, 1, 2]
    assert nms(boxes, scores, 0.1).tolist() == [3, 0]
    assert nms(boxes, scores, -1.0).tolist() == [3]


@pytest.mark.parametrize("n", [0, 1, 2, 7, 8, 9, 33, 60])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_matches_reference(n, dtype):
    for spread in (1.0, 4.0):
        boxes, scores = boxes_of(n, dtype, spread), random(n, dtype=dtype)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        for threshold in (0.0, 0.3, 0.7):
            kept = nms(boxes, scores, threshold)
            assert kept.dtype == torch.int64 and kept.device == boxes.device and kept.is_contiguous()
            assert kept.tolist() == reference(boxes.cpu().to(wide), scores.cpu().to(wide), threshold).tolist()


@pytest.mark.parametrize("n", [255, 256, 257, 700, 3000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_across_blocks(n, dtype):
    """The reference in meta/ takes a row at a time; it is held against the loops above, by test_other_devices."""
    boxes, scores = boxes_of(n, dtype, spread=12.0), random(n, dtype=dtype)
    for threshold in (0.1, 0.6):
        assert torch.equal(nms(boxes, scores, threshold).cpu(), nms(boxes.cpu(), scores.cpu(), threshold))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_at_the_threshold(dtype):
    """A threshold that is an overlap's own value keeps the box, the double just below it does not: no rounding of the
    overlap, or of the threshold, is other than torchvision's."""
    for _ in range(200):
        boxes = boxes_of(2, dtype, spread=0.3)
        a, b = boxes.cpu()
        lt, rb = torch.maximum(a[:2], b[:2]), torch.minimum(a[2:], b[2:])
        inter = (rb - lt)[0] * (rb - lt)[1]
        area = [(box[2] - box[0]) * (box[3] - box[1]) for box in (a, b)]
        overlap = (inter / (area[0] + area[1] - inter)).item()
        below = torch.nextafter(torch.tensor(overlap, dtype=torch.float64), torch.tensor(0.0, dtype=torch.float64))
        assert len(nms(boxes, kit.tensor([1.0, 0.0], dtype=dtype), overlap)) == 2
        assert len(nms(boxes, kit.tensor([1.0, 0.0], dtype=dtype), below.item())) == 1


@pytest.mark.parametrize("where", [DEVICE, "cpu"])
def test_ties_and_special_values(where):
    nan, inf = float("nan"), float("inf")
    apart = torch.tensor([[10.0 * i, 0, 10.0 * i + 1, 1] for i in range(5)], device=where)
    same = apart[:1].expand(5, 4)

    def scores(*values):
        return torch.tensor(values, device=where)

    assert nms(apart, scores(1.0, 2.0, 2.0, 1.0, 2.0), 0.5).tolist() == [1, 2, 4, 0, 3], "ties in the order given"
    assert nms(same, scores(1.0, 2.0, 2.0, 1.0, 2.0), 0.5).tolist() == [1]
    assert nms(apart, scores(1.0, nan, inf, -inf, nan), 0.5).tolist() == [1, 4, 2, 0, 3], "NaN is the highest"
    assert nms(apart, scores(0.0, -0.0, 0.0, -0.0, 1.0), 0.5).tolist() == [4, 0, 1, 2, 3], "no sign of zero"
    for column in range(4):
        odd = same.clone()
        odd[1, column] = nan
        assert nms(odd, scores(5.0, 4.0, 3.0, 2.0, 1.0), 0.5).tolist() == [0, 1], "NaN is not dropped"
        assert nms(odd, scores(4.0, 5.0, 3.0, 2.0, 1.0), -1.0).tolist() == [1, 0], "and drops none"
    points = torch.zeros(3, 4, device=where)
    assert nms(points, scores(1.0, 2.0, 3.0), 0.0).tolist() == [2, 1, 0], "0 / 0 is above no threshold"
    for threshold in (1.0, nan, inf, 1e300):
        assert nms(same, scores(1.0, 2.0, 3.0, 4.0, 5.0), threshold).tolist() == [4, 3, 2, 1, 0]
    for threshold in (-inf, -1e300):
        assert nms(apart, scores(1.0, 2.0, 3.0, 4.0, 5.0), threshold).tolist() == [4]


# ---- autograd, transforms, compilation ----


@pytest.mark.parametrize("where", [DEVICE, "cpu"])
def test_indices_have_no_derivative(where):
    """Boxes and scores may require a gradient: it flows through what is indexed, never through the indices."""
    boxes = boxes_of(6).to(where).requires_grad_()
    scores = random(6, device=where, grad=True)
    kept = nms(boxes, scores, 0.3)
    assert not kept.requires_grad
    scores[kept].sum().backward()
    assert scores.grad.sum() == len(kept) and boxes.grad is None
    with pytest.raises(RuntimeError, match="does not require grad"):
        kept.sum().backward()
    grad = torch.func.grad(lambda s: s[nms(boxes.detach(), s, 0.3)].sum())(scores.detach())
    assert torch.equal(grad, scores.grad)
    _, tangent = torch.func.jvp(lambda s: s[nms(boxes.detach(), s, 0.3)], (scores.detach(),), (scores.detach(),))
    assert torch.equal(tangent, scores.detach()[kept])


@pytest.mark.parametrize("where", [DEVICE, "cpu"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_size_is_unbacked(where, dynamic):
    """One graph for any number of boxes that are kept, none included."""

    def function(boxes, scores):
        kept = nms(boxes, scores, 0.3)
        return boxes[kept] * 2, kept + 1, kept.numel()

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=dynamic)
    for spread in (0.1, 3.0, 50.0):
        boxes, scores = boxes_of(20, spread=spread).to(where), random(20, device=where)
        assert_close(compiled(boxes, scores), function(boxes, scores))
    assert counter.frame_count == 1
    if dynamic:
        assert_close(compiled(boxes[:7], scores[:7]), function(boxes[:7], scores[:7]))
        assert counter.frame_count == 1


def test_metadata():
    """Under FakeTensorMode: an int64 vector of unknown length on the device of boxes."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols

    with torch._subclasses.FakeTensorMode(shape_env=ShapeEnv()) as mode:
        out = nms(mode.from_tensor(boxes_of(5)), mode.from_tensor(random(5)), 0.3)
    assert out.dtype == torch.int64 and out.device == torch.device(DEVICE) and out.dim() == 1
    assert free_unbacked_symbols(out.shape[0]) and out.stride() == (1,)
    with pytest.raises(RuntimeError):  # torch's own sentence
        nms(boxes_of(5).to("meta"), random(5).to("meta"), 0.3)


@pytest.mark.parametrize("where", [DEVICE, "cpu"])
def test_vmap_is_refused(where):
    boxes, scores = boxes_of(5).to(where), random(5, device=where)
    sentence = "nms: expected no vmap, because the number of boxes that are kept differs from sample to sample; call it"
    for dims in ((0, 0), (0, None), (None, 0)):
        inputs = [x if d is None else torch.stack([x, x]) for x, d in zip((boxes, scores), dims, strict=True)]
        with pytest.raises(RuntimeError, match=sentence):
            torch.vmap(lambda b, s: nms(b, s, 0.3), in_dims=dims)(*inputs)
    same = torch.vmap(lambda x: x[nms(boxes, scores, 0.3)])(torch.stack([boxes, boxes]))
    assert torch.equal(same[0], boxes[nms(boxes, scores, 0.3)])


def test_rejects():
    boxes, scores = boxes_of(5), random(5)
    for inputs, match in [
        ((boxes[:, :3], scores), "nms: expected boxes of shape [N, 4], but got [5, 3]"),
        ((boxes.flatten(), scores), "nms: expected boxes of shape [N, 4], but got [20]"),
        ((boxes, scores[:4]), "nms: expected scores of shape [5], a score for each box, but got [4]"),
        ((boxes, scores.unsqueeze(1)), "but got [5, 1]"),
        ((boxes.long(), scores), "nms: expected boxes of float32, float64, float16 or bfloat16, but got int64"),
    ]:
        kit.check_error(OP, *inputs, 0.5, match=match)


# ---- torchvision ----


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("order", ["before", "after"])
def test_serves_torchvision(order):
    """torchvision's schema, loaded before or after openreg_ops, finds the device's kernel; as does autocast, which
    torchvision has for its own devices; its meta kernel makes it compile. A fresh process: the schema stays."""
    program = """
        import torch
        if ORDER == "after":
            import openreg_ops
            assert not hasattr(torch.ops.torchvision, "nms")
        torchvision = torch.library.Library("torchvision", "DEF")
        torchvision.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        torchvision.impl("nms", lambda boxes, scores, threshold: torch.tensor([-1]), "CPU")

        @torch.library.register_fake("torchvision::nms")
        def fake(boxes, scores, threshold):
            return boxes.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.int64)

        if ORDER == "before":
            import openreg_ops
        boxes = torch.tensor([[0.0, 0, 3, 1], [1.0, 0, 4, 1], [9.0, 9, 10, 10]])
        scores = torch.tensor([0.9, 0.8, 0.95])
        nms = torch.ops.torchvision.nms
        assert nms(boxes, scores, 0.4).tolist() == [-1], "the CPU's kernel is torchvision's"
        boxes, scores = boxes.to(NAME).requires_grad_(), scores.to(NAME)
        assert nms(boxes, scores, 0.4).tolist() == [2, 0] == openreg_ops.nms(boxes, scores, 0.4).tolist()
        with torch.autocast(NAME, torch.float16):
            assert nms(boxes.half(), scores, 0.4).tolist() == nms(boxes, scores.half(), 0.4).tolist() == [2, 0]
        if ORDER == "before":
            compiled = torch.compile(lambda b, s: nms(b, s, 0.4) + 1, backend="aot_eager", fullgraph=True)
            assert compiled(boxes, scores).tolist() == [3, 1]
        report = openreg_ops.fallback.report()
        assert "nms" not in str(report), report
        print("served")
    """
    source = f"ORDER, NAME = {order!r}, {NAME!r}\n" + textwrap.dedent(program)
    done = python("-c", source, PYTHONWARNINGS="ignore")
    assert done.returncode == 0 and done.stdout.endswith("served\n"), done.stderr

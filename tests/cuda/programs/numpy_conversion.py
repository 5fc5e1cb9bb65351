"""CUDA tensors and NumPy: the error, and the right ways."""

import numpy as np
import torch

array = np.arange(6, dtype=np.float32).reshape(2, 3)
x = torch.from_numpy(array).cuda()
TEXT = "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
for call in (lambda: x.numpy(), lambda: np.asarray(x), lambda: np.array(x), lambda: np.sum(np.asarray(x)), x.__array__):
    try:
        call()
    except TypeError as error:
        assert str(error) == TEXT, error
    else:
        raise AssertionError("converted a CUDA tensor")
assert np.array_equal(x.cpu().numpy(), array) and np.array_equal(x.numpy(force=True), array)
assert np.array_equal(x.detach().cpu().numpy().T, array.T) and x.tolist() == array.tolist()
assert np.array_equal(x.t().cpu().numpy(), array.T)
parameter = torch.nn.Parameter(x)
try:
    parameter.cpu().numpy()
except RuntimeError as error:
    assert "requires grad" in str(error), error
assert np.array_equal(parameter.numpy(force=True), array)
assert float(x.sum()) == array.sum() and int(x[1, 2]) == 5 and f"{x[0, 1]:.2f}" == "1.00" and x[0, 1].item() == 1.0
assert bool(x.any()) and [row.sum().item() for row in x] == array.sum(1).tolist() and len(x) == 2
assert array[int(x[0, 1])].tolist() == [3, 4, 5] and list(range(x[0, 2].int())) == [0, 1]
y = torch.as_tensor(array, device="cuda")
y[0, 0] = 50
assert array[0, 0] == 0 and y[0, 0].item() == 50
assert torch.tensor(np.float64(2.5), device="cuda").item() == 2.5 and (x * np.float32(2))[1, 2].item() == 10
assert torch.equal(torch.tensor(array, device="cuda:1").cpu(), torch.from_numpy(array))
image = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (4, 5, 3), dtype=np.uint8))
normalized = image.cuda().permute(2, 0, 1).float().div(255)
assert np.allclose(normalized.cpu().numpy(), image.numpy().transpose(2, 0, 1).astype(np.float32) / 255)
text = repr(x)
assert text == "tensor([[0., 1., 2.],\n        [3., 4., 5.]], device='cuda:0')", text

"""Decompositions, solvers, FFT, einsum, complex numbers, float64 products, in-place and out= forms."""

import torch

torch.manual_seed(0)
a = torch.randn(3, 5, 5, dtype=torch.float64)
spd = a @ a.mT + 5 * torch.eye(5, dtype=torch.float64)
b = torch.randn(3, 5, 2, dtype=torch.float64)
g, gs, gb = a.cuda(), spd.cuda(), b.cuda(0)


def close(ours, theirs):
    assert ours.is_cuda
    torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-6, atol=1e-8)


close(torch.linalg.solve(g, gb), torch.linalg.solve(a, b))
close(torch.linalg.inv(g), torch.linalg.inv(a))
close(torch.linalg.det(g), torch.linalg.det(a))
close(torch.linalg.cholesky(gs), torch.linalg.cholesky(spd))
close(torch.cholesky_solve(gb, torch.linalg.cholesky(gs)), torch.linalg.solve(spd, b))
close(torch.linalg.eigvalsh(gs), torch.linalg.eigvalsh(spd))
close(torch.linalg.svdvals(g), torch.linalg.svdvals(a))
close(torch.linalg.lstsq(g, gb).solution, torch.linalg.solve(a, b))
close(torch.linalg.matrix_exp(g / 5), torch.linalg.matrix_exp(a / 5))
close(torch.linalg.pinv(g), torch.linalg.pinv(a))
close(torch.linalg.norm(g, dim=(-2, -1)), torch.linalg.norm(a, dim=(-2, -1)))
q, r = torch.linalg.qr(g)
close(q @ r, a)
close(q.mT @ q, torch.eye(5, dtype=torch.float64).expand(3, 5, 5))
u, s, vh = torch.linalg.svd(g, full_matrices=False)
close(u @ torch.diag_embed(s) @ vh, a)
values, vectors = torch.linalg.eigh(gs)
close(vectors * values[:, None] @ vectors.mT, spd)
eigenvalues = torch.linalg.eigvals(g).abs().sort(-1).values
close(eigenvalues, torch.linalg.eigvals(a).abs().sort(-1).values)
close(torch.linalg.solve_triangular(gs.triu(), gb, upper=True), torch.linalg.solve(spd.triu(), b))
lu, pivots = torch.linalg.lu_factor(g)
assert pivots.dtype == torch.int32
close(torch.linalg.lu_solve(lu, pivots, gb), torch.linalg.solve(a, b))
close(torch.einsum("bij,bjk,bik->b", g, g, g), torch.einsum("bij,bjk,bik->b", a, a, a))
out = torch.empty(3, 5, 2, dtype=torch.float64, device="cuda")
torch.bmm(g, gb, out=out)
close(out, a @ b)
close(torch.baddbmm(gb, g, gb, beta=0.5, alpha=2), 0.5 * b + 2 * a @ b)
close(torch.tensordot(g, gb, dims=([0, 2], [0, 1])), torch.tensordot(a, b, dims=([0, 2], [0, 1])))
spectrum = torch.fft.fft2(g)
assert spectrum.dtype == torch.complex128
close(spectrum, torch.fft.fft2(a))
close(torch.fft.ifft2(spectrum * spectrum.conj()).real, torch.fft.ifft2(torch.fft.fft2(a).abs().square() + 0j).real)
window = torch.hann_window(16, device="cuda")
signal = torch.randn(2, 64)
stft = torch.stft(signal.cuda(), 16, 4, window=window, return_complex=True)
torch.testing.assert_close(torch.istft(stft, 16, 4, window=window).cpu(), signal, rtol=1e-3, atol=1e-4)
z = torch.polar(g.abs(), g)
close(torch.view_as_real(z.conj().resolve_conj()), torch.view_as_real(torch.polar(a.abs(), a).conj().resolve_conj()))
try:
    torch.linalg.cholesky(-gs)
except torch.linalg.LinAlgError as error:
    assert "cholesky" in str(error), error
else:
    raise AssertionError("a negative matrix has no Cholesky factor")
close(torch.linalg.cholesky_ex(gs)[0], torch.linalg.cholesky(spd))
